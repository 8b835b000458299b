"""Tokenizers learned from text: exact, deterministic, tags whole; ids kept between runs or made again."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.data.learn import KINDS, SPECIALS, learn, suitable_size
from headwater.errors import BadInput, BadSetting

TEXTS = [
    f">>{'zh' if i % 2 else 'de'} the {w} of {i} days 今天天气很好 Männer"
    for i, w in enumerate(["cat", "dog", "tree"] * 60)
]


@pytest.fixture(scope="module")
def bpe():
    return learn(TEXTS)


@given(st.text(st.characters(exclude_categories=("Cs",))))
def test_byte_level_pieces_give_every_text_back(bpe, text: str) -> None:
    assert bpe.decode(bpe.encode(text)) == text
    assert all(n < len(bpe) for n in bpe.encode(text))


@given(st.text(st.sampled_from(sorted(set("".join(TEXTS))))))
def test_characters_give_back_what_they_have_seen(text: str) -> None:
    tokenizer = learn([*TEXTS, "\n"], "characters")
    assert tokenizer.decode(tokenizer.encode(text)) == text
    if ">>" not in text:
        assert len(tokenizer.encode(text, special=False)) == len(text)


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_ids_are_the_specials_and_tags_are_whole(kind: str) -> None:
    tokenizer = learn(TEXTS, kind, sentinels=3)
    assert [tokenizer.piece(n) for n in range(5)] == list(SPECIALS)
    assert tokenizer.id_of("<extra_id_2>") == 7
    assert (tokenizer.pad, tokenizer.bos, tokenizer.eos, tokenizer.mask) == (0, 1, 2, 4)
    ids = tokenizer.encode(">>zh the cat", special=False)
    assert ids[0] == tokenizer.id_of(">>zh")
    assert tokenizer.decode(ids).replace(" ", "") == ">>zhthecat"
    typed = tokenizer.encode("<eos>", special=False)
    assert 2 not in typed  # a special token that a user types is text
    assert learn(TEXTS, kind, wrapped=False).encode("the cat")[-1] != 2


SCRIPT = """
from headwater.data.learn import learn
texts = [" ".join(f"w{(i * j) % 97}{'äöü'[j % 3]}" for j in range(i % 9 + 1)) for i in range(800)]
print([learn(texts, kind, 400).hash for kind in ("bpe", "unigram", "characters")])
"""


def test_learning_twice_is_learning_once() -> None:
    """In fresh processes, whose hash seeds differ."""
    here = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    found = {subprocess.run([sys.executable, "-c", SCRIPT], env=here, capture_output=True, text=True, check=True).stdout
             for _ in range(3)}  # fmt: skip
    assert len(found) == 1


def test_the_size_suits_the_data() -> None:
    assert suitable_size(["short"]) == 320
    assert suitable_size(["x" * 4_000_000]) == 8000
    assert suitable_size(["x" * 65_000_000]) == 32_000
    assert suitable_size(["".join(map(chr, range(0x4E00, 0x4E00 + 5000)))]) > 5000
    assert len(learn(TEXTS, vocab=300)) == 300 + 2  # and the two tags
    with pytest.raises(BadSetting, match="at least 261 pieces, got 100"):
        learn(TEXTS, vocab=100)
    with pytest.raises(BadSetting, match="no tokenizer is called 'bbpe'; did you mean 'bpe'"):
        learn(TEXTS, "bbpe")
    with pytest.raises(BadInput, match="all of it is blank"):
        learn(["", " "])


def test_a_repeated_character_takes_no_time(bpe) -> None:
    start = time.perf_counter()
    for character in "a^ 天":
        assert bpe.decode(bpe.encode(character * 200_000)) == character * 200_000
    learn(["a" * 300_000, "^" * 300_000])
    assert time.perf_counter() - start < 20
