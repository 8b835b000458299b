"""The settings as keyword arguments: known to editors by a TypedDict, to help() and notebooks by a signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from inspect import Parameter
from pathlib import Path
from typing import Any, TypedDict, TypeVar, get_type_hints

from headwater.training.settings import LEAVES, SECTIONS

Function = TypeVar("Function", bound=Callable[..., Any])


class TrainSettings(TypedDict, total=False):
    """Every setting by its name and type, in the order of settings.py; a test compares the two."""

    # the data
    valid: str | list[str]
    task: str
    columns: str | dict[str, str]
    source: str
    target: str
    header: str
    encoding: str
    invalid: str
    held_out: float
    longest: int
    cut: bool
    context: int
    objective: str
    augment: str | dict[str, str]
    synonyms: str | Path
    tokenizer: str | Path
    vocab: int
    # the model
    start: str | Path
    size: str
    layers: int
    d_model: int
    heads: int
    d_ff: int
    dropout: float
    position: str
    # how it learns
    method: str
    lr: float
    schedule: str
    warmup: int
    floor: float
    beta1: float
    momentum: float
    beta2: float
    eps: float
    weight_decay: float
    clip: float
    smoothing: float
    average: float
    # how long and how
    batch_tokens: int
    micro_tokens: int
    max_steps: int
    epochs: float
    max_time: str | float
    seed: int
    dtype: str
    device: str
    compile: bool
    recompute: bool
    shard: bool
    spike: float
    bad_steps: int
    # measuring
    eval_every: int
    eval_rows: int
    final_rows: int
    patience: int
    metric: str
    samples: int
    # keeping
    out: str | Path
    save_every: str | float
    save_steps: int
    keep: int
    log_every: int
    log_order: bool


KINDS = get_type_hints(TrainSettings)


def with_settings(function: Function) -> Function:
    """Give a function that takes **settings a signature and a docstring that list each of them."""
    plain = inspect.signature(function)
    own = [p for p in plain.parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
    more = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=leaf.default, annotation=KINDS.get(name, leaf.kind))
        for name, leaf in LEAVES.items()
        if name != "paths"
    ]
    function.__signature__ = plain.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
    function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\n{settings_in_words()}"
    return function


def settings_in_words() -> str:
    """Each setting with type, default and meaning, a line each, by section."""
    lines = ["Every setting is a keyword; 0 or 'auto' means: chosen when the data has been seen."]
    for section in SECTIONS:
        lines += ["", f"{section}:"]
        for name, leaf in LEAVES.items():
            if leaf.section == section and name != "paths":
                kind = inspect.formatannotation(KINDS.get(name, leaf.kind)).replace("pathlib.", "")
                lines.append(f"    {name} ({kind}, default {leaf.default!r}): {leaf.words[0]}")
    return "\n".join(lines)
