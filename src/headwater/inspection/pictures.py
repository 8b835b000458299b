"""Every result as a picture: picture(result) gives a figure, save(result, path) writes it.

Of attention, one kind as a grid of layers and heads; picture(found, kind, layer, head) is one large heat map.
"""

from __future__ import annotations

import functools
import math
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from headwater.errors import BadSetting
from headwater.inspection import canvas
from headwater.inspection.ablation import Ablation, Ablations
from headwater.inspection.credit import Attribution
from headwater.inspection.flow import Gradients
from headwater.inspection.grouping import grouped, groups, visible
from headwater.inspection.logit_lens import Lens
from headwater.inspection.maps import Alignment, Attention
from headwater.inspection.patterns import Heads
from headwater.inspection.places import Drawn, Positions
from headwater.inspection.subjects import Token
from headwater.inspection.surprise import NextTokens, TokenLosses

MOST_COLUMNS = 24  # places of a lens that are drawn: the last ones
MEASURES = ("previous", "self", "first", "repeat", "spread", "distance")


_drawn_before: weakref.WeakKeyDictionary[Any, dict[Any, bytes]] = weakref.WeakKeyDictionary()


def png(result: Any, **which: Any) -> bytes:
    """The picture of a result as PNG; drawn once for as long as the result lives."""
    known = _drawn_before.setdefault(result, {})
    key = tuple(sorted(which.items()))
    if key not in known:
        with canvas.style():
            known[key] = canvas.to_bytes(picture(result, **which))
    return known[key]


def save(result: Any, path: str | Path, **which: Any) -> Path:
    """Write the picture of a result: .png, .svg or .pdf."""
    kind = canvas.kind_of(path)
    if kind == "png":
        return canvas.write(png(result, **which), path)
    with canvas.style():
        return canvas.write(canvas.to_bytes(picture(result, **which), kind), path)


@functools.singledispatch
def picture(result: Any, **which: Any) -> Any:
    """A matplotlib figure of a result."""
    raise BadSetting(f"there is no picture of a {type(result).__name__}; give a result of headwater.inspection")


def _noted(figure: Any, labels: Any) -> Any:
    if said := canvas.notice(list(labels)):
        figure.supxlabel(said, fontsize=8, color=canvas.ORANGE)
    return figure


# ----------------------------------------------------------------------------------------------------------- attention


@picture.register
def _(result: Attention, kind: str | None = None, layer: int | None = None, head: int | None = None) -> Any:
    if layer is not None or (len(result.maps) == 1 and len(result.maps[0].heads) == 1):
        return _one(result, kind, layer, head)
    kind = kind if kind is not None else result.kinds[-1]
    maps = [m for m in result.maps if m.kind == kind]
    if not maps:
        raise BadSetting(f"attention: {kind!r} was not kept, {', '.join(result.kinds)} were; choose one of them")
    return _grid(maps, kind)


