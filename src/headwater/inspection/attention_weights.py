"""The attention layers of a model, and their weights [H, Q, S] during a forward pass.

The weights are recomputed by a forward hook from the queries and keys of each layer, a chunk of queries at a time: the
model's own forward pass does not change, and only a few million weights exist before they are stored.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from headwater.core.attention import AttentionLayer
from headwater.core.modules import eval_mode
from headwater.errors import BadSetting, nearest
from headwater.i18n import _
from headwater.inspection.inputs import TokenizedInput

WEIGHTS_PER_CHUNK = 1 << 22  # weights computed at a time


@dataclass(frozen=True)
class AttentionSite:
    """One attention layer in a forward pass. kind: its stack and role, as decoder.cross_attn. layer: its depth.

    call_index: the number of earlier calls of its module in the same pass; above 0 only if layers share weights.
    """

    kind: str
    layer: int
    path: str
    heads: int
    call_index: int = 0


def attention_sites(model: nn.Module) -> list[AttentionSite]:
    """Every attention layer of a model, in execution order."""
    sites = []
    for side in ("encoder", "decoder"):
        stack: Any = getattr(model, side)
        order = stack.order if stack is not None else ()
        for step, index in enumerate(order):
            for role, module in stack.layers[index].named_modules():
                if isinstance(module, AttentionLayer):
                    path = f"{side}.layers.{index}.{role}"
                    call_index = order[:step].count(index)
                    sites.append(AttentionSite(f"{side}.{role}", step, path, module.heads, call_index))
    return sites


def select_sites(
    model: nn.Module, kinds: Sequence[str] | None, layers: Sequence[int] | None, heads: Sequence[int] | None = None
) -> list[AttentionSite]:
    """The attention layers of these kinds and layers; a kind, layer or head that does not exist raises BadSetting."""
    sites = attention_sites(model)
    known = {site.kind for site in sites}
    for kind in kinds or ():
        if kind not in known:
            raise BadSetting(
                _(
                    "attention: there is no kind {kind!r} in this model; {nearest}",
                    kind=kind,
                    nearest=nearest(kind, known),
                )
            )
    sites = [site for site in sites if kinds is None or site.kind in kinds]
    _check_range(_("layer"), layers, 1 + max((site.layer for site in sites), default=0))
    _check_range(_("head"), heads, max((site.heads for site in sites), default=1))
    return [site for site in sites if layers is None or site.layer in layers]


def _check_range(name: str, numbers: Sequence[int] | None, count: int) -> None:
    for n in numbers or ():
        if not 0 <= n < count:
            raise BadSetting(
                _(
                    "attention: {what} must be from 0 to {count}, got {n}; choose one of them",
                    what=name,
                    count=count - 1,
                    n=n,
                )
            )


# --------------------------------------------------------------------------------------------------- capturing weights

WeightsCallback = Callable[[AttentionSite, int, Tensor], None]  # site, first query, weights [H, queries, S]
WeightsOf = Callable[[nn.Module, Any, Any], Iterator[tuple[int, Tensor]]]


def capture_weights(inputs: TokenizedInput, sites: Sequence[AttentionSite], callback: WeightsCallback) -> None:
    """Run the model once and pass the weights of these attention layers to the callback, chunk by chunk."""
    sites_by_call = {(site.path, site.call_index): site for site in sites}
    with eval_mode(inputs.model), contextlib.ExitStack() as hooks:
        for path in dict.fromkeys(site.path for site in sites):
            layer: Any = inputs.model.get_submodule(path)
            source = layer.kernel if layer.calls_kernel else layer.kernel.weights
            weights_of = _weights_of_call if layer.calls_kernel else _weights_of_tap
            handle = source.register_forward_hook(_capture_hook(path, sites_by_call, callback, weights_of))
            hooks.callback(handle.remove)
        inputs.hidden_states()


def _capture_hook(
    path: str, sites: dict[tuple[str, int], AttentionSite], callback: WeightsCallback, weights_of: WeightsOf
) -> Callable[..., None]:
    num_calls = 0

    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal num_calls
        site = sites.get((path, num_calls))
        num_calls += 1
        if site is not None:
            for first, weights in weights_of(module, inputs, output):
                callback(site, first, weights)

    return hook


def _weights_of_call(kernel: nn.Module, inputs: Any, output: Any) -> Iterator[tuple[int, Tensor]]:
    """The weights on the tokens. An adapter may have put virtual tokens before them: their columns are left out."""
    q, k, _v, mask, *_rest = inputs
    all_k, all_v = keys_and_values(inputs)
    for first, weights in weights_in_chunks(kernel, q, all_k, all_v, mask):
        yield first, weights[..., all_k.shape[2] - k.shape[2] :]


def keys_and_values(kernel_inputs: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """k and v [B, G, S, D] as the kernel reads them: those of an adapter's virtual tokens before its inputs.

    Without a KV cache to append to: a pass with one would be changed by this.
    """
    _q, k, v, _mask, _attn_mask, *caches = kernel_inputs  # cross-attention has no cache
    return caches[0].update(k, v) if caches else (k, v)


def _weights_of_tap(tap: nn.Module, inputs: Any, output: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Those of a layer that attends by itself (Longformer, LSH): it has computed them for the hook."""
    yield 0, output[0].float()


def weights_in_chunks(kernel: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Iterator[tuple[int, Tensor]]:
    """The weights of the kernel's eager formula in chunks of queries: [H, queries, S] of the first row of the batch."""
    captured: list[Tensor] = []
    size = max(1, WEIGHTS_PER_CHUNK // (q.shape[1] * k.shape[2]))
    handle = kernel.weights.register_forward_hook(lambda tap, inputs, output: captured.append(output))
    try:
        for first in range(0, q.shape[2], size):
            queries = slice(first, first + size)
            q_chunk = q[:, :, queries]
            kernel.eager(q_chunk, k, v, kernel.dense_mask(q_chunk, mask.narrow(queries, slice(None))))
            yield first, captured.pop()[0].float()
    finally:
        handle.remove()
