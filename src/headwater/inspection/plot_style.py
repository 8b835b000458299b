"""Matplotlib style of all figures: colors, fonts with Chinese glyphs, token labels on axes. No display is needed."""

from __future__ import annotations

import contextlib
import functools
import io
import math
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headwater.errors import BadFile, BadSetting, nearest
from headwater.i18n import _

TEXT_COLOR = "#1f2937"
GRID_COLOR = "#d1d5db"
BLUE = "#2c5f9e"
ORANGE = "#d97706"
SEQUENTIAL = "viridis"  # both colormaps are color-blind safe
DIVERGING = "PuOr"
CJK_FONTS = (
    *("Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "WenQuanYi Zen Hei", "WenQuanYi Micro Hei"),
    *("Microsoft YaHei", "SimHei", "PingFang SC", "Hiragino Sans GB", "Droid Sans Fallback", "Noto Sans CJK JP"),
)
CJK_FONT_FILES = (
    "NotoSansCJK",
    "NotoSansSC",
    "SourceHanSans",
    "wqy-",
    "msyh",
    "simhei",
    "PingFang",
)  # beginnings of their file names
MAX_TICK_LABELS = 60
IMAGE_FORMATS = ("png", "svg", "pdf")


@functools.cache
def font_families() -> tuple[str, ...]:
    """Font families: one for Latin, and the first installed one with Chinese glyphs."""
    from matplotlib import font_manager

    installed = {font.name for font in font_manager.fontManager.ttflist}
    known = [name for name in CJK_FONTS if name in installed]
    return ("DejaVu Sans", *(known or _find_unlisted_font())[:1])


def _find_unlisted_font() -> list[str]:
    """A Chinese font that was installed after matplotlib built its font list."""
    from matplotlib import font_manager

    paths = [path for path in font_manager.findSystemFonts() if Path(path).name.startswith(CJK_FONT_FILES)]
    for path in sorted(paths, key=lambda path: ("Regular" not in path, path))[:1]:
        with contextlib.suppress(RuntimeError, OSError):  # a font file that cannot be read
            before = len(font_manager.fontManager.ttflist)
            font_manager.fontManager.addfont(path)
            names = [font.name for font in font_manager.fontManager.ttflist[before:]]
            return sorted(names, key=lambda name: name not in CJK_FONTS)
    return []


def missing_font_notice(labels: Sequence[str]) -> str:
    """The notice under a figure whose labels no installed font can show; "" if one can."""
    chinese = any(ord(c) > 0x2E7F for label in labels for c in label)
    return (
        "no installed font has these characters: install fonts-noto-cjk" if chinese and len(font_families()) < 2 else ""
    )


def new_figure(width: float, height: float) -> Any:
    """An empty figure, in inches."""
    from matplotlib.figure import Figure  # not pyplot, which needs a display

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


@contextlib.contextmanager
def style() -> Iterator[None]:
    """The matplotlib settings under which figures are drawn and saved."""
    import matplotlib

    ink = {name: TEXT_COLOR for name in ("text.color", "axes.labelcolor", "xtick.color", "ytick.color")}
    sizes = {"axes.titlesize": 10, "font.size": 9}
    settings: dict[Any, Any] = {**ink, **sizes, "font.family": list(font_families()), "axes.edgecolor": GRID_COLOR}
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        yield


def hide_frame(axis: Any) -> None:
    """Hide the top and right spines and the tick marks."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(length=0)
    axis.set_axisbelow(True)


def thin_labels(labels: Sequence[str]) -> tuple[list[int], list[str]]:
    """Positions and texts of at most MAX_TICK_LABELS labels; thinned ones are numbered, long ones truncated."""
    step = math.ceil(len(labels) / MAX_TICK_LABELS)
    indices = list(range(0, len(labels), step))
    texts = [labels[n] if len(labels[n]) <= 14 else labels[n][:13] + "…" for n in indices]
    return indices, texts if step == 1 else [f"{n} {text}" for n, text in zip(indices, texts, strict=True)]


def label_ticks(axis: Any, columns: Sequence[str] | None = None, rows: Sequence[str] | None = None) -> None:
    """Set tokens as tick labels; a $ in them is not parsed as a formula."""
    size = 9 if max(len(columns or ()), len(rows or ())) <= 30 else 6.5
    if columns is not None:
        rotation = {"rotation": 60, "ha": "right", "rotation_mode": "anchor"} if _needs_rotation(columns) else {}
        axis.set_xticks(*thin_labels(columns), fontsize=size, parse_math=False, **rotation)
    if rows is not None:
        axis.set_yticks(*thin_labels(rows), fontsize=size, parse_math=False)


def _needs_rotation(labels: Sequence[str]) -> bool:
    return len(labels) > 12 or sum(map(len, labels)) > 24


def heatmap(
    axis: Any, values: np.ndarray, rows: Sequence[str], columns: Sequence[str], vmax: float | None = None
) -> Any:
    """A heat map with tokens as tick labels; cells are square if there are few."""
    aspect = "equal" if max(values.shape) <= 2 * MAX_TICK_LABELS else "auto"
    if vmax is None:
        vmax = float(np.nanmax(values)) if values.size else 1.0
    image = axis.imshow(values, cmap=SEQUENTIAL, vmin=0, vmax=vmax or 1.0, aspect=aspect, interpolation="nearest")
    label_ticks(axis, columns, rows)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    return image


def add_colorbar(figure: Any, image: Any, axes: Any, label: str) -> None:
    """A color bar with a label."""
    bar = figure.colorbar(image, ax=axes, shrink=0.7, pad=0.02, aspect=30)
    bar.outline.set_visible(False)
    bar.set_label(label)
    bar.ax.tick_params(length=0, labelsize=8)


def figure_to_bytes(figure: Any, image_format: str = "png", dpi: int = 110) -> bytes:
    """A figure as the bytes of an image file; an SVG without a date, so that equal figures give equal files."""
    buffer = io.BytesIO()
    with style():
        figure.savefig(buffer, format=image_format, dpi=dpi, metadata={"Date": None} if image_format == "svg" else None)
    return buffer.getvalue()


def image_format_of(path: str | Path) -> str:
    """The image format of a path, by its suffix."""
    kind = Path(path).suffix.lstrip(".").lower()
    if kind not in IMAGE_FORMATS:
        name = Path(path).name
        raise BadSetting(
            _(
                "a figure must be a .png, .svg or .pdf file, got {name!r}; {nearest}",
                name=name,
                nearest=nearest(kind, IMAGE_FORMATS),
            )
        )
    return kind


def write_image(data: bytes, path: str | Path) -> Path:
    """Write the bytes of an image file."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as error:
        raise BadFile(
            _(
                "{path} must be a path that can be written, got: {strerror}; choose another",
                path=path,
                strerror=error.strerror,
            )
        ) from None
    return path
