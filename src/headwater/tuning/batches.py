"""Several adapters in one batch: one for each row, chosen by the request that the row answers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from headwater.core import Transformer
from headwater.errors import BadInput, BadSetting
from headwater.i18n import _
from headwater.tuning.base import ChangedModule, tuning_of
from headwater.tuning.hooks import StackChanges


def adapter_of_each_row(model: Transformer, names: Sequence[str | None]) -> AbstractContextManager[None]:
    """In a block each row of a batch has its own adapter; None: the one that acts on the model."""
    tuning = tuning_of(model)
    if tuning is None or not any(names):
        return nullcontext()
    active = tuning.selection.active
    return tuning.selection.per_row([active if name is None else name for name in names])


def check_can_share_batch(model: Transformer, name: str) -> None:
    """Refuse an adapter that the model lacks, or that cannot act on some rows of a batch alone."""
    tuning = tuning_of(model)
    if tuning is None:
        raise BadSetting(_("adapter {name!r}: the model has no adapter; load one, or call headwater.tune", name=name))
    tuning.check_name(name)
    for path, module in model.named_modules():
        if isinstance(module, StackChanges) and name in module:
            raise BadInput(
                _("adapter {name!r}: it adds tokens and cannot share a batch with others; use it alone", name=name)
            )
        if isinstance(module, ChangedModule) and name in module.changes and path.startswith("head."):
            raise BadInput(_("adapter {name!r}: it changes the head and cannot share a batch with others", name=name))
    if any(method.paths(model) for method in tuning.adapters[name]):
        raise BadInput(
            _("adapter {name!r}: it has weights in place of the base's and cannot share a batch with others", name=name)
        )
