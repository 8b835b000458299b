"""Matplotlib figures of the results: plot(result) returns a figure, save_figure(result, path) writes it.

plot(maps, kind=) of attention maps is a grid of all layers and heads, plot(maps, kind=, layer=, head=) one heat map.
"""

from __future__ import annotations

import functools
import math
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from headwater.errors import BadSetting
from headwater.i18n import _
from headwater.inspection import plot_style
from headwater.inspection.ablation import Ablation, HeadImportance
from headwater.inspection.attention import Alignment, AttentionMaps
from headwater.inspection.attribution import Attribution
from headwater.inspection.gradients import GradientFlow
from headwater.inspection.head_patterns import HeadPatterns
from headwater.inspection.inputs import Token
from headwater.inspection.logit_lens import LogitLens
from headwater.inspection.position_plots import PositionEffect, PositionEffects
from headwater.inspection.predictions import NextTokens, TokenLosses
from headwater.inspection.results import group_label, group_tokens, pool_by_group

MAX_LENS_COLUMNS = 24  # positions of a logit lens that are drawn: the last ones
PLOTTED_MEASURES = ("previous", "diagonal", "first", "induction", "normalized_entropy", "distance")


_png_cache: weakref.WeakKeyDictionary[Any, dict[Any, bytes]] = weakref.WeakKeyDictionary()


def to_png(result: Any, **selection: Any) -> bytes:
    """The figure of a result as PNG, cached as long as the result exists."""
    cache = _png_cache.setdefault(result, {})
    key = tuple(sorted(selection.items()))
    if key not in cache:
        with plot_style.style():
            cache[key] = plot_style.figure_to_bytes(plot(result, **selection))
    return cache[key]


def save_figure(result: Any, path: str | Path, **selection: Any) -> Path:
    """Write the figure of a result as .png, .svg or .pdf."""
    image_format = plot_style.image_format_of(path)
    if image_format == "png":
        return plot_style.write_image(to_png(result, **selection), path)
    with plot_style.style():
        return plot_style.write_image(plot_style.figure_to_bytes(plot(result, **selection), image_format), path)


@functools.singledispatch
def plot(result: Any, **selection: Any) -> Any:
    """A matplotlib figure of a result."""
    raise BadSetting(
        _("there is no figure of a {name}; give a result of headwater.inspection", name=type(result).__name__)
    )


def _with_font_notice(figure: Any, labels: Any) -> Any:
    if notice := plot_style.missing_font_notice(list(labels)):
        figure.supxlabel(notice, fontsize=8, color=plot_style.ORANGE)
    return figure


# ----------------------------------------------------------------------------------------------------------- attention


@plot.register
def _draw_attention(
    result: AttentionMaps, kind: str | None = None, layer: int | None = None, head: int | None = None
) -> Any:
    if layer is not None or (len(result.maps) == 1 and len(result.maps[0].heads) == 1):
        return _plot_head(result, kind, layer, head)
    kind = kind if kind is not None else result.kinds[-1]
    maps = [m for m in result.maps if m.kind == kind]
    if not maps:
        raise BadSetting(
            _(
                "attention: {kind!r} was not stored, only {kinds}; choose one of them",
                kind=kind,
                kinds=", ".join(result.kinds),
            )
        )
    return _plot_grid(maps, kind)


