"""What all pictures share: paper, ink, fonts that know Chinese, axes with tokens on them. No display is needed."""

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

INK, PALE, BLUE, ORANGE = "#1f2937", "#d1d5db", "#2c5f9e", "#d97706"
SEQUENTIAL, DIVERGING = "viridis", "PuOr"  # both can be told apart by the colour-blind
CJK = (
    *("Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "WenQuanYi Zen Hei", "WenQuanYi Micro Hei"),
    *("Microsoft YaHei", "SimHei", "PingFang SC", "Hiragino Sans GB", "Droid Sans Fallback", "Noto Sans CJK JP"),
)
FILES = (
    "NotoSansCJK",
    "NotoSansSC",
    "SourceHanSans",
    "wqy-",
    "msyh",
    "simhei",
    "PingFang",
)  # as they are called on disk
MOST_LABELS = 60
KINDS = ("png", "svg", "pdf")


@functools.cache
def fonts() -> tuple[str, ...]:
    """The families to look through: one for Latin, and the first installed one that knows Chinese."""
    from matplotlib import font_manager

    there = {font.name for font in font_manager.fontManager.ttflist}
    known = [name for name in CJK if name in there]
    return ("DejaVu Sans", *(known or _newer_than_the_list())[:1])


def _newer_than_the_list() -> list[str]:
    """matplotlib keeps a list of fonts, and does not see what was installed since it was made."""
    from matplotlib import font_manager

    paths = [path for path in font_manager.findSystemFonts() if Path(path).name.startswith(FILES)]
    for path in sorted(paths, key=lambda path: ("Regular" not in path, path))[:1]:
        with contextlib.suppress(RuntimeError, OSError):  # a font that cannot be read is no font
            before = len(font_manager.fontManager.ttflist)
            font_manager.fontManager.addfont(path)
            names = [font.name for font in font_manager.fontManager.ttflist[before:]]
            return sorted(names, key=lambda name: name not in CJK)
    return []


def notice(labels: Sequence[str]) -> str:
    """What to say under a picture whose labels no installed font can show; nothing where one can."""
    chinese = any(ord(c) > 0x2E7F for label in labels for c in label)
    return "no font here knows these characters: install fonts-noto-cjk" if chinese and len(fonts()) < 2 else ""


def sheet(width: float, height: float) -> Any:
    """An empty figure, in inches."""
    from matplotlib.figure import Figure  # no pyplot: it would look for a display

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


@contextlib.contextmanager
def style() -> Iterator[None]:
    """Under which figures are made and saved."""
    import matplotlib

    ink = {name: INK for name in ("text.color", "axes.labelcolor", "xtick.color", "ytick.color")}
    sizes = {"axes.titlesize": 10, "font.size": 9}
    settings: dict[Any, Any] = {**ink, **sizes, "font.family": list(fonts()), "axes.edgecolor": PALE}
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        yield


def clear(axis: Any) -> None:
    """No frame where it says nothing."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(length=0)
    axis.set_axisbelow(True)


def thinned(labels: Sequence[str]) -> tuple[list[int], list[str]]:
    """Every label up to MOST_LABELS of them, else every so many-th with its number, long ones cut."""
    step = math.ceil(len(labels) / MOST_LABELS)
    at = list(range(0, len(labels), step))
    shown = [labels[n] if len(labels[n]) <= 14 else labels[n][:13] + "…" for n in at]
    return at, shown if step == 1 else [f"{n} {text}" for n, text in zip(at, shown, strict=True)]


def named_ticks(axis: Any, columns: Sequence[str] | None = None, rows: Sequence[str] | None = None) -> None:
    """Tokens along an axis. They are text: a $ in them begins no formula."""
    size = 9 if max(len(columns or ()), len(rows or ())) <= 30 else 6.5
    if columns is not None:
        turned = {"rotation": 60, "ha": "right", "rotation_mode": "anchor"} if _wide(columns) else {}
        axis.set_xticks(*thinned(columns), fontsize=size, parse_math=False, **turned)
    if rows is not None:
        axis.set_yticks(*thinned(rows), fontsize=size, parse_math=False)


def _wide(labels: Sequence[str]) -> bool:
    return len(labels) > 12 or sum(map(len, labels)) > 24


def heat(axis: Any, values: np.ndarray, rows: Sequence[str], columns: Sequence[str], most: float | None = None) -> Any:
    """A matrix with its tokens. Cells stay square while there are few of them."""
    few = max(values.shape) <= 2 * MOST_LABELS
    top = most if most is not None else float(np.nanmax(values)) if values.size else 1.0
    image = axis.imshow(values, cmap=SEQUENTIAL, vmin=0, vmax=top or 1.0, aspect="equal" if few else "auto",
                        interpolation="nearest")  # fmt: skip
    named_ticks(axis, columns, rows)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    return image


def rule(figure: Any, image: Any, axes: Any, label: str) -> None:
    """A bar that tells what the colours mean."""
    bar = figure.colorbar(image, ax=axes, shrink=0.7, pad=0.02, aspect=30)
    bar.outline.set_visible(False)
    bar.set_label(label)
    bar.ax.tick_params(length=0, labelsize=8)


def to_bytes(figure: Any, kind: str = "png", dpi: int = 110) -> bytes:
    buffer = io.BytesIO()
    with style():
        figure.savefig(buffer, format=kind, dpi=dpi, metadata={"Date": None} if kind == "svg" else None)
    return buffer.getvalue()


def kind_of(path: str | Path) -> str:
    kind = Path(path).suffix.lstrip(".").lower()
    if kind not in KINDS:
        name = Path(path).name
        raise BadSetting(f"a picture must end in .png, .svg or .pdf, got {name!r}; {nearest(kind, KINDS)}")
    return kind


def write(picture: bytes, path: str | Path) -> Path:
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture)
    except OSError as error:
        raise BadFile(f"{path} must be a place that can be written, got: {error.strerror}; choose another") from None
    return path
