"""SmolLM2 in Headwater: a prompt of 128 tokens read, then 128 tokens written greedily."""

import json
import sys
import time

import torch

import headwater
from headwater.generation.reading import read
from headwater.generation.slots import Slots

PROMPT, NEW = 128, 128
loaded = headwater.load(sys.argv[1])
ids = (loaded.tokenizer.encode("The history of the river begins at its headwater, high in the hills. ") * 20)[:PROMPT]


def once() -> dict[str, float]:
    slots = Slots(loaded.model, [0], most=PROMPT + NEW)
    begun = time.perf_counter()
    scores = read(loaded.model, slots, [ids])
    token = int(scores.argmax())
    middle = time.perf_counter()
    for _ in range(NEW - 1):
        token = int(read(loaded.model, slots, [[token]]).argmax())
    end = time.perf_counter()
    return {"prefill tokens/s": PROMPT / (middle - begun), "decode tokens/s": (NEW - 1) / (end - middle)}


torch.set_num_threads(2)
print("ready", flush=True)
for _ in sys.stdin:
    print(json.dumps(once()), flush=True)