def _grid(maps: list[Any], kind: str) -> Any:
    """Thumbnails: a row for each layer, a column for each head, all of them one image."""
    width, height = max(len(m.heads) for m in maps), len(maps)
    tiles = [[m.tile(head, size=96) for head in m.heads] for m in maps]
    figure = canvas.sheet(min(14.0, max(3.2, 0.62 * width + 1.2)), min(24.0, max(2.4, 0.62 * height + 1.0)))
    axis = figure.subplots()
    down, across = (n + max(1, n // 12) for n in tiles[0][0].shape)  # a tile and the gap after it
    axis.imshow(mosaic(tiles, down, across), cmap=canvas.SEQUENTIAL, vmin=0, vmax=255, aspect="auto",
                interpolation="nearest")  # fmt: skip
    axis.set_xticks([across * n + tiles[0][0].shape[1] / 2 for n in range(width)], maps[0].heads)
    axis.set_yticks([down * n + tiles[0][0].shape[0] / 2 for n in range(height)], [m.layer for m in maps])
    axis.xaxis.tick_top()
    axis.tick_params(length=0, labelsize=8)
    axis.spines[:].set_visible(False)
    axis.set(title=f"{kind}: heads across", ylabel="layer")
    return figure


def mosaic(tiles: list[list[np.ndarray]], down: int, across: int) -> np.ndarray:
    """Tiles side by side as one matrix; between them nothing."""
    whole = np.full((down * len(tiles), across * max(map(len, tiles))), np.nan, np.float32)
    for y, row in enumerate(tiles):
        for x, tile in enumerate(row):
            whole[y * down : y * down + tile.shape[0], x * across : x * across + tile.shape[1]] = tile
    return whole


def _one(result: Attention, kind: str | None, layer: int | None, head: int | None) -> Any:
    kind = kind if kind is not None else result.kinds[-1]
    found = result.map(kind, layer if layer is not None else result.maps[0].layer)
    weights, name = (
        found.of(head),
        f"{kind}, layer {found.layer}, {'mean of heads' if head is None else f'head {head}'}",
    )
    rows, columns = result.between(kind)
    if found.pooled > 1:
        labels = [[side[n].label for n in range(0, len(side), found.pooled)] for side in (rows, columns)]
    else:
        by = [groups(side) for side in (rows, columns)]
        weights = grouped(weights, *by)
        labels = [[visible(side, group) for group in made] for side, made in zip((rows, columns), by, strict=True)]
    return _heat(weights, labels[0], labels[1], name, "weight", "looked at", "looks")


def _heat(
    weights: np.ndarray, rows: Any, columns: Any, title: str, label: str, across: str, down: str, cell: float = 0.26
) -> Any:
    size = [max(3.4, min(11.0, cell * n + 1.6)) for n in (weights.shape[1], weights.shape[0])]
    figure = canvas.sheet(size[0] + 1.0, size[1])
    axis = figure.subplots()
    image = canvas.heat(axis, weights, rows, columns)
    axis.set(title=title, xlabel=across, ylabel=down)
    canvas.rule(figure, image, axis, label)
    return _noted(figure, [*rows, *columns])


@picture.register
def _(result: Alignment) -> Any:
    title = "Where it looked while it wrote" + (" (its own words)" if result.generated else "")
    return _heat(result.weights, result.written, result.source, title, "mean weight", "read", "written")


@picture.register
def _(result: Heads) -> Any:
    """A panel for each measure, layers down and heads across; a row of panels for each kind. Distance is that of the
    largest.
    """
    kinds = list(dict.fromkeys(head.kind for head in result.heads))
    tables = {kind: [h for h in result.heads if h.kind == kind] for kind in kinds}
    heights = [1 + max(h.layer for h in tables[kind]) for kind in kinds]
    figure = canvas.sheet(11.5, sum(min(6.0, 0.2 * n + 0.7) for n in heights) + 0.3)
    axes = figure.subplots(len(kinds), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, kind in zip(axes, kinds, strict=True):
        panels = [_table(tables[kind], measure) for measure in MEASURES]
        panels[-1] = panels[-1] / max(float(np.nanmax(np.nan_to_num(panels[-1]))), 1e-9)
        across = panels[0].shape[1] + 1
        image = axis.imshow(mosaic([panels], len(panels[0]), across), cmap=canvas.SEQUENTIAL, vmin=0, vmax=1,
                            aspect="auto", interpolation="nearest")  # fmt: skip
        axis.set_xticks([across * n + (across - 2) / 2 for n in range(len(MEASURES))], MEASURES)
        axis.xaxis.tick_top()
        axis.tick_params(length=0, labelsize=8)
        axis.spines[:].set_visible(False)
        axis.set_ylabel(f"{kind}\nlayer", fontsize=8)
    canvas.rule(figure, image, list(axes), "share (distance: of the largest)")
    return figure


def _table(heads: list[Any], measure: str) -> np.ndarray:
    table = np.full((1 + max(h.layer for h in heads), 1 + max(h.head for h in heads)), np.nan)
    for head in heads:
        table[head.layer, head.head] = getattr(head, measure)
    return table


# --------------------------------------------------------------------------------------------------------------- tokens


@picture.register
def _(result: Lens) -> Any:
    """Layers upwards, the embedding at the bottom; a cell is what would be said, its colour how surely."""
    first = max(0, len(result.places) - MOST_COLUMNS)
    shares, names = result.shares[:, first:, 0], [row[first:] for row in result.words]
    columns = [result.tokens[n].label for n in result.places[first:]]
    figure = canvas.sheet(max(4.5, 0.72 * len(columns) + 2.0), max(2.5, 0.24 * len(shares) + 1.4))
    axis = figure.subplots()
    image = axis.imshow(shares, cmap=canvas.SEQUENTIAL, vmin=0, vmax=1, aspect="auto", origin="lower")
    for (row, column), share in np.ndenumerate(shares):
        ink = "black" if share > 0.6 else "white"
        label = names[row][column].label[:9]
        axis.text(column, row, label, ha="center", va="center", fontsize=6.5, color=ink, parse_math=False)
    canvas.named_ticks(axis, columns, result.layers)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    axis.set(title="Logit lens: what would be said after each layer", xlabel="read")
    canvas.rule(figure, image, axis, "probability")
    return _noted(figure, [*columns, *(token.label for row in names for token in row)])


def _columns(values: np.ndarray, labels: list[str], title: str, up: str, colours: Any) -> Any:
    """Upright bars along a text."""
    figure = canvas.sheet(min(16.0, max(4.5, 0.24 * len(labels) + 1.5)), 3.2)
    axis = figure.subplots()
    axis.bar(range(len(labels)), values, color=colours, width=0.85)
    canvas.named_ticks(axis, columns=labels)
    canvas.clear(axis)
    axis.grid(axis="y", color=canvas.PALE, linewidth=0.6)
    axis.margins(x=0.01)
    axis.set(ylabel=up)
    axis.set_title(title, parse_math=False)
    return _noted(figure, labels)


@picture.register
def _(result: NextTokens) -> Any:
    shares, labels = [100 * c.share for c in result.choices], [spoken(c.token) for c in result.choices]
    figure = canvas.sheet(6.4, max(1.6, 0.26 * len(labels) + 1.0))
    axis = figure.subplots()
    bars = axis.barh(range(len(labels)), shares, color=canvas.BLUE, height=0.7)
    axis.bar_label(bars, fmt="%.1f", padding=3, fontsize=8)
    axis.invert_yaxis()
    canvas.named_ticks(axis, rows=labels)
    canvas.clear(axis)
    axis.margins(x=0.08)
    axis.set(title="Next token", xlabel="probability, %")
    return _noted(figure, labels)


def spoken(token: Token) -> str:
    """With its spaces, which make another token of it."""
    return token.text.replace(" ", "␣") if token.text.isprintable() else token.label


@picture.register
def _(result: TokenLosses) -> Any:
    title = f"Surprise of each token: mean {result.mean:.2f} nats, perplexity {result.perplexity:.1f}"
    return _columns(result.losses, [t.label for t in result.tokens], title, "-ln p", canvas.BLUE)


@picture.register
def _(result: Attribution) -> Any:
    scores = np.concatenate((result.source_scores, result.scores))
    tokens = [*result.source, *result.tokens]
    colours = [canvas.BLUE if score >= 0 else canvas.ORANGE for score in scores]
    title = f"What made it say {result.output!r} (p = {math.exp(result.value):.1%}; {result.by})"
    return _columns(scores, [t.label for t in tokens], title, "adds to ln p", colours)


@picture.register
def _(result: Ablation) -> Any:
    some = result.choices[:10]
    figure = canvas.sheet(6.4, 0.32 * len(some) + 1.2)
    axis = figure.subplots()
    at = np.arange(len(some))
    axis.barh(at - 0.19, [100 * c.before for c in some], 0.36, color=canvas.BLUE, label="with the head")
    axis.barh(at + 0.19, [100 * c.after for c in some], 0.36, color=canvas.ORANGE, label="without")
    axis.invert_yaxis()
    labels = [spoken(c.token) for c in some]
    canvas.named_ticks(axis, rows=labels)
    canvas.clear(axis)
    axis.legend(frameon=False)
    axis.set(title=f"Next token without {result.kind} {result.layer}.{result.head}", xlabel="probability, %")
    return _noted(figure, labels)


@picture.register
def _(result: Ablations) -> Any:
    most = float(np.nanmax(np.abs(result.change))) or 1.0
    figure = canvas.sheet(0.4 * result.change.shape[1] + 2.4, 0.24 * result.change.shape[0] + 1.3)
    axis = figure.subplots()
    image = axis.imshow(result.change, cmap=canvas.DIVERGING + "_r", vmin=-most, vmax=most, aspect="auto")
    axis.set(title="Loss without each head", xlabel="head", ylabel="layer")
    axis.tick_params(length=0)
    canvas.rule(figure, image, axis, "change of the loss")
    return figure


# ------------------------------------------------------------------------------------------------ gradients, positions


@picture.register
def _(result: Gradients) -> Any:
    names, values = [name for name, _ in result.flow], [value for _, value in result.flow]
    kinds = {norm.path.partition(".layers.")[2].partition(".")[2] for norm in result.norms}
    figure = canvas.sheet(10.0, max(2.6, 0.17 * max(len(names), len(kinds)) + 1.2))
    left, right = figure.subplots(1, 2)
    left.barh(range(len(names)), np.maximum(values, 1e-30), color=canvas.BLUE, height=0.7)
    left.set_yticks(range(len(names)), names, fontsize=7)
    left.set(title="Through the layers", xlabel="‖∂loss/∂stream‖ a token")
    if min(values, default=0) > 0:
        ends = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)) + 1e-9)
        left.set_xscale("log")
        left.set_xlim(10.0 ** ends[0], 10.0 ** ends[1])  # whole decades: labels between them would overlap
        left.set_xticks([], minor=True)
    canvas.clear(left)
    _by_layer(figure, right, result)
    figure.suptitle(f"Gradients of the {result.of}: norm {result.total:.3g}", fontsize=10)
    return figure


