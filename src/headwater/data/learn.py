"""A tokenizer learned from the user's own text: byte-level BPE, unigram or characters. Deterministic.

The first ids are always <pad> <bos> <eos> <unk> <mask>, then sentinels for span corruption where asked. Tags such as
`>>zh` at the start of a source are kept whole. Byte-level BPE gives back every text exactly; characters do for all they
have seen; unigram keeps spaces and marks characters it has not seen as <unk>.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Engine

from headwater.errors import BadInput, BadSetting, nearest
from headwater.text.tokenizer import Tokenizer

SPECIALS = ("<pad>", "<bos>", "<eos>", "<unk>", "<mask>")
ROLES = {
    "pad": "<pad>",
    "bos": "<bos>",
    "eos": "<eos>",
    "unk": "<unk>",
    "mask": "<mask>",
    "cls": "<bos>",
    "sep": "<eos>",
}
TAG = re.compile(r"^>>[\w-]{1,20}(?= )")
MOST_TAGS = 200
LARGEST, SMALLEST = 32_000, 320
ENOUGH = 200_000_000  # characters; more text does not change the pieces of a small vocabulary
LONGEST_WORD = 1000  # characters of text without a space that are looked at as one: keeps learning linear


def sentinel(number: int) -> str:
    """The name of a place that stands for a hidden span, as in T5."""
    return f"<extra_id_{number}>"


def learn(
    texts: Iterable[str], kind: str = "bpe", vocab: int = 0, sentinels: int = 0, wrapped: bool = True
) -> Tokenizer:
    """A tokenizer for these texts. vocab 0: a size that suits their amount; wrapped: encode() adds <bos> and <eos>."""
    if kind not in KINDS:
        raise BadSetting(f"no tokenizer is called {kind!r}; {nearest(kind, KINDS)}")
    held = list(_enough(texts))
    if not any(text.strip() for text in held):
        raise BadInput("a tokenizer needs text to learn from, all of it is blank; check the data")
    specials = [*SPECIALS, *map(sentinel, range(sentinels))]
    least = len(specials) + (256 if kind == "bpe" else 1)
    if vocab and vocab < least:
        raise BadSetting(
            f"a {kind} vocabulary must have at least {least} pieces, got {vocab}; raise it, or 0 to choose"
        )
    engine = KINDS[kind](held, vocab or suitable_size(held), specials)
    engine.add_tokens([AddedToken(tag, normalized=False) for tag in tags_of(held)])
    spec: dict[str, Any] = json.loads(engine.to_str())
    return Tokenizer({**spec, "post_processor": _wrap(spec) if wrapped else None}, ROLES)


def suitable_size(texts: Iterable[str]) -> int:
    """How many pieces: four times the root of the bytes, and one for each character beyond ASCII; a multiple of 64.

    Rare pieces learn nothing: with this rule a piece is met some hundred times (29,000 sentence pairs: about 8,000).
    """
    size, wide = 0, set[str]()
    for text in texts:
        size += len(text.encode("utf-8", "replace"))
        if not text.isascii():
            wide.update(text)
    wanted = 4 * size**0.5 + sum(not c.isascii() for c in wide)
    return int(min(LARGEST, max(SMALLEST, -(-wanted // 64) * 64)))


def tags_of(texts: Iterable[str]) -> list[str]:
    """The tags that begin texts, such as >>zh, when they are few."""
    found = {match[0] for text in texts if (match := TAG.match(text))}
    return sorted(found) if len(found) <= MOST_TAGS else []


def _enough(texts: Iterable[str]) -> Iterator[str]:
    size = 0
    for text in texts:
        yield text
        size += len(text)
        if size > ENOUGH:
            return


def _wrap(spec: dict[str, Any]) -> dict[str, Any]:
    """<bos> text <eos>; for two texts <bos> first <eos> second <eos>, the second of kind 1."""
    ids = {token["content"]: token["id"] for token in spec["added_tokens"]}

    def mark(name: str, kind: int = 0) -> dict[str, Any]:
        return {"SpecialToken": {"id": name, "type_id": kind}}

    first, second = ({"Sequence": {"id": name, "type_id": kind}} for kind, name in enumerate("AB"))
    single = [mark("<bos>"), first, mark("<eos>")]
    known = {name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in ("<bos>", "<eos>")}
    return {"type": "TemplateProcessing", "single": single, "pair": [*single, second, mark("<eos>", 1)],
            "special_tokens": known}  # fmt: skip


# ----------------------------------------------------------------------------------------------------- the three kinds


def _bpe(texts: list[str], vocab: int, specials: list[str]) -> Engine:
    engine = Engine(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=specials,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=24,
        show_progress=False,
    )
    engine.train_from_iterator(_bounded(texts), trainer)
    return engine


def _unigram(texts: list[str], vocab: int, specials: list[str]) -> Engine:
    """The library finds the pieces; their scores are counted here, because its own differ from run to run."""
    engine = Engine(models.Unigram())
    engine.pre_tokenizer = pre_tokenizers.Metaspace()
    engine.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab, special_tokens=specials, unk_token="<unk>", show_progress=False, max_piece_length=16
    )
    with _one_thread():
        engine.train_from_iterator(_bounded(texts), trainer)
    found = [piece for piece, _ in json.loads(engine.to_str())["model"]["vocab"] if piece not in specials]
    words = Counter(word for text in _bounded(texts) for word, _ in engine.pre_tokenizer.pre_tokenize_str(text))
    engine.model = models.Unigram(_scored(sorted(found), words, specials), unk_id=specials.index("<unk>"))
    return engine


def _scored(pieces: list[str], words: Counter[str], specials: list[str], rounds: int = 3) -> list[tuple[str, float]]:
    """Each piece with the log of its share in the best cuts of all words, from equal shares on, in a few rounds."""
    scores = dict.fromkeys(pieces, -1.0)
    ordered = sorted(words)
    for _ in range(rounds):
        model, counts = models.Unigram([("<unk>", 0.0), *scores.items()], unk_id=0), Counter[str]()
        for word in ordered:
            for token in model.tokenize(word):
                counts[token.value] += words[word]
        total = sum(counts.values())
        scores = {piece: math.log((counts[piece] + 0.5) / total) for piece in pieces}
    best_first = sorted(scores.items(), key=lambda item: (-item[1], item[0]))
    return [*((name, 0.0) for name in specials), *best_first]


@contextmanager
def _one_thread() -> Iterator[None]:
    """The library's threads add in any order, and are slower here too."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def _characters(texts: list[str], vocab: int, specials: list[str]) -> Engine:
    """Every character that occurs, the most frequent first; BPE without merges, so that nothing is ever joined."""
    counts = Counter[str]()
    for text in texts:
        counts.update(text)
    kept = sorted(counts, key=lambda c: (-counts[c], c))[: max(1, max(vocab, 2 * SMALLEST) - len(specials))]
    pieces = {piece: number for number, piece in enumerate([*specials, *kept])}
    engine = Engine(models.BPE(pieces, [], unk_token="<unk>"))
    engine.decoder = decoders.Fuse()
    engine.add_special_tokens(specials)
    return engine


def _bounded(texts: list[str]) -> Iterator[str]:
    """Texts for the trainer; a stretch without a space is cut, because a trainer is quadratic in its longest word."""
    for text in texts:
        if len(text) <= LONGEST_WORD:
            yield text
        else:
            yield from (text[i : i + LONGEST_WORD * 10] for i in range(0, len(text), LONGEST_WORD * 10))


KINDS: dict[str, Callable[[list[str], int, list[str]], Engine]] = {
    "bpe": _bpe, "unigram": _unigram, "characters": _characters}  # fmt: skip
