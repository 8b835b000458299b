"""The work of all translators: sentences of 30 tokens, beam 4, exactly 30 tokens out; one at a time and 32 together."""

import json
import random
import sys
import time
from collections.abc import Callable

TOKENS, BEAM, TOGETHER, ALONE, LAST = 30, 4, 32, 3, 32_000


def sentences(count: int) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(10, LAST) for _ in range(TOKENS)] for _ in range(count)]


def serve(translate: Callable[[list[list[int]]], list[list[int]]]) -> None:
    """translate(sentences) gives the tokens of each translation. The first translations are told as a fact."""
    some = sentences(TOGETHER)
    first = translate(some)
    assert [len(one) for one in first] == [TOKENS] * TOGETHER
    print(json.dumps({"translations": first}), flush=True)
    for _ in sys.stdin:
        begun = time.perf_counter()
        for one in some[:ALONE]:
            translate([one])
        middle = time.perf_counter()
        translate(some)
        end = time.perf_counter()
        figures = {"batch 1 sentences/s": ALONE / (middle - begun), "batch 32 sentences/s": TOGETHER / (end - middle)}
        print(json.dumps(figures), flush=True)
