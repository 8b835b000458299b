"""The work of all who decode: one prompt of ids, 128 tokens after it, each the most probable.

So that speed counts only where answers are right, each tells the log-probabilities of the prompt's own tokens, read at
once ("reading") and, where it can, token by token ("writing").
"""

import json
import sys
from collections.abc import Callable

NEW = 128


def prompt() -> list[int]:
    """The last word of the command line: ids with commas between them."""
    return [int(word) for word in sys.argv[-1].split(",")]


def rates(reading: float, writing: float) -> dict[str, float]:
    """From the seconds up to the first token, and of all the others."""
    return {"prefill tokens/s": len(prompt()) / reading, "decode tokens/s": (NEW - 1) / writing}


def serve(once: Callable[[], tuple[list[int], dict[str, float]]], logprobs: dict[str, list[float]]) -> None:
    """once() gives the tokens and the rates. Also reports its first output and its log-probabilities."""
    tokens, _ = once()
    assert len(tokens) == NEW
    print(json.dumps({"tokens": tokens, "logprobs": logprobs}), flush=True)
    for _ in sys.stdin:
        print(json.dumps(once()[1]), flush=True)
