"""Load the tokenizer of a model folder, from whichever files it has.

tokenizer.json                          used directly; with tokenizer_target.json: a translation model's two tokenizers
vocab.txt                               WordPiece
vocab.json + merges.txt                 byte-level BPE
source.spm (target.spm) + vocab.json    Marian
*.model                                 sentencepiece
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headwater.errors import BadFile, NotFound
from headwater.i18n import _
from headwater.io.files import quote, read_limited
from headwater.io.strict_json import parse_json_object
from headwater.text.loaders.marian import MARIAN_SPECIAL_TOKENS, marian_spec
from headwater.text.loaders.sentencepiece import SPEC_BUILDERS, plain_spec
from headwater.text.loaders.sentencepiece_model import read_sentencepiece
from headwater.text.loaders.vocab import BERT_TOKENS, BYTE_LEVEL_BUILDERS, parse_merges, wordpiece_spec
from headwater.text.spec import added_token
from headwater.text.tokenizer import SPECIAL_TOKEN_ROLES, TARGET_TOKENIZER_FILE, PairTokenizer, Tokenizer

MAX_FILE_BYTES = 128 << 20
MAX_CONFIG_BYTES = 8 << 20
SENTENCEPIECE_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "spm.model", "sentencepiece.model")


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Load the tokenizer of a folder; for a translation model with two vocabularies, a PairTokenizer."""
    source = _load_from_files(Path(folder), "source.spm")
    if (Path(folder) / TARGET_TOKENIZER_FILE).exists():
        return PairTokenizer(source, load_target_tokenizer(folder))
    return source


def load_target_tokenizer(folder: str | Path) -> Tokenizer:
    """Load the target tokenizer of a translation model; the same as load_tokenizer for other models."""
    path = Path(folder) / TARGET_TOKENIZER_FILE
    if path.exists():
        spec = parse_json_object(read_limited(path, MAX_FILE_BYTES), path)
        return Tokenizer(spec, _special_tokens_map(_read_config(Path(folder))), where=path)
    return _load_from_files(Path(folder), "target.spm")


def _load_from_files(folder: Path, spm_name: str) -> Tokenizer:
    """The tokenizer from tokenizer.json, else vocab.txt, merges.txt or a sentencepiece model."""
    config = _read_config(folder)
    style = _tokenizer_style(folder, config)
    specials = _special_tokens_map(config)
    template = _chat_template(folder, config)
    if (folder / "tokenizer.json").exists():
        spec = parse_json_object(read_limited(folder / "tokenizer.json", MAX_FILE_BYTES), folder / "tokenizer.json")
        return Tokenizer(spec, specials, template, folder / "tokenizer.json")
    for name, read in (("vocab.txt", _from_vocab_txt), ("merges.txt", _from_merges), (spm_name, _from_marian)):
        if (folder / name).exists():
            spec, defaults = read(folder, name, style, specials, config)
            break
    else:
        spec, defaults = _from_sentencepiece(folder, style, config)
    _append_added_tokens(spec, folder)
    return Tokenizer(spec, defaults | specials, template, folder)


def _from_vocab_txt(folder: Path, name: str, style: str, special_tokens: dict[str, str], config: dict[str, Any]) -> Any:
    tokens = BERT_TOKENS | special_tokens
    return wordpiece_spec(_read_text(folder / name), tokens, config, folder / name), BERT_TOKENS


def _from_merges(folder: Path, name: str, style: str, special_tokens: dict[str, str], config: dict[str, Any]) -> Any:
    """Byte-level BPE from vocab.json and merges.txt."""
    build_spec, defaults = BYTE_LEVEL_BUILDERS.get(style, BYTE_LEVEL_BUILDERS["gpt2"])
    vocab = _read_vocab(folder / "vocab.json")
    tokens = defaults | special_tokens
    for role in ("sep", "cls"):
        if role in defaults and tokens[role] not in vocab:
            raise BadFile(
                _(
                    "{where}: the {role} token {token} must be in the vocabulary; it is not",
                    where=folder / "vocab.json",
                    role=role,
                    token=quote(tokens[role]),
                )
            )
    merges = parse_merges(_read_text(folder / name))
    return build_spec(vocab, merges, tokens, config), defaults


