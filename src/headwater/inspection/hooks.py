"""Forward hooks: headwater.watch captures module outputs; record_calls records every module's inputs and outputs.

    with headwater.watch(model, "decoder.layers.*.cross_attn") as activations:
        model(ids, source=source)
    activations["decoder.layers.0.cross_attn"]    # [B, H, Q, S]: of an attention layer, the weights of its heads

In a pattern * matches one name between dots, ** any number of names. A path may name a tap (…kernel.weights), a block
(the residual stream after it), a projection or a norm. For an attention layer its weights are captured; its output is
that of its `out`. A fused kernel computes no weights, so a watched attention layer uses the eager formula.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from headwater.core.attention import AttentionLayer
from headwater.errors import BadInput, BadSetting, nearest
from headwater.i18n import _
from headwater.inspection.inputs import ModelWithTokenizer
from headwater.training.nonfinite import by_position, flatten_tensors, forward_hooks


class ActivationCache(Mapping[str, Any]):
    """The last output of each watched module, by path; history(path) has all of them, in order of the calls."""

    def __init__(self, paths: list[str]) -> None:
        self._values: dict[str, list[Any]] = {path: [] for path in paths}

    def append(self, path: str, value: Any) -> None:
        self._values[path].append(value)

    def history(self, path: str) -> list[Any]:
        if path not in self._values:
            raise KeyError(f"{path!r} is not watched; {nearest(path, self._values)}")
        return list(self._values[path])

    def __getitem__(self, path: str) -> Any:
        if values := self.history(path):
            return values[-1]
        raise KeyError(f"{path!r} has no output yet; run the model inside `with watch(…)`")

    def __iter__(self) -> Iterator[str]:
        return (path for path, values in self._values.items() if values)

    def __len__(self) -> int:
        return sum(bool(values) for values in self._values.values())

    def __repr__(self) -> str:
        shapes = {path: tuple(v.shape) if isinstance(v, Tensor) else type(v).__name__ for path, v in self.items()}
        return f"ActivationCache({shapes})"


@contextlib.contextmanager
def watch(model: nn.Module | ModelWithTokenizer, *patterns: str) -> Iterator[ActivationCache]:
    """Capture the outputs of all modules whose path matches one of the patterns, as detached copies.

    model: an nn.Module, or the result of headwater.load.
    """
    model = model if isinstance(model, nn.Module) else getattr(model, "model", model)
    if not isinstance(model, nn.Module):
        raise BadSetting(
            _(
                "watch: the model must be an nn.Module, got {name}; use headwater.load or .build()",
                name=type(model).__name__,
            )
        )
    paths = matching_paths(model, *patterns)
    activations = ActivationCache(paths)
    handles = []
    try:
        for path in paths:
            module = model.get_submodule(path)
            source = module.kernel.weights if isinstance(module, AttentionLayer) else module
            handles.append(source.register_forward_hook(_capture_hook(activations, path)))
        yield activations
    finally:
        for handle in handles:
            handle.remove()


def _capture_hook(activations: ActivationCache, path: str) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        activations.append(path, _detached_copy(output))

    return hook


def _detached_copy(value: Any) -> Any:
    """Copies of the tensors in a nested value: modules that run later may write into them in place."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _detached_copy(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_detached_copy(inner) for inner in value)
    return value


def matching_paths(model: nn.Module, *patterns: str) -> list[str]:
    """The paths of the modules that match any of the patterns, in the order of the model; each pattern must match."""
    paths = [path for path, _ in model.named_modules() if path]
    if not patterns:
        raise BadSetting(
            _("watch: a pattern must be given, got none; {nearest}", nearest=nearest("", _collapse_indices(paths)))
        )
    for pattern in patterns:
        if not any(matches_pattern(path, pattern) for path in paths):
            hint = nearest(pattern, _collapse_indices(paths) if "*" in pattern else paths)
            raise BadSetting(
                _("watch: {pattern!r} matches no module of this model; {hint}", pattern=pattern, hint=hint)
            )
    return [path for path in paths if any(matches_pattern(path, pattern) for pattern in patterns)]


def matches_pattern(path: str, pattern: str) -> bool:
    """Whether a module path matches a pattern, name by name.

    >>> [matches_pattern("a.0.b", pattern) for pattern in ("a.*.b", "a.*", "a.**", "**.b")]
    [True, False, True, True]
    """
    return _match_names(path.split("."), pattern.split("."))


