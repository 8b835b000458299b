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


def targets(count: int) -> list[list[int]]:
    """Translations that all are asked to score: so that speed counts only where answers are right."""
    draw = random.Random(1)
    return [[draw.randrange(10, LAST) for _ in range(TOKENS)] for _ in range(count)]


Sentences = list[list[int]]


def serve(
    translate: Callable[[Sentences], Sentences], score: Callable[[Sentences, Sentences], list[list[float]]]
) -> None:
    """translate(sentences) gives the tokens of each translation, score(sentences, targets) the log-probability of each
    token of the targets. Reported as facts: the first translations, and the scores one at a time and together.
    """
    some, wanted = sentences(TOGETHER), targets(TOGETHER)
    first = translate(some)
    assert [len(one) for one in first] == [TOKENS] * TOGETHER
    alone = [score([some[i]], [wanted[i]])[0] for i in range(ALONE)]
    logprobs = {"batch 32": score(some, wanted), "batch 1": alone}
    flat = {way: [value for row in rows for value in row] for way, rows in logprobs.items()}
    print(json.dumps({"translations": first, "logprobs": flat}), flush=True)
    for _ in sys.stdin:
        begun = time.perf_counter()
        for one in some[:ALONE]:
            translate([one])
        middle = time.perf_counter()
        translate(some)
        end = time.perf_counter()
        figures = {"batch 1 sentences/s": ALONE / (middle - begun), "batch 32 sentences/s": TOGETHER / (end - middle)}
        print(json.dumps(figures), flush=True)
