"""Reversible stack: training without stored activations, for any block (Gomez et al. 2017, Kitaev et al. 2020).

Two streams s and t, both the embedding at first. The branches of all layers write to them in turn:

    forward     s' = s + f(t)      t' = t + g(s')       …
    backward    t  = t' - g(s')    s  = s' - f(t)       the inputs of a branch, computed from its outputs

Only the last two streams are stored; a branch runs once more in the backward pass, with the random numbers it had.
The result is both streams side by side, [B, Q, 2 · d_model].
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from headwater.core.attention import ForwardContext
from headwater.core.norms import NoNorm
from headwater.core.stack import Block, BlockLayer, ResidualBranch, Stack, TransformerStack
from headwater.i18n import _
from headwater.parts import must, part


@part
class ReversibleStack(Stack):
    """A stack whose layers are reversible. Its hidden states are 2 · d_model wide: those of both streams."""

    def __post_init__(self) -> None:
        super().__post_init__()
        hint = _("a reversible branch has one norm before it; use pre()")
        for layer in self.layers:
            kind = type(layer).__name__
            must(type(layer) is Block, self, _("layers must be Blocks"), kind, _("their branches run in sequence"))
            plain = all(branch.post_norm == NoNorm() for branch in getattr(layer, "branches", ()))
            must(plain, self, _("branches must not have a post_norm"), "one", hint)

    @property
    def output_width(self) -> int:
        return 2 * self.d_model

    def build(self) -> TransformerStack:
        return ReversibleTransformerStack(self)


@dataclass(frozen=True)
class Step:
    """One branch of one layer: the next one to write to a stream. number: the layer's number in the order."""

    block: BlockLayer
    branch: ResidualBranch
    number: int

    def __call__(self, x: Tensor, context: ForwardContext) -> Tensor:
        """dropout(out_norm(layer(norm(x)))): what is added to the other stream."""
        y = self.branch.out_norm(self.branch.layer(self.branch.norm(x), context, self.number))
        return self.block.dropout(y)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that learn."""
        return [p for module in self.branch for p in module.parameters() if p.requires_grad]


class ReversibleTransformerStack(TransformerStack):
    """The module of ReversibleStack. gradient_checkpointing changes nothing: no activations are stored as it is."""

    def run_layers(self, x: Tensor, context: ForwardContext) -> Tensor:
        """x [B, Q, D] -> both streams [B, Q, 2·D]"""
        steps = list(self._steps())
        if not torch.is_grad_enabled() or not steps:
            return torch.cat(_run(steps, x, x, context), -1)
        shared = SharedTensors.of(context, self)
        learned = list(dict.fromkeys(p for step in steps for p in step.parameters))
        streams = ReversibleFunction.apply(steps, context, shared, learned, x, *shared.tensors, *learned)
        return torch.cat(streams, -1)

    def _steps(self) -> Iterator[Step]:
        for number, index in enumerate(self.order):
            block = self.layers[index]
            assert isinstance(block, BlockLayer)
            for branch in block.branches:
                yield Step(block, branch, number)


def _run(steps: list[Step], s: Tensor, t: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor]:
    """The two streams after all steps: each adds to the stream that it does not read."""
    for step in steps:
        s, t = t, s + step(t, context)
    return (s, t) if len(steps) % 2 == 0 else (t, s)


@dataclass
class Memo:
    """What a branch needs to run again exactly: the random state, and the discrete choice of its layer (LSH)."""

    random_state: Tensor
    choice: Tensor | None = None

    @staticmethod
    def before() -> Memo:
        """Taken before a branch runs."""
        return Memo(torch.get_rng_state())

    def after(self, step: Step) -> None:
        """Completed after the branch has run."""
        self.choice = getattr(step.branch.layer, "choice", None)

    @contextlib.contextmanager
    def replayed(self, step: Step) -> Iterator[None]:
        """In this block the branch has the random numbers and the choices of its first run."""
        current = torch.get_rng_state()
        torch.set_rng_state(self.random_state)
        layer: Any = step.branch.layer
        if self.choice is not None:
            layer.replayed_choice = self.choice
        try:
            yield
        finally:
            torch.set_rng_state(current)
            if self.choice is not None:
                layer.replayed_choice = None


def rebuilt(after: Tensor, added: Tensor) -> Tensor:
    """A stream as it was before a branch added to it."""
    return after - added


@dataclass(frozen=True)
class SharedTensors:
    """What all branches read beside the streams and has a gradient: position biases, encoder output, their modules."""

    tensors: list[Tensor]
    names: list[tuple[str, int]]  # where in the context each stands

    @staticmethod
    def of(context: ForwardContext, stack: TransformerStack) -> SharedTensors:
        """Those of a context, and the parameters of the position encodings."""
        places: dict[tuple[str, int], Tensor | None] = {("memory", 0): context.memory}
        for number, group in enumerate(context.mask_groups):
            places["mask", number] = group.attn_mask
        kept = {place: t for place, t in places.items() if t is not None and t.requires_grad}
        parameters = [p for p in stack.position_encodings.parameters() if p.requires_grad]
        return SharedTensors([*kept.values(), *parameters], list(kept))

    def fresh(self, context: ForwardContext) -> tuple[ForwardContext, list[Tensor]]:
        """The context with leaves in place of its tensors, and the leaves: gradients stop at them."""
        leaves = [t.detach().requires_grad_() for t in self.tensors[: len(self.names)]]
        groups = list(context.mask_groups)
        memory = context.memory
        for (name, number), leaf in zip(self.names, leaves, strict=True):
            if name == "memory":
                memory = leaf
            else:
                groups[number] = replace(groups[number], attn_mask=leaf)
        context = replace(context, mask_groups=tuple(groups), memory=memory)
        return context, [*leaves, *self.tensors[len(self.names) :]]


class ReversibleFunction(torch.autograd.Function):
    """The branches of a reversible stack, whose backward pass computes the inputs of each branch from its outputs."""

    @staticmethod
    def forward(
        ctx: Any,
        steps: list[Step],
        context: ForwardContext,
        shared: SharedTensors,
        learned: list[nn.Parameter],
        x: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        s = x
        t = x
        ctx.memos = []
        for step in steps:
            ctx.memos.append(Memo.before())
            s, t = t, s + step(t, context)
            ctx.memos[-1].after(step)
        ctx.run = steps, context, shared, learned
        ctx.device = x.device.type
        ctx.autocast = torch.get_autocast_dtype(ctx.device), torch.is_autocast_enabled(ctx.device)
        ctx.save_for_backward(s, t)
        return (s, t) if len(steps) % 2 == 0 else (t, s)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        steps, context, shared, learned = ctx.run
        s, t = ctx.saved_tensors
        ds, dt = grads if len(steps) % 2 == 0 else grads[::-1]
        context, leaves = shared.fresh(context)
        autocast = torch.autocast(ctx.device, *ctx.autocast)
        totals: dict[int, Tensor] = {}
        for step, memo in zip(reversed(steps), reversed(ctx.memos), strict=True):
            # t = s_before + step(s), where s is the stream that the branch read
            read = s.detach().requires_grad_()
            with memo.replayed(step), torch.enable_grad(), autocast:
                added = step(read, context)
            inputs = [read, *leaves, *step.parameters]
            branch_grads = torch.autograd.grad(added, inputs, dt, allow_unused=True)
            with torch.no_grad():
                s, t = rebuilt(t, added), s
                ds, dt = dt, ds if branch_grads[0] is None else ds + branch_grads[0]
            for tensor, grad in zip(inputs[1:], branch_grads[1:], strict=True):
                if grad is not None:
                    totals[id(tensor)] = grad if id(tensor) not in totals else totals[id(tensor)] + grad
        return None, None, None, None, ds + dt, *(totals.get(id(tensor)) for tensor in [*leaves, *learned])
