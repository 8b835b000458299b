"""What a look at the files says, a line for each thing, in English or in Chinese."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeAlias

from headwater.data.reading.recipe import Recipe

if TYPE_CHECKING:
    from headwater.data.look import Facts, Look

Say: TypeAlias = Callable[[str, str], str]  # one of two texts that mean the same
SETS = {"train": "训练集", "valid": "验证集", "test": "测试集"}
COLUMN = 11  # places of a terminal that the names of the lines take


def english(en: str, zh: str) -> str:
    return en


def filled(text: str, width: int) -> str:
    """Spaces up to a width in places of a terminal: a Chinese character takes two."""
    return text + " " * (width - sum(2 if ord(c) > 0x2E7F else 1 for c in text))


def line(name: str, text: str) -> str:
    """A name in its column, and what is said of it.

    >>> line("task", "tagging"), line("任务", "tagging")
    ('task       tagging', '任务       tagging')
    """
    return filled(name, COLUMN) + text


def told(look: Look, say: Say = english) -> str:
    return "\n".join(_lines(look, say))


def _lines(look: Look, say: Say) -> Iterator[str]:
    yield line(say("task", "任务"), look.task + _direction(look.recipe, say))
    for name, facts in look.sets.items():
        yield from _of_set(look, name, facts, say)
    if look.held_out:
        yield line(say("valid", "验证集"), say(f"{look.held_out:,} rows, held out of train by a hash of their text",
                                             f"{look.held_out:,} 行,按文本的哈希从训练集留出"))  # fmt: skip
    elif look.task == "language-model" and "valid" not in look.sets:
        yield line(say("valid", "验证集"), say("the end of the text, held out in one stretch", "文本末尾的一整段"))
    train = look.sets["train"]
    for what, (least, half, nearly, most) in train.lengths.items() if train.rows > 1 else ():
        yield line(say("length", "长度"), say(
            f"{what}: {half:,} characters usual, 95 % up to {nearly:,}, all {least:,} to {most:,}",
            f"{what}:通常 {half:,} 个字符,95 % 不超过 {nearly:,},全部在 {least:,} 到 {most:,} 之间"))  # fmt: skip
    if train.labels:
        yield line(say("labels", "标签"), _labels(train.labels))
    for how in dict.fromkeys(look.encodings.values()):
        yield line(say("encoding", "编码"), how)
    for note in look.notes:
        yield line(say("note", "注意"), note)


def _of_set(look: Look, name: str, facts: Facts, say: Say) -> Iterator[str]:
    unit, unit_zh = ("document", "篇") if look.task == "language-model" else ("row", "行")
    unit += "s" if facts.rows != 1 else ""
    part = "" if look.whole else say(" looked at", "(只看了这些)")
    size = say(f"{facts.rows:,} {unit}{part}, {facts.characters:,} characters",
               f"{facts.rows:,} {unit_zh}{part},{facts.characters:,} 个字符")  # fmt: skip
    yield line(say(name, SETS.get(name, name)), size)
    for problem in facts.problems.lines():
        yield line("", say(f"bad: {problem}", f"坏行:{problem}"))
    if facts.duplicates:
        yield line("", say(f"{facts.duplicates:,} duplicate rows", f"{facts.duplicates:,} 行重复"))
    if count := look.overlap.get(name):
        yield line("", say(f"inputs that are in train too: {count:,}", f"输入也在训练集中的:{count:,}"))


def _direction(recipe: Recipe, say: Say) -> str:
    """Which column, suffix or language is read as what; columns without a name have numbers."""
    roles = {role: say(f"column {name}", f"第 {name} 列") if name.isdigit() else name
             for role, name in recipe.roles.items()}  # fmt: skip
    if recipe.task == "text-to-text":
        first, second = recipe.languages or tuple(roles.values())
        return say(f", from {first} to {second}", f",{first} → {second}")
    named = ", ".join(f"{role} = {name}" for role, name in roles.items())
    return f" ({named})" if named else ""


def _labels(labels: dict[str, int]) -> str:
    shown = ", ".join(f"{name} {count:,}" for name, count in list(labels.items())[:8])
    return f"{len(labels):,}: {shown}{' …' if len(labels) > 8 else ''}"
