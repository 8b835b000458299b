"""SmolLM2 in Headwater, from its file or from a folder: a prompt read, then 128 tokens written greedily."""

import os
import sys
import time

import torch
from decode_work import NEW, prompt, rates, serve

import headwater
from headwater.generation.reading import read
from headwater.generation.slots import Slots

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
model, ids = headwater.load(sys.argv[1]).model, prompt()


def once() -> tuple[list[int], dict[str, float]]:
    slots = Slots(model, [0], most=len(ids) + NEW)
    begun = time.perf_counter()
    tokens = [int(read(model, slots, [ids]).argmax())]
    middle = time.perf_counter()
    for _ in range(NEW - 1):
        tokens.append(int(read(model, slots, [tokens[-1:]]).argmax()))
    return tokens, rates(middle - begun, time.perf_counter() - middle)


serve(once)
