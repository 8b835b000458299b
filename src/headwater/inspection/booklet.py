"""Results as HTML: one file that needs nothing else, or a fragment for a notebook. No script; all text is escaped."""

from __future__ import annotations

import base64
import functools
import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import numpy as np

from headwater.inspection import canvas
from headwater.inspection.logit_lens import Lens
from headwater.inspection.maps import Attention
from headwater.inspection.patterns import Heads, strength
from headwater.inspection.pictures import png
from headwater.inspection.places import Positions
from headwater.inspection.subjects import Token
from headwater.inspection.surprise import NextTokens, TokenLosses
from headwater.inspection.words import Both, spoken

MOST_COLUMNS = 32  # places of a lens that are shown: the last ones
STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.55 system-ui,-apple-system,"Segoe UI","Noto Sans","Noto Sans CJK SC","Microsoft YaHei",sans-serif;
max-width:1080px;margin:2rem auto;padding:0 1rem;color:#1f2937;background:#fff}
h1{font-size:1.5rem;margin:.2rem 0}h2{font-size:1.15rem;margin:2.2rem 0 .4rem;border-bottom:1px solid #e5e7eb}
p.why{color:#6b7280;margin:.2rem 0 .7rem}img{max-width:100%;height:auto;background:#fff}
nav a{margin-right:.9rem}table{border-collapse:collapse;font-size:.85rem}.wide{overflow-x:auto}
td,th{padding:.15rem .5rem;text-align:left;white-space:nowrap}th{font-weight:600;color:#6b7280}
td.n{text-align:right;font-variant-numeric:tabular-nums}.t{padding:.08rem .02rem;border-radius:2px;white-space:pre-wrap}
.lens td{padding:.1rem .3rem;text-align:center;font-size:.75rem;max-width:6.5rem;overflow:hidden;text-overflow:ellipsis}
.bar{display:inline-block;height:.7rem;background:#2c5f9e;vertical-align:middle;border-radius:2px}
pre{white-space:pre-wrap;font-size:.85rem}
figure{display:inline-block;width:48%;min-width:20rem;margin:.5rem .5rem .5rem 0}figcaption{font-size:.85rem}
@media(prefers-color-scheme:dark){body{color:#e5e7eb;background:#111827}h2{border-color:#374151}a{color:#93c5fd}}
"""
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def fragment(result: Any) -> str:
    """A result for a notebook."""
    return f"<style>{_scoped()}</style><div class='headwater'>{shown(result)}</div>"


def _scoped() -> str:
    wanted = [line for line in STYLE.splitlines() if line.startswith((".lens", ".bar", "td.n", "pre"))]
    return "\n".join(f".headwater {line}" for line in wanted)


@functools.singledispatch
def shown(result: Any, language: str = "en") -> str:
    """A picture, and the same in words."""
    return image(result, _said(result, language)) + _words(result, language)


def _said(result: Any, language: str) -> str:
    return "\n".join(spoken(line, language) for line in str(result).splitlines())


def _words(result: Any, language: str) -> str:
    return f"<pre>{escape(_said(result, language))}</pre>"


def image(result: Any, told: str, **which: Any) -> str:
    """An <img> that carries its picture; told: for those who cannot see it."""
    data = base64.b64encode(png(result, **which)).decode()
    return f'<img alt="{escape(told[:300], quote=True)}" src="data:image/png;base64,{data}">'


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], kind: str = "", language: str = "en") -> str:
    """Cells are escaped; numbers stand to the right."""
    top = "".join(f"<th>{escape(spoken(name, language))}</th>" for name in head)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f'<div class="wide"><table class="{kind}"><tr>{top}</tr>{body}</table></div>'


def _cell(value: Any) -> str:
    if not isinstance(value, (int, float)):
        return f"<td>{escape(str(value))}</td>"
    shown = f"{value:,}" if isinstance(value, int) else "–" if math.isnan(value) else f"{value:,.2f}"
    return f'<td class="n">{shown}</td>'


# ------------------------------------------------------------------------------------------------------ better than PNG


@shown.register
def _(result: Attention, language: str = "en") -> str:
    return "".join(f"<p>{image(result, kind, kind=kind)}</p>" for kind in result.kinds) + _words(result, language)


@shown.register
def _(result: Positions, language: str = "en") -> str:
    return (image(result, _said(result, language)) if result.drawn else "") + _words(result, language)


@shown.register
def _(result: Heads, language: str = "en") -> str:
    measures = {
        "previous": Both("previous", "前一个"),
        "self": Both("self", "自己"),
        "first": Both("first", "第一个"),
        "repeat": Both("repeat", "重复处"),
        "spread": Both("spread", "分散"),
        "distance": Both("distance", "距离"),
    }
    head = [Both("head", "头"), Both("does", "做什么"), Both("how much", "程度"), *measures.values()]
    rows = [
        [h.name, spoken(h.does, language), strength(h), *(getattr(h, m) for m in measures)] for h in result.worth(12)
    ]
    near = {"looks nearby": Both("looks nearby", "看附近")}  # without the distance, which only one head has
    kinds = [[spoken(near.get(does, does), language), many] for does, many in result.counts().items()]
    counted = table([Both("what heads do", "头在做什么"), Both("how many", "个数")], kinds, language=language)
    return table(head, rows, language=language) + counted + image(result, _said(result, language))


@shown.register
def _(result: NextTokens, language: str = "en") -> str:
    rows = [(escape(repr(c.token.text)), c.share) for c in result.choices]
    most = max((share for _, share in rows), default=1) or 1
    body = "".join(
        f'<tr><td>{name}</td><td class="n">{share:.2%}</td>'
        f'<td><span class="bar" style="width:{12 * share / most:.2f}rem"></span></td></tr>'
        for name, share in rows
    )
    before = escape(repr("".join(token.text for token in result.after if token.part == 1)[-60:]))
    bits = f"{result.entropy / math.log(2):.2f}"
    told = Both(f"after {before}; entropy {bits} bits", f"在 {before} 之后；熵 {bits} 比特")
    return f"<table>{body}</table><p class='why'>{spoken(told, language)}</p>"


@shown.register
def _(result: TokenLosses, language: str = "en") -> str:
    """The text itself, each token coloured by its surprise; what was expected is told where the pointer rests."""
    most = max(8.0, float(result.losses.max()))
    spans = []
    for n, token in enumerate(result.tokens):
        if token.part > 1:
            continue
        loss = float(result.losses[n])
        best = f"{result.best[n].text!r} ({result.best_shares[n]:.1%})"
        chance = f"p = {math.exp(-loss):.2%}"
        both = Both(f"{chance}, {loss:.2f} nats; expected {best}", f"{chance}，{loss:.2f} 纳特；预期 {best}")
        told = spoken(both, language)
        style = f"background:rgba(217,119,6,{min(1.0, loss / most):.2f})"
        spans.append(f'<span class="t" style="{style}" title="{escape(told, quote=True)}">{escape(token.text)}</span>')
    return f"<p>{''.join(spans)}</p>" + image(result, _said(result, language)) + _words(result, language)


@shown.register
def _(result: Lens, language: str = "en") -> str:
    first = max(0, len(result.places) - MOST_COLUMNS)
    columns = range(first, len(result.places))
    head = ["", *(result.tokens[result.places[n]].label for n in columns)]
    rows = []
    for row in reversed(range(len(result.layers))):
        cells = "".join(_lens_cell(result.words[row][n], float(result.shares[row, n, 0])) for n in columns)
        rows.append(f"<tr><th>{escape(result.layers[row])}</th>{cells}</tr>")
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    return f'<div class="wide"><table class="lens">{"".join(rows)}<tr>{top}</tr></table></div>'


def _lens_cell(token: Token, share: float) -> str:
    red, green, blue = (int(255 * c) for c in _colour(share))
    ink = "#000" if share > 0.6 else "#fff"
    told = escape(f"{token.text!r} {share:.1%}", quote=True)
    return f'<td style="background:rgb({red},{green},{blue});color:{ink}" title="{told}">{escape(token.label)}</td>'


@functools.lru_cache(maxsize=512)
def _colour(share: float) -> tuple[float, float, float]:
    import matplotlib

    red, green, blue, _ = matplotlib.colormaps[canvas.SEQUENTIAL](float(np.clip(share, 0, 1)))
    return red, green, blue


# ------------------------------------------------------------------------------------------------------- the whole file


def document(title: str, facts: Sequence[tuple[str, str]], sections: Sequence[tuple[str, str, str, str]]) -> str:
    """sections: (anchor, heading, what it is, HTML). All but the HTML is escaped here."""
    told = table(["", ""], facts)
    menu = "".join(f'<a href="#{escape(anchor, quote=True)}">{escape(head)}</a>' for anchor, head, _, _ in sections)
    parts = "".join(
        f'<section id="{escape(anchor, quote=True)}"><h2>{escape(head)}</h2><p class="why">{escape(why)}</p>'
        f"{body}</section>"
        for anchor, head, why, body in sections
    )
    return (
        f'<!doctype html><html><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body><h1>{escape(title)}</h1>{told}<nav>{menu}</nav>{parts}</body></html>\n"
    )
