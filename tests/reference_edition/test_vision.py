"""The NumPy edition of patches and of the contrastive loss equals the core, gradients included."""

from __future__ import annotations

import numpy as np
import torch

from headwater.reference.vision import contrastive_loss, embed_patches, patches
from headwater.tasks import losses
from headwater.variants.patches import Patches

rng = np.random.default_rng(0)


def test_patches_are_those_of_the_core():
    layer = Patches((12, 8), (4, 4)).build(10)
    torch.nn.init.normal_(layer.class_token)
    pixels = rng.normal(size=(2, 3, 12, 8)).astype(np.float32)
    weights = {name: p.detach().numpy() for name, p in layer.named_parameters()}
    expected = layer(layer.read(torch.from_numpy(pixels), "ids"), torch.zeros(1, 7)).detach().numpy()
    got = embed_patches(
        pixels,
        weights["projection.weight"],
        weights["projection.bias"],
        weights["class_token"],
        weights["position.table.weight"],
    )
    assert np.abs(got - expected).max() < 1e-5
    # a convolution whose stride is its kernel; other orders of the patches would show
    projection = layer.projection
    conv = torch.conv2d(torch.from_numpy(pixels), projection.weight, projection.bias, stride=4)
    conv = conv.detach().flatten(2).transpose(1, 2).numpy()
    assert np.abs(patches(pixels, 4) @ weights["projection.weight"].reshape(10, -1).T
                  + weights["projection.bias"] - conv).max() < 1e-5  # fmt: skip
    swapped = patches(pixels.transpose(0, 1, 3, 2), 4)
    assert not np.allclose(swapped, patches(pixels, 4))


def test_the_contrastive_loss_and_its_gradients_are_those_of_torch():
    vectors = [rng.normal(size=(5, 6)) for _ in range(2)]
    texts, images = (v / np.linalg.norm(v, axis=1, keepdims=True) for v in vectors)
    loss, backward = contrastive_loss(texts, images, 7.0)
    a, b = (torch.from_numpy(v).requires_grad_() for v in (texts, images))
    expected = losses.contrastive_loss(7.0 * a @ b.T, torch.eye(5, dtype=torch.bool)) / 5
    expected.backward()
    assert abs(loss - float(expected)) < 1e-6
    for got, reference in zip(backward(), (a.grad, b.grad), strict=True):
        assert np.abs(got - reference.numpy()).max() < 1e-6
