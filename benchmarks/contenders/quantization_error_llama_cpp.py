"""Loss and KL divergence of windows of tokens in llama.cpp.

quantization_error_llama_cpp.py FILE WINDOWS.json EXACT.npy CHUNK_SIZE

CHUNK_SIZE tokens are evaluated at a time: a full window as in prefill, few as in decoding. EXACT.npy has the
log-probabilities of the same weights without rounding of activations, [windows, tokens - 1, vocabulary].
"""

import json
import os
import sys
from pathlib import Path

import numpy as np
from llama_cpp import Llama

windows, chunk_size = json.loads(Path(sys.argv[2]).read_text()), int(sys.argv[4])
exact = np.load(sys.argv[3], mmap_mode="r")
threads, longest = int(os.environ["OMP_NUM_THREADS"]), max(map(len, windows))
model = Llama(
    sys.argv[1], n_ctx=longest, n_batch=longest, n_threads=threads, n_threads_batch=threads, logits_all=True,
    verbose=False,
)  # fmt: skip
loss, kl = [], []
for ids, exact_logprobs in zip(windows, exact, strict=True):
    model.reset()
    for i in range(0, len(ids) - 1, chunk_size):
        model.eval(ids[i : min(i + chunk_size, len(ids) - 1)])
    logprobs = np.array(model.scores[: len(ids) - 1], dtype=np.float64)
    logprobs -= logprobs.max(-1, keepdims=True)
    logprobs -= np.log(np.exp(logprobs).sum(-1, keepdims=True))
    loss.append(float(-logprobs[np.arange(len(ids) - 1), ids[1:]].mean()))
    kl.append(float((np.exp(exact_logprobs) * (exact_logprobs - logprobs)).sum(-1).mean()))
print(json.dumps({"loss": loss, "kl": kl}), flush=True)
