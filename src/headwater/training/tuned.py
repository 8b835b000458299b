"""Tuning as a setting of a run: --tune lora and its sizes become methods of headwater.tuning."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from headwater.errors import BadSetting, nearest
from headwater.i18n import _
from headwater.training.config import TrainConfig
from headwater.tuning import (
    IA3,
    DoRA,
    Full,
    Houlsby,
    LoRA,
    Parallel,
    Pfeiffer,
    PrefixTuning,
    PromptTuning,
    PTuning,
    TuningMethod,
)
from headwater.tuning.full import DECODER, HEAD
from headwater.tuning.hooks import TOKEN_METHODS
from headwater.tuning.lowrank import QUERIES_AND_VALUES

FULL = "full"  # every weight learns: no method is needed


class MethodSetting(NamedTuple):
    """A method of --tune. lr: the usual peak learning rate times d_model."""

    build: Callable[[TrainConfig], TuningMethod]
    lr: float


def _lora(config: TrainConfig, kind: type[LoRA] = LoRA) -> TuningMethod:
    target = tuple(config.tune_target) or QUERIES_AND_VALUES
    return kind(config.tune_rank, config.tune_alpha or None, target, config.tune_dropout)


def _bottleneck(kind: type[Houlsby]) -> Callable[[TrainConfig], TuningMethod]:
    return lambda config: kind(config.tune_reduction) if config.tune_reduction else kind()


METHODS: dict[str, MethodSetting] = {
    "head": MethodSetting(lambda config: Full(HEAD), 0.4),
    "decoder": MethodSetting(lambda config: Full(DECODER), 0.04),
    "lora": MethodSetting(_lora, 0.4),
    "dora": MethodSetting(lambda config: _lora(config, DoRA), 0.4),
    "ia3": MethodSetting(lambda config: IA3(), 4.0),
    "houlsby": MethodSetting(_bottleneck(Houlsby), 0.4),
    "pfeiffer": MethodSetting(_bottleneck(Pfeiffer), 0.4),
    "parallel": MethodSetting(_bottleneck(Parallel), 0.4),
    "prefix": MethodSetting(lambda config: PrefixTuning(config.tune_tokens), 4.0),
    "prompt": MethodSetting(lambda config: PromptTuning(config.tune_tokens), 4.0),
    "p-tuning": MethodSetting(lambda config: PTuning(config.tune_tokens), 0.4),
}


def is_tuned(config: TrainConfig) -> bool:
    """Whether a run trains an adapter on a frozen base."""
    return config.tune != FULL


def check_tuning(config: TrainConfig) -> None:
    """Refuse an unknown method, and one without a base."""
    if config.tune not in (FULL, *METHODS):
        known = (FULL, *METHODS)
        raise BadSetting(
            _(
                "tune must be {known}, got {tune!r}; {nearest}",
                known=", ".join(known),
                tune=config.tune,
                nearest=nearest(config.tune, known),
            )
        )
    if is_tuned(config) and not config.init_from:
        raise BadSetting(_("tune={tune} needs a base that was trained before; give --init-from", tune=config.tune))
    if is_tuned(config) and config.fsdp:
        raise BadSetting(
            _("fsdp and tune={tune} cannot be combined: an adapter is small; leave fsdp out", tune=config.tune)
        )


def added_tokens(config: TrainConfig) -> int:
    """The virtual tokens of a run, which take positions of the model."""
    return config.tune_tokens if config.tune in TOKEN_METHODS else 0


def tuning_methods(config: TrainConfig, new_head: str) -> tuple[TuningMethod, ...]:
    """The methods of a run. new_head: the paths of the head that learn whole beside the adapter (Task.new_head)."""
    method = METHODS[config.tune].build(config)
    return (method, Full(new_head)) if new_head and config.tune != "head" else (method,)