def _plot_grid(maps: list[Any], kind: str) -> Any:
    """Thumbnails as one image: one row per layer, one column per head."""
    width = max(len(m.heads) for m in maps)
    height = len(maps)
    tiles = [[m.tile(head, size=96) for head in m.heads] for m in maps]
    tile_height, tile_width = tiles[0][0].shape
    row_step = tile_height + max(1, tile_height // 12)  # height of a tile and of the gap below it
    column_step = tile_width + max(1, tile_width // 12)
    figure = plot_style.new_figure(min(14.0, max(3.2, 0.62 * width + 1.2)), min(24.0, max(2.4, 0.62 * height + 1.0)))
    axis = figure.subplots()
    image = mosaic(tiles, row_step, column_step)
    axis.imshow(image, cmap=plot_style.SEQUENTIAL, vmin=0, vmax=255, aspect="auto", interpolation="nearest")
    axis.set_xticks([column_step * n + tile_width / 2 for n in range(width)], maps[0].heads)
    axis.set_yticks([row_step * n + tile_height / 2 for n in range(height)], [m.layer for m in maps])
    axis.xaxis.tick_top()
    axis.tick_params(length=0, labelsize=8)
    axis.spines[:].set_visible(False)
    axis.set(title=f"{kind}: heads across", ylabel="layer")
    return figure


def mosaic(tiles: list[list[np.ndarray]], row_step: int, column_step: int) -> np.ndarray:
    """Tiles side by side as one matrix, with NaN between them; row_step and column_step: a tile and its gap."""
    matrix = np.full((row_step * len(tiles), column_step * max(map(len, tiles))), np.nan, np.float32)
    for y, row in enumerate(tiles):
        for x, tile in enumerate(row):
            cell = matrix[y * row_step :, x * column_step :]
            cell[: tile.shape[0], : tile.shape[1]] = tile
    return matrix


def _plot_head(result: AttentionMaps, kind: str | None, layer: int | None, head: int | None) -> Any:
    kind = kind if kind is not None else result.kinds[-1]
    attention = result.get_map(kind, layer if layer is not None else result.maps[0].layer)
    weights = attention.head_weights(head)
    title = f"{kind}, layer {attention.layer}, {'mean of heads' if head is None else f'head {head}'}"
    rows, columns = result.query_key_tokens(kind)
    if attention.pool_size > 1:
        labels = [[side[n].label for n in range(0, len(side), attention.pool_size)] for side in (rows, columns)]
    else:
        row_groups = group_tokens(rows)
        column_groups = group_tokens(columns)
        weights = pool_by_group(weights, row_groups, column_groups)
        labels = [[group_label(rows, g) for g in row_groups], [group_label(columns, g) for g in column_groups]]
    return _plot_heatmap(weights, labels[0], labels[1], title, "weight", "key", "query")


def _plot_heatmap(
    weights: np.ndarray,
    rows: Any,
    columns: Any,
    title: str,
    colorbar_label: str,
    x_label: str,
    y_label: str,
    cell_inches: float = 0.26,
) -> Any:
    size = [max(3.4, min(11.0, cell_inches * n + 1.6)) for n in (weights.shape[1], weights.shape[0])]
    figure = plot_style.new_figure(size[0] + 1.0, size[1])
    axis = figure.subplots()
    image = plot_style.heatmap(axis, weights, rows, columns)
    axis.set(title=title, xlabel=x_label, ylabel=y_label)
    plot_style.add_colorbar(figure, image, axis, colorbar_label)
    return _with_font_notice(figure, [*rows, *columns])


@plot.register
def _draw_alignment(result: Alignment) -> Any:
    title = "Alignment (mean cross-attention)" + (", generated target" if result.generated else "")
    return _plot_heatmap(result.weights, result.target, result.source, title, "mean weight", "source", "target")


@plot.register
def _draw_heads(result: HeadPatterns) -> Any:
    """One panel per measure (rows: layers, columns: heads), one row of panels per kind. Distances are relative."""
    kinds = list(dict.fromkeys(head.kind for head in result.heads))
    tables = {kind: [h for h in result.heads if h.kind == kind] for kind in kinds}
    heights = [1 + max(h.layer for h in tables[kind]) for kind in kinds]
    figure = plot_style.new_figure(11.5, sum(min(6.0, 0.2 * n + 0.7) for n in heights) + 0.3)
    axes = figure.subplots(len(kinds), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, kind in zip(axes, kinds, strict=True):
        panels = [_measure_table(tables[kind], measure) for measure in PLOTTED_MEASURES]
        panels[-1] = panels[-1] / max(float(np.nanmax(np.nan_to_num(panels[-1]))), 1e-9)
        across = panels[0].shape[1] + 1
        image = axis.imshow(
            mosaic([panels], len(panels[0]), across),
            cmap=plot_style.SEQUENTIAL,
            vmin=0,
            vmax=1,
            aspect="auto",
            interpolation="nearest",
        )
        axis.set_xticks([across * n + (across - 2) / 2 for n in range(len(PLOTTED_MEASURES))], PLOTTED_MEASURES)
        axis.xaxis.tick_top()
        axis.tick_params(length=0, labelsize=8)
        axis.spines[:].set_visible(False)
        axis.set_ylabel(f"{kind}\nlayer", fontsize=8)
    plot_style.add_colorbar(figure, image, list(axes), "weight (distance: relative to the largest)")
    return figure


def _measure_table(heads: list[Any], measure: str) -> np.ndarray:
    table = np.full((1 + max(h.layer for h in heads), 1 + max(h.head for h in heads)), np.nan)
    for head in heads:
        table[head.layer, head.head] = getattr(head, measure)
    return table


# --------------------------------------------------------------------------------------------------------------- tokens


@plot.register
def _draw_lens(result: LogitLens) -> Any:
    """The embedding at the bottom, the last layer at the top; a cell is the most probable token, its color the prob."""
    first = max(0, len(result.positions) - MAX_LENS_COLUMNS)
    probs = result.top_probs[:, first:, 0]
    names = [row[first:] for row in result.top_tokens]
    columns = [result.tokens[n].label for n in result.positions[first:]]
    figure = plot_style.new_figure(max(4.5, 0.72 * len(columns) + 2.0), max(2.5, 0.24 * len(probs) + 1.4))
    axis = figure.subplots()
    image = axis.imshow(probs, cmap=plot_style.SEQUENTIAL, vmin=0, vmax=1, aspect="auto", origin="lower")
    for (row, column), prob in np.ndenumerate(probs):
        ink = "black" if prob > 0.6 else "white"
        label = names[row][column].label[:9]
        axis.text(column, row, label, ha="center", va="center", fontsize=6.5, color=ink, parse_math=False)
    plot_style.label_ticks(axis, columns, result.layers)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    axis.set(title="Logit lens: the most probable token after each layer", xlabel="input token")
    plot_style.add_colorbar(figure, image, axis, "probability")
    return _with_font_notice(figure, [*columns, *(token.label for row in names for token in row)])


def _plot_bars(values: np.ndarray, labels: list[str], title: str, y_label: str, colors: Any) -> Any:
    """Vertical bars along a text."""
    figure = plot_style.new_figure(min(16.0, max(4.5, 0.24 * len(labels) + 1.5)), 3.2)
    axis = figure.subplots()
    axis.bar(range(len(labels)), values, color=colors, width=0.85)
    plot_style.label_ticks(axis, columns=labels)
    plot_style.hide_frame(axis)
    axis.grid(axis="y", color=plot_style.GRID_COLOR, linewidth=0.6)
    axis.margins(x=0.01)
    axis.set(ylabel=y_label)
    axis.set_title(title, parse_math=False)
    return _with_font_notice(figure, labels)


@plot.register
def _draw_next_tokens(result: NextTokens) -> Any:
    percentages = [100 * c.prob for c in result.candidates]
    labels = [mark_spaces(c.token) for c in result.candidates]
    figure = plot_style.new_figure(6.4, max(1.6, 0.26 * len(labels) + 1.0))
    axis = figure.subplots()
    bars = axis.barh(range(len(labels)), percentages, color=plot_style.BLUE, height=0.7)
    axis.bar_label(bars, fmt="%.1f", padding=3, fontsize=8)
    axis.invert_yaxis()
    plot_style.label_ticks(axis, rows=labels)
    plot_style.hide_frame(axis)
    axis.margins(x=0.08)
    axis.set(title="Next token", xlabel="probability, %")
    return _with_font_notice(figure, labels)


def mark_spaces(token: Token) -> str:
    """The text of a token with visible spaces."""
    return token.text.replace(" ", "␣") if token.text.isprintable() else token.label


@plot.register
def _draw_token_losses(result: TokenLosses) -> Any:
    title = f"Loss of each token: mean {result.mean:.2f} nats, perplexity {result.perplexity:.1f}"
    return _plot_bars(result.losses, [t.label for t in result.tokens], title, "-ln p", plot_style.BLUE)


@plot.register
def _draw_attribution(result: Attribution) -> Any:
    scores = np.concatenate((result.source_attributions, result.attributions))
    tokens = [*result.source, *result.tokens]
    colors = [plot_style.BLUE if score >= 0 else plot_style.ORANGE for score in scores]
    title = f"Attribution of {result.output!r} (p = {math.exp(result.logprob):.1%}; {result.method})"
    return _plot_bars(scores, [t.label for t in tokens], title, "contribution to ln p", colors)


@plot.register
def _draw_ablation(result: Ablation) -> Any:
    candidates = result.candidates[:10]
    figure = plot_style.new_figure(6.4, 0.32 * len(candidates) + 1.2)
    axis = figure.subplots()
    y = np.arange(len(candidates))
    axis.barh(y - 0.19, [100 * c.prob for c in candidates], 0.36, color=plot_style.BLUE, label="with the head")
    axis.barh(y + 0.19, [100 * c.ablated_prob for c in candidates], 0.36, color=plot_style.ORANGE, label="without")
    axis.invert_yaxis()
    labels = [mark_spaces(c.token) for c in candidates]
    plot_style.label_ticks(axis, rows=labels)
    plot_style.hide_frame(axis)
    axis.legend(frameon=False)
    axis.set(title=f"Next token without {result.kind} {result.layer}.{result.head}", xlabel="probability, %")
    return _with_font_notice(figure, labels)


@plot.register
def _draw_head_importance(result: HeadImportance) -> Any:
    limit = float(np.nanmax(np.abs(result.loss_change))) or 1.0
    figure = plot_style.new_figure(0.4 * result.loss_change.shape[1] + 2.4, 0.24 * result.loss_change.shape[0] + 1.3)
    axis = figure.subplots()
    image = axis.imshow(result.loss_change, cmap=plot_style.DIVERGING + "_r", vmin=-limit, vmax=limit, aspect="auto")
    axis.set(title="Loss change when each head is ablated", xlabel="head", ylabel="layer")
    axis.tick_params(length=0)
    plot_style.add_colorbar(figure, image, axis, "change of the loss")
    return figure


# ------------------------------------------------------------------------------------------------ gradients, positions


@plot.register
def _draw_gradients(result: GradientFlow) -> Any:
    names = [name for name, _ in result.flow]
    values = [value for _, value in result.flow]
    kinds = {norm.path.partition(".layers.")[2].partition(".")[2] for norm in result.norms}
    figure = plot_style.new_figure(10.0, max(2.6, 0.17 * max(len(names), len(kinds)) + 1.2))
    left, right = figure.subplots(1, 2)
    left.barh(range(len(names)), np.maximum(values, 1e-30), color=plot_style.BLUE, height=0.7)
    left.set_yticks(range(len(names)), names, fontsize=7)
    left.set(title="By layer", xlabel="‖∂loss/∂x‖ per token")
    if min(values, default=0) > 0:
        ends = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)) + 1e-9)
        left.set_xscale("log")
        left.set_xlim(10.0 ** ends[0], 10.0 ** ends[1])  # full decades: labels between them would overlap
        left.set_xticks([], minor=True)
    plot_style.hide_frame(left)
    _plot_parameter_grads(figure, right, result)
    figure.suptitle(f"Gradients of the {result.loss_name}: norm {result.total_norm:.3g}", fontsize=10)
    return figure


