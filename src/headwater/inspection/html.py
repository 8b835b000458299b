"""The HTML report: one self-contained file without scripts, and fragments for notebooks.

The markup is in report.html.j2, whose macros escape all text; this module computes its values.
"""

from __future__ import annotations

import base64
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from headwater.i18n import Message, _, use_language
from headwater.inspection import plot_style
from headwater.inspection.attention import AttentionMaps
from headwater.inspection.costs import ModelCosts
from headwater.inspection.figures import to_png
from headwater.inspection.head_patterns import HeadPatterns, pattern_strength
from headwater.inspection.inputs import Token
from headwater.inspection.logit_lens import LogitLens
from headwater.inspection.position_plots import PositionEffects
from headwater.inspection.predictions import NextTokens, TokenLosses

if TYPE_CHECKING:
    from headwater.inspection.api import Inspection

MAX_LENS_COLUMNS = 32  # positions of a logit lens in the report: the last ones
MAX_EXCERPT = 400  # characters
REPORT_CSP = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"

# name -> title and description, in the order of the report
SECTION_TITLES: dict[str, tuple[str, str]] = {
    "next": (
        _("Next token"),
        _(
            "The most probable tokens after the last one; for an encoder-decoder, at the target token with "
            "the highest loss."
        ),
    ),
    "losses": (_("Loss of each token"), _("The deeper the color, the higher the loss of the token: -ln p.")),
    "alignment": (
        _("Alignment"),
        _("Cross-attention while each target token was predicted: the mean over layers and heads."),
    ),
    "heads": (
        _("Attention patterns of the heads"),
        _("Means of the attention weights over the text; the clearest head of each pattern."),
    ),
    "attention": (
        _("Attention"),
        _("Rows are queries, columns are keys. Attention weights are not an explanation of the output."),
    ),
    "lens": (
        _("Logit lens"),
        _("The most probable token decoded from the residual stream after each layer; the embedding is at the bottom."),
    ),
    "attribution": (_("Attribution"), _("The contribution of each input token to ln p of the output.")),
    "gradients": (_("Gradients"), _("Gradient norms of the text's loss, by layer and by parameter.")),
    "ablation": (_("Head ablation"), _("What changes when a head's output is set to zero.")),
    "positions": (_("Positions"), _("What each position encoding computes, measured on the modules of this model.")),
    "visibility": (_("Who sees whom"), _("Which tokens reach which outputs of one layer: rows are queries.")),
    "costs": (_("Costs"), _("Parameters, memory and FLOPs at this length.")),
}
COST_LABELS = {
    "embeddings": _("embeddings"),
    "encoder": _("encoder"),
    "decoder": _("decoder"),
    "output": _("output"),
    "other": _("other"),
    "weights": _("weights"),
    "gradients": _("gradients"),
    "optimizer": _("optimizer"),
    "activations": _("activations"),
    "kv_cache": _("KV cache"),
    "linear": _("linear"),
    "attention": _("attention"),
    "forward": _("forward"),
    "training": _("training"),
}


