"""Loss of a fixed text under SmolLM2-135M (Q4_1): the modules of Headwater, its compiled step, and llama.cpp on the
same file if it is installed (make bench).

    python benchmarks/text_loss.py
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
        losses = {"headwater, modules": nll(loaded.model(ids[None])[0], ids)}
    cache, token_ids = BatchKVCache(loaded.model, ["text"]), ids.tolist()
    logits = [
        forward_single(loaded.model, cache, token_ids[i : i + 8], len(token_ids[i : i + 8]))
        for i in range(0, len(token_ids), 8)
    ]
    losses["headwater, compiled step"] = nll(torch.cat(logits), ids)
    if BENCH_PYTHON.exists():
        command = [str(BENCH_PYTHON), "-c", PEER, str(find_installed("smollm2")), json.dumps(token_ids)]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        if process.returncode == 0:
            losses["llama.cpp"] = float(process.stdout.strip().splitlines()[-1])
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / "text_loss.json").write_text(json.dumps({"tokens": len(ids), **losses}, indent=1))
    for name, value in losses.items():
        print(f"{name:<26} {value:.4f}")


if __name__ == "__main__":
    main()