def _plot_parameter_grads(figure: Any, axis: Any, result: GradientFlow) -> None:
    """Gradient norms of the parameters: one row per parameter of a layer, one column per layer."""
    cells = {}
    for norm in result.norms:
        side, _, rest = norm.path.partition(".layers.")
        number, _, name = rest.partition(".")
        if name:
            cells[f"{side}.{name.removesuffix('.weight')}", int(number)] = math.log10(max(norm.grad_norm, 1e-12))
    rows = list(dict.fromkeys(row for row, _ in cells))
    table = np.full((len(rows), 1 + max((n for _, n in cells), default=0)), np.nan)
    for (row, layer), value in cells.items():
        table[rows.index(row), layer] = value
    image = axis.imshow(table, cmap=plot_style.SEQUENTIAL, aspect="auto", interpolation="nearest")
    axis.set_yticks(range(len(rows)), rows, fontsize=7)
    axis.set_xticks(range(0, table.shape[1], max(1, table.shape[1] // 8)))
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    axis.set(title="By parameter", xlabel="layer")
    plot_style.add_colorbar(figure, image, axis, "log₁₀ ‖∂loss/∂parameter‖")


@plot.register
def _draw_positions(result: PositionEffects) -> Any:
    effects = result.effects[:8]
    if not effects:
        raise BadSetting(_("positions: this model has no position encoding to plot"))
    figure = plot_style.new_figure(9.0, 3.0 * len(effects))
    for axes, effect in zip(figure.subplots(len(effects), 2, squeeze=False), effects, strict=True):
        _plot_effect(figure, axes, effect)
    return figure


@plot.register
def _draw_position_effect(result: PositionEffect) -> Any:
    return plot(PositionEffects((result,)))


def _plot_effect(figure: Any, axes: Any, effect: PositionEffect) -> None:
    left, right = axes
    title = f"{effect.path}: {effect.part}, {effect.kind}"
    if effect.table.size:
        image = left.imshow(effect.table, cmap=plot_style.SEQUENTIAL, aspect="auto", interpolation="nearest")
        left.set(title=title, xlabel="dimension" if effect.kind == "add" else "pair", ylabel="position")
        figure.colorbar(image, ax=left, shrink=0.8)
    if effect.similarity.size:
        image = right.imshow(effect.similarity, cmap=plot_style.SEQUENTIAL, interpolation="nearest")
        right.set(title="cosine similarity of positions", xlabel="position", ylabel="position")
        figure.colorbar(image, ax=right, shrink=0.8)
    if effect.curves.size:
        axis = right if effect.table.size else left
        _plot_curves(axis, effect)
        axis.set(title="score by distance" if effect.table.size else title, xlabel="distance (key − query)")
        if not effect.table.size:
            image = right.imshow(
                effect.curves,
                cmap=plot_style.SEQUENTIAL,
                aspect="auto",
                interpolation="nearest",
                extent=(effect.offsets[0], effect.offsets[-1], len(effect.curves) - 0.5, -0.5),
            )
            right.set(title="added to the score", xlabel="distance (key − query)", ylabel="head")
            figure.colorbar(image, ax=right, shrink=0.8)


def _plot_curves(axis: Any, effect: PositionEffect) -> None:
    import matplotlib

    colors = matplotlib.colormaps[plot_style.SEQUENTIAL](np.linspace(0, 0.85, len(effect.curves)))
    for n, (curve, color) in enumerate(zip(effect.curves, colors, strict=True)):
        axis.plot(effect.offsets, curve, color=color, linewidth=1.2, label=f"head {n}")
    if 1 < len(effect.curves) <= 12:
        axis.legend(frameon=False, fontsize=6, ncols=2)
    plot_style.hide_frame(axis)