def _from_marian(folder: Path, name: str, style: str, special_tokens: dict[str, str], config: dict[str, Any]) -> Any:
    vocab = _read_vocab(folder / "vocab.json")
    spec = marian_spec(read_sentencepiece(folder / name), vocab, folder / "vocab.json")
    return spec, MARIAN_SPECIAL_TOKENS


def _from_sentencepiece(folder: Path, style: str, config: dict[str, Any]) -> Any:
    name = next((name for name in SENTENCEPIECE_FILES if (folder / name).exists()), None)
    if name is None:
        raise NotFound(
            _(
                "{folder} has no tokenizer: tokenizer.json, vocab.txt, vocab.json + merges.txt or a .model file",
                folder=folder,
            )
        )
    return SPEC_BUILDERS.get(style, plain_spec)(read_sentencepiece(folder / name), config)


def _read_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json over special_tokens_map.json; either may be absent."""
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).exists():
            config |= parse_json_object(read_limited(folder / name, MAX_CONFIG_BYTES), folder / name)
    return config


def _tokenizer_style(folder: Path, config: dict[str, Any]) -> str:
    """The model family whose conventions apply: `BartTokenizerFast` -> bart; else the model_type of config.json."""
    class_name = config.get("tokenizer_class")
    if isinstance(class_name, str) and class_name not in ("PreTrainedTokenizerFast", "TokenizersBackend"):
        return class_name.removesuffix("Fast").removesuffix("Tokenizer").lower().replace("_", "")
    if (folder / "config.json").exists():
        path = folder / "config.json"
        model_type = parse_json_object(read_limited(path, MAX_CONFIG_BYTES), path).get("model_type")
        return model_type.lower().replace("-", "").replace("_", "") if isinstance(model_type, str) else ""
    return ""


def _special_tokens_map(config: dict[str, Any]) -> dict[str, str]:
    """Special tokens by role (bos, eos, pad, …); in the file each is a text, or an object with its content."""
    tokens: dict[str, str] = {}
    for role in SPECIAL_TOKEN_ROLES:
        token = config.get(f"{role}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and 0 < len(token) <= 1000:
            tokens[role] = token
    return tokens


def _chat_template(folder: Path, config: dict[str, Any]) -> str:
    if (folder / "chat_template.jinja").exists():
        return _read_text(folder / "chat_template.jinja", max_bytes=1 << 20)
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = next((t.get("template") for t in template if isinstance(t, dict) and t.get("name") == "default"), "")
    return template if isinstance(template, str) else ""


def _append_added_tokens(spec: dict[str, Any], folder: Path) -> None:
    """Append the tokens of added_tokens.json, which older folders have next to the vocabulary."""
    path = folder / "added_tokens.json"
    if path.exists():
        known = {token["content"] for token in spec["added_tokens"]}
        for token, number in parse_json_object(read_limited(path, MAX_CONFIG_BYTES), path).items():
            if token not in known:
                spec["added_tokens"].append(added_token(token, number))


def _read_vocab(path: Path) -> dict[str, int]:
    vocab = parse_json_object(read_limited(path, MAX_FILE_BYTES), path)
    if not all(type(n) is int for n in vocab.values()):
        raise BadFile(_("{path}: every piece must have an integer id", path=path))
    return vocab


def _read_text(path: Path, max_bytes: int = MAX_FILE_BYTES) -> str:
    try:
        return read_limited(path, max_bytes).decode()
    except UnicodeDecodeError:
        raise BadFile(_("{path}: not UTF-8 text; the file is damaged or of another kind", path=path)) from None
