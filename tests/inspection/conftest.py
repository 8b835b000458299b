"""Tiny byte-level models of all three architectures, with large weights so that a wrong term shows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import headwater
from headwater.families.hf_folder import LoadedModel
from headwater.text.pieces import byte_alphabet
from headwater.text.tokenizer import Tokenizer

SPECIALS = {"bos": "<s>", "eos": "</s>", "pad": "<pad>", "mask": "<mask>"}
SIZES = {"d_model": 32, "heads": 4, "layers": 3, "d_ff": 48, "dropout": 0.1}
STYLES = {
    "pre": {"norm_position": "pre", "norm": "rms", "position": "rotary", "kv_heads": 2},
    "post": {"norm_position": "post"},
    "sandwich": {"norm_position": "sandwich", "position": "learned"},
    "alibi": {"norm_position": "pre", "position": "alibi"},
    "relative": {"norm_position": "pre", "position": "relative"},
    "xl": {"norm_position": "pre", "position": "xl"},
}


def byte_tokenizer():
    """A tokenizer of 256 bytes and four special tokens."""
    vocab = {character: n for n, character in enumerate(byte_alphabet())}
    added = [
        {"id": 256 + n, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
        for n, text in enumerate(SPECIALS.values())
    ]  # fmt: skip
    spec = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": vocab | {text: 256 + n for n, text in enumerate(SPECIALS.values())}, "merges": []},
    }  # fmt: skip
    return Tokenizer(spec, SPECIALS)


def load_tiny(spec, seed=0, scale=1.7):
    model = spec.build(seed=seed).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
    config = {"eos_token_id": 257, "decoder_start_token_id": 256}
    return LoadedModel(model, byte_tokenizer(), config, Path("tiny"), "language")


@pytest.fixture(scope="session")
def make_model():
    """make_model("decoder", "pre"): a model with its tokenizer."""

    def build(shape, style="pre", **sizes):
        sizes = {**SIZES, **STYLES[style], **sizes}
        return load_tiny(getattr(headwater, "transformer" if shape == "both" else shape)(260, **sizes))

    return build


@pytest.fixture(scope="session", params=["decoder", "encoder", "both"])
def any_model(request, make_model):
    return make_model(request.param)


@pytest.fixture(scope="session")
def causal_lm(make_model):
    return make_model("decoder")


@pytest.fixture(scope="session")
def masked_lm(make_model):
    return make_model("encoder", "post")


@pytest.fixture(scope="session")
def encoder_decoder(make_model):
    return make_model("both", "post")


@pytest.fixture(scope="session")
def tokenizer():
    return byte_tokenizer()
