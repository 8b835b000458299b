"""SmolLM2 in Headwater, from its file or from a folder: a prompt read, then 128 tokens written greedily."""

import os
import sys
import time

import torch
from decode_work import NEW, prompt, rates, serve

import headwater
from headwater.generation.forward import forward_last, forward_single
from headwater.generation.kv_cache import BatchKVCache

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
model, ids = headwater.load(sys.argv[1]).model, prompt()


def once() -> tuple[list[int], dict[str, float]]:
    slots = BatchKVCache(model, [0], max_columns=len(ids) + NEW)
    begun = time.perf_counter()
    tokens = [int(forward_last(model, slots, [ids]).argmax())]
    middle = time.perf_counter()
    for _ in range(NEW - 1):
        tokens.append(int(forward_last(model, slots, [tokens[-1:]]).argmax()))
    return tokens, rates(middle - begun, time.perf_counter() - middle)


def logprobs(together: int) -> list[float]:
    """Of the prompt's tokens, read so many at a time by the step that is timed."""
    slots = BatchKVCache(model, [0], max_columns=len(ids) + NEW)
    parts = [ids[i : i + together] for i in range(0, len(ids), together)]
    scores = torch.cat([forward_single(model, slots, part, len(part)) for part in parts]).log_softmax(-1)
    return scores[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].tolist()


serve(once, {"reading": logprobs(len(ids)), "writing": logprobs(1)})
