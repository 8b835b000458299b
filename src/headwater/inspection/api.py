"""headwater.inspect: run all analyses of a model on a text, and write them as HTML, JSON, figures and arrays."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headwater.errors import BadFile, BadInput, BadSetting, Fault, TooLong, nearest
from headwater.i18n import _, join
from headwater.inspection.ablation import ablate, head_importance
from headwater.inspection.attention import AttentionMaps, alignment, attention_maps
from headwater.inspection.attribution import MAX_COMPLETENESS_GAP, attribute
from headwater.inspection.costs import ModelCosts, count
from headwater.inspection.gradients import first_nonfinite, gradient_flow
from headwater.inspection.head_patterns import HeadPattern, HeadPatterns, classify_heads
from headwater.inspection.inputs import InspectedModel, ModelLike, TextLike, TokenizedInput, tokenize_input
from headwater.inspection.logit_lens import lens
from headwater.inspection.position_plots import position_effects
from headwater.inspection.predictions import next_tokens, token_losses
from headwater.inspection.results import InspectionResult, to_jsonable
from headwater.inspection.visibility import measure_visibility
from headwater.training.nonfinite import NonFinite

MAX_GRADIENT_TOKENS = 256  # gradients of a longer text are computed only if requested by name
LENS_POSITIONS = 24  # positions of the logit lens: the last ones


@dataclass(frozen=True, eq=False)
class CostReport(InspectionResult):
    """Parameters, memory and FLOPs at this text's length (costs.py)."""

    costs: ModelCosts

    def to_dict(self) -> dict[str, Any]:
        return self.costs.to_dict()

    def lines(self) -> list[str]:
        groups = ", ".join(f"{name} {number:,}" for name, number in self.costs.groups.items())
        sizes = [_("{name} {size:,.1f} MB", name=name, size=size / 1e6) for name, size in self.costs.bytes.items()]
        flops = _("{forward:,.1f} million FLOPs per token", forward=self.costs.flops["forward"] / 1e6)
        return [
            _("{parameters:,} parameters: {groups}", parameters=self.costs.parameters, groups=groups),
            _(
                "{sizes}; {flops} at length {length}",
                sizes=join(", ", sizes),
                flops=flops,
                length=self.costs.settings["length"],
            ),
        ]

    def _repr_html_(self) -> str:
        from headwater.inspection.html import costs_html

        return str(costs_html(self.costs))


@dataclass(frozen=True)
class AnalysisRequest:
    """The arguments of one analysis: the model, its tokenized input, and the selected head."""

    model: ModelLike
    inputs: TokenizedInput
    layer: int | None
    head: int | None
    kind: str | None
    explicit: bool  # requested by name

    def position(self) -> int | None:
        """The position to explain: the last one (None); of an encoder-decoder the one with the largest loss."""
        if not self.inputs.source:
            return None
        return int(token_losses(self.model, self.inputs).losses.argmax())

    def check_gradient_length(self) -> None:
        """Raise TooLong if the text is too long for an analysis by gradients that was not requested by name."""
        num_tokens = len(self.inputs.tokens)
        if num_tokens > MAX_GRADIENT_TOKENS and not self.explicit:
            raise TooLong(_("skipped for a text of {num_tokens} tokens; request it by name", num_tokens=num_tokens))


def _attention(request: AnalysisRequest) -> InspectionResult:
    layers = [request.layer] if request.layer is not None else None
    heads = [request.head] if request.head is not None else None
    kinds = [request.kind] if request.kind is not None else None
    return attention_maps(request.model, request.inputs, kinds=kinds, layers=layers, heads=heads)


def _lens(request: AnalysisRequest) -> InspectionResult:
    length = len(request.inputs.tokens)
    return lens(request.model, request.inputs, positions=range(max(0, length - LENS_POSITIONS), length))


def _attribution(request: AnalysisRequest) -> InspectionResult:
    """Integrated gradients; if they are not complete (do not sum to the output), occlusion."""
    request.check_gradient_length()
    position = request.position()
    result = attribute(request.model, request.inputs, position=position)
    if result.completeness_gap > MAX_COMPLETENESS_GAP:
        result = attribute(request.model, request.inputs, position=position, method="occlusion")
    return result


