"""How likely a fixed text is to SmolLM2-135M (Q4_1): Headwater's modules, its compiled step, packed int8 and int4, and
llama.cpp on the same file where it is installed (make bench).

    python benchmarks/likelihood.py
"""

from __future__ import annotations

import json
import subprocess

import torch
from side_by_side import BENCH_PYTHON, HERE
from torch.nn import functional as F

import headwater
from headwater.families.hub import find_installed
from headwater.generation.forward import forward_single
from headwater.generation.kv_cache import BatchKVCache

TEXT = (
    "A river begins small. High in the hills a spring comes out of the ground, and the water runs down the slope "
    "until it meets other water. The stream grows into a river, the river passes towns and fields, and at last it "
    "reaches the sea. People have always lived near rivers, because they need water to drink, to cook, and to grow "
    "their food. Some rivers are slow and wide, others are quick and narrow. In spring, when the snow melts, a quiet "
    "river can rise within a day and flood the land on both sides. When the water goes down again it leaves mud "
    "behind, and in that mud plants grow better than anywhere else."
)
PEER = """
import json, sys
import numpy as np
from llama_cpp import Llama
model = Llama(sys.argv[1], n_ctx=1024, n_threads=2, logits_all=True, verbose=False)
ids = json.loads(sys.argv[2])
model.eval(ids)
scores = np.array(model.scores[: len(ids)], dtype=np.float64)
scores = scores - scores.max(-1, keepdims=True)
logp = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
print(-logp[np.arange(len(ids) - 1), ids[1:]].mean())
"""


def nll(scores: torch.Tensor, ids: torch.Tensor) -> float:
    return F.cross_entropy(scores[:-1], ids[1:]).item()


def main() -> None:
    loaded = headwater.load("smollm2")
    ids = torch.tensor(loaded.tokenizer.encode(TEXT))
    with torch.inference_mode():
        found = {"headwater, modules": nll(loaded.model(ids[None])[0], ids)}
    slots, said = BatchKVCache(loaded.model, ["text"]), ids.tolist()
    parts = [forward_single(loaded.model, slots, said[i : i + 8], len(said[i : i + 8])) for i in range(0, len(said), 8)]
    found["headwater, compiled step"] = nll(torch.cat(parts), ids)
    if BENCH_PYTHON.exists():
        command = [str(BENCH_PYTHON), "-c", PEER, str(find_installed("smollm2")), json.dumps(said)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            found["llama.cpp"] = float(done.stdout.strip().splitlines()[-1])
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / "likelihood.json").write_text(json.dumps({"tokens": len(ids), **found}, indent=1))
    for name, value in found.items():
        print(f"{name:<26} {value:.4f}")


if __name__ == "__main__":
    main()
