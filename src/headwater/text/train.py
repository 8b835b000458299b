"""Train a tokenizer on the user's text: byte-level BPE, unigram or character level. Deterministic.

The first ids are always <pad> <bos> <eos> <unk> <mask>, then the sentinels for span corruption. Language tags such as
`>>zh` at the start of a source are one token each. Byte-level BPE decodes every text exactly; char only characters of
its vocabulary; unigram keeps spaces and encodes unknown characters as <unk>.
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
from tokenizers import Tokenizer as BackendTokenizer

from headwater.errors import BadInput, BadSetting, nearest
from headwater.i18n import _
from headwater.text.tokenizer import Tokenizer

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>", "<mask>")
SPECIAL_TOKENS_MAP = {
    "pad": "<pad>",
    "bos": "<bos>",
    "eos": "<eos>",
    "unk": "<unk>",
    "mask": "<mask>",
    "cls": "<bos>",
    "sep": "<eos>",
}
LANGUAGE_TAG = re.compile(r"^>>[\w-]{1,20}(?= )")
MAX_LANGUAGE_TAGS = 200
MAX_VOCAB_SIZE = 32_000
MIN_VOCAB_SIZE = 320
MAX_TRAINING_CHARACTERS = 200_000_000  # more text does not change the pieces of a small vocabulary
MAX_WORD_CHARACTERS = 1000  # longer words are split, which keeps training linear


def sentinel_token(index: int) -> str:
    """The sentinel token of a masked span, as in T5."""
    return f"<extra_id_{index}>"


def train_tokenizer(
    texts: Iterable[str], algorithm: str = "bpe", vocab_size: int = 0, num_sentinels: int = 0, add_bos_eos: bool = True
) -> Tokenizer:
    """Train a tokenizer: bpe, unigram or char.

    vocab_size 0: chosen by the amount of text. add_bos_eos: encode() adds <bos> and <eos>.
    """
    if algorithm not in ALGORITHMS:
        raise BadSetting(
            _("no tokenizer is called {kind!r}; {nearest}", kind=algorithm, nearest=nearest(algorithm, ALGORITHMS))
        )
    corpus = list(_limit_training_text(texts))
    if not any(text.strip() for text in corpus):
        raise BadInput(_("a tokenizer needs text to train on, all of it is blank; check the data"))
    special_tokens = [*SPECIAL_TOKENS, *map(sentinel_token, range(num_sentinels))]
    min_size = len(special_tokens) + (256 if algorithm == "bpe" else 1)
    if vocab_size and vocab_size < min_size:
        raise BadSetting(
            _(
                "a {algorithm} vocabulary must have at least {min_size} pieces, got {vocab_size}; raise it, "
                "or use 0 to choose automatically",
                algorithm=algorithm,
                min_size=min_size,
                vocab_size=vocab_size,
            )
        )
    backend = ALGORITHMS[algorithm](corpus, vocab_size or suggest_vocab_size(corpus), special_tokens)
    backend.add_tokens([AddedToken(tag, normalized=False) for tag in language_tags(corpus)])
    spec: dict[str, Any] = json.loads(backend.to_str())
    return Tokenizer({**spec, "post_processor": _bos_eos_template(spec) if add_bos_eos else None}, SPECIAL_TOKENS_MAP)


def suggest_vocab_size(texts: Iterable[str]) -> int:
    """Vocabulary size: 4 √bytes, and one for each character beyond ASCII; a multiple of 64.

    A token then occurs some hundred times, often enough to be learned (29,000 sentence pairs: about 8,000 tokens).
    """
    size = 0
    characters: set[str] = set()
    for text in texts:
        size += len(text.encode("utf-8", "replace"))
        if not text.isascii():
            characters.update(text)
    vocab_size = 4 * size**0.5 + sum(not c.isascii() for c in characters)
    return int(min(MAX_VOCAB_SIZE, max(MIN_VOCAB_SIZE, -(-vocab_size // 64) * 64)))


def language_tags(texts: Iterable[str]) -> list[str]:
    """The language tags at the start of texts, such as >>zh; none when there are too many to be tags."""
    matches = (LANGUAGE_TAG.match(text) for text in texts)
    tags = {match[0] for match in matches if match}
    return sorted(tags) if len(tags) <= MAX_LANGUAGE_TAGS else []


def _limit_training_text(texts: Iterable[str]) -> Iterator[str]:
    size = 0
    for text in texts:
        yield text
        size += len(text)
        if size > MAX_TRAINING_CHARACTERS:
            return


def _bos_eos_template(spec: dict[str, Any]) -> dict[str, Any]:
    """<bos> text <eos>; for a pair <bos> first <eos> second <eos>, the second of token type 1."""
    ids = {token["content"]: token["id"] for token in spec["added_tokens"]}

    def special(name: str, type_id: int = 0) -> dict[str, Any]:
        return {"SpecialToken": {"id": name, "type_id": type_id}}

    first = {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 1}}
    single = [special("<bos>"), first, special("<eos>")]
    tokens = {name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in ("<bos>", "<eos>")}
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, second, special("<eos>", 1)],
        "special_tokens": tokens,
    }


# -------------------------------------------------------------------------------------------------------- algorithms


def _train_bpe(texts: list[str], vocab_size: int, special_tokens: list[str]) -> BackendTokenizer:
    backend = BackendTokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special_tokens,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=24,
        show_progress=False,
    )
    backend.train_from_iterator(_split_long_texts(texts), trainer)
    return backend


def _train_unigram(texts: list[str], vocab_size: int, special_tokens: list[str]) -> BackendTokenizer:
    """The library chooses the pieces; their scores are computed here, because its own differ from run to run."""
    backend = BackendTokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size,
        special_tokens=special_tokens,
        unk_token="<unk>",
        show_progress=False,
        max_piece_length=16,
    )
    with _single_threaded():
        backend.train_from_iterator(_split_long_texts(texts), trainer)
    pieces = [piece for piece, _ in json.loads(backend.to_str())["model"]["vocab"] if piece not in special_tokens]
    words = Counter(
        word for text in _split_long_texts(texts) for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)
    )
    backend.model = models.Unigram(
        _score_pieces(sorted(pieces), words, special_tokens), unk_id=special_tokens.index("<unk>")
    )
    return backend


def _score_pieces(
    pieces: list[str], words: Counter[str], special_tokens: list[str], rounds: int = 3
) -> list[tuple[str, float]]:
    """Unigram log-probabilities from piece counts in the best segmentations of all words (hard EM, a few rounds)."""
    scores = dict.fromkeys(pieces, -1.0)
    ordered = sorted(words)
    for _unused in range(rounds):
        model = models.Unigram([("<unk>", 0.0), *scores.items()], unk_id=0)
        counts = Counter[str]()
        for word in ordered:
            for token in model.tokenize(word):
                counts[token.value] += words[word]
        total = sum(counts.values())
        scores = {piece: math.log((counts[piece] + 0.5) / total) for piece in pieces}
    best_first = sorted(scores.items(), key=lambda item: (-item[1], item[0]))
    return [*((name, 0.0) for name in special_tokens), *best_first]


@contextmanager
def _single_threaded() -> Iterator[None]:
    """Disable the threads of the library: they sum in varying order, and are slower here."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def _train_char(texts: list[str], vocab_size: int, special_tokens: list[str]) -> BackendTokenizer:
    """Character level: the most frequent characters, as a BPE model without merges."""
    counts = Counter[str]()
    for text in texts:
        counts.update(text)
    limit = max(1, max(vocab_size, 2 * MIN_VOCAB_SIZE) - len(special_tokens))
    characters = sorted(counts, key=lambda c: (-counts[c], c))[:limit]
    pieces = {piece: number for number, piece in enumerate([*special_tokens, *characters])}
    backend = BackendTokenizer(models.BPE(pieces, [], unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(special_tokens)
    return backend


def _split_long_texts(texts: list[str]) -> Iterator[str]:
    """Texts for the trainer; long texts are split, because training is quadratic in the longest word."""
    for text in texts:
        if len(text) <= MAX_WORD_CHARACTERS:
            yield text
        else:
            yield from (text[i : i + MAX_WORD_CHARACTERS * 10] for i in range(0, len(text), MAX_WORD_CHARACTERS * 10))


ALGORITHMS: dict[str, Callable[[list[str], int, list[str]], BackendTokenizer]] = {
    "bpe": _train_bpe,
    "unigram": _train_unigram,
    "char": _train_char,
}
