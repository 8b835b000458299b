"""What a look at the files says, a line for each thing, in English or in Chinese."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from headwater.data.reading.recipe import Recipe
from headwater.i18n import filled

if TYPE_CHECKING:
    from headwater.data.look import Facts, Look


class Say(Protocol):
    """One of two texts that mean the same; without the Chinese, it is looked up in the catalogue (headwater.i18n)."""

    def __call__(self, en: str, zh: str | None = None, /) -> str: ...


SETS = {"train": "训练集", "valid": "验证集", "test": "测试集"}
IMBALANCE = 10  # times the rows of the least frequent class from which the most frequent one is warned of
COLUMN = 11  # places of a terminal that the names of the lines take


def english(en: str, zh: str | None = None) -> str:
    return en


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
    if look.recipe.format:
        roles, name = look.recipe.roles, look.recipe.format
        columns = ", ".join(roles[role] for role in ("source", "input", "target") if role in roles)
        yield line(say("format", "格式"), say(f"{name} ({columns})", f"{name}（{columns}）"))
    yield from _headers(look.recipe, say)
    for name, facts in look.sets.items():
        yield from _of_set(look, name, facts, say)
    if look.held_out:
        yield line(say("valid", "验证集"), say(f"{look.held_out:,} rows, held out of train by a hash of their text",
                                             f"{look.held_out:,} 行，按文本的哈希从训练集留出"))  # fmt: skip
    elif look.task == "language-model" and "valid" not in look.sets:
        yield line(say("valid", "验证集"), say("the end of the text, held out in one stretch", "文本末尾的一整段"))
    train = look.sets["train"]
    for what, (least, half, nearly, most) in train.lengths.items() if train.rows > 1 else ():
        yield line(say("length", "长度"), say(
            f"{what}: {half:,} characters usual, 95 % up to {nearly:,}, all {least:,} to {most:,}",
            f"{what}：通常 {half:,} 个字符，95 % 不超过 {nearly:,}，全部在 {least:,} 到 {most:,} 之间"))  # fmt: skip
    if train.labels:
        yield line(say("labels", "标签"), _labels(train.labels))
    if look.task == "classification":
        yield from _imbalance(train.labels, say)
    for how in dict.fromkeys(look.encodings.values()):
        yield line(say("encoding", "编码"), say(how))
    for note in look.notes:
        yield line(say("note", "注意"), say(note))


def _headers(recipe: Recipe, say: Say) -> Iterator[str]:
    """Whether the first row of a TSV or CSV names its columns; where the files differ, file by file."""
    tables = [part for part in recipe.parts if part.header]
    found = {part.header if part.skip else (): part for part in tables}
    for part in found.values():
        file = f"{part.paths[0].name}: " if len(found) > 1 else ""
        names = ", ".join(part.header)
        yield line(say("header", "表头"), say(
            f"{file}{names} (the first row; --header no takes it for data)" if part.skip else
            f"{file}none, the first row is data (--header yes takes it for the names of the columns)",
            f"{file}{names}（第一行；--header no 把它当作数据）" if part.skip else
            f"{file}没有，第一行是数据（--header yes 把它当作列名）"))  # fmt: skip


def _of_set(look: Look, name: str, facts: Facts, say: Say) -> Iterator[str]:
    unit, unit_zh = ("document", "篇") if look.task == "language-model" else ("row", "行")
    unit += "s" if facts.rows != 1 else ""
    part = "" if look.whole else say(" looked at", "（只看了这些）")
    size = say(f"{facts.rows:,} {unit}{part}, {facts.characters:,} characters",
               f"{facts.rows:,} {unit_zh}{part}，{facts.characters:,} 个字符")  # fmt: skip
    yield line(say(name, SETS.get(name, name)), size)
    if look.task == "answers":
        yield line("", say(f"questions without an answer: {facts.unanswerable:,} of {facts.rows:,}",
                           f"没有答案的问题：{facts.unanswerable:,} / {facts.rows:,}"))  # fmt: skip
    for problem in facts.problems.lines():
        yield line("", say("bad: ", "坏行：") + say(problem))
    if facts.duplicates:
        yield line("", say(f"{facts.duplicates:,} duplicate rows", f"{facts.duplicates:,} 行重复"))
    if count := look.overlap.get(name):
        yield line("", say(f"inputs that are in train too: {count:,}", f"输入也在训练集中的：{count:,}"))


def _direction(recipe: Recipe, say: Say) -> str:
    """Which column, suffix or language is read as what; columns without a name have numbers."""
    roles = {role: say(f"column {name}", f"第 {name} 列") if name.isdigit() else name
             for role, name in recipe.roles.items()}  # fmt: skip
    if recipe.task == "text-to-text":
        source = " + ".join(roles[role] for role in ("source", "input") if role in roles)
        first, second = recipe.languages or (source, roles["target"])
        return say(f", from {first} to {second}", f"，{first} → {second}")
    named = ", ".join(f"{role} = {name}" for role, name in roles.items())
    return say(f" ({named})", f"（{named}）") if named else ""


def _labels(labels: dict[str, int]) -> str:
    shown = ", ".join(f"{name} {count:,}" for name, count in list(labels.items())[:8])
    return f"{len(labels):,}: {shown}{' …' if len(labels) > 8 else ''}"


def _imbalance(labels: dict[str, int], say: Say) -> Iterator[str]:
    """A warning where the most frequent class has many times the rows of the least frequent one."""
    (most, many), (least, few) = (pick(labels.items(), key=lambda item: item[1]) for pick in (max, min))
    if many >= IMBALANCE * few:
        share = f"{100 * many / sum(labels.values()):.1f} %"
        yield line(say("warning", "警告"), say(
            f"imbalanced classes: {many:,} rows of {most}, {few:,} of {least}; always answering {most} has an accuracy "
            f"of {share}, so look at macro_f1 (--metric macro_f1)",
            f"类别不平衡：{most} 有 {many:,} 行，{least} 只有 {few:,} 行；总是回答 {most} 的准确率就有 {share}，"
            f"所以请看 macro_f1（--metric macro_f1）"))  # fmt: skip
