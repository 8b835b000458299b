"""Several adapters in one batch: one for each row, chosen by the request that the row answers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from headwater.core import Transformer
from headwater.errors import BadInput, BadSetting
from headwater.i18n import _
from headwater.tuning.base import ChangedModule, TuningMethod, tuning_of
from headwater.tuning.hooks import StackChanges


def adapter_of_each_row(model: Transformer, names: Sequence[str | None]) -> AbstractContextManager[None]:
    """In a block each row of a batch has its own adapter; None: the one that acts on the model."""
    tuning = tuning_of(model)
    if tuning is None or not any(names):
        return nullcontext()
    active = tuning.selection.active
    return tuning.selection.per_row([active if name is None else name for name in names])


class AdapterIndex:
    """The adapters of a model by number, as the decoding step in C knows them."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.adapters = self._adapters()
        self.names = list(self.adapters)

    def is_current(self) -> bool:
        """Whether the model has the same adapters still."""
        now = self._adapters()
        return list(now) == self.names and all(now[name] is methods for name, methods in self.adapters.items())

    def of_rows(self, count: int) -> list[int]:
        """The number of the adapter that acts on each row of a batch, or -1."""
        tuning = tuning_of(self.model)
        names = [None] * count if tuning is None else tuning.selection.of_rows(count)
        return [-1 if name is None else self.names.index(name) for name in names]

    def _adapters(self) -> dict[str, tuple[TuningMethod, ...]]:
        tuning = tuning_of(self.model)
        return {} if tuning is None else dict(tuning.adapters)


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
