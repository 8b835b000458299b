"""The translation workload: sentences of 30 tokens, beam 4, exactly 30 output tokens; batches of 1 and 32."""

import json
import random
import sys
import time
from collections.abc import Callable

TOKENS, BEAM, BATCH, SINGLES, LAST = 30, 4, 32, 3, 32_000


def sentences(count: int) -> list[list[int]]:
    generator = random.Random(0)
    return [[generator.randrange(10, LAST) for _ in range(TOKENS)] for _ in range(count)]


def targets(count: int) -> list[list[int]]:
    """Targets that every contender scores, so that wrong outputs are detected."""
    generator = random.Random(1)
    return [[generator.randrange(10, LAST) for _ in range(TOKENS)] for _ in range(count)]


Sentences = list[list[int]]


def serve(
    translate: Callable[[Sentences], Sentences], score: Callable[[Sentences, Sentences], list[list[float]]]
) -> None:
    """Report facts, then time one round per line of stdin.

    translate(sentences) returns the tokens of each translation, score(sentences, targets) the log-probability of each
    target token. The facts are the first translations, and the scores in batches of 1 and 32.
    """
    sources, expected = sentences(BATCH), targets(BATCH)
    first = translate(sources)
    assert [len(one) for one in first] == [TOKENS] * BATCH
    alone = [score([sources[i]], [expected[i]])[0] for i in range(SINGLES)]
    logprobs = {"batch 32": score(sources, expected), "batch 1": alone}
    logprobs_by_batch = {mode: [value for row in rows for value in row] for mode, rows in logprobs.items()}
    print(json.dumps({"translations": first, "logprobs": logprobs_by_batch}), flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        for one in sources[:SINGLES]:
            translate([one])
        batch_start = time.perf_counter()
        translate(sources)
        end = time.perf_counter()
        figures = {
            "batch 1 sentences/s": SINGLES / (batch_start - start),
            "batch 32 sentences/s": BATCH / (end - batch_start),
        }
        print(json.dumps(figures), flush=True)
