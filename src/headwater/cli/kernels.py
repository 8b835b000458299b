"""Says once, on the error stream, that the C kernels are missing, what that costs and what to do."""

from __future__ import annotations

import sys
from typing import NamedTuple

from headwater.cli.language import say


class Missing(NamedTuple):
    """Why there are no C kernels here, and what to do about it."""

    why: str
    remedy: str

    def __str__(self) -> str:
        """The figure is that of docs/en/generate.md: 24 tokens of SmolLM2-135M in 4 bits, start-up included."""
        return say(
            f"{self.why}: running on torch alone, several times slower (packed models such as smollm2: about 6 x)",
            f"{self.why}：只用 torch 运行，慢数倍（smollm2 这样的量化模型约慢 6 倍）",
        )


def missing() -> Missing | None:
    from headwater.machine import build

    why = build.missing()
    if not why:
        return None
    if why.startswith("HEADWATER_FAST=0"):
        return Missing(
            say("HEADWATER_FAST=0 turns the C kernels off", "HEADWATER_FAST=0 关闭了 C 内核"),
            say("unset HEADWATER_FAST", "请取消 HEADWATER_FAST 的设置"),
        )
    if "there is no cc" in why:
        return Missing(
            say("no C compiler found", "找不到 C 编译器"),
            say("install gcc (Debian, Ubuntu: apt install gcc)", "请安装 gcc（Debian、Ubuntu：apt install gcc）"),
        )
    return Missing(
        say(f"the C kernels were not compiled ({why})", f"C 内核没有编译成功（{why}）"),
        say("install another gcc, or name a compiler with CC", "请换一个 gcc，或用 CC 指定编译器"),
    )


said: set[Missing | None] = set()  # empty until a verb runs a model


def note_missing() -> None:
    """For the verbs that run a model: one line, once in a process, where torch does all the work."""
    found = missing()
    if found is not None and found not in said:
        line = say(f"note: {found}; {found.remedy}", f"注意：{found}；{found.remedy}")
        print(line, file=sys.stderr, flush=True)
    said.add(found)


def note_failed() -> None:
    """At the end of a command that ran a model: kernels are compiled on first use, and that may have failed since."""
    if said:
        note_missing()
