"""Tokenizer training: exact round trips, deterministic, one token per language tag."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import BadInput, BadSetting
from headwater.text.train import ALGORITHMS, SPECIAL_TOKENS, suggest_vocab_size, train_tokenizer

TEXTS = [
    f">>{'zh' if i % 2 else 'de'} the {w} of {i} days 今天天气很好 Männer"
    for i, w in enumerate(["cat", "dog", "tree"] * 60)
]


@pytest.fixture(scope="module")
def bpe():
    return train_tokenizer(TEXTS)


@given(st.text(st.characters(exclude_categories=("Cs",))))
def test_byte_level_bpe_decodes_every_text_exactly(bpe, text: str) -> None:
    assert bpe.decode(bpe.encode(text)) == text
    assert all(n < len(bpe) for n in bpe.encode(text))


@given(st.text(st.sampled_from(sorted(set("".join(TEXTS))))))
def test_char_decodes_known_characters_exactly(text: str) -> None:
    tokenizer = train_tokenizer([*TEXTS, "\n"], "char")
    assert tokenizer.decode(tokenizer.encode(text)) == text
    if ">>" not in text:
        assert len(tokenizer.encode(text, add_special_tokens=False)) == len(text)


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_special_tokens_come_first_and_language_tags_are_one_token(kind: str) -> None:
    tokenizer = train_tokenizer(TEXTS, kind, num_sentinels=3)
    assert [tokenizer.piece(n) for n in range(5)] == list(SPECIAL_TOKENS)
    assert tokenizer.token_to_id("<extra_id_2>") == 7
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.mask_id) == (0, 1, 2, 4)
    ids = tokenizer.encode(">>zh the cat", add_special_tokens=False)
    assert ids[0] == tokenizer.token_to_id(">>zh")
    assert tokenizer.decode(ids).replace(" ", "") == ">>zhthecat"
    typed = tokenizer.encode("<eos>", add_special_tokens=False)
    assert 2 not in typed  # a special token that a user types is text
    assert train_tokenizer(TEXTS, kind, add_bos_eos=False).encode("the cat")[-1] != 2


SCRIPT = """
from headwater.text.train import train_tokenizer
texts = [" ".join(f"w{(i * j) % 97}{'äöü'[j % 3]}" for j in range(i % 9 + 1)) for i in range(800)]
print([train_tokenizer(texts, kind, 400).hash for kind in ("bpe", "unigram", "char")])
"""


def test_training_is_deterministic() -> None:
    """In fresh processes, whose hash seeds differ."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    command = [sys.executable, "-c", SCRIPT]
    runs = [subprocess.run(command, env=env, capture_output=True, text=True, check=True) for _ in range(3)]
    assert len({run.stdout for run in runs}) == 1


def test_the_suggested_vocabulary_size_grows_with_the_data() -> None:
    assert suggest_vocab_size(["short"]) == 320
    assert suggest_vocab_size(["x" * 4_000_000]) == 8000
    assert suggest_vocab_size(["x" * 65_000_000]) == 32_000
    assert suggest_vocab_size(["".join(map(chr, range(0x4E00, 0x4E00 + 5000)))]) > 5000
    assert len(train_tokenizer(TEXTS, vocab_size=300)) == 300 + 2  # and the two tags
    with pytest.raises(BadSetting, match="at least 261 pieces, got 100"):
        train_tokenizer(TEXTS, vocab_size=100)
    with pytest.raises(BadSetting, match="no tokenizer is called 'bbpe'; did you mean 'bpe'"):
        train_tokenizer(TEXTS, "bbpe")
    with pytest.raises(BadInput, match="all of it is blank"):
        train_tokenizer(["", " "])


def test_a_repeated_character_is_fast(bpe) -> None:
    start = time.perf_counter()
    for character in "a^ 天":
        assert bpe.decode(bpe.encode(character * 200_000)) == character * 200_000
    train_tokenizer(["a" * 300_000, "^" * 300_000])
    assert time.perf_counter() - start < 20