def _match_names(names: list[str], pattern: list[str]) -> bool:
    if not pattern:
        return not names
    if pattern[0] == "**":
        return any(_match_names(names[n:], pattern[1:]) for n in range(len(names) + 1))
    return bool(names) and fnmatchcase(names[0], pattern[0]) and _match_names(names[1:], pattern[1:])


def _collapse_indices(paths: list[str]) -> list[str]:
    """The paths with every layer number as *."""
    return list(dict.fromkeys(".".join("*" if n.isdigit() else n for n in path.split(".")) for path in paths))


# ------------------------------------------------------------------------------------------------------ comparing runs
# Two runs that must agree: the responsible module is the innermost one whose inputs agree and whose outputs differ.


@dataclass(frozen=True)
class RecordedCall:
    """Inputs and outputs of one call of a module; call_index: its earlier calls in the same forward pass."""

    path: str
    call_index: int
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


@contextlib.contextmanager
def record_calls(model: nn.Module) -> Iterator[list[RecordedCall]]:
    """Record every call of every module, in the order they return; children come before their parents."""
    calls: list[RecordedCall] = []
    num_calls: Counter[str] = Counter()

    def make_hook(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            inputs = tuple(t.detach().clone() for t in flatten_tensors((args, kwargs)))
            outputs = tuple(t.detach().clone() for t in flatten_tensors(output))
            calls.append(RecordedCall(path, num_calls[path], inputs, outputs))
            num_calls[path] += 1

        return hook

    with forward_hooks(model, make_hook):
        yield calls


def extract_logits(output: Any) -> Tensor:
    """The logits in the output of a forward pass: a tensor, an object with .logits, or a tuple of tensors."""
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "last_hidden_state"):
        value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(value, Tensor):
            return value
    if isinstance(output, tuple | list):
        first = next((value for value in output if isinstance(value, Tensor)), None)
        if first is not None:
            return first
    raise BadInput(
        _(
            "the model must return a tensor or an object with .logits, got {name}; pass call=",
            name=type(output).__name__,
        )
    )


PositionIndex = tuple[Tensor, Tensor]  # rows and columns, one of each for every position that is compared


@dataclass(frozen=True)
class PairedPositions:
    """Positions of run a, and the positions of run b that must agree with them, one to one."""

    a: PositionIndex
    b: PositionIndex
    size_a: tuple[int, int]
    size_b: tuple[int, int]

    def differences(self, a: Tensor, b: Tensor) -> tuple[Tensor, float] | None:
        """The maximum difference of each pair, and the largest magnitude in a; None if they cannot be compared."""
        left = by_position(a, *self.size_a)
        right = by_position(b, *self.size_b)
        if left is None or right is None or left.shape[2] != right.shape[2] or not len(self.a[0]):
            return None
        x = left[self.a].double()  # [pairs, values]
        y = right[self.b].double()
        equal = (x == y) | (x.isnan() & y.isnan())
        difference = torch.where(equal, 0.0, (x - y).abs().nan_to_num(nan=torch.inf)).amax(1)
        scale = float(x[x.isfinite()].abs().max()) if x.isfinite().any() else 0.0
        return difference, scale

    def differ(self, a: tuple[Tensor, ...], b: tuple[Tensor, ...], tolerance: float) -> bool | None:
        """Whether any tensor of one call differs from its counterpart; None if none can be compared."""
        results = (self.differences(x, y) for x, y in zip(a, b, strict=False))
        compared = [result for result in results if result is not None]
        if not compared:
            return None
        return any(bool((difference > tolerance * max(scale, 1e-6)).any()) for difference, scale in compared)


def responsible_module(
    a: list[RecordedCall], b: list[RecordedCall], paired_positions: Callable[[str], PairedPositions], tolerance: float
) -> str | None:
    """The path of the module in which two runs diverge; None if no module shows it."""
    calls_b = {(call.path, call.call_index): call for call in b}
    first = None
    for call in a:
        other = calls_b.get((call.path, call.call_index))
        pairs = paired_positions(call.path)
        if other is None or not pairs.differ(call.outputs, other.outputs, tolerance):
            continue
        first = call.path if first is None else first
        if call.path and pairs.differ(call.inputs, other.inputs, tolerance) is False:
            return call.path
    return first
