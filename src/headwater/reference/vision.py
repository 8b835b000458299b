"""14. Images: patches as rows of numbers, and the contrastive loss that matches images with texts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from headwater.reference.gradients import Array
from headwater.reference.loss import log_softmax


def patches(pixels: Array, size: int) -> Array:
    """[B, C, H, W] -> [B, H/size · W/size, C · size · size]: patches row by row, each with its channels first.

    A Vision Transformer multiplies each row with a matrix; that is a convolution whose stride is its kernel.
    """
    batch, channels, height, width = pixels.shape
    grid = pixels.reshape(batch, channels, height // size, size, width // size, size)
    rows = grid.transpose(0, 2, 4, 1, 3, 5)  # [B, H/size, W/size, C, size, size]
    return rows.reshape(batch, -1, channels * size * size)


def embed_patches(pixels: Array, weight: Array, bias: Array, class_token: Array, positions: Array) -> Array:
    """[B, C, H, W] -> [B, 1 + N, D]: the projected patches after the class token, plus the positions.

    weight [D, C, size, size], bias and class_token [D], positions [1 + N, D].
    """
    projected = patches(pixels, weight.shape[-1]) @ weight.reshape(len(weight), -1).T + bias
    first = np.broadcast_to(class_token, (len(pixels), 1, len(class_token)))
    return np.concatenate((first, projected), axis=1) + positions


def contrastive_loss(texts: Array, images: Array, scale: float) -> tuple[float, Callable[[], tuple[Array, Array]]]:
    """CLIP's loss: L = (1/2N) Σ_i [−log softmax_j(s t_i·v_j)_i − log softmax_j(s t_j·v_i)_i], pair i belongs together.

    texts, images [N, W]: unit vectors. The backward function gives dL/dtexts and dL/dimages.
    """
    count = len(texts)
    logits = scale * texts @ images.T  # [texts, images]
    by_text = log_softmax(logits)
    by_image = log_softmax(logits.T).T
    loss = -float(np.trace(by_text) + np.trace(by_image)) / (2 * count)

    def backward() -> tuple[Array, Array]:
        # d(−log p_ii) = p − onehot, along the rows and along the columns
        dlogits = (np.exp(by_text) + np.exp(by_image) - 2 * np.eye(count)) / (2 * count)
        return scale * dlogits @ images, scale * dlogits.T @ texts

    return loss, backward
