"""A small generated corpus, vocabularies trained on it, and texts that are hard to tokenize."""

from __future__ import annotations

import io
import json
import random

import pytest

HARD = [
    "",
    " ",
    "a",
    " lead",
    "trail ",
    "  two  spaces  ",
    "tab\tand\nline",
    "don't stop",
    "naïve café ÀÉ",
    "北京 你好",
    "日本語 xyz 😀",
    "ﬁne ① ½",
    "a-b_c.d,e",
    "1234567 3.14",
    "▁odd",
    "``quoted'' text",
    "e\u0301 combining",
    "\u200b zero",
    "UPPER Lower",
    "the river flows under bridges",
    "x" * 120,
    "\r\n",
    "'s 'S 'll",
    "a\u00a0b",
]


@pytest.fixture(scope="session")
def lines():
    draw = random.Random(0)
    syllables = [
        "ka",
        "ri",
        "to",
        "men",
        "al",
        "es",
        "ing",
        "qu",
        "on",
        "der",
        "pra",
        "vu",
        "st",
        "el",
        "ó",
        "ñu",
        "é",
        "北",
        "你",
        "の",
    ]
    words = ["the", "river", "flows", "under", "bridges", "don't", "café"]
    words += ["".join(draw.choices(syllables, k=draw.randint(1, 4))) for _ in range(800)]
    return [
        " ".join(draw.choices(words, k=draw.randint(3, 12))).capitalize() + draw.choice([".", "!", ""])
        for _ in range(1500)
    ]


@pytest.fixture(scope="session")
def texts(lines):
    return lines[:40] + HARD


@pytest.fixture(scope="session")
def train_spm(lines):
    sentencepiece = pytest.importorskip("sentencepiece")
    cache = {}

    def train(kind, **settings):
        key = (kind, *sorted(settings.items()))
        if key not in cache:
            out = io.BytesIO()
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(lines),
                model_writer=out,
                model_type=kind,
                minloglevel=2,
                num_threads=1,
                **settings,
            )
            cache[key] = out.getvalue()
        return cache[key], sentencepiece.SentencePieceProcessor(model_proto=cache[key])

    return train


@pytest.fixture(scope="session")
def byte_bpe(lines):
    """vocab.json and merges.txt of a small byte-level BPE, with room for special tokens."""
    from tokenizers import ByteLevelBPETokenizer

    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(
        lines,
        vocab_size=500,
        show_progress=False,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>", "<|endoftext|>"],
    )
    spec = json.loads(trained.to_str())["model"]
    merges = "\n".join(["#version: 0.2", *(" ".join(pair) for pair in spec["merges"])]) + "\n"
    return spec["vocab"], merges


@pytest.fixture(scope="session")
def wordpieces(lines):
    from tokenizers import BertWordPieceTokenizer

    trained = BertWordPieceTokenizer(lowercase=True)
    trained.train_from_iterator(lines, vocab_size=400, show_progress=False)
    vocab = trained.get_vocab()
    return sorted(vocab, key=vocab.get)
