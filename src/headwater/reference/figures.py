"""13. Figures of attention weights and learning curves. No display is needed; matplotlib is imported on use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from headwater.errors import BadFile
from headwater.i18n import _
from headwater.reference.copy_task import PADDING, START, STOP, Report
from headwater.reference.gradients import Array

INK = "#1f2937"
PALE = "#d1d5db"
COLOURS = ("#2563eb", "#f59e0b", "#10b981")


def token_label(token: int) -> str:
    """A token of the copy task for display: symbols as letters, special tokens as signs."""
    return {PADDING: "·", START: "▷", STOP: "□"}.get(token) or chr(ord("a") + token - STOP - 1)


def patterns(weights: Array) -> tuple[Array, Array]:
    """Mean attention of each head, over [B, H, N, N], from token i to itself, and to its neighbours i − 1 and i + 1.

    self = (1/N) Σ_i P_ii          neighbour = (1/(2(N − 1))) Σ_i (P_{i,i+1} + P_{i+1,i})
    """
    positions = weights.shape[-1]
    mean = weights.mean(axis=0)
    diagonal = np.trace(mean, axis1=1, axis2=2) / positions
    neighbour = (np.trace(mean, 1, axis1=1, axis2=2) + np.trace(mean, -1, axis1=1, axis2=2)) / (
        2 * max(positions - 1, 1)
    )
    return diagonal, neighbour


def heat_maps(
    path: Path, attention_weights: Mapping[str, Array], role: str, rows: list[str], columns: list[str]
) -> None:
    """One heat map for each layer and head of `role` (decoder.cross_attn): a row is a query, a column a key."""
    stack, kind = role.split(".")
    layers = [w[0] for tap, w in attention_weights.items() if tap.startswith(stack + ".") and f".{kind}." in tap]
    heads = layers[0].shape[0]
    size = (2.4 * heads + 1, 2.6 * len(layers) + 0.5)
    figure, axes = _plot().subplots(len(layers), heads, figsize=size, sharex=True, sharey=True, squeeze=False)
    for layer, maps in enumerate(layers):
        for head, (axis, weights) in enumerate(zip(axes[layer], maps, strict=True)):
            image = axis.imshow(weights, cmap="Blues", vmin=0, vmax=1)
            axis.set_title(f"layer {layer}  head {head}", fontsize=9, color=INK)
            axis.tick_params(length=0, labelsize=9)
            axis.spines[:].set_color(PALE)
    axes[0][0].set_xticks(range(len(columns)), columns)
    axes[0][0].set_yticks(range(len(rows)), rows)
    figure.colorbar(image, ax=axes, shrink=0.7, pad=0.02).outline.set_edgecolor(PALE)
    figure.suptitle(f"{stack} {kind}: queries in rows, keys in columns", fontsize=11, color=INK)
    _save(figure, path)


def pattern_bars(path: Path, attention_weights: Mapping[str, Array]) -> None:
    """Mean self-attention and mean neighbour attention of every head: a row of panels for each layer."""
    paths = [tap.split(".")[:4] for tap in attention_weights]
    kinds = list(dict.fromkeys((stack, role) for stack, _, _, role in sorted(paths, key=_order)))
    layers = 1 + max(int(layer) for _, _, layer, _ in paths)
    size = (3.2 * len(kinds) + 1, 2.4 * layers + 0.6)
    figure, axes = _plot().subplots(layers, len(kinds), figsize=size, sharey=True, squeeze=False)
    for (stack, _unused, layer, role), weights in zip(paths, attention_weights.values(), strict=True):
        axis = axes[int(layer)][kinds.index((stack, role))]
        diagonal, neighbour = patterns(weights)
        positions = np.arange(len(diagonal))
        axis.bar(positions - 0.2, diagonal, 0.38, label="the same position (i → i)", color=COLOURS[0])
        axis.bar(positions + 0.2, neighbour, 0.38, label="its neighbours (i → i ± 1, mean)", color=COLOURS[1])
        axis.set_title(f"{stack} {role}, layer {layer}", fontsize=9, color=INK)
        axis.set_xticks(positions, [f"head {head}" for head in positions], fontsize=8)
        axis.set_ylim(0, 1)
        _hide_frame(axis)
    figure.supylabel("mean attention", color=INK, fontsize=10)
    figure.legend(
        *axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=9
    )
    _save(figure, path)


def _order(path: list[str]) -> tuple[bool, bool]:
    """The encoder first, and cross-attention after self-attention."""
    return path[0] == "decoder", path[3] == "cross_attn"


def learning_curves(path: Path, reports: Mapping[str, Report], min_loss: float) -> None:
    """The loss of each size over steps and over seconds. min_loss: the minimum loss, as a dotted line."""
    figure, axes = _plot().subplots(1, 2, figsize=(10, 3.8), sharey=True)
    for colour, (size, report) in zip(COLOURS, reports.items(), strict=False):
        steps = np.arange(1, len(report.losses) + 1)
        label = f"{size}: {report.parameters:,} parameters, {report.exact:.1%} copied exactly"
        for axis, x in zip(axes, (steps, steps * report.seconds / len(steps)), strict=True):
            axis.plot(x, report.losses, color=colour, linewidth=1.4, label=label)
    for axis, x_name in zip(axes, ("step", "seconds"), strict=True):
        axis.axhline(min_loss, color=INK, linewidth=0.8, linestyle=":")
        axis.set_xlabel(x_name, color=INK)
        axis.set_ylim(0)
        _hide_frame(axis)
    axes[0].set_ylabel("smoothed cross-entropy", color=INK)
    axes[0].annotate("minimum with smoothed labels", (0, min_loss), (6, -11), textcoords="offset points", fontsize=8)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=1, frameon=False, fontsize=9)
    _save(figure, path)


def _plot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["figure.constrained_layout.use"] = True
    return pyplot


def _hide_frame(axis: Any) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(PALE)
    axis.tick_params(length=0, labelcolor=INK)
    axis.grid(axis="y", color=PALE, linewidth=0.6, alpha=0.6)
    axis.set_axisbelow(True)


def _save(figure: Any, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150, facecolor="white")
    except OSError as error:
        raise BadFile(
            _(
                "{path} must be a path that can be written, got: {strerror}; choose another --out",
                path=path,
                strerror=error.strerror,
            )
        ) from None
    finally:
        _plot().close(figure)
