"""headwater.watch: listen to any module of any model while it runs. Its answer does not change.

    with headwater.watch(model, "decoder.layers.*.cross_attn") as seen:
        model(ids, source=source)
    seen["decoder.layers.0.cross_attn"]           # [B, H, Q, S]: of an attention layer, the weights of its heads

In a pattern * is any one name between dots, ** any number of them. A path may name a tap (…kernel.weights), a block
(the residual stream after it), a projection, a norm. Of an attention layer the weights are heard; what it hands on is
heard at its `out`. A fused kernel has no weights to show, so while it is watched it works by the plain formula.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from headwater.core.attention import AttentionLayer
from headwater.errors import BadSetting, nearest


class Seen(Mapping[str, Any]):
    """What each watched module said last, by path. every(path): all it said, in order: a module may run often."""

    def __init__(self, paths: list[str]) -> None:
        self._heard: dict[str, list[Any]] = {path: [] for path in paths}

    def hear(self, path: str, value: Any) -> None:
        self._heard[path].append(value)

    def every(self, path: str) -> list[Any]:
        if path not in self._heard:
            raise KeyError(f"{path!r} is not watched; {nearest(path, self._heard)}")
        return list(self._heard[path])

    def __getitem__(self, path: str) -> Any:
        if heard := self.every(path):
            return heard[-1]
        raise KeyError(f"{path!r} has said nothing yet; run the model inside `with watch(…)`")

    def __iter__(self) -> Iterator[str]:
        return (path for path, heard in self._heard.items() if heard)

    def __len__(self) -> int:
        return sum(bool(heard) for heard in self._heard.values())

    def __repr__(self) -> str:
        said = {path: tuple(v.shape) if isinstance(v, Tensor) else type(v).__name__ for path, v in self.items()}
        return f"Seen({said})"


@contextlib.contextmanager
def watch(model: Any, *patterns: str) -> Iterator[Seen]:
    """Hear all modules whose path matches one of the patterns. Values are copies, cut off from the gradient.

    model: an nn.Module, or what headwater.load gives.
    """
    model = model if isinstance(model, nn.Module) else getattr(model, "model", model)
    if not isinstance(model, nn.Module):
        raise BadSetting(f"watch: a model must be given, got {type(model).__name__}; use headwater.load or .build()")
    paths = matching(model, *patterns)
    seen, handles = Seen(paths), []
    try:
        for path in paths:
            module = model.get_submodule(path)
            source = module.kernel.weights if isinstance(module, AttentionLayer) else module
            handles.append(source.register_forward_hook(_listener(seen, path)))
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _listener(seen: Seen, path: str) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        seen.hear(path, _copied(output))

    return hook


def _copied(value: Any) -> Any:
    """The tensors in it, copied: what runs later may write into them."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _copied(inner) for key, inner in value.items()}
    return tuple(_copied(inner) for inner in value) if isinstance(value, (tuple, list)) else value


def matching(model: nn.Module, *patterns: str) -> list[str]:
    """The paths of the modules that match any of the patterns, in the order of the model; each pattern must match."""
    paths = [path for path, _ in model.named_modules() if path]
    if not patterns:
        raise BadSetting(f"watch: a pattern must be given, got none; {nearest('', _folded(paths))}")
    for pattern in patterns:
        if not any(fits(path, pattern) for path in paths):
            hint = nearest(pattern, _folded(paths) if "*" in pattern else paths)
            raise BadSetting(f"watch: {pattern!r} matches no module of this model; {hint}")
    return [path for path in paths if any(fits(path, pattern) for pattern in patterns)]


def fits(path: str, pattern: str) -> bool:
    """Name by name.

    >>> fits("a.0.b", "a.*.b"), fits("a.0.b", "a.*"), fits("a.0.b", "a.**"), fits("a.0.b", "**.b")
    (True, False, True, True)
    """
    return _fits(path.split("."), pattern.split("."))


def _fits(names: list[str], asked: list[str]) -> bool:
    if not asked:
        return not names
    if asked[0] == "**":
        return any(_fits(names[n:], asked[1:]) for n in range(len(names) + 1))
    return bool(names) and fnmatchcase(names[0], asked[0]) and _fits(names[1:], asked[1:])


def _folded(paths: list[str]) -> list[str]:
    """What exists, numbered layers as one."""
    return list(dict.fromkeys(".".join("*" if n.isdigit() else n for n in path.split(".")) for path in paths))
