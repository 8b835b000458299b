"""13. What attention looked at, as pictures. No display is needed; matplotlib is imported when something is drawn."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from headwater.errors import BadFile
from headwater.reference.copy_task import PADDING, START, STOP, Report
from headwater.reference.gradients import Array

INK, PALE = "#1f2937", "#d1d5db"
COLOURS = ("#2563eb", "#f59e0b", "#10b981")


def name(token: int) -> str:
    """The symbols of the copy task as letters, the rest as signs."""
    return {PADDING: "·", START: "▷", STOP: "□"}.get(token) or chr(ord("a") + token - STOP - 1)


def patterns(weights: Array) -> tuple[Array, Array]:
    """For each head, over [B, H, N, N]: how much token i looks at place i, and at its neighbours i − 1 and i + 1.

    self = (1/N) Σ_i P_ii          neighbour = (1/(2(N − 1))) Σ_i (P_{i,i+1} + P_{i+1,i})
    """
    places = weights.shape[-1]
    mean = weights.mean(axis=0)
    own = np.trace(mean, axis1=1, axis2=2) / places
    beside = (np.trace(mean, 1, axis1=1, axis2=2) + np.trace(mean, -1, axis1=1, axis2=2)) / (2 * max(places - 1, 1))
    return own, beside


def heat_maps(path: Path, seen: Mapping[str, Array], role: str, rows: list[str], columns: list[str]) -> None:
    """One map for each layer and head of `role` (decoder.cross_attn): a row is a token that looks, dark is much."""
    stack, kind = role.split(".")
    layers = [w[0] for tap, w in seen.items() if tap.startswith(stack + ".") and f".{kind}." in tap]
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
    figure.suptitle(f"{stack} {kind}: a row is a token that looks, a column one that is seen", fontsize=11, color=INK)
    _save(figure, path)


def pattern_bars(path: Path, seen: Mapping[str, Array]) -> None:
    """Mean self-attention and mean neighbour attention of every head: a row of panels for each layer."""
    places = [tap.split(".")[:4] for tap in seen]
    kinds = list(dict.fromkeys((stack, role) for stack, _, _, role in sorted(places, key=_order)))
    layers = 1 + max(int(layer) for _, _, layer, _ in places)
    size = (3.2 * len(kinds) + 1, 2.4 * layers + 0.6)
    figure, axes = _plot().subplots(layers, len(kinds), figsize=size, sharey=True, squeeze=False)
    for (stack, _, layer, role), weights in zip(places, seen.values(), strict=True):
        axis, (own, beside) = axes[int(layer)][kinds.index((stack, role))], patterns(weights)
        at = np.arange(len(own))
        axis.bar(at - 0.2, own, 0.38, label="the same place (i → i)", color=COLOURS[0])
        axis.bar(at + 0.2, beside, 0.38, label="its neighbours (i → i ± 1, mean)", color=COLOURS[1])
        axis.set_title(f"{stack} {role}, layer {layer}", fontsize=9, color=INK)
        axis.set_xticks(at, [f"head {head}" for head in at], fontsize=8)
        axis.set_ylim(0, 1)
        _plain(axis)
    figure.supylabel("mean attention", color=INK, fontsize=10)
    figure.legend(
        *axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=9
    )
    _save(figure, path)


def _order(place: list[str]) -> tuple[bool, bool]:
    """The encoder first, and cross-attention after self-attention."""
    return place[0] == "decoder", place[3] == "cross_attn"


def learning_curves(path: Path, reports: Mapping[str, Report], least: float) -> None:
    """The loss of each size over steps and over seconds; `least` is what perfect knowledge would still lose."""
    figure, axes = _plot().subplots(1, 2, figsize=(10, 3.8), sharey=True)
    for colour, (size, report) in zip(COLOURS, reports.items(), strict=False):
        steps = np.arange(1, len(report.losses) + 1)
        label = f"{size}: {report.parameters:,} parameters, {report.exact:.1%} copied exactly"
        for axis, x in zip(axes, (steps, steps * report.seconds / len(steps)), strict=True):
            axis.plot(x, report.losses, color=colour, linewidth=1.4, label=label)
    for axis, what in zip(axes, ("step", "seconds"), strict=True):
        axis.axhline(least, color=INK, linewidth=0.8, linestyle=":")
        axis.set_xlabel(what, color=INK)
        axis.set_ylim(0)
        _plain(axis)
    axes[0].set_ylabel("smoothed cross-entropy", color=INK)
    axes[0].annotate(
        "the least that smoothed labels allow", (0, least), (6, -11), textcoords="offset points", fontsize=8
    )
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=1, frameon=False, fontsize=9)
    _save(figure, path)


def _plot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["figure.constrained_layout.use"] = True
    return pyplot


def _plain(axis: Any) -> None:
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
            f"{path} must be a place that can be written, got: {error.strerror}; choose another --out"
        ) from None
    finally:
        _plot().close(figure)
