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

    attention [layers, heads, rows, columns]: from the class token to each patch; without a class token, the mean over
    all queries. rollout: the attention of all layers multiplied, with the residual connection as half of each (Abnar &
    Zuidema 2020). attribution: gradient times input of the best output, summed over each patch; positive is for it.
    """

    attention: np.ndarray
    rollout: np.ndarray
    attribution: np.ndarray
    best: int  # the index of the output that is attributed


def image_maps(model: Transformer, pixels: Tensor) -> ImageMaps:
    """The maps of one image [1, C, H, W], prepared by the model's image processor."""
    tower = model.image if isinstance(model, TwoTowers) else model
    embed = getattr(tower.encoder, "embed", None)
    if not isinstance(embed, PatchesLayer):
        raise BadInput(_("inspect: an image needs a model of images, this one reads something else"))
    first = embed.spec.first_tokens
    grid = embed.spec.grid(*pixels.shape[2:])

    # attention weights [L, H, Q, Q]
    with eval_mode(tower), watch(tower, "encoder.layers.*.self_attn.kernel.weights") as seen:
        tower(pixels)
    weights = torch.stack([seen[path][0].float() for path in seen])
    from_query = weights[:, :, 0] if first else weights.mean(2)  # [L, H, Q]
    attention = from_query[..., first:].unflatten(-1, grid)

    rolled = rollout(weights)
    rolled = (rolled[0] if first else rolled.mean(0))[first:].unflatten(0, grid)
    credit, best = attribute(tower, pixels)
    return ImageMaps(attention.numpy(), rolled.numpy(), credit[first:].unflatten(0, grid).numpy(), best)


def rollout(weights: Tensor) -> Tensor:
    """Attention rollout [Q, Q] of weights [L, H, Q, Q]: Π over layers of (mean over heads + I) / 2."""
    identity = torch.eye(weights.shape[-1])
    total = identity
    for layer in weights.mean(1):
        total = (layer + identity) / 2 @ total
    return total


def attribute(model: Transformer, pixels: Tensor) -> tuple[Tensor, int]:
    """Gradient times input [Q] of the largest output, at the output of the embedding; and which output it is."""
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
    return (grad[0] * kept[0][0]).sum(-1).detach(), best
