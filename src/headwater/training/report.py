"""The report before training: what was found in the data and what will be done, a line each, in either language."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwater.data.telling import Say, english, line, told
from headwater.training.planning import memory
from headwater.training.progress import in_words

if TYPE_CHECKING:
    from headwater.training.teaching import Lesson


def announced(lesson: Lesson, say: Say = english) -> str:
    """What was found and what will be done."""
    s, m = lesson.settings, lesson.material
    seconds = s.max_steps * lesson.step_seconds + lesson.evaluation.total_seconds(s.max_steps)
    hint = (
        say("; --max-time 15m makes it fit", "；--max-time 15m 可以限时") if seconds > 1900 and not s.max_time else ""
    )
    time = in_words(max(1.0, seconds), say)
    size = f"{memory(lesson.model, s, len(m.tokenizer)) / 2**20:,.0f} MB"
    lines = [
        *([told(lesson.found, say)] if lesson.found else []),
        line(say("tokenizer", "分词器"), say(
            f"{len(m.tokenizer):,} pieces ({s.tokenizer}), {m.tokens:,} tokens to learn from",
            f"{len(m.tokenizer):,} 种词元（{s.tokenizer}），训练数据有 {m.tokens:,} 个")),
        line(say("model", "模型"), _model(lesson, say)),
        line(say("training", "训练"), say(
            f"{s.max_steps:,} steps of up to {s.batch_tokens:,} tokens, learning rate {s.lr:.2g} ({s.schedule})",
            f"{s.max_steps:,} 步，每步至多 {s.batch_tokens:,} 个词元，学习率 {s.lr:.2g}（{s.schedule}）")),
        line(say("evaluation", "评估"), _evaluation(lesson, say)),
        line(say("memory", "内存"), say(f"about {size}", f"约 {size}")),
        line(say("time", "时间"), say(f"about {time} on {s.device}, from measured steps{hint}",
                                    f"约 {time}（{s.device}，按实测的几步估计）{hint}")),
    ]  # fmt: skip
    return "\n".join(lines)


def noted(lesson: Lesson, say: Say = english) -> list[str]:
    """What is to be noted of the data and of the plan."""
    return [line(say("note", "注意"), say(note)) for note in (*lesson.material.notes, *lesson.notes)]


def _evaluation(lesson: Lesson, say: Say) -> str:
    """How often and on how many rows; what share of the time that takes is said where it was measured."""
    s, plan = lesson.settings, lesson.evaluation
    every = say(
        "at the end" if plan.every >= s.max_steps else f"every {plan.every:,} steps",
        "结束时" if plan.every >= s.max_steps else f"每 {plan.every:,} 步一次",
    )
    part, part_zh = f"{plan.rows:,} of {plan.available:,}", f"{plan.available:,} 行中的 {plan.rows:,} 行"
    rows = say(f"{part} validation rows", f"验证数据 {part_zh}")
    if plan.rows == plan.available:
        rows = say(f"all {plan.rows:,} validation rows", f"验证数据全部 {plan.rows:,} 行")
    final = ""
    if plan.final_rows > plan.rows:
        more = f"{plan.final_rows:,}"
        final = say(f"; the best model on {more} at the end", f"；结束时用 {more} 行评估最好的模型")
    return say(f"{every}, {rows}", f"{every}，用{rows}") + final


def _model(lesson: Lesson, say: Say) -> str:
    s, size = lesson.settings, sum(p.numel() for p in lesson.model.parameters())
    names = {"encoder": say("encoder", "编码器"), "decoder": say("decoder", "解码器")}
    stacks = [words for name, words in names.items() if getattr(lesson.model, name) is not None]
    layers = say("1 layer" if s.layers == 1 else f"{s.layers} layers", f"{s.layers} 层")
    each = say(" each", "") if len(stacks) > 1 else ""
    return say(f"{' and '.join(stacks)}, {layers}{each}, d_model {s.d_model}, {s.heads} heads: {size:,} weights",
               f"{'和'.join(stacks)}，{'各 ' if len(stacks) > 1 else ''}{layers}，d_model {s.d_model}，{s.heads} 头，"
               f"共 {size:,} 个参数")  # fmt: skip
