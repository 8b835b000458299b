"""Tuning as a setting of a run: --tune lora and its sizes become methods of headwater.tuning."""

from __future__ import annotations

from collections.abc import Callable

from headwater.core import LMHead, Model
from headwater.errors import BadSetting, nearest
from headwater.i18n import _
from headwater.training.config import TrainConfig
from headwater.tuning import DoRA, Full, LoRA, TuningMethod
from headwater.tuning.full import HEAD
from headwater.tuning.lowrank import QUERIES_AND_VALUES

FULL = "full"  # every weight learns: no method is needed


def _lora(config: TrainConfig, kind: type[LoRA] = LoRA) -> TuningMethod:
    target = tuple(config.tune_target) or QUERIES_AND_VALUES
    return kind(config.tune_rank, config.tune_alpha or None, target, config.tune_dropout)


METHODS: dict[str, Callable[[TrainConfig], TuningMethod]] = {
    "head": lambda config: Full(HEAD),
    "lora": _lora,
    "dora": lambda config: _lora(config, DoRA),
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


def tuning_methods(config: TrainConfig, spec: Model) -> tuple[TuningMethod, ...]:
    """The methods of a run. A head that is no language model's learns too: it is new, or its labels are this task's."""
    method = METHODS[config.tune](config)
    if isinstance(spec.head, LMHead) or config.tune == "head":
        return (method,)
    return method, Full(HEAD)
