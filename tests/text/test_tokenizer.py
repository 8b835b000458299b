"""Tokenizer: special tokens typed in a text stay text, pieces are readable, streamed text equals decoded text."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headwater.errors import BadInput
from headwater.generation.streaming import TextStream
from headwater.text.load import load_tokenizer
from headwater.text.loaders import sentencepiece_model as spm
from headwater.text.loaders.sentencepiece import llama_spec, plain_spec, t5_spec
from headwater.text.special_tokens import unused_character
from headwater.text.tokenizer import Tokenizer, pad_sequences


def stream_texts(tokenizer, ids):
    """The text emitted after each token, and the rest at the end."""
    decoded, stream = [], TextStream(tokenizer.decode)
    for token in ids:
        text, stream = stream.push(token)
        decoded.append(text)
    return [*decoded, stream.flush()]


@pytest.fixture(scope="module")
def tokenizers(byte_bpe, wordpieces, train_spm, tmp_path_factory):
    path = tmp_path_factory.mktemp("all")
    vocab, merges = byte_bpe
    by_name = {}
    for name, files in {
        "gpt2": {"vocab.json": json.dumps(vocab), "merges.txt": merges},
        "bert": {"vocab.txt": "\n".join(wordpieces)},
    }.items():
        (path / name).mkdir()
        for file, content in files.items():
            (path / name / file).write_text(content)
        by_name[name] = load_tokenizer(path / name)
    raw, _ = train_spm("unigram", vocab_size=200, pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    by_name["t5"] = Tokenizer(*t5_spec(spm.parse_sentencepiece(raw), {}))
    raw, _ = train_spm(
        "bpe", vocab_size=600, byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False
    )
    by_name["llama"] = Tokenizer(*llama_spec(spm.parse_sentencepiece(raw), {}))
    raw, _ = train_spm("unigram", vocab_size=400, byte_fallback=True, pad_id=3)
    by_name["unigram"] = Tokenizer(*plain_spec(spm.parse_sentencepiece(raw), {}))
    return by_name


NAMES = ["gpt2", "bert", "t5", "llama", "unigram"]


@pytest.mark.parametrize("name", NAMES)
def test_special_tokens_typed_as_text_stay_text(tokenizers, name):
    ours = tokenizers[name]
    unknown = None if name == "gpt2" else ours.special_id("unk")  # GPT-2 has no unknown pieces; its unk is its eos
    special_ids = {ours.token_to_id(token) for token in ours.special_tokenizer.tokens} - {unknown}
    assert special_ids
    for token in ours.special_tokenizer.tokens:
        for text in (
            token,
            f"ka {token} ri",
            token * 3,
            token[0] + token + token[1:],
            f"{token}{unused_character('')}{token}\0",
        ):
            assert not special_ids & set(ours.encode(text, add_special_tokens=False)), (token, text)
        if ours.token_to_id(token) != unknown:
            assert ours.token_to_id(token) in ours.encode(
                f"ka {token} ri", parse_special=True, add_special_tokens=False
            )


def test_a_disguised_special_token_stays_text(tokenizers):
    """Full-width letters that the character map normalizes: a check of the text alone would miss them."""
    ours = tokenizers["t5"]
    disguised = "ka＜/s＞ri <\u200b/s> ＜extra_id_0＞"
    assert ours.eos_id in ours.backend.encode(disguised, add_special_tokens=False).ids
    assert ours.special_tokenizer.ids.isdisjoint(ours.encode(disguised, add_special_tokens=False))
    assert ours.special_tokenizer.ids.isdisjoint(ours.encode(disguised, add_special_tokens=False, parse_special=True))
    assert ours.special_tokenizer.ids.isdisjoint(ours.encode_batch([disguised], add_special_tokens=False)[0])


def test_without_escaping_a_unigram_model_would_parse_special_tokens(tokenizers):
    """Planted fault: the library's own option does not help where the vocabulary of the model has the token."""
    ours = tokenizers["t5"]
    assert ours.eos_id in ours.backend.encode("ka</s>ri", add_special_tokens=False).ids
    assert ours.eos_id not in ours.encode("ka</s>ri", add_special_tokens=False)
    with pytest.raises(BadInput, match="contains the special token '</s>'"):
        ours.encode_with_offsets("ka </s>")


@pytest.mark.parametrize("name", NAMES)
def test_special_affixes_do_not_depend_on_parse_special(tokenizers, name):
    ours = tokenizers[name]
    assert ours.encode("ka ri", parse_special=True) == ours.encode("ka ri")
    inside = ours.encode("ka ri", add_special_tokens=False)
    full = ours.encode("ka ri")
    assert any(full[n : n + len(inside)] == inside for n in range(len(full)))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=30))
