"""SmolLM2 in Headwater, from its file or from a folder: prefill of a prompt, then 128 greedy tokens."""

import os
import sys
import time

import torch
from decode_workload import NEW, prompt, rates, serve

import headwater
from headwater.generation.forward import forward_last, forward_single
from headwater.generation.kv_cache import BatchKVCache

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
model, ids = headwater.load(sys.argv[1]).model, prompt()


def once() -> tuple[list[int], dict[str, float]]:
    cache = BatchKVCache(model, [0], max_columns=len(ids) + NEW)
    start = time.perf_counter()
    tokens = [int(forward_last(model, cache, [ids]).argmax())]
    first_token = time.perf_counter()
    for _ in range(NEW - 1):
        tokens.append(int(forward_last(model, cache, [tokens[-1:]]).argmax()))
    return tokens, rates(first_token - start, time.perf_counter() - first_token)


def logprobs(chunk_size: int) -> list[float]:
    """Log-probabilities of the prompt's tokens, chunk_size tokens at a time, by the timed step."""
    cache = BatchKVCache(model, [0], max_columns=len(ids) + NEW)
    parts = [ids[i : i + chunk_size] for i in range(0, len(ids), chunk_size)]
    scores = torch.cat([forward_single(model, cache, part, len(part)) for part in parts]).log_softmax(-1)
    return scores[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].tolist()


serve(once, {"prefill": logprobs(len(ids)), "decode": logprobs(1)})