def _by_layer(figure: Any, axis: Any, result: Gradients) -> None:
    """The parameters of the layers: a row for each kind, a column for each layer."""
    cells = {}
    for norm in result.norms:
        side, _, rest = norm.path.partition(".layers.")
        number, _, name = rest.partition(".")
        if name:
            cells[f"{side}.{name.removesuffix('.weight')}", int(number)] = math.log10(max(norm.gradient, 1e-12))
    rows = list(dict.fromkeys(row for row, _ in cells))
    table = np.full((len(rows), 1 + max((n for _, n in cells), default=0)), np.nan)
    for (row, layer), value in cells.items():
        table[rows.index(row), layer] = value
    image = axis.imshow(table, cmap=canvas.SEQUENTIAL, aspect="auto", interpolation="nearest")
    axis.set_yticks(range(len(rows)), rows, fontsize=7)
    axis.set_xticks(range(0, table.shape[1], max(1, table.shape[1] // 8)))
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    axis.set(title="By parameter", xlabel="layer")
    canvas.rule(figure, image, axis, "log₁₀ ‖∂loss/∂parameter‖")


@picture.register
def _(result: Positions) -> Any:
    shown = result.drawn[:8]
    if not shown:
        raise BadSetting("positions: this model has none to draw; it knows no order, or a convolution tells it")
    figure = canvas.sheet(9.0, 3.0 * len(shown))
    for row, one in zip(figure.subplots(len(shown), 2, squeeze=False), shown, strict=True):
        _drawn(figure, row, one)
    return figure


@picture.register
def _(result: Drawn) -> Any:
    return picture(Positions((result,)))


def _drawn(figure: Any, row: Any, one: Drawn) -> None:
    left, right = row
    title = f"{one.where}: {one.part}, {one.acts}"
    if one.table.size:
        image = left.imshow(one.table, cmap=canvas.SEQUENTIAL, aspect="auto", interpolation="nearest")
        left.set(title=title, xlabel="dimension" if one.acts == "added" else "pair", ylabel="place")
        figure.colorbar(image, ax=left, shrink=0.8)
    if one.similarity.size:
        image = right.imshow(one.similarity, cmap=canvas.SEQUENTIAL, interpolation="nearest")
        right.set(title="how alike two places are (cosine)", xlabel="place", ylabel="place")
        figure.colorbar(image, ax=right, shrink=0.8)
    if one.curves.size:
        axis = right if one.table.size else left
        _curves(axis, one)
        axis.set(title="score by distance" if one.table.size else title, xlabel="distance (key − query)")
        if not one.table.size:
            image = right.imshow(one.curves, cmap=canvas.SEQUENTIAL, aspect="auto", interpolation="nearest",
                                 extent=(one.offsets[0], one.offsets[-1], len(one.curves) - 0.5, -0.5))  # fmt: skip
            right.set(title="added to the score", xlabel="distance (key − query)", ylabel="head")
            figure.colorbar(image, ax=right, shrink=0.8)


def _curves(axis: Any, one: Drawn) -> None:
    import matplotlib

    colours = matplotlib.colormaps[canvas.SEQUENTIAL](np.linspace(0, 0.85, len(one.curves)))
    for n, (curve, colour) in enumerate(zip(one.curves, colours, strict=True)):
        axis.plot(one.offsets, curve, color=colour, linewidth=1.2, label=f"head {n}")
    if 1 < len(one.curves) <= 12:
        axis.legend(frameon=False, fontsize=6, ncols=2)
    canvas.clear(axis)
