"""The tokenizer of an old checkpoint, written as tokenizer.json beside its converted weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headwater.errors import BadFile, NotFound
from headwater.text import from_fairseq
from headwater.text.from_vocab import BERT_TOKENS, wordpiece
from headwater.text.load import load
from headwater.text.pair import PairTokenizer
from headwater.text.tokenizer import Tokenizer
from headwater.weights.files import read_bounded

MOST_BYTES = 64 << 20
ENOUGH = 0.9  # of its pieces a vocabulary must find again; BERT's [unused17] and the like can not be


def public_tokenizer(folder: Path, made: Path) -> str:
    """Save the tokenizer of a public folder; a remark where it has none that can be trusted."""
    try:
        tokenizer = load(folder)
    except NotFound:
        return "no tokenizer was found; --vocabulary names the folder where it lies"
    if (folder / "vocab.txt").exists() and not (folder / "tokenizer.json").exists():
        tokenizer = max((tokenizer, _cased(folder)), key=share_found)
        if share_found(tokenizer) < ENOUGH:
            return "vocab.txt is not WordPiece's (most pieces could never be found), so no tokenizer was written"
    tokenizer.save(made)
    return ""


def _cased(folder: Path) -> Tokenizer:
    text = read_bounded(folder / "vocab.txt", MOST_BYTES).decode()
    return Tokenizer(wordpiece(text, BERT_TOKENS, {"do_lower_case": False}, folder), BERT_TOKENS, where=folder)


def share_found(tokenizer: Tokenizer) -> float:
    """Of the pieces that begin a word, how many the tokenizer finds when it is given just that piece."""
    special = set(tokenizer.specials.values())
    words = [piece for piece in tokenizer.engine.get_vocab() if not piece.startswith("##") and piece not in special]
    found = tokenizer.encode_many(words, special=False)
    hits = sum(ids == [tokenizer.id_of(word)] for word, ids in zip(words, found, strict=True))
    return hits / max(len(words), 1)


def fairseq_tokenizer(folder: Path, made: Path, source_size: int, target_size: int, settings: dict[str, Any]) -> int:
    """Save the pair of tokenizers; how many rows the source's table must grow for pieces its dictionary lacks."""
    place = next((p for p in (folder, folder / "data", folder.parent / "data") if any(p.glob("dict.*.txt"))), None)
    if place is None:
        raise NotFound(f"{folder}: fairseq's dict.*.txt must lie in it or in data/; --vocabulary names their folder")
    source, target = _dictionaries(place, source_size, target_size, settings)
    merges = _merges(place)
    more = from_fairseq.strays(source, merges)
    for piece in more:
        source[piece] = len(source)
    made_from = [Tokenizer(from_fairseq.fairseq(vocab, merges), from_fairseq.ROLES) for vocab in (source, target)]
    PairTokenizer(*made_from).save(made)
    return len(more)


def _dictionaries(place: Path, source_size: int, target_size: int, settings: dict[str, Any]) -> tuple[dict, dict]:
    """Which dictionary is whose: the settings say, or the sizes of the tables do."""
    found = {
        path.name.split(".")[1]: from_fairseq.dictionary(_text(path), path) for path in sorted(place.glob("dict.*.txt"))
    }
    named = [found.get(str(settings.get(key))) for key in ("source_lang", "target_lang")]
    fits = [[vocab for vocab in found.values() if len(vocab) == size] for size in (source_size, target_size)]
    chosen = [said or (alike[0] if len(alike) == 1 else None) for said, alike in zip(named, fits, strict=True)]
    sizes = [len(vocab or ()) for vocab in chosen]
    if sizes != [source_size, target_size]:
        told = ", ".join(f"{name} {len(vocab)}" for name, vocab in found.items())
        raise BadFile(f"{place}: dictionaries of {source_size} and {target_size} pieces must be there, found: {told}")
    return chosen[0] or {}, chosen[1] or {}


def _merges(place: Path) -> list[list[str]]:
    files = [path for pattern in ("bpe.code*", "*bpecodes", "code*") for path in sorted(place.glob(pattern))]
    return from_fairseq.codes(_text(files[0]), files[0]) if files else []


def _text(path: Path) -> str:
    try:
        return read_bounded(path, MOST_BYTES).decode()
    except UnicodeDecodeError:
        raise BadFile(f"{path}: not UTF-8 text; the file is damaged or of another kind") from None
