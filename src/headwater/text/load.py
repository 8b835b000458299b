"""The tokenizer of a public model folder, whichever files it came in.

tokenizer.json                          read as it is; with tokenizer_target.json beside it, what a translator writes
vocab.txt                               WordPiece
vocab.json + merges.txt                 byte-level BPE
source.spm (target.spm) + vocab.json    Marian
*.model                                 sentencepiece
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headwater.errors import BadFile, NotFound
from headwater.text import from_marian, sentencepiece
from headwater.text.components import added
from headwater.text.from_sentencepiece import STYLES, plain
from headwater.text.from_vocab import BERT_TOKENS, BYTE_STYLES, merge_rules, wordpiece
from headwater.text.pair import TARGET, PairTokenizer
from headwater.text.tokenizer import ROLES, Tokenizer
from headwater.weights.files import read_bounded, shown
from headwater.weights.strict_json import parse_object

MOST_BYTES, MOST_CONFIG = 128 << 20, 8 << 20
MODELS = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "spm.model", "sentencepiece.model")


def load(folder: str | Path) -> Tokenizer:
    """The tokenizer of a folder; for a translator, the one that reads the source."""
    source = _load(Path(folder), "source.spm")
    return PairTokenizer(source, load_target(folder)) if (Path(folder) / TARGET).exists() else source


def load_target(folder: str | Path) -> Tokenizer:
    """A translator's tokenizer for what it writes; the same as `load` for everyone else."""
    if (Path(folder) / TARGET).exists():
        spec = parse_object(read_bounded(Path(folder) / TARGET, MOST_BYTES), Path(folder) / TARGET)
        return Tokenizer(spec, _specials(_config(Path(folder))), where=Path(folder) / TARGET)
    return _load(Path(folder), "target.spm")


def _load(folder: Path, spm: str) -> Tokenizer:
    config = _config(folder)
    style = _style(folder, config)
    specials = _specials(config)
    template = _chat_template(folder, config)
    if (folder / "tokenizer.json").exists():
        spec = parse_object(read_bounded(folder / "tokenizer.json", MOST_BYTES), folder / "tokenizer.json")
        return Tokenizer(spec, specials, template, folder / "tokenizer.json")
    for name, read in (("vocab.txt", _from_vocab_txt), ("merges.txt", _from_merges), (spm, _from_marian)):
        if (folder / name).exists():
            spec, defaults = read(folder, name, style, specials, config)
            break
    else:
        spec, defaults = _from_model(folder, style, config)
    _add_more(spec, folder)
    return Tokenizer(spec, defaults | specials, template, folder)


def _from_vocab_txt(folder: Path, name: str, style: str, specials: dict[str, str], config: dict[str, Any]) -> Any:
    tokens = BERT_TOKENS | specials
    return wordpiece(_text(folder / name), tokens, config, folder / name), BERT_TOKENS


def _from_merges(folder: Path, name: str, style: str, specials: dict[str, str], config: dict[str, Any]) -> Any:
    make, defaults = BYTE_STYLES.get(style, BYTE_STYLES["gpt2"])
    vocab = _vocab(folder / "vocab.json")
    tokens = defaults | specials
    for role in ("sep", "cls"):
        if role in defaults and tokens[role] not in vocab:
            raise BadFile(f"{folder / 'vocab.json'}: the {role} token {shown(tokens[role])} must be in it; it is not")
    return make(vocab, merge_rules(_text(folder / name)), tokens, config), defaults


def _from_marian(folder: Path, name: str, style: str, specials: dict[str, str], config: dict[str, Any]) -> Any:
    vocab = _vocab(folder / "vocab.json")
    return from_marian.marian(sentencepiece.read(folder / name), vocab, folder / "vocab.json"), from_marian.ROLES


def _from_model(folder: Path, style: str, config: dict[str, Any]) -> Any:
    name = next((name for name in MODELS if (folder / name).exists()), None)
    if name is None:
        raise NotFound(
            f"{folder} has no tokenizer: tokenizer.json, vocab.txt, vocab.json + merges.txt or a .model file"
        )
    return STYLES.get(style, plain)(sentencepiece.read(folder / name), config)


def _config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json over special_tokens_map.json; either may be absent."""
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).exists():
            config |= parse_object(read_bounded(folder / name, MOST_CONFIG), folder / name)
    return config


def _style(folder: Path, config: dict[str, Any]) -> str:
    """Whose conventions: `BartTokenizerFast` -> bart; else the model_type of config.json."""
    named = config.get("tokenizer_class")
    if isinstance(named, str) and named not in ("PreTrainedTokenizerFast", "TokenizersBackend"):
        return named.removesuffix("Fast").removesuffix("Tokenizer").lower().replace("_", "")
    if (folder / "config.json").exists():
        kind = parse_object(read_bounded(folder / "config.json", MOST_CONFIG), folder / "config.json").get("model_type")
        return kind.lower().replace("-", "").replace("_", "") if isinstance(kind, str) else ""
    return ""


def _specials(config: dict[str, Any]) -> dict[str, str]:
    """bos, eos, pad ...: each a text, or a table with its content."""
    found = {}
    for role in ROLES:
        token = config.get(f"{role}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and 0 < len(token) <= 1000:
            found[role] = token
    return found


def _chat_template(folder: Path, config: dict[str, Any]) -> str:
    if (folder / "chat_template.jinja").exists():
        return _text(folder / "chat_template.jinja", most=1 << 20)
    told = config.get("chat_template")
    if isinstance(told, list):  # several, by name
        told = next((t.get("template") for t in told if isinstance(t, dict) and t.get("name") == "default"), "")
    return told if isinstance(told, str) else ""


def _add_more(spec: dict[str, Any], folder: Path) -> None:
    """added_tokens.json: tokens the older files keep beside the vocabulary."""
    path = folder / "added_tokens.json"
    if path.exists():
        known = {token["content"] for token in spec["added_tokens"]}
        for token, number in parse_object(read_bounded(path, MOST_CONFIG), path).items():
            if token not in known:
                spec["added_tokens"].append(added(token, number))


def _vocab(path: Path) -> dict[str, int]:
    vocab = parse_object(read_bounded(path, MOST_BYTES), path)
    if not all(type(n) is int for n in vocab.values()):
        raise BadFile(f"{path}: must give every piece a whole number")
    return vocab


def _text(path: Path, most: int = MOST_BYTES) -> str:
    try:
        return read_bounded(path, most).decode()
    except UnicodeDecodeError:
        raise BadFile(f"{path}: not UTF-8 text; the file is damaged or of another kind") from None