def _gradients(request: AnalysisRequest) -> InspectionResult:
    request.check_gradient_length()
    return gradient_flow(request.model, request.inputs)


def _ablation(request: AnalysisRequest) -> InspectionResult:
    if request.layer is None or request.head is None:
        return head_importance(request.model, request.inputs, kind=request.kind)
    return ablate(request.model, request.inputs, request.layer, request.head, kind=request.kind)


def _costs(request: AnalysisRequest) -> InspectionResult:
    length = max(len(request.inputs.tokens), len(request.inputs.source))
    return CostReport(count(request.inputs.model.spec, 1, length))


ANALYSES: dict[str, Callable[[AnalysisRequest], InspectionResult]] = {
    "next": lambda request: next_tokens(request.model, request.inputs, position=request.position()),
    "losses": lambda request: token_losses(request.model, request.inputs),
    "heads": lambda request: classify_heads(request.model, request.inputs),
    "alignment": lambda request: alignment(request.model, request.inputs),
    "attention": _attention,
    "lens": _lens,
    "attribution": _attribution,
    "gradients": _gradients,
    "ablation": _ablation,
    "positions": lambda request: position_effects(request.model),
    "visibility": lambda request: measure_visibility(request.model),
    "costs": _costs,
}
DEFAULT_ANALYSES = tuple(name for name in ANALYSES if name != "ablation")


@dataclass(frozen=True, eq=False)
class Inspection(InspectionResult):
    """The results by name. nonfinite: the first module that outputs NaN or infinity.

    skipped: the analyses that were not run, with the reason. too_long: those of them skipped for the text's length.
    """

    name: str
    inputs: TokenizedInput
    results: dict[str, InspectionResult]
    skipped: dict[str, str] = field(default_factory=dict)
    nonfinite: NonFinite | None = None
    too_long: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> InspectionResult:
        if name not in self.results:
            reason = self.skipped.get(name) or nearest(name, self.results)
            raise KeyError(f"{name!r} is not among the results; {reason}")
        return self.results[name]

    def lines(self) -> list[str]:
        lines: list[str] = []
        if self.nonfinite:
            path = self.nonfinite.path
            lines.append(_("NaN or infinity first appears in {path}: {what}", path=path, what=self.nonfinite.what))
        for name in ("next", "losses", "heads", "alignment", "attribution", "gradients", "ablation"):
            if name in self.results:
                lines += self.results[name].lines()
        return lines

    def to_dict(self) -> dict[str, Any]:
        results = {name: result.to_dict() for name, result in self.results.items()}
        return {
            "model": self.name,
            "inputs": to_jsonable(self.inputs),
            **results,
            "skipped": self.skipped,
            "nonfinite": to_jsonable(self.nonfinite),
        }

    def html(self, language: str = "en") -> str:
        """The report as one HTML page."""
        from headwater.inspection.html import report_html

        return report_html(self, language)

    def _repr_html_(self) -> str:
        from headwater.inspection.html import notebook_html

        return notebook_html(self)

    def write(self, folder: str | Path, language: str = "en", image_format: str = "png") -> list[Path]:
        """Write report.html, inspection.json, a figure of each result and attention.npz; returns the paths."""
        folder = Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            report = folder / "report.html"
            report.write_text(self.html(language), encoding="utf-8")
            data = folder / "inspection.json"
            data.write_text(json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False), encoding="utf-8")
            return [report, data, *self._save_figures(folder, image_format), *self._save_weights(folder)]
        except OSError as error:
            raise BadFile(
                _(
                    "{folder} must be a writable folder, got: {strerror}; choose another",
                    folder=folder,
                    strerror=error.strerror,
                )
            ) from None

    def _save_figures(self, folder: Path, image_format: str) -> list[Path]:
        from headwater.inspection.figures import save_figure

        paths = []
        for name, result in self.results.items():
            if isinstance(result, AttentionMaps):
                paths += self._save_attention(name, result, folder, image_format)
            elif not isinstance(result, CostReport) and getattr(result, "effects", True):
                paths.append(save_figure(result, folder / f"{name}.{image_format}"))
        return paths

    def _save_attention(self, name: str, result: AttentionMaps, folder: Path, image_format: str) -> list[Path]:
        """A grid of each kind of attention, and a large map of each notable head."""
        from headwater.inspection.figures import save_figure

        paths = [save_figure(result, folder / f"{name}.{kind}.{image_format}", kind=kind) for kind in result.kinds]
        for head in self.notable_heads(result):
            path = folder / f"{head.kind}.{head.layer}.{head.head}.{image_format}"
            paths.append(save_figure(result, path, kind=head.kind, layer=head.layer, head=head.head))
        return paths

    def notable_heads(self, attention: AttentionMaps) -> list[HeadPattern]:
        """The notable heads among those whose weights were stored."""
        patterns = self.results.get("heads")
        if not isinstance(patterns, HeadPatterns):
            return []
        stored = {(m.kind, m.layer, head) for m in attention.maps for head in m.heads}
        return [head for head in patterns.notable_heads(4) if (head.kind, head.layer, head.head) in stored]

    def _save_weights(self, folder: Path) -> list[Path]:
        attention = self.results.get("attention")
        if not isinstance(attention, AttentionMaps):
            return []
        path = folder / "attention.npz"
        weights = {f"{m.kind}.{m.layer}": m.weights for m in attention.maps}
        np.savez_compressed(path, **weights)  # type: ignore[arg-type]
        return [path]


