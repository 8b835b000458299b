"""Planning: what was left open in the settings is chosen when the data has been seen, and said before it begins."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import torch

from headwater.core import (
    ClassHead,
    LanguageHead,
    Mean,
    Model,
    Picked,
    Several,
    TokenHead,
    Tokens,
    decoder,
    encoder,
    transformer,
)
from headwater.data.batches import Batch
from headwater.errors import BadSetting, Unavailable, nearest
from headwater.parts import swap
from headwater.training.divergence import lr_warning
from headwater.training.evaluation_cost import EvaluationPlan, plan_evaluations
from headwater.training.exam import Exam
from headwater.training.loop import DTYPES, Trainer
from headwater.training.material import LONGEST, USUAL_KIND, Material
from headwater.training.optimiser import set_lr
from headwater.training.schedules import schedule
from headwater.training.settings import Settings
from headwater.training.starting import places, spec_to_start_from


class Size(NamedTuple):
    d_model: int
    heads: int
    layers: int
    d_ff: int


class Done(NamedTuple):
    """What a resumed run has behind it, where its time decides how many steps are to come."""

    steps: int = 0
    seconds: float = 0.0


NOTHING_DONE = Done()
SIZES = {
    "xs": Size(32, 2, 1, 64),
    "s": Size(64, 4, 2, 256),
    "m": Size(128, 4, 2, 512),
    "l": Size(256, 4, 3, 1024),
    "xl": Size(512, 8, 6, 2048),
}
# The smallest size whose tokens are not yet reached: a larger model would learn the rows by heart.
BY_TOKENS = ((100_000, "s"), (600_000, "m"), (50_000_000, "l"), (math.inf, "xl"))
BATCH_TOKENS, PASSES_OF_SMALL, PASSES, PASSES_OF_STARTED = 4096, 30.0, 10.0, 4.0
BATCH_OF_STARTED = 1024  # what is known already needs many small corrections
FRESH_LR, STARTED_LR = 0.25, 0.04  # over d_model: the peak from scratch, and of a model that has learned already
MUON_LR, MOST_LR = 0.9, 1e-2
WRITTEN = ("text-to-text", "language-model")  # tasks that write
MARKS = 3  # special tokens around two texts
TIME_USED = 0.97  # share of the time for steps that is planned; the rest goes to checkpoints
CLOSING, DISK = 2.0, 3e8  # seconds to end a run beside writing its files; bytes written in a second
MOST_SLOWDOWN = 5.0
PROBE, FEWEST, SLOW_PROBE = 16, 2, 1.0  # rows evaluated to measure a row; those before them; seconds that are enough


def early(settings: Settings) -> Settings:
    """What must be known before the data is cut into batches."""
    s = settings
    if s.dtype not in ("auto", *DTYPES):
        raise BadSetting(f"no dtype is called {s.dtype!r}; {nearest(s.dtype, DTYPES)}")
    room = places(spec_to_start_from(s.start)) if s.start else 0
    return s.but(
        device=_device(s.device),
        batch_tokens=s.batch_tokens or (BATCH_OF_STARTED if s.start else BATCH_TOKENS),
        longest=min(s.longest or LONGEST, room - MARKS) if room else s.longest,
        context=min(s.context, room) if room else s.context,
    )


def _device(wanted: str) -> str:
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=wanted)
    except (RuntimeError, AssertionError) as error:
        raise Unavailable(
            f"device {wanted!r} can not be used: {str(error).splitlines()[0][:80]}; --device cpu always can"
        ) from None
    return wanted


def resolved(settings: Settings, material: Material, known: Model | None = None) -> Settings:
    """Settings with nothing left open but the number of steps, where that depends on time. known: a resumed model."""
    s = settings
    body = known or (spec_to_start_from(s.start) if s.start else None)
    size = _size(s, material) if body is None else size_of(body)
    passes = s.epochs or (0.0 if s.max_steps or s.max_time else _passes(s, material))
    steps = s.max_steps or math.ceil(passes * steps_an_epoch(material))
    position = s.position if s.position != "auto" else "sinusoidal" if material.task == "text-to-text" else "rotary"
    method = _method(s, material)
    return s.but(
        task=material.task,
        method=method,
        size="own" if s.start else s.size,
        **size._asdict(),
        tokenizer=s.tokenizer if s.tokenizer != "auto" else s.start or USUAL_KIND,
        position="own" if s.start else position,
        lr=s.lr or _lr(s, method, size.d_model),
        objective=material.objective or s.objective,
        max_steps=steps,
        epochs=passes,
    )


def _method(s: Settings, material: Material) -> str:
    """Muon learns to write in half of the steps; a rate that is given is meant for AdamW, unless Muon is given too."""
    if s.method != "auto":
        return s.method
    free = not (s.lr or s.start or s.shard) and s.schedule != "noam"
    return "muon" if free and material.task in WRITTEN else "adamw"


def _lr(s: Settings, method: str, d_model: int) -> float:
    if s.schedule == "noam":
        return 1.0
    return min(MOST_LR, MUON_LR / d_model) if method == "muon" else (STARTED_LR if s.start else FRESH_LR) / d_model


def _passes(s: Settings, material: Material) -> float:
    if s.start:
        return PASSES_OF_STARTED
    return PASSES_OF_SMALL if material.task in WRITTEN and material.tokens < 2_000_000 else PASSES


class Timings(NamedTuple):
    """Seconds that were measured before training."""

    step: float  # of a training step
    row: float  # of one validation row's evaluation
    spent: float = 0.0  # since the command began
    closing: float = 0.0  # after the last evaluation: files, plots


def paced(
    settings: Settings, measured: Timings, available: int, done: Done = NOTHING_DONE
) -> tuple[Settings, EvaluationPlan]:
    """The steps that fit into the time, the warm-up, and evaluations that cost little. available: validation rows."""
    s = settings
    limit = s.max_time - done.seconds - measured.spent - measured.closing if s.max_time else math.inf
    seconds = max(0.0, min(limit, s.max_steps * measured.step or math.inf))
    plan = plan_evaluations(s, seconds, measured.step, measured.row, available)
    planned = s.max_steps or int(seconds / measured.step)
    more = max(1, int(TIME_USED * (seconds - plan.total_seconds(planned)) / measured.step))
    steps = s.max_steps or done.steps + more
    warmup = s.warmup if s.warmup >= 0 else min(4000, max(1, steps // 10))
    every = s.eval_every or min(plan.every, steps)
    chosen = s.but(max_steps=steps, warmup=warmup, eval_every=every, eval_rows=plan.rows, final_rows=plan.final_rows)
    return chosen, plan._replace(every=every)


def unplannable(s: Settings, measured: Timings, plan: EvaluationPlan) -> str:
    """What to say where reading the data and the last evaluation take all the time there is; empty: nothing."""
    ending = plan.seconds + plan.final_seconds + measured.closing
    if not s.max_time or measured.spent + ending + measured.step <= s.max_time:
        return ""
    return (
        f"--max-time {s.max_time:.0f}s is too short: reading and planning took {measured.spent:.1f} s, a step takes "
        f"{measured.step:.1f} s, and the last evaluation and the files need about {ending:.1f} s"
    )


def unusual_lr(s: Settings) -> str:
    """What to say before training of a learning rate that hardly any model survives."""
    return lr_warning(s.method, schedule_of(s).at(max(1, s.warmup)))


def steps_an_epoch(material: Material) -> int:
    """Batches in one pass through the data, from the first window of them."""
    batches = material.train.batches
    first = batches.of_window(0, 0)
    share = sum(len(batch.examples) for batch in first) / batches.size
    return max(1, round(len(first) / share))


def _size(s: Settings, material: Material) -> Size:
    if s.size not in ("auto", "own", *SIZES):
        raise BadSetting(f"no size is called {s.size!r}; {nearest(s.size, SIZES)}")
    name = s.size if s.size in SIZES else next(name for most, name in BY_TOKENS if material.tokens < most)
    base = SIZES[name]
    d_model = s.d_model or base.d_model
    heads = s.heads or (base.heads if d_model == base.d_model else max(1, d_model // 64))
    d_ff = s.d_ff or (base.d_ff if d_model == base.d_model else 4 * d_model)
    return Size(d_model, heads, s.layers or base.layers, d_ff)


def size_of(spec: Model) -> Size:
    """The sizes of a model that exists."""
    stack: Any = spec.decoder or spec.encoder
    found = {name: value for branch in stack.layers[0].branches for name, value in vars(branch.layer).items()}
    return Size(stack.d_model, found.get("heads", 0), len(stack.layers), found.get("d_ff", 0))


# ----------------------------------------------------------------------------------------------------------- the model


def spec_of(settings: Settings, material: Material) -> Model:
    """The tree of parts for these settings: which stacks and which head, the task says."""
    s, vocab = settings, len(material.tokenizer)
    if s.start:  # the stacks are those of the other model; only the head and the kinds of text are taken from here
        s = s.but(d_model=8, heads=1, layers=1, d_ff=8, position="none")
    sizes: dict[str, Any] = {
        "d_model": s.d_model, "heads": s.heads, "layers": s.layers, "d_ff": s.d_ff, "dropout": s.dropout,
        "position": s.position, "placement": "pre", "longest": max(s.context + 2, s.longest + 2, 514)}  # fmt: skip
    if material.task == "text-to-text" or material.objective in ("spans", "denoise"):
        return transformer(vocab, **sizes)
    if material.objective == "masked-next":
        made = encoder(vocab, head_for(material, s.dropout), activation="gelu", **sizes)
        made = swap(made, Tokens, lambda embed: replace(embed, kinds=2))
        return replace(made, tied=(("head.language.out", "encoder.embed.tokens"),))
    if material.task == "language-model":
        shape = encoder if material.objective == "masked" else decoder
        return shape(vocab, activation="gelu", **sizes)
    made = encoder(vocab, head_for(material, s.dropout), activation="gelu", **sizes)
    kinds = 3 if material.task == "answers" else 2
    return swap(made, Tokens, lambda embed: replace(embed, kinds=kinds))


def head_for(material: Material, dropout: float) -> Any:
    if material.task == "classification":
        return ClassHead(len(material.labels), Picked(Mean()), dropout=dropout)
    if material.task == "tagging":
        return TokenHead(len(material.labels), dropout=dropout)
    if material.task == "answers":
        return TokenHead(2)
    words = LanguageHead(len(material.tokenizer))
    return Several((("language", words), ("next", ClassHead(2)))) if material.objective == "masked-next" else words


def check_vocabulary(model: Any, material: Material, settings: Settings) -> None:
    """Every id of the tokenizer must have a row in the table."""
    rows = model.writer.embed.tokens.num_embeddings
    if rows < len(material.tokenizer):
        raise BadSetting(f"--from {settings.start}: the model has {rows} tokens, the tokenizer "
                         f"{len(material.tokenizer)}; leave --tokenizer out to use the model's own")  # fmt: skip


def schedule_of(settings: Settings) -> Any:
    s = settings
    return schedule(s.schedule, peak=s.lr, warmup=s.warmup, steps=s.max_steps, d_model=s.d_model, floor=s.floor)


def seconds_a_step(trainer: Trainer, tries: int = 3) -> float:
    """Measured on real batches, without changing a weight: the optimiser steps by nothing, and forgets it."""
    times, optimiser = [], trainer.optimiser
    set_lr(optimiser, 0.0)
    for batch in islice(_spread(trainer), tries + 1):
        began = time.perf_counter()
        pieces = list(trainer._pieces(batch))
        for number, piece in enumerate(pieces):
            trainer._backward(number, piece, 1.0)
        optimiser.step()
        times.append(time.perf_counter() - began)
        optimiser.zero_grad(set_to_none=True)
    optimiser.state.clear()
    return sorted(times[1:])[len(times[1:]) // 2]


def seconds_a_row(trainer: Trainer, exam: Exam) -> float:
    """Of an evaluation, measured on a few rows. Before training most texts are written to their greatest length."""
    for rows in (FEWEST, PROBE):
        began = time.perf_counter()
        with trainer.at_rest() as model:
            replace(exam, rows=rows)(model)
        took = time.perf_counter() - began
        if took > SLOW_PROBE:
            break
    return max(took / rows, 1e-9)


def closing_seconds(model: Any, slowdown: float) -> float:
    """After the last evaluation: a checkpoint and the model are written, the curves are drawn, the model is read.

    slowdown: clock time over processor time so far; above 1 where the machine is shared with others.
    """
    alone = CLOSING + 24 * sum(p.numel() for p in model.parameters()) / DISK
    return alone * min(MOST_SLOWDOWN, max(1.0, slowdown))


def _spread(trainer: Trainer) -> Any:
    """Batches of short, middling and long rows alike."""
    some: list[Batch] = list(islice(trainer.source.after(0), 16))
    yield from (some[i % len(some)] for i in (0, *range(0, len(some), max(1, len(some) // 3))))


def memory(model: Any, settings: Settings, vocab: int) -> int:
    """Bytes: weights, gradients and two moments in fp32, and about what the activations of one piece take."""
    weights = sum(p.numel() for p in model.parameters())
    tokens = settings.micro_tokens or settings.batch_tokens
    layers = settings.layers * (2 if model.encoder is not None and model.decoder is not None else 1)
    activations = tokens * layers * (10 * settings.d_model + 2 * settings.d_ff) * 4
    scores = 2 * min(tokens, 512) * vocab * 4
    return (
        16 * weights + 4 * weights * bool(settings.average) + (activations // (6 if settings.recompute else 1)) + scores
    )
