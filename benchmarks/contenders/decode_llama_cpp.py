"""SmolLM2 in llama.cpp (llama-cpp-python): the same prompt and the same number of new tokens, from the same file."""

import os
import sys
import time

import numpy as np
from decode_work import NEW, prompt, rates, serve
from llama_cpp import Llama

threads = int(os.environ["OMP_NUM_THREADS"])
model = Llama(sys.argv[1], n_ctx=512, n_threads=threads, n_threads_batch=threads, verbose=False)
ids = prompt()


def once() -> tuple[list[int], dict[str, float]]:
    model.reset()
    begun = time.perf_counter()
    model.eval(ids)
    tokens = [model.sample(temp=0.0)]
    middle = time.perf_counter()
    for _ in range(NEW - 1):
        model.eval(tokens[-1:])
        tokens.append(model.sample(temp=0.0))
    return tokens, rates(middle - begun, time.perf_counter() - middle)


def logprobs(together: int) -> list[float]:
    """Of the prompt's tokens, read so many at a time."""
    every = Llama(sys.argv[1], n_ctx=512, n_threads=threads, n_threads_batch=threads, logits_all=True, verbose=False)
    for i in range(0, len(ids), together):
        every.eval(ids[i : i + together])
    scores = np.array(every.scores[: len(ids) - 1], dtype=np.float64)
    scores -= scores.max(-1, keepdims=True)
    scores -= np.log(np.exp(scores).sum(-1, keepdims=True))
    return scores[np.arange(len(ids) - 1), ids[1:]].tolist()


serve(once, {"reading": logprobs(len(ids)), "writing": logprobs(1)})