def inspect(
    model: ModelLike,
    text: TextLike,
    target: str | Iterable[int] | None = None,
    *,
    analyses: Iterable[str] | None = None,
    layer: int | None = None,
    head: int | None = None,
    kind: str | None = None,
) -> Inspection:
    """Run analyses of a model on a text.

    model: the result of headwater.load, a run, or a Transformer (its texts are token ids).
    text: the input, of an encoder-decoder the source. target: the target of an encoder-decoder; generated if None.
    analyses: names of ANALYSES; if None all but ablation, and those that a model does not support (no LM head, no
    encoder) are skipped with the reason. layer, head, kind: select attention, and the head that is ablated.
    """
    names = list(analyses) if analyses is not None else list(DEFAULT_ANALYSES)
    for name in names:
        if name not in ANALYSES:
            raise BadSetting(
                _("inspect: there is no analysis {name!r}; {nearest}", name=name, nearest=nearest(name, ANALYSES))
            )

    # the analyses that apply
    inputs = tokenize_input(model, text, target)
    if analyses is None and not inputs.source:
        names.remove("alignment")
    if analyses is None and layer is not None and head is not None:
        names.append("ablation")

    # run them
    request = AnalysisRequest(model, inputs, layer, head, kind, explicit=analyses is not None)
    results: dict[str, InspectionResult] = {}
    skipped: dict[str, str] = {}
    too_long: list[str] = []
    for name in names:
        try:
            results[name] = ANALYSES[name](request)
        except BadInput as fault:
            if analyses is not None:
                raise
            skipped[name] = str(fault)
            if isinstance(fault, TooLong):
                too_long.append(name)
    nonfinite = _first_nonfinite_or_none(model, inputs) if skipped else first_nonfinite(model, inputs)
    return Inspection(_model_name(model), inputs, results, skipped, nonfinite, tuple(too_long))


def _first_nonfinite_or_none(model: ModelLike, inputs: TokenizedInput) -> NonFinite | None:
    try:
        return first_nonfinite(model, inputs)
    except Fault:
        return None


def _model_name(model: ModelLike) -> str:
    """The name of the model's folder, or of its run, with the architecture."""
    path = Path(getattr(model, "path", None) or getattr(model, "folder", None) or "")
    name = path.parent.name if path.name == "model" else path.name  # a run has its model in a folder of that name
    transformer = InspectedModel.wrap(model).model
    if transformer.decoder is None:
        architecture = "encoder-only"
    elif transformer.encoder is None:
        architecture = "decoder-only"
    else:
        architecture = "encoder-decoder"
    return f"{name} ({architecture})" if name else architecture
