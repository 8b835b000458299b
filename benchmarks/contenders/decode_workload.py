"""The decoding workload: one prompt of ids, then 128 greedy tokens.

Each contender reports the log-probabilities of the prompt's tokens, computed in one pass ("prefill") and, if it can,
token by token ("decode"), so that wrong outputs are detected.
"""

import json
import sys
from collections.abc import Callable

NEW = 128


def prompt() -> list[int]:
    """The last command line argument: ids separated by commas."""
    return [int(word) for word in sys.argv[-1].split(",")]


def rates(prefill: float, decode: float) -> dict[str, float]:
    """Tokens per second, from the seconds until the first token and those of all other tokens."""
    return {"prefill tokens/s": len(prompt()) / prefill, "decode tokens/s": (NEW - 1) / decode}


def serve(once: Callable[[], tuple[list[int], dict[str, float]]], logprobs: dict[str, list[float]]) -> None:
    """Report facts, then time one round per line of stdin. once() returns the tokens and the rates."""
    tokens, _ = once()
    assert len(tokens) == NEW
    print(json.dumps({"tokens": tokens, "logprobs": logprobs}), flush=True)
    for _ in sys.stdin:
        print(json.dumps(once()[1]), flush=True)
