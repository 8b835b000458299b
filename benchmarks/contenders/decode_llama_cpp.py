"""SmolLM2 in llama.cpp (llama-cpp-python): the same prompt and the same number of new tokens, from the same file."""

import json
import sys
import time

from llama_cpp import Llama

PROMPT, NEW = 128, 128
model = Llama(sys.argv[1], n_ctx=512, n_threads=2, n_threads_batch=2, verbose=False)
TEXT = b"The history of the river begins at its headwater, high in the hills. "
ids = (model.tokenize(TEXT, add_bos=False) * 20)[:PROMPT]


def once() -> dict[str, float]:
    model.reset()
    begun = time.perf_counter()
    model.eval(ids)
    token = model.sample(temp=0.0)
    middle = time.perf_counter()
    for _ in range(NEW - 1):
        model.eval([token])
        token = model.sample(temp=0.0)
    end = time.perf_counter()
    return {"prefill tokens/s": PROMPT / (middle - begun), "decode tokens/s": (NEW - 1) / (end - middle)}


print("ready", flush=True)
for _ in sys.stdin:
    print(json.dumps(once()), flush=True)
