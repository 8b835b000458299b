"""Figures of images: the similarity matrix of images and texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np


def plot_similarity(cosines: np.ndarray, images: Sequence[str], texts: Sequence[str], path: str | Path) -> None:
    """Draw the cosine similarities [I, T] of images and texts into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(2 + 0.6 * len(texts), 1.5 + 0.4 * len(images)), layout="constrained")
    shown = axes.imshow(cosines, cmap="viridis", aspect="auto")
    axes.set_xticks(range(len(texts)), [text[:40] for text in texts], rotation=45, ha="right")
    axes.set_yticks(range(len(images)), [name[:40] for name in images])
    for row, column in np.ndindex(*cosines.shape):
        axes.text(column, row, f"{cosines[row, column]:.2f}", ha="center", va="center", color="white", fontsize=8)
    figure.colorbar(shown, ax=axes, label="cosine")
    figure.savefig(path, dpi=120)
    plt.close(figure)
