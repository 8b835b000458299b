"""Bottleneck adapters: a narrow feed-forward layer, up(act(down(x))), added at one of three places of a branch f.

    Houlsby    x + f + up(act(down(f)))                 after attention and feed-forward layers (Houlsby et al. 2019)
    Pfeiffer   s + up(act(down(norm(s)))), s = x + f    after the feed-forward layer (Pfeiffer et al. 2020)
    Parallel   x + f + scale · up(act(down(x)))         beside the feed-forward layer (He et al. 2021)

What follows the branch, the norm of a post-norm block, comes last in all of them; in a pre-norm block there is none.
up is zero at the start, so that the model is unchanged before the first step.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from headwater.core import Transformer, functional
from headwater.core.base import check_positive
from headwater.core.feedforward import get_activation
from headwater.core.stack import BlockLayer
from headwater.errors import BadSetting
from headwater.i18n import _
from headwater.parts import must, part
from headwater.quantization.layers import replace_module
from headwater.tuning.base import Change, ChangedModule, Selection, TuningMethod, selection_of
from headwater.tuning.paths import match_paths

INITIAL_STD = 0.02


@part
class Houlsby(TuningMethod):
    """Bottleneck adapters after attention and feed-forward layers. Their width is d_model / reduction."""

    reduction: int = 16
    activation: str = "silu"
    target: str | tuple[str, ...] = ("*.self_attn", "*.ffn")

    slot: ClassVar[str] = "out_norm"  # the module of a branch that the adapter joins
    scale: ClassVar[float] = 1.0
    reads_sum: ClassVar[bool] = False  # the normalized sum x + f, instead of x

    def __post_init__(self) -> None:
        get_activation(self.activation)
        check_positive(self, "reduction", _("16 is usual"))

    def apply(self, model: Transformer, name: str, generator: torch.Generator) -> None:
        for path in match_paths(self.target, branch_paths(model), _("branch")):
            slot = tuned_slot(model, f"{path}_{self.slot}")
            stack = getattr(model, path.partition(".")[0])
            slot.add_change(name, BottleneckAdapter(stack.spec.d_model, self, generator))


@part
class Pfeiffer(Houlsby):
    """Bottleneck adapters after the feed-forward layers, which read the normalized sum."""

    activation: str = "relu"
    target: str | tuple[str, ...] = "*.ffn"

    slot: ClassVar[str] = "post_norm"
    reads_sum: ClassVar[bool] = True


@part
class Parallel(Houlsby):
    """Bottleneck adapters beside the feed-forward layers, which read their input."""

    reduction: int = 2
    activation: str = "relu"
    target: str | tuple[str, ...] = "*.ffn"

    slot: ClassVar[str] = "post_norm"
    scale: ClassVar[float] = 4.0


def branch_paths(model: Transformer) -> list[str]:
    """The paths of all residual branches: decoder.layers.0.self_attn, …"""
    blocks = [(path, module) for path, module in model.named_modules() if type(module) is BlockLayer]
    return [f"{path}.{names[0]}" for path, block in blocks for names in block.names]


class BottleneckAdapter(Change):
    """up(act(down(x)))"""

    def __init__(self, d_model: int, spec: Houlsby, generator: torch.Generator) -> None:
        super().__init__()
        width = d_model // spec.reduction
        must(
            width >= 1,
            spec,
            _("reduction must be at most d_model ({d_model})", d_model=d_model),
            spec.reduction,
            _("16 is usual"),
        )
        self.down = nn.Linear(d_model, width)
        self.up = nn.Linear(width, d_model)
        self.act = get_activation(spec.activation)
        self.scale = spec.scale
        self.reads_sum = spec.reads_sum
        with torch.no_grad():
            self.down.weight.normal_(0, INITIAL_STD, generator=generator)
            for zero in (self.down.bias, self.up.weight, self.up.bias):
                zero.zero_()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.up(self.act(self.down(x)))
        return y if self.scale == 1.0 else self.scale * y


class TunedSlot(ChangedModule):
    """A norm of a branch with bottleneck adapters before it: norm(y), or norm(x + dropout(y))."""

    def __init__(self, base: nn.Module, selection: Selection) -> None:
        super().__init__()
        self.base = base
        self.changes = nn.ModuleDict()
        self.selection = selection

    def forward(self, x: Tensor, y: Tensor | None = None, p: float = 0.0) -> Tensor:
        changed = list(self.active())
        if y is None:
            for bottleneck, rows in changed:
                x = x + bottleneck(x) if rows is None else x.index_add(0, rows, bottleneck(x[rows]))
            return self.base(x)
        if not changed:
            return self.base(x, y, p)
        total = functional.add_dropout(x, y, p)
        added = total
        for bottleneck, rows in changed:
            source = self.base(total) if bottleneck.reads_sum else x
            if rows is None:
                added = added + bottleneck(source)
            else:
                added = added.index_add(0, rows, bottleneck(source[rows]))
        return self.base(added)


def tuned_slot(model: Transformer, path: str) -> TunedSlot:
    """The norm at a path as a TunedSlot, which is put in its place if it is none yet."""
    slot = model.get_submodule(path)
    if isinstance(slot, ChangedModule) and not isinstance(slot, TunedSlot):
        raise BadSetting(_("tune: two methods change the same module ({base}); give them different targets", base=path))
    if not isinstance(slot, TunedSlot):
        slot = TunedSlot(slot, selection_of(model))
        replace_module(model, path, slot)
    return slot
