"""What an image model looks at: attention of each head over the patches, attention rollout, attribution to patches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headwater.core.model import Transformer
from headwater.core.modules import eval_mode
from headwater.errors import BadInput
from headwater.i18n import _
from headwater.inspection.hooks import watch
from headwater.variants.patches import PatchesLayer
from headwater.variants.towers import TwoTowers


@dataclass(frozen=True, eq=False)
class ImageMaps:
    """Maps over the grid of patches [rows, columns] of one image.

    attention [layers, heads, rows, columns]: from the query to each patch. The query is a patch, or the class token;
    without a class token, the mean over all queries. rollout: the attention of all layers multiplied, with the residual
    connection as half of each (Abnar & Zuidema 2020). attribution: gradient times input of the best output, summed over
    each patch; positive is for it.
    """

    attention: np.ndarray
    rollout: np.ndarray
    attribution: np.ndarray
    best: int  # the index of the output that is attributed
    output: np.ndarray  # [labels] logits, or [width] the vector of the image


def image_maps(model: Transformer, pixels: Tensor, patch: int | None = None) -> ImageMaps:
    """The maps of one image [1, C, H, W], prepared by the model's image processor.

    patch: the query, counted row by row; None for the class token.
    """
    tower = model.image if isinstance(model, TwoTowers) else model
    embed = getattr(tower.encoder, "embed", None)
    if not isinstance(embed, PatchesLayer):
        raise BadInput(_("inspect: an image needs a model of images, this one reads something else"))
    first = embed.spec.first_tokens
    grid = embed.spec.grid(*pixels.shape[2:])

    # attention weights [L, H, Q, Q]
    with eval_mode(tower), watch(tower, "encoder.layers.*.self_attn.kernel.weights") as seen:
        tower(pixels)
    weights = torch.stack([seen[path][0].float() for path in seen])  # [L, H, Q, Q]
    queries = _queries(patch, first, weights.shape[-1])
    attention = weights[:, :, queries].mean(2)[..., first:].unflatten(-1, grid)
    rolled = rollout(weights)[queries].mean(0)[first:].unflatten(0, grid)

    credit, best, output = attribute(tower, pixels)
    by_patch = credit[first:].unflatten(0, grid)
    return ImageMaps(attention.numpy(), rolled.numpy(), by_patch.numpy(), best, output.numpy())


def _queries(patch: int | None, first_tokens: int, length: int) -> slice:
    """The rows of the attention weights that are averaged."""
    if patch is None:
        return slice(0, 1) if first_tokens else slice(None)
    if not 0 <= patch < length - first_tokens:
        raise BadInput(
            _(
                "patch must be from 0 to {last}, got {patch}: the image has {count} patches",
                last=length - first_tokens - 1,
                patch=patch,
                count=length - first_tokens,
            )
        )
    return slice(first_tokens + patch, first_tokens + patch + 1)


def rollout(weights: Tensor) -> Tensor:
    """Attention rollout [Q, Q] of weights [L, H, Q, Q]: Π over layers of (mean over heads + I) / 2."""
    identity = torch.eye(weights.shape[-1])
    total = identity
    for layer in weights.mean(1):
        total = (layer + identity) / 2 @ total
    return total


def attribute(model: Transformer, pixels: Tensor) -> tuple[Tensor, int, Tensor]:
    """Gradient times input [Q] of the largest output, at the output of the embedding; which it is; all outputs."""
    kept: list[Tensor] = []
    assert model.encoder is not None

    def keep(module: torch.nn.Module, arguments: object, output: Tensor) -> Tensor:
        kept.append(output.detach().requires_grad_())
        return kept[0]

    handle = model.encoder.embed.register_forward_hook(keep)
    try:
        with eval_mode(model, enable_grad=True):
            output = model(pixels)[0].flatten()
            best = int(output.argmax())
            (grad,) = torch.autograd.grad(output[best], kept)
    finally:
        handle.remove()
    return (grad[0] * kept[0][0]).sum(-1).detach(), best, output.detach()
