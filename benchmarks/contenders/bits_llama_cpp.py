"""Loss and KL divergence of windows of tokens in llama.cpp: bits_llama_cpp.py FILE WINDOWS.json EXACT.npy TOGETHER.

So many tokens are read at a time: a whole window as prompts are read, few as an answer is written. EXACT.npy holds the
log-probabilities of the same weights without rounding, [windows, tokens - 1, vocabulary].
"""

import json
import os
import sys
from pathlib import Path

import numpy as np
from llama_cpp import Llama

windows, together = json.loads(Path(sys.argv[2]).read_text()), int(sys.argv[4])
exact = np.load(sys.argv[3], mmap_mode="r")
threads, longest = int(os.environ["OMP_NUM_THREADS"]), max(map(len, windows))
model = Llama(
    sys.argv[1], n_ctx=longest, n_batch=longest, n_threads=threads, n_threads_batch=threads, logits_all=True,
    verbose=False,
)  # fmt: skip
loss, kl = [], []
for ids, true in zip(windows, exact, strict=True):
    model.reset()
    for i in range(0, len(ids) - 1, together):
        model.eval(ids[i : min(i + together, len(ids) - 1)])
    scores = np.array(model.scores[: len(ids) - 1], dtype=np.float64)
    scores -= scores.max(-1, keepdims=True)
    scores -= np.log(np.exp(scores).sum(-1, keepdims=True))
    loss.append(float(-scores[np.arange(len(ids) - 1), ids[1:]].mean()))
    kl.append(float((np.exp(true) * (true - scores)).sum(-1).mean()))
print(json.dumps({"loss": loss, "kl": kl}), flush=True)
