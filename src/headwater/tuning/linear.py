"""TunedLinear: a linear layer in any format with the changes that adapters make to it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from headwater.core import Transformer
from headwater.core.functional import ChangedLinear
from headwater.cpu.decode import LinearTerms
from headwater.errors import BadSetting
from headwater.i18n import _
from headwater.quantization.layers import QuantizedLinear, replace_module
from headwater.tuning.base import Change, ChangedModule, Selection, selection_of


class LinearChange(Change):
    """A change of a linear layer: of its input, of its output, or both."""

    def scale_input(self, x: Tensor) -> Tensor:
        """The input of the base, from the input x."""
        return x

    def update(self, x: Tensor, y: Tensor) -> Tensor:
        """The output, from the input x and the output y of the base."""
        return y

    def merged(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The weight and the bias of one linear layer that computes the same."""
        raise NotImplementedError

    def terms(self, bias: Tensor | None) -> LinearTerms:
        """The change as the decoding step in C computes it, of a layer with that bias."""
        raise NotImplementedError


class TunedLinear(ChangedModule, ChangedLinear):
    """A linear layer with changes: y = update(x, base(scale_input(x))), for the rows that use the adapter."""

    def __init__(self, base: nn.Linear | QuantizedLinear, selection: Selection) -> None:
        super().__init__()
        self.base = base
        self.changes = nn.ModuleDict()
        self.selection = selection
        self.in_features = base.in_features
        self.out_features = base.out_features

    @property
    def weight(self) -> Tensor:
        """The weight of the base; a quantized one is dequantized."""
        weight: Tensor = self.base.weight  # type: ignore[assignment]
        return weight

    @weight.setter
    def weight(self, weight: nn.Parameter) -> None:
        """Weight tying sets the weight of the base."""
        self.base.weight = weight

    @property
    def bias(self) -> Tensor | None:
        bias: Tensor | None = self.base.bias  # type: ignore[assignment]
        return bias

    def before(self, x: Tensor) -> Tensor:
        for change, rows in self.active():
            assert isinstance(change, LinearChange)
            scaled = change.scale_input(x if rows is None else x[rows]).to(x.dtype)
            x = scaled if rows is None else _with_rows(x, rows, scaled)
        return x

    def after(self, x: Tensor, y: Tensor) -> Tensor:
        for change, rows in self.active():
            assert isinstance(change, LinearChange)
            updated = change.update(x, y) if rows is None else change.update(x[rows], y[rows])
            updated = updated.to(y.dtype)
            y = updated if rows is None else _with_rows(y, rows, updated)
        return y

    def terms(self, names: Sequence[str]) -> list[LinearTerms]:
        """What the adapters of these names change, as the decoding step in C computes it."""
        changes: dict[str, nn.Module] = dict(self.changes.items())
        terms: list[LinearTerms] = []
        for change in map(changes.get, names):
            assert change is None or isinstance(change, LinearChange)
            terms.append(LinearTerms() if change is None else change.terms(self.bias))
        return terms

    def merged(self, name: str) -> nn.Linear:
        """One plain linear layer that computes the same with the adapter of that name."""
        change = self.changes[name]
        assert isinstance(change, LinearChange)
        weight, bias = change.merged(self.weight.detach().float(), None if self.bias is None else self.bias.detach())
        linear = nn.Linear(self.in_features, self.out_features, bias is not None, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            linear.bias = nn.Parameter(bias, requires_grad=False)
        return linear


def _with_rows(t: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    """t with other values in some rows; where they equal t's, t itself."""
    return t if values.data_ptr() == t.data_ptr() else t.index_copy(0, rows.to(t.device), values)


def tuned_linear(model: Transformer, path: str) -> TunedLinear:
    """The linear layer at a path as a TunedLinear, which is put in its place if it is none yet."""
    layer = model.get_submodule(path)
    if not isinstance(layer, TunedLinear):
        assert isinstance(layer, nn.Linear | QuantizedLinear)
        layer = TunedLinear(layer, selection_of(model))
        replace_module(model, path, layer)
    return layer


def check_rank(r: int, layers: Sequence[tuple[str, TunedLinear]]) -> None:
    """A rank above the width of a layer has more weights than the layer itself."""
    for path, layer in layers:
        check_width(r, path, min(layer.in_features, layer.out_features))


def check_width(r: int, path: str, width: int) -> None:
    """A rank must not be above the width of the layer at a path."""
    if r > width:
        raise BadSetting(
            _(
                "r must be at most the width of the layer ({width}, {path}), got {r}; 8 is usual",
                width=width,
                path=path,
                r=r,
            )
        )


def linear_sizes(layer: TunedLinear) -> tuple[int, int, torch.device]:
    """[in, out] of a linear layer, and its device."""
    device = next((t.device for t in (*layer.base.parameters(), *layer.base.buffers())), torch.device("cpu"))
    return layer.in_features, layer.out_features, device
