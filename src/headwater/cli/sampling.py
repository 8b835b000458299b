"""The flags that say how an answer is chosen, the same for generate and chat."""

from __future__ import annotations

import argparse
from typing import Any

from headwater.cli.language import say


def add(parser: argparse.ArgumentParser) -> None:
    """One flag for each of generation's settings."""
    group = parser.add_argument_group(
        say("how it is chosen (greedy, where none is given)", "如何选词（都不给则取最可能的）")
    )
    told = {
        "temperature": (float, "how bold: 0 greedy, 0.7 usual", "大胆程度：0 为贪心，常用 0.7"),
        "top-k": (int, "only the K most probable tokens", "只在最可能的 K 个词中选"),
        "top-p": (float, "only the most probable tokens that make up this share", "只在累计概率达到此值的词中选"),
        "min-p": (float, "only tokens this many times as probable as the best", "概率至少为最高者的几分之几"),
        "repetition-penalty": (float, "above 1: what was said is less probable", "大于 1 时，说过的词不易再出现"),
        "no-repeat-ngram": (int, "no run of N tokens twice", "任何连续 N 个词不出现两次"),
    }
    for name, (kind, en, zh) in told.items():
        group.add_argument(f"--{name}", type=kind, metavar="N", help=say(en, zh))
    told_seed = say("the same seed gives the same text", "种子相同，文本相同")
    group.add_argument("--seed", type=int, default=0, metavar="N", help=told_seed)
    told_most = say("the longest answer (256, or what fits)", "回答最多多少个词元（默认 256 或剩余空间）")
    group.add_argument("--max-tokens", type=int, metavar="N", help=told_most)
    told_stop = say("end the answer before this text; may be given again", "遇到此文本即停止；可多次给出")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help=told_stop)
    told_raw = say("let control characters of the answer act on the terminal", "不转义回答中的控制字符")
    group.add_argument("--raw", action="store_true", help=told_raw)


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """The flags as generate takes them."""
    names = (
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "no_repeat_ngram",
        "seed",
        "max_tokens",
        "stop",
    )
    return {name: getattr(args, name) for name in names}