@functools.cache
def _macros() -> Any:
    """The macros of report.html.j2."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=lambda value: str(value) if isinstance(value, Message) else value,  # in the language in effect
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = _format_number
    return environment.get_template("report.html.j2").module


def _format_number(value: float) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return "–" if math.isnan(value) else f"{value:,.2f}"


# ---------------------------------------------------------------------------------------------------------- the report


@dataclass(frozen=True)
class Section:
    """One section of the report; body is HTML."""

    name: str
    title: str
    description: str
    body: Markup


def report_html(inspection: Inspection, language: str = "en") -> str:
    """The report of an inspection as an HTML page."""
    with use_language(language):
        title = f"{_('Inspection')}: {inspection.name}"
        return str(_macros().page(title, _facts(inspection), list(_sections(inspection)), REPORT_CSP)).lstrip()


def notebook_html(inspection: Inspection) -> str:
    """The sections of the report, for a notebook."""
    return str(_macros().notebook(list(_sections(inspection))))


def to_notebook_html(result: Any) -> str:
    """One result, for a notebook."""
    return str(_macros().fragment(render_html(result)))


def _facts(inspection: Inspection) -> list[tuple[str, str]]:
    """The table at the top of the report: the model, its input and output, what was skipped."""
    inputs = inspection.inputs
    source = inputs.source or inputs.tokens
    facts = [(str(_("model")), inspection.name), (f"{_('input')} ({len(source)} {_('tokens')})", _excerpt(source))]
    if inputs.source:
        facts.append((f"{_('target')} ({len(inputs.next_tokens)} {_('tokens')})", _excerpt(inputs.next_tokens)))
    facts += [(f"{_('skipped')}: {name}", str(reason)) for name, reason in inspection.skipped.items()]
    if inspection.nonfinite:
        facts.append((str(_("NaN or infinity")), f"{inspection.nonfinite.path}: {inspection.nonfinite.what}"))
    return facts


def _excerpt(tokens: Sequence[Token]) -> str:
    text = "".join(token.text for token in tokens if token.piece_index == 1).strip()
    return text if len(text) <= MAX_EXCERPT else text[:MAX_EXCERPT] + " …"


def _sections(inspection: Inspection) -> Iterator[Section]:
    for name, (title, description) in SECTION_TITLES.items():
        result = inspection.results.get(name)
        if result is None:
            continue
        body = Markup(result._repr_html_()) if name == "costs" else render_html(result)
        if isinstance(result, AttentionMaps):
            body = _notable_head_figures(inspection, result) + body
        yield Section(name, title, description, body)


def _notable_head_figures(inspection: Inspection, result: AttentionMaps) -> Markup:
    """Large maps of the notable heads, above the grids."""
    figures = Markup()
    for head in inspection.notable_heads(result):
        image = img_tag(result, head.name, kind=head.kind, layer=head.layer, head=head.head)
        figures += _macros().head_figure(image, head.name, head.pattern)
    return figures


# ---------------------------------------------------------------------------------------------------- HTML of a result


@functools.singledispatch
def render_html(result: Any) -> Markup:
    """The HTML of a result, in the language in effect: by default its figure and its summary."""
    return img_tag(result, str(result)) + _summary(result)


def _summary(result: Any) -> Markup:
    return Markup(_macros().summary(str(result)))


def img_tag(result: Any, alt: str, **selection: Any) -> Markup:
    """An <img> with the PNG of a result as a data URL."""
    data = base64.b64encode(to_png(result, **selection)).decode()
    return Markup(_macros().image(alt[:300], f"data:image/png;base64,{data}"))


def html_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> Markup:
    """A table; numbers are aligned to the right."""
    return Markup(_macros().table(header, list(rows)))


@render_html.register
def _attention_html(result: AttentionMaps) -> Markup:
    images = [img_tag(result, kind, kind=kind) for kind in result.kinds]
    return Markup().join(Markup("<p>{}</p>").format(image) for image in images) + _summary(result)


@render_html.register
def _positions_html(result: PositionEffects) -> Markup:
    image = img_tag(result, str(result)) if result.effects else Markup()
    return image + _summary(result)


@render_html.register
def _heads_html(result: HeadPatterns) -> Markup:
    measures = {
        "previous": _("previous"),
        "diagonal": _("self"),
        "first": _("first"),
        "induction": _("induction"),
        "normalized_entropy": _("entropy"),
        "distance": _("distance"),
    }
    header = [_("head"), _("pattern"), _("strength"), *measures.values()]
    rows = [
        [head.name, head.pattern, pattern_strength(head), *(getattr(head, measure) for measure in measures)]
        for head in result.notable_heads(12)
    ]
    counts = html_table([_("pattern of the heads"), _("number of heads")], result.pattern_counts().items())
    return html_table(header, rows) + counts + img_tag(result, str(result))


@render_html.register
def _next_tokens_html(result: NextTokens) -> Markup:
    largest = max((candidate.prob for candidate in result.candidates), default=1) or 1
    rows = [
        {
            "token": repr(candidate.token.text),
            "prob": f"{candidate.prob:.2%}",
            "width": f"{12 * candidate.prob / largest:.2f}",
        }
        for candidate in result.candidates
    ]
    context = repr("".join(token.text for token in result.context if token.piece_index == 1)[-60:])
    bits = f"{result.entropy / math.log(2):.2f}"
    note = _("after {context}; entropy {bits} bits", context=context, bits=bits)
    return Markup(_macros().next_tokens(rows, note))


@render_html.register
def _token_losses_html(result: TokenLosses) -> Markup:
    """The text with each token colored by its loss; its tooltip has the probability and the most probable token."""
    largest = max(8.0, float(result.losses.max()))
    tokens = []
    for n, token in enumerate(result.tokens):
        if token.piece_index > 1:
            continue
        loss = float(result.losses[n])
        title = _(
            "{prob}, {loss:.2f} nats; most probable: {top_token}",
            prob=f"p = {math.exp(-loss):.2%}",
            loss=loss,
            top_token=f"{result.top_tokens[n].text!r} ({result.top_probs[n]:.1%})",
        )
        tokens.append({"text": token.text, "title": title, "opacity": f"{min(1.0, loss / largest):.2f}"})
    return _macros().token_losses(tokens) + img_tag(result, str(result)) + _summary(result)


@render_html.register
def _lens_html(result: LogitLens) -> Markup:
    """A table with the last layer at the top and the embedding at the bottom."""
    columns = range(max(0, len(result.positions) - MAX_LENS_COLUMNS), len(result.positions))
    rows = []
    for row in reversed(range(len(result.layers))):
        cells = [_lens_cell(result.top_tokens[row][n], float(result.top_probs[row, n, 0])) for n in columns]
        rows.append({"layer": result.layers[row], "cells": cells})
    labels = [result.tokens[result.positions[n]].label for n in columns]
    return Markup(_macros().logit_lens(rows, labels))


def _lens_cell(token: Token, prob: float) -> dict[str, str]:
    red, green, blue = (int(255 * channel) for channel in _color(prob))
    return {
        "text": token.label,
        "title": f"{token.text!r} {prob:.1%}",
        "background": f"rgb({red},{green},{blue})",
        "color": "#000" if prob > 0.6 else "#fff",
    }


@functools.lru_cache(maxsize=512)
def _color(prob: float) -> tuple[float, float, float]:
    import matplotlib

    red, green, blue, _alpha = matplotlib.colormaps[plot_style.SEQUENTIAL](float(np.clip(prob, 0, 1)))
    return red, green, blue


def costs_html(costs: ModelCosts) -> Markup:
    """Tables of parameters, memory and FLOPs."""
    megabytes = {name: size / 1e6 for name, size in costs.bytes.items()}
    millions = {name: number / 1e6 for name, number in costs.flops.items()}
    tables: list[tuple[str, Mapping[str, float]]] = [
        (_("parameters"), costs.groups),
        (_("memory, MB"), megabytes),
        (_("million FLOPs per token"), millions),
    ]
    return Markup().join(
        html_table([title, ""], [(COST_LABELS[name], number) for name, number in numbers.items()])
        for title, numbers in tables
    )
