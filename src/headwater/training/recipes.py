"""Defaults chosen from the data, and recipes: settings known to work on public data, by name.

headwater train --recipe multi30k train.en train.de
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from headwater.codecs import CodecSpec
from headwater.core import Model
from headwater.errors import BadSetting, Unavailable, nearest
from headwater.i18n import _
from headwater.tasks import Task, TaskData
from headwater.tasks.base import DEFAULT_MAX_LENGTH
from headwater.training.config import TrainConfig
from headwater.training.gradients import DTYPES
from headwater.training.pretrained import max_positions, pretrained_spec
from headwater.training.task_data import DEFAULT_TOKENIZER
from headwater.training.tuned import METHODS, added_tokens, check_tuning, is_tuned
from headwater.variants.audiolm import AudioLM
from headwater.variants.towers import Towers

# ----------------------------------------------------------------------------------------------- defaults from the data


class ModelSize(NamedTuple):
    d_model: int
    heads: int
    layers: int
    d_ff: int


SIZES = {
    "xs": ModelSize(32, 2, 1, 64),
    "s": ModelSize(64, 4, 2, 256),
    "m": ModelSize(128, 4, 2, 512),
    "l": ModelSize(256, 4, 3, 1024),
    "xl": ModelSize(512, 8, 6, 2048),
}
# The smallest size whose tokens are not yet reached: a larger model would memorize the rows.
SIZE_BY_TOKENS = ((100_000, "s"), (600_000, "m"), (50_000_000, "l"), (math.inf, "xl"))
DEFAULT_BATCH_TOKENS = 4096
FINETUNE_BATCH_TOKENS = 1024  # fine-tuning: many small steps
EPOCHS_SMALL_DATA = 30.0
DEFAULT_EPOCHS = 10.0
FINETUNE_EPOCHS = 4.0
# peak learning rate · d_model, from scratch and for fine-tuning
SCRATCH_LR = 0.25
FINETUNE_LR = 0.04
MUON_LR = 0.9
MAX_MUON_LR = 1e-2
NUM_SPECIAL_TOKENS = 3  # special tokens around two texts


def resolve_early(config: TrainConfig) -> TrainConfig:
    """Resolve the settings that must be known before batching: device, batch_tokens, max_length, context_length."""
    dtype = config.dtype
    if dtype not in ("auto", *DTYPES):
        raise BadSetting(_("no dtype is called {dtype!r}; {nearest}", dtype=dtype, nearest=nearest(dtype, DTYPES)))
    default_batch_tokens = FINETUNE_BATCH_TOKENS if config.init_from else DEFAULT_BATCH_TOKENS
    check_tuning(config)
    config = config.replace(
        device=_resolve_device(config.device), batch_tokens=config.batch_tokens or default_batch_tokens
    )
    max_tokens = max_positions(pretrained_spec(config.init_from)) if config.init_from else 0
    if not max_tokens:
        return config
    max_tokens -= added_tokens(config)
    return config.replace(
        max_length=min(config.max_length or DEFAULT_MAX_LENGTH, max_tokens - NUM_SPECIAL_TOKENS),
        context_length=min(config.context_length, max_tokens),
    )


def _resolve_device(device: str) -> str:
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise Unavailable(
            _(
                "device {wanted!r} cannot be used: {reason}; --device cpu always can",
                wanted=device,
                reason=str(error).splitlines()[0][:80],
            )
        ) from None
    return device


def resolve(config: TrainConfig, task_data: TaskData, saved_spec: Model | CodecSpec | None = None) -> TrainConfig:
    """Resolve all settings but a number of steps that depends on time. saved_spec: of a resumed run."""
    # model
    spec = saved_spec or (pretrained_spec(config.init_from) if config.init_from else None)
    size = model_size(spec) if isinstance(spec, Model) else _resolve_size(config, task_data)
    position = config.position
    if position == "auto":
        position = task_data.task.default_position
    tokenizer = config.tokenizer
    if tokenizer == "auto":
        tokenizer = config.init_from or DEFAULT_TOKENIZER

    # optimization
    optimizer = _default_optimizer(config, task_data)
    epochs = config.epochs
    max_steps = config.max_steps
    if not (epochs or max_steps or config.max_time):
        max_steps = task_data.task.default_steps
    if not (epochs or max_steps or config.max_time):
        epochs = _default_epochs(config, task_data)
    return config.replace(
        **task_data.settings,
        task=task_data.task.name,
        optimizer=optimizer,
        size="own" if config.init_from else config.size,
        **size._asdict(),
        tokenizer=tokenizer,
        position="own" if config.init_from else position,
        lr=config.lr or _default_lr(config, task_data.task, optimizer, size.d_model),
        objective=task_data.task.objective or config.objective,
        max_steps=max_steps or math.ceil(epochs * task_data.train.steps_per_epoch()),
        epochs=epochs,
    )


def _default_optimizer(config: TrainConfig, task_data: TaskData) -> str:
    """Muon for generative tasks from scratch; a given lr is meant for AdamW, unless Muon is given too."""
    if config.optimizer != "auto":
        return config.optimizer
    unconstrained = not (config.lr or config.init_from or config.fsdp) and config.schedule != "noam"
    return "muon" if unconstrained and task_data.task.generates_text else "adamw"


def _default_lr(config: TrainConfig, task: Task[Any], optimizer: str, d_model: int) -> float:
    if config.schedule == "noam":
        return 1.0
    if optimizer == "muon":
        return min(MAX_MUON_LR, MUON_LR / d_model)
    if is_tuned(config):
        return task.lr_factor * METHODS[config.tune].lr / d_model
    return task.lr_factor * (FINETUNE_LR if config.init_from else SCRATCH_LR) / d_model


def _default_epochs(config: TrainConfig, task_data: TaskData) -> float:
    if config.init_from:
        return FINETUNE_EPOCHS
    small = task_data.task.generates_text and task_data.num_tokens < 2_000_000
    return EPOCHS_SMALL_DATA if small else DEFAULT_EPOCHS


def _resolve_size(config: TrainConfig, task_data: TaskData) -> ModelSize:
    name = config.size
    if name not in ("auto", "own", *SIZES):
        raise BadSetting(_("no size is called {size!r}; {nearest}", size=name, nearest=nearest(name, SIZES)))
    if name not in SIZES:
        name = next(name for max_tokens, name in SIZE_BY_TOKENS if task_data.num_tokens < max_tokens)
    base = SIZES[name]
    d_model = config.d_model or base.d_model
    heads = config.heads or (base.heads if d_model == base.d_model else max(1, d_model // 64))
    d_ff = config.d_ff or (base.d_ff if d_model == base.d_model else 4 * d_model)
    return ModelSize(d_model, heads, config.layers or base.layers, d_ff)


def model_size(spec: Model) -> ModelSize:
    """The size of an existing model."""
    if isinstance(spec, Towers):
        spec = spec.text
    if isinstance(spec, AudioLM):
        spec = spec.semantic
    stack: Any = spec.decoder or spec.encoder
    sizes = {name: value for branch in stack.layers[0].branches for name, value in vars(branch.layer).items()}
    return ModelSize(stack.d_model, sizes.get("heads", 0), len(stack.layers), sizes.get("d_ff", 0))


# -------------------------------------------------------------------------------------------------------------- recipes

RECIPES: dict[str, dict[str, Any]] = {
    # The embedded dates, 50,000 rows: about a minute on two cores; `headwater demo` says how many it reads rightly.
    "dates": {
        "d_model": 128,
        "heads": 4,
        "layers": 2,
        "d_ff": 256,
        "dropout": 0.0,
        "tokenizer": "bpe",
        "vocab": 1600,
        "batch_tokens": 3000,
        "lr": 3e-3,
        "warmup": 25,
        "weight_decay": 0.01,
        "beta2": 0.99,
        "max_steps": 500,
        "eval_every": 50,
        "eval_examples": 200,
        "metric": "exact",
        "log_every": 5,
    },
    # Multi30k English to German, from scratch: 39.5 BLEU on test_2016 after 34 minutes of one core (tasks.py).
    "multi30k": {
        "d_model": 192,
        "heads": 4,
        "layers": 3,
        "d_ff": 768,
        "dropout": 0.15,
        "vocab": 6000,
        "position": "rotary",
        "optimizer": "muon",
        "batch_tokens": 4000,
        "lr": 5e-3,
        "warmup": 200,
        "label_smoothing": 0.1,
        "ema": 0.995,
        "weight_decay": 0.05,
        "max_time": "28m",
        "eval_examples": 300,
        "metric": "bleu",
    },
    # A small character model of running text, as nanoGPT trains it on a CPU …
    "characters": {
        "tokenizer": "char",
        "d_model": 128,
        "heads": 4,
        "layers": 4,
        "d_ff": 512,
        "dropout": 0.0,
        "context_length": 64,
        "position": "learned",
        "batch_tokens": 768,
        "lr": 1e-3,
        "warmup": 100,
        "min_lr_ratio": 0.1,
        "beta2": 0.99,
        "weight_decay": 0.1,
        "max_steps": 2000,
        "valid_fraction": 0.1,
    },
    # … and the same model to the same loss in a fifth of the steps.
    "characters-quick": {
        "tokenizer": "char",
        "d_model": 128,
        "heads": 4,
        "layers": 4,
        "d_ff": 512,
        "dropout": 0.0,
        "context_length": 64,
        "batch_tokens": 768,
        "optimizer": "muon",
        "lr": 1e-2,
        "warmup": 30,
        "beta2": 0.99,
        "weight_decay": 0.1,
        "max_steps": 400,
        "valid_fraction": 0.1,
    },
    # The 2017 paper's own way to learn, for any data: Adam, the rate that rises and falls with the root of the step.
    "paper": {
        "optimizer": "adamw",
        "schedule": "noam",
        "lr": 1.0,
        "warmup": 4000,
        "beta1": 0.9,
        "beta2": 0.98,
        "eps": 1e-9,
        "weight_decay": 0.0,
        "max_grad_norm": 0.0,
        "label_smoothing": 0.1,
        "dropout": 0.1,
        "position": "sinusoidal",
    },
    # One sentence for a longer text (Debian's descriptions): a quarter of an hour; most is said in its first words.
    "synopsis": {
        "d_model": 192,
        "heads": 4,
        "layers": 2,
        "d_ff": 768,
        "dropout": 0.1,
        "vocab": 8000,
        "max_length": 48,
        "truncate": True,
        "position": "rotary",
        "batch_tokens": 3000,
        "label_smoothing": 0.1,
        "ema": 0.995,
        "max_time": "15m",
        "eval_examples": 300,
        "metric": "rougeL",
    },
    # What to type, from what is wanted (nl2bash).
    "commands": {
        "d_model": 192,
        "heads": 4,
        "layers": 3,
        "d_ff": 768,
        "dropout": 0.15,
        "vocab": 3000,
        "position": "rotary",
        "batch_tokens": 2048,
        "label_smoothing": 0.1,
        "ema": 0.995,
        "max_time": "15m",
        "eval_examples": 300,
        "metric": "chrf",
    },
    # A few thousand labelled sentences, or sentences with tagged words, and no model to start from.
    "sentences": {
        "d_model": 128,
        "heads": 4,
        "layers": 1,
        "d_ff": 256,
        "dropout": 0.4,
        "vocab": 4000,
        "lr": 1e-3,
        "weight_decay": 0.1,
        "ema": 0.99,
        "max_time": "15m",
        "patience": 12,
    },
    # Answers in a text, from about a thousand questions and a model to start from.
    "answers": {"max_length": 320, "max_time": "15m", "weight_decay": 0.05},
}


def recipe(name: str) -> dict[str, Any]:
    if name not in RECIPES:
        raise BadSetting(_("no recipe is called {name!r}; {nearest}", name=name, nearest=nearest(name, RECIPES)))
    return dict(RECIPES[name])
