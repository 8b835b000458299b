"""Loading needs little more memory than the weights: measured in a separate process."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from tiny_models import CONFIGS

from headwater.families import FAMILIES
from headwater.weights.hf_config import HFConfig
from headwater.weights.safetensors import write_safetensors

WIDE = {"hidden_size": 768, "num_hidden_layers": 7, "num_attention_heads": 12, "intermediate_size": 2048}
LLAMA = CONFIGS["llama"] | WIDE | {"num_key_value_heads": 12, "vocab_size": 2000}
GPT2 = {"vocab_size": 2000, "n_embd": 768, "n_layer": 7, "n_head": 12, "n_positions": 128}

CHILD = r"""
import re, sys, torch, headwater
from headwater.families.hf_folder import load_hf_folder

def peak():
    status = open("/proc/self/status").read()  # getrusage would count the memory of the parent process
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", status)[1])

torch.ones(1000, 1000) @ torch.ones(1000, 1000)
load_hf_folder(sys.argv[1])  # a small model first, so that late imports are not measured
before = peak()
model = load_hf_folder(sys.argv[2]).model
print(peak() - before, sum(p.numel() * 4 for p in model.parameters()))
"""


def written(folder, family, config, dtype):
    """A model folder of about 180 MB in float32, saved in this dtype."""
    folder.mkdir()
    definition = FAMILIES[family]
    model = definition.read_spec(HFConfig(dict(config)), "language").build(seed=0)
    names = definition.body_names + definition.head_names["language"]
    exported = names.export(dict(model.named_parameters()), heads=12, kv_heads=12)
    write_safetensors(
        folder / "model.safetensors", {name: exported[name].detach().to(dtype).contiguous() for name in exported}
    )
    (folder / "config.json").write_text(json.dumps({"model_type": family, **config}))
    return folder


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from Linux")
@pytest.mark.parametrize(
    ("family", "config", "dtype"),
    [("llama", LLAMA, torch.float32), ("llama", LLAMA, torch.bfloat16), ("gpt2", GPT2, torch.float32)],
    ids=["float32", "bfloat16", "gpt2, transposed"],
)
def test_peak_is_at_most_a_fifth_above_the_weights(family, config, dtype, tmp_path):
    small = written(tmp_path / "small", family, CONFIGS[family], torch.float32) if family == "gpt2" else None
    small = small or written(tmp_path / "small", "llama", CONFIGS["llama"] | {"num_attention_heads": 2}, torch.float32)
    large = written(tmp_path / "large", family, config, dtype)
    done = subprocess.run([sys.executable, "-c", CHILD, small, large], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    used, weights = map(int, done.stdout.split())
    assert weights > 150e6
    assert used / weights < 1.2, f"{used / 1e6:.0f} MB for {weights / 1e6:.0f} MB of weights"
    assert used / weights > 0.5  # the measurement itself sees the weights