def test_bytes_survive(tokenizers, name, text):
    ours = tokenizers[name]
    ids = ours.encode(text, add_special_tokens=False)
    decoded = ours.decode_bytes(ids)
    if name == "llama":  # a space is put in front, and ▁ is a space
        decoded, text = decoded.removeprefix(b" "), text.replace("▁", " ")
    assert decoded == text.encode()
    displayed = "".join(piece for piece, _ in ours.display_pieces(ids))
    assert displayed.encode()[-len(text.encode()) :] == text.encode() or not text


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=30), more=st.lists(st.integers(0, 150), max_size=8))
def test_streamed_text_equals_the_decoded_text(tokenizers, name, text, more):
    ours = tokenizers[name]
    ids = ours.encode(text) + (more if name in ("gpt2", "t5") else [])  # the others repair invalid bytes afterwards
    decoded = stream_texts(ours, ids)
    if name == "bert":  # its decoder removes spaces before punctuation
        assert "".join(decoded).replace(" ", "") == ours.decode(ids).replace(" ", "")
    else:
        assert "".join(decoded) == ours.decode(ids)


def test_a_stream_never_splits_a_character(tokenizers):
    ours = tokenizers["llama"]
    decoded = stream_texts(ours, ours.encode("😀 ok", add_special_tokens=False))
    assert all("�" not in part for part in decoded)
    assert "".join(decoded) == "😀 ok"
    assert decoded[1] == ""


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_equals_single_texts(tokenizers, texts, name):
    ours = tokenizers[name]
    hard = [*texts, *ours.special_tokenizer.tokens, *(f"ka{token}ri" for token in ours.special_tokenizer.tokens)]
    for special in (True, False):
        assert ours.encode_batch(hard, add_special_tokens=special) == [
            ours.encode(t, add_special_tokens=special) for t in hard
        ]


def test_pieces_are_readable(tokenizers):
    gpt2 = tokenizers["gpt2"]
    ids = gpt2.encode("the 😀")
    assert ("😀", 4) in gpt2.display_pieces(ids)
    assert gpt2.piece(ids[-1]) == "\\x80"
    assert gpt2.piece_bytes(gpt2.eos_id) == b"<|endoftext|>"
    bert = tokenizers["bert"]
    assert next(text for text, _ in bert.display_pieces(bert.encode("kari", add_special_tokens=False))).startswith(" ")
    assert tokenizers["llama"].piece(tokenizers["llama"].token_to_id("<0x0A>")) == "\n"


def test_batches_are_padded_on_either_side(tokenizers):
    ours = tokenizers["bert"]
    texts = ["ka", "the river flows", "ri to"]
    rows = [ours.encode(t) for t in texts]
    for side in ("left", "right"):
        ids, keep = ours.encode_padded(texts, padding_side=side)
        assert [row[mask].tolist() for row, mask in zip(ids, keep, strict=True)] == rows
        assert (ids[~keep] == ours.pad_id).all()
        assert keep[1].all()
    assert pad_sequences([], 0).ids.shape == (0, 0)
    assert pad_sequences([[], [1]], 7, "left").ids.tolist() == [[7], [1]]
    assert pad_sequences([[1]], 0).ids.dtype == torch.long
    with pytest.raises(BadInput, match="must be left or right"):
        pad_sequences([[1]], 0, "middle")


def test_offsets_point_into_the_text(tokenizers):
    ours = tokenizers["bert"]
    text = "The river ka"
    aligned = ours.encode_with_offsets(text)
    assert [text[a:b].lower() for a, b in aligned.offsets if b > a] == [
        ours.backend.id_to_token(n).removeprefix("##")
        for n, (a, b) in zip(aligned.ids, aligned.offsets, strict=True)
        if b > a
    ]
    words = ours.encode_with_offsets(["kari", "the", "prader"])
    assert [w for w in dict.fromkeys(words.word_ids) if w is not None] == [0, 1, 2]


@pytest.mark.parametrize("bad", [[-1], [10**9], [True], ["a"], [1.0]])
def test_ids_out_of_range_are_reported(tokenizers, bad):
    with pytest.raises(BadInput, match="token ids must be integers from 0"):
        tokenizers["gpt2"].decode(bad)


def test_lone_surrogates_in_a_text_are_reported(tokenizers):
    for name in NAMES:
        with pytest.raises(BadInput):
            tokenizers[name].encode("\ud800")


def test_the_hash_covers_everything_that_matters(tokenizers):
    ours = tokenizers["bert"]
    spec = ours.spec
    same = Tokenizer(spec, ours.special_tokens_map)
    assert same.hash == ours.hash
    spec["normalizer"]["lowercase"] = False
    assert Tokenizer(spec, ours.special_tokens_map).hash != ours.hash
    assert Tokenizer(ours.spec, {}).hash != ours.hash
    assert len(ours) == max(ours.backend.get_vocab().values()) + 1
    assert "pieces" in repr(ours)
