"""Figures of images: attention and attribution over an image, the similarity matrix of images and texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from headwater.i18n import _
from headwater.inspection.image_maps import ImageMaps


def plot_similarity(cosines: np.ndarray, images: Sequence[str], texts: Sequence[str], path: str | Path) -> None:
    """Draw the cosine similarities [I, T] of images and texts into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(2 + 0.6 * len(texts), 1.5 + 0.4 * len(images)), layout="constrained")
    matrix = axes.imshow(cosines, cmap="viridis", aspect="auto")
    axes.set_xticks(range(len(texts)), [text[:40] for text in texts], rotation=45, ha="right")
    axes.set_yticks(range(len(images)), [name[:40] for name in images])
    middle = (cosines.min() + cosines.max()) / 2
    for row, column in np.ndindex(*cosines.shape):
        color = "white" if cosines[row, column] < middle else "black"
        axes.text(column, row, f"{cosines[row, column]:.2f}", ha="center", va="center", color=color, fontsize=8)
    figure.colorbar(matrix, ax=axes, label="cosine")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_image_maps(pixels: np.ndarray, maps: ImageMaps, title: str, path: str | Path) -> None:
    """The image, and over it rollout, attribution, and the mean attention of each layer."""
    panels = [(str(_("attention rollout")), maps.rollout), (str(_("attribution")), maps.attribution)]
    layers = maps.attention.mean(1)
    panels += [(str(_("layer {number}", number=number)), layer) for number, layer in enumerate(layers)]
    _plot_overlays(pixels, [("", None), *panels], title, path, columns=min(5, len(panels) + 1))


def plot_heads(pixels: np.ndarray, maps: ImageMaps, title: str, path: str | Path) -> None:
    """The attention of every head over the image: a row for each layer."""
    layers, heads = maps.attention.shape[:2]
    panels = [(f"{layer}.{head}", maps.attention[layer, head]) for layer in range(layers) for head in range(heads)]
    _plot_overlays(pixels, panels, title, path, columns=heads)


def _plot_overlays(
    pixels: np.ndarray, panels: Sequence[tuple[str, np.ndarray | None]], title: str, path: str | Path, columns: int
) -> None:
    """The image in each panel, under a map of its patches; signed maps are red for and blue against."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(2.2 * columns, 2.4 * rows), layout="constrained", squeeze=False)
    for axis in axes.flat:
        axis.axis("off")
    extent = (0, pixels.shape[1], pixels.shape[0], 0)
    for axis, (name, values) in zip(axes.flat, panels, strict=False):
        axis.imshow(pixels, extent=extent)
        axis.set_title(name, fontsize=9)
        if values is None:
            continue
        signed = bool((values < 0).any())
        bound = float(np.abs(values).max()) or 1.0
        colors = (
            {"cmap": "coolwarm", "vmin": -bound, "vmax": bound}
            if signed
            else {"cmap": "inferno", "vmin": 0, "vmax": bound}
        )
        axis.imshow(values, extent=extent, alpha=0.6, interpolation="nearest", **colors)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    plt.close(figure)
