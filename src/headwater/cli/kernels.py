"""Says once, on the error stream, that the C kernels are missing and what that costs."""

from __future__ import annotations

import sys

from headwater.cli.language import say

said: set[str] = set()


def note_missing() -> None:
    """For the verbs that run a model: one line, once in a process, where torch does all the work."""
    if (why := missing()) and why not in said:
        said.add(why)
        print(say(f"note: {cost()} ({why})", f"注意：{cost()}（{why}）"), file=sys.stderr, flush=True)


def missing() -> str:
    """Why there are no C kernels here; empty where there are."""
    from headwater.machine import build

    why = build.missing()
    if not why:
        return ""
    if why.startswith("HEADWATER_FAST=0"):
        return say("HEADWATER_FAST=0 turns the C kernels off", "HEADWATER_FAST=0 关闭了 C 内核")
    if "there is no cc" in why:
        return say("no C compiler found; install gcc", "找不到 C 编译器；请安装 gcc")
    return why


def cost() -> str:
    """The figure is that of docs/en/generate.md: 24 tokens of SmolLM2-135M in 4 bits, start-up included."""
    return say(
        "running on torch alone, several times slower (a packed model such as smollm2: about 5 x)",
        "只用 torch 运行，慢数倍（smollm2 这样的量化模型约慢 5 倍）",
    )
