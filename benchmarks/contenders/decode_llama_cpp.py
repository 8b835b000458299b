"""SmolLM2 in llama.cpp (llama-cpp-python): the same prompt and the same number of new tokens, from the same file."""

import os
import sys
import time

import numpy as np
from decode_workload import NEW, prompt, rates, serve
from llama_cpp import Llama

threads = int(os.environ["OMP_NUM_THREADS"])
model = Llama(sys.argv[1], n_ctx=512, n_threads=threads, n_threads_batch=threads, verbose=False)
ids = prompt()


def once() -> tuple[list[int], dict[str, float]]:
    model.reset()
    start = time.perf_counter()
    model.eval(ids)
    tokens = [model.sample(temp=0.0)]
    first_token = time.perf_counter()
    for _ in range(NEW - 1):
        model.eval(tokens[-1:])
        tokens.append(model.sample(temp=0.0))
    return tokens, rates(first_token - start, time.perf_counter() - first_token)


def logprobs(chunk_size: int) -> list[float]:
    """Log-probabilities of the prompt's tokens, evaluated chunk_size tokens at a time."""
    scorer = Llama(sys.argv[1], n_ctx=512, n_threads=threads, n_threads_batch=threads, logits_all=True, verbose=False)
    for i in range(0, len(ids), chunk_size):
        scorer.eval(ids[i : i + chunk_size])
    scores = np.array(scorer.scores[: len(ids) - 1], dtype=np.float64)
    scores -= scores.max(-1, keepdims=True)
    scores -= np.log(np.exp(scores).sum(-1, keepdims=True))
    return scores[np.arange(len(ids) - 1), ids[1:]].tolist()


serve(once, {"prefill": logprobs(len(ids)), "decode": logprobs(1)})
