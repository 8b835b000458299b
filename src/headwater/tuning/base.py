"""TuningMethod: a change of a built model by path pattern; and Tuning, the record of the adapters that a model has.

Every change of the adapter NAME is a child `changes.NAME` of a module that tuning put in place of another, its `base`:

    decoder.layers.0.self_attn.q.weight           before
    decoder.layers.0.self_attn.q.base.weight      after, the same tensor, frozen
    decoder.layers.0.self_attn.q.changes.NAME.lora_a

In files the words base and changes.NAME are left out, so that no name depends on what else is changed.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from headwater.core import Transformer
from headwater.errors import BadSetting, NotFound, nearest
from headwater.i18n import _

DEFAULT_NAME = "default"


class TuningMethod(ABC):
    """A tuning method: which modules of a built model it changes, and how."""

    @abstractmethod
    def apply(self, model: Transformer, name: str, generator: torch.Generator) -> None:
        """Change a model in place. name: of the adapter; generator: of its initial weights."""

    def paths(self, model: nn.Module) -> list[str]:
        """The paths of the base's own parameters that the method trains; most train none."""
        return []


def method_names(methods: Sequence[TuningMethod]) -> str:
    """The methods of an adapter for people: their settings that are not the usual ones."""
    return ", ".join(map(repr, methods))


class Selection:
    """Which adapters act: one for all rows of a batch, or one for each row. None is the model without any."""

    def __init__(self) -> None:
        self.active: str | None = None
        self.rows: dict[str, Tensor] | None = None  # adapter -> indices of its rows

    def rows_of(self, name: str) -> Tensor | bool | None:
        """True: all rows; False: none; else the indices of its rows."""
        if self.rows is not None:
            return self.rows.get(name, False)
        return name == self.active

    def of_rows(self, count: int) -> list[str | None]:
        """The adapter of each row of a batch of so many, or None."""
        names = [self.active if self.rows is None else None] * count
        for name, rows in (self.rows or {}).items():
            for row in rows.tolist():
                names[row] = name
        return names

    @contextmanager
    def using(self, active: str | None) -> Iterator[None]:
        """One adapter, or none, for all rows in a block."""
        before = self.active, self.rows
        self.active = active
        self.rows = None
        try:
            yield
        finally:
            self.active, self.rows = before

    @contextmanager
    def per_row(self, names: Sequence[str | None]) -> Iterator[None]:
        """One adapter, or none, for each row of a batch in a block."""
        before = self.rows
        chosen = {name: [row for row, other in enumerate(names) if other == name] for name in set(names) - {None}}
        self.rows = {str(name): torch.tensor(rows) for name, rows in chosen.items()}
        try:
            yield
        finally:
            self.rows = before


@dataclass
class Tuning:
    """The adapters of a model: the methods of each by name, which of them act, and the base that they belong to.

    base: the name or folder that the base was loaded from; fingerprint: the hash of its weights (base_fingerprint).
    """

    adapters: dict[str, tuple[TuningMethod, ...]] = field(default_factory=dict)
    selection: Selection = field(default_factory=Selection)
    base: str = ""
    fingerprint: str = ""

    def check_name(self, name: str) -> str:
        """The name of an adapter of this model; an unknown one is refused."""
        if name not in self.adapters:
            raise NotFound(
                _(
                    "no adapter of this model is called {name!r}; {nearest}",
                    name=name,
                    nearest=nearest(name, self.adapters),
                )
            )
        return name


def tuning_of(model: nn.Module) -> Tuning | None:
    """The record of a tuned model; None for one that was not tuned."""
    return model.__dict__.get("tuning")


def check_merged(model: nn.Module, where: object) -> None:
    """Refuse a model with an adapter beside its weights where a whole model is needed. where: what needs it."""
    tuning = tuning_of(model)
    if tuning is None or not any(".changes." in path for path, _parameter in model.named_parameters()):
        return
    methods = (method for each in tuning.adapters.values() for method in each)
    raise BadSetting(
        _(
            "{where}: the model has an adapter beside its weights ({methods}); merge it first (headwater adapter "
            "merge), or use its base {base}",
            where=where,
            methods=method_names(tuple(methods)),
            base=tuning.base,
        )
    )


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that learn, by path: all of them, or of a tuned model what its adapter adds.

    Parameters without a gradient of a model that is not tuned change in other ways, such as the averages of a codebook.
    """
    if tuning_of(model) is None:
        return dict(model.named_parameters())
    return {path: parameter for path, parameter in model.named_parameters() if parameter.requires_grad}


def selection_of(model: nn.Module) -> Selection:
    """Which adapters of a tuned model act."""
    tuning = tuning_of(model)
    assert tuning is not None, "the model is tuned"
    return tuning.selection


class Change(nn.Module):
    """What one adapter changes in one module."""


class ChangedModule(nn.Module):
    """A module in place of another, its base, with the changes of each adapter by name."""

    base: nn.Module
    changes: nn.ModuleDict
    selection: Selection

    def add_change(self, name: str, change: Change) -> None:
        """Add the change of an adapter; there is one for each."""
        if name in self.changes:
            raise BadSetting(
                _(
                    "tune: two methods change the same module ({base}); give them different targets",
                    base=type(self.base).__name__,
                )
            )
        self.changes[name] = change

    def active(self) -> Iterator[tuple[nn.Module, Tensor | None]]:
        """The changes that act now, each with the indices of its rows; None: all rows."""
        for name, change in self.changes.items():
            rows = self.selection.rows_of(name)
            if rows is True:
                yield change, None
            elif isinstance(rows, Tensor):
                yield change, rows


def file_name(path: str, name: str = DEFAULT_NAME) -> str:
    """The name of a parameter in files: its path without base and changes.NAME.

    >>> file_name("decoder.layers.0.self_attn.q.changes.default.lora_a", "default")
    'decoder.layers.0.self_attn.q.lora_a'
    """
    return re.sub(r"\.base(?=\.)", "", path.replace(f".changes.{name}.", "."))


def learned_parameters(model: nn.Module, name: str = DEFAULT_NAME) -> dict[str, nn.Parameter]:
    """What an adapter has learned, by the names in files: the parameters of its changes, and those tuned in place."""
    inside = f".changes.{name}."
    tuning = tuning_of(model)
    methods = () if tuning is None else tuning.adapters.get(name, ())
    in_place = {path for method in methods for path in method.paths(model)}
    return {file_name(path, name): p for path, p in model.named_parameters() if inside in path or path in in_place}
