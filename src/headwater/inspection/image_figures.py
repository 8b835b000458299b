"""Figures of images: attention and attribution over an image, the similarity matrix of images and texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headwater.i18n import _
from headwater.inspection import plot_style
from headwater.inspection.image_maps import ImageMaps

MAX_NUMBERS = 600  # cells of a matrix up to which each shows its value
MAX_WIDTH = 16.0  # inches
MAX_HEIGHT = 24.0
LABEL_LENGTH = 40  # characters


def plot_similarity(cosines: np.ndarray, images: Sequence[str], texts: Sequence[str], path: str | Path) -> None:
    """Draw the cosine similarities [I, T] of images and texts."""
    image_format = plot_style.image_format_of(path)
    width = min(MAX_WIDTH, 2.5 + 0.6 * len(texts))
    height = min(MAX_HEIGHT, 1.5 + 0.4 * len(images))
    with plot_style.style():
        figure = plot_style.new_figure(width, height)
        axis = figure.subplots()
        matrix = axis.imshow(cosines, cmap=plot_style.SEQUENTIAL, aspect="auto", interpolation="nearest")
        _label(axis.set_xticks, texts, rotation=45, ha="right", rotation_mode="anchor")
        _label(axis.set_yticks, images)
        plot_style.hide_frame(axis)
        if cosines.size <= MAX_NUMBERS:
            _write_numbers(axis, cosines)
        plot_style.add_colorbar(figure, matrix, axis, str(_("cosine")))
        if notice := plot_style.missing_font_notice([*texts, *images]):
            figure.text(0, 0, notice, fontsize=7)
    plot_style.write_image(plot_style.figure_to_bytes(figure, image_format, dpi=120), path)


def _label(set_ticks: Any, names: Sequence[str], **options: Any) -> None:
    """Names at the ticks of an axis, thinned where there are many; a $ in them is not parsed as a formula."""
    indices, _short = plot_style.thin_labels(names)
    labels = [names[n] if len(names[n]) <= LABEL_LENGTH else names[n][: LABEL_LENGTH - 1] + "…" for n in indices]
    set_ticks(indices, labels, parse_math=False, **options)


def _write_numbers(axis: Any, cosines: np.ndarray) -> None:
    """The value in each cell, light on dark cells."""
    middle = (cosines.min() + cosines.max()) / 2
    for row, column in np.ndindex(*cosines.shape):
        value = cosines[row, column]
        color = "white" if value < middle else "black"
        axis.text(column, row, f"{value:.2f}", ha="center", va="center", color=color, fontsize=8)


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
    rows = -(-len(panels) // columns)
    extent = (0, pixels.shape[1], pixels.shape[0], 0)
    with plot_style.style():
        figure = plot_style.new_figure(2.2 * columns, 2.4 * rows + 0.3)
        axes = figure.subplots(rows, columns, squeeze=False)
        for axis in axes.flat:
            axis.axis("off")
        for axis, (name, values) in zip(axes.flat, panels, strict=False):
            axis.imshow(pixels, extent=extent)
            axis.set_title(name, fontsize=9)
            if values is not None:
                axis.imshow(values, extent=extent, alpha=0.6, interpolation="nearest", **_colors(values))
        figure.suptitle(title, parse_math=False)
    plot_style.write_image(plot_style.figure_to_bytes(figure, plot_style.image_format_of(path)), path)


def _colors(values: np.ndarray) -> dict[str, Any]:
    """The colors of a map: around zero where it is signed, else from zero on."""
    bound = float(np.abs(values).max()) or 1.0
    if (values < 0).any():
        return {"cmap": "coolwarm", "vmin": -bound, "vmax": bound}
    return {"cmap": "inferno", "vmin": 0, "vmax": bound}
