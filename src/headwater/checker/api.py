"""headwater.check: test a model against the laws of a Transformer; report the module, the positions and a remedy.

It runs on headwater models and on any nn.Module from ids [B, L] to logits. The state of the model is preserved: mode,
buffers, gradients, hooks and random number generator.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headwater.checker.adapters import adapt
from headwater.checker.claims import ModelUnderTest, Violation, preserved_state
from headwater.checker.image_laws import patch_claims, size_claims
from headwater.checker.laws import CLAIMS_BY_LAW as CLAIMS_OF_ALL
from headwater.checker.laws import Probes
from headwater.checker.verdicts import (
    DETACHED_REMEDY,
    FUTURE_GRADIENT_REMEDY,
    NONFINITE_REMEDY,
    PASSED_MESSAGES,
    REMEDIES,
    UNUSED_REMEDY,
    CheckReport,
    Verdict,
    remedy_for,
    skip_reason,
    violation_message,
)
from headwater.core.model import Transformer
from headwater.errors import BadInput, BadSetting, nearest
from headwater.i18n import _
from headwater.inspection.gradients import BackwardTrace, random_projection_loss
from headwater.inspection.hooks import extract_logits
from headwater.training.nonfinite import by_position, is_nonfinite
from headwater.variants.patches import PatchesLayer

CLAIMS_BY_LAW = {**CLAIMS_OF_ALL, "patches": patch_claims, "sizes": size_claims}
LAWS = ("numbers", *CLAIMS_OF_ALL, "gradients")
IMAGE_LAWS = ("numbers", "batch", "backend", "patches", "sizes", "gradients")
ALL_LAWS = ("numbers", *CLAIMS_BY_LAW, "gradients")
PADDING_SIDES = ("left", "right")
PRIME_LENGTHS = (13, 17, 11, 19, 23, 29, 31, 37, 41, 43)  # a length that no weight has identifies the position axis


def check(
    model: nn.Module,
    call: Callable[..., Any] | None = None,
    step: Callable[..., Any] | None = None,
    *,
    vocab: int | None = None,
    causal: bool | None = None,
    receptive_field: tuple[int | None, int | None] | None = None,
    length: int | None = None,
    num_probes: int = 4,
    seed: int = 0,
    padding_sides: Iterable[str] = PADDING_SIDES,
    laws: Iterable[str] | None = None,
) -> CheckReport:
    """Run the model on pairs of inputs whose outputs must agree, and report where they do not.

    model: any nn.Module that takes token ids. vocab: its vocabulary size; by default read from its embedding.
    call, step: how to call a model whose signature is not recognized (see headwater.checker.adapters).
    causal: whether a position must not see later ones; guessed if None, and stated in the report.
    receptive_field: how far back and ahead a position may depend on others through all layers, for windowed attention.
    length, num_probes: tokens per row, and positions that are changed in it. padding_sides: where rows may be padded.
    seed: of the random tokens. laws: the laws to check, by default all of LAWS, or of IMAGE_LAWS.
    """
    start_time = time.monotonic()
    laws = None if laws is None else tuple(laws)
    padding_sides = tuple(padding_sides)
    _validate(model, laws, padding_sides, num_probes, length)
    with preserved_state(model):
        adapter = adapt(model, call, step, vocab, causal, receptive_field, length or 5)
        tested = ModelUnderTest(model, adapter, seed)
        probes = _make_probes(tested, length, num_probes, padding_sides)
        chosen = laws_of(model) if laws is None else [law for law in ALL_LAWS if law in laws]
        verdicts = [verdict for law in chosen for verdict in _check_law(law, tested, probes)]
        verdicts = [_skip_if_consequence(verdict, verdicts) for verdict in verdicts]
    description = _(
        "{call}, {mode}, {vocab} tokens",
        call=adapter.description,
        mode=_("causal") if adapter.causal else _("bidirectional"),
        vocab=adapter.vocab,
    )
    seconds = round(time.monotonic() - start_time, 2)
    return CheckReport(
        type(model).__name__, description, probes.length, seconds, tuple(verdicts), tested.forward_passes
    )


def laws_of(model: nn.Module) -> tuple[str, ...]:
    """The laws of a model of images, or of tokens."""
    encoder = model.encoder if isinstance(model, Transformer) else None
    return IMAGE_LAWS if encoder is not None and isinstance(encoder.embed, PatchesLayer) else LAWS


def _validate(
    model: nn.Module, laws: tuple[str, ...] | None, padding_sides: tuple[str, ...], num_probes: int, length: int | None
) -> None:
    """Raise BadSetting or BadInput for arguments of check() that are not valid."""
    if not isinstance(model, nn.Module):
        raise BadSetting(
            _(
                "check: model must be an nn.Module, got {name}; a spec is built with .build(seed=0)",
                name=type(model).__name__,
            )
        )
    if any(p.is_meta for p in model.parameters()):
        raise BadInput(_("check: the model must have weights, this one is on the meta device; build it first"))

    for what, names, known in ((_("law"), laws or (), ALL_LAWS), (_("side"), padding_sides, PADDING_SIDES)):
        for name in names:
            if name not in known:
                raise BadSetting(
                    _(
                        "check: there is no {what} {name!r}; {nearest}",
                        what=what,
                        name=name,
                        nearest=nearest(name, known),
                    )
                )

    if num_probes < 1 or (length is not None and length < 4):
        raise BadSetting(
            _(
                "check: num_probes must be at least 1 and length at least 4, got {num_probes} and {length}; use more",
                num_probes=num_probes,
                length=length,
            )
        )


def _make_probes(tested: ModelUnderTest, length: int | None, num_probes: int, padding_sides: tuple[str, ...]) -> Probes:
    """Random inputs for the model; raises BadInput if the model cannot be called."""
    # the length: not a width of the model, so that no axis is mistaken for it, and longer than the receptive field
    widths = {size for p in tested.model.parameters() for size in p.shape}
    default_length = next((n for n in PRIME_LENGTHS if n not in widths), PRIME_LENGTHS[0])
    back, ahead = dict(tested.adapter.receptive_fields).get("", (None, None))
    needed = (back or 0) + (ahead or 0) + 5
    if default_length < needed <= 512:
        default_length = needed

    fixed = tested.adapter.length
    if fixed is not None and length not in (None, fixed):
        raise BadSetting(
            _(
                "check: images of this model have {fixed} tokens, got length {length}; leave it out",
                fixed=fixed,
                length=length,
            )
        )

    pad_id = getattr(getattr(tested.model, "config", None), "pad_token_id", None)
    probes = Probes(
        tested.adapter,
        fixed or length or default_length,
        num_probes,
        generator=torch.Generator().manual_seed(tested.seed),
        device=tested.device,
        padding_sides=tuple(side for side in padding_sides if side in tested.adapter.padding_sides),
        excluded_id=pad_id if isinstance(pad_id, int) else -1,
    )

    # the first call: logits [2, L, V], or [2, V] of a model with one output per row
    logits = tested.logits(probes.query())
    per_token = logits.dim() == 3
    if logits.dim() not in (2, 3) or (per_token and by_position(logits, 2, probes.length) is None):
        raise BadInput(
            _(
                "check: logits must be [2, {length}, V] for ids [2, {length}], got {shape}; pass call=",
                length=probes.length,
                shape=tuple(logits.shape),
            )
        )
    return replace(probes, per_token=per_token)


# ----------------------------------------------------------------------------------------------------------- verdicts


def _check_law(law: str, tested: ModelUnderTest, probes: Probes) -> list[Verdict]:
    """The verdicts on one law: one if it holds, one for each broken claim if not."""
    if law == "numbers":
        return _check_finite(tested, probes)
    if law == "gradients":
        return _check_gradients(tested, probes)

    # verify the claims, until num_probes of them are violated
    tested.max_rounding = 0.0
    num_claims = 0
    num_compared = 0
    violations: list[Violation] = []
    for claim in CLAIMS_BY_LAW[law](probes):
        num_claims += 1
        try:
            result = tested.verify(claim)
        except BadInput as error:  # unpadded rows were accepted, so this is a fault of the model
            message = _("{error} (while this law was checked)", error=str(error).partition(";")[0])
            return [Verdict(law, "failed", message, remedy=REMEDIES[law])]
        num_compared += bool(result)
        if isinstance(result, Violation):
            violations.append(result)
        if violations and (law == "cache" or len(violations) >= probes.count):
            break  # later chunks are wrong because the cache is

    # the verdict
    if violations:
        return _violation_verdicts(tested, violations)
    if not num_claims:
        return [Verdict(law, "skipped", skip_reason(law, tested.adapter, probes.per_token))]
    if not num_compared:
        return [Verdict(law, "skipped", _("the outputs are NaN"))]
    rounding = _(", rounding error {rounding:.0e}", rounding=tested.max_rounding) if tested.max_rounding else ""
    comparisons = _(
        " ({comparisons}{rounding})",
        comparisons=_plural(num_compared, "comparison"),
        rounding=rounding,
        count=num_compared,
    )
    return [Verdict(law, "passed", PASSED_MESSAGES[law] + comparisons)]


def _skip_if_consequence(verdict: Verdict, others: list[Verdict]) -> Verdict:
    """Skip a failure that follows from another: visible padding shifts positions, a leak has a gradient."""
    cause = {"positions": "padding", "gradients": "future"}.get(verdict.law)
    may_follow = verdict.status == "failed" and (verdict.law == "positions" or verdict.key is not None)
    if may_follow and any(other.law == cause and other.status == "failed" for other in others):
        return Verdict(verdict.law, "skipped", _("not reported: it follows from {cause}", cause=cause))
    return verdict


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' if count != 1 else ''}"


def _violation_verdicts(tested: ModelUnderTest, violations: list[Violation]) -> list[Verdict]:
    """One verdict per violated claim, at its worst position. A failure in evaluation mode explains one in training."""
    violations = [violation for violation in violations if not violation.claim.a.training] or violations
    verdicts: list[Verdict] = []
    for message in dict.fromkeys(violation.claim.message for violation in violations):
        same_claim = [violation for violation in violations if violation.claim.message == message]
        worst = max(same_claim, key=lambda violation: violation.relative_difference)
        claim = worst.claim
        module, _inverted = tested.locate(claim)
        middle = same_claim[len(same_claim) // 2].claim  # a changed position with others on both sides of it
        _module, inverted = tested.locate(middle)
        verdicts.append(
            Verdict(
                claim.law,
                "failed",
                violation_message(same_claim, worst),
                module,
                worst.row,
                worst.position,
                claim.key,
                worst.difference,
                remedy_for(claim, same_claim, inverted),
            )
        )
    return verdicts


# -------------------------------------------------------------------------------------------------- numbers, gradients


def _check_finite(tested: ModelUnderTest, probes: Probes) -> list[Verdict]:
    """No NaN and no infinity on unpadded and padded rows: a query without visible keys is a frequent cause."""
    queries = [probes.query(), *(claim.a for claim in CLAIMS_BY_LAW["padding"](probes) if claim.exact)]
    for query in queries:
        padded = set(query.model_kwargs) & {"attention_mask", "source_attention_mask"}
        where = _(" with padding") if padded else ""
        nonfinite = tested.first_nonfinite(query)
        if nonfinite:
            row, position = nonfinite.positions[0] if nonfinite.positions else (None, None)
            message = _("{what} first appears here", what=nonfinite.what) + where
            return [Verdict("numbers", "failed", message, nonfinite.path, row, position, remedy=NONFINITE_REMEDY)]
        if tested.logits(query).isnan().any():
            message = _("NaN in the output") + where
            message += _(", but not while hooks are registered: a fused path produces it")
            return [Verdict("numbers", "failed", message, remedy=NONFINITE_REMEDY)]
    runs = _plural(len(queries), "run")
    message = _("no NaN and no infinity in any module ({runs})", runs=runs, num_runs=len(queries))
    return [Verdict("numbers", "passed", message)]


def _check_gradients(tested: ModelUnderTest, probes: Probes) -> list[Verdict]:
    """Every parameter gets a finite gradient, and no gradient flows from an output to a later token."""
    query = probes.query()
    parameters = [(name, p) for name, p in tested.model.named_parameters() if p.requires_grad]

    # forward
    tested.model.eval()
    torch.manual_seed(tested.seed)
    trace = BackwardTrace(*query.size)
    with torch.enable_grad(), trace.record(tested.model):
        output = tested.adapter.call(query.ids, **query.model_kwargs)
    loss = random_projection_loss(output, tested.seed)
    if not loss.requires_grad:
        return [Verdict("gradients", "skipped", _("no output depends on a trainable parameter"))]

    # backward
    future = _future_gradient_verdict(trace, tested, output, query.size[1])
    grads = torch.autograd.grad(loss, [p for _, p in parameters], allow_unused=True) if parameters else ()
    missing = [name for (name, _), grad in zip(parameters, grads, strict=True) if grad is None]
    nonfinite = [
        name for (name, _), grad in zip(parameters, grads, strict=True) if grad is not None and is_nonfinite(grad)
    ]

    verdicts = [future] if future else []
    if nonfinite:
        verdicts.append(_nonfinite_gradient_verdict(nonfinite, trace))
    if missing:
        verdicts.append(_missing_gradient_verdict(missing, {path for path, *_ in trace.calls}))
    return verdicts or [_finite_gradients_verdict(len(parameters))]


def _finite_gradients_verdict(count: int) -> Verdict:
    return Verdict("gradients", "passed", _("all {count} parameters get a finite gradient", count=count))


def _nonfinite_gradient_verdict(names: list[str], trace: BackwardTrace) -> Verdict:
    message = _(
        "the gradient of {name} is not finite; {count} such parameters in total", name=names[-1], count=len(names)
    )
    return Verdict("gradients", "failed", message, trace.responsible_module(), remedy=NONFINITE_REMEDY)


def _future_gradient_verdict(trace: BackwardTrace, tested: ModelUnderTest, output: Any, length: int) -> Verdict | None:
    """∂ output_i / ∂ token_j = 0 for j > i: detects a leak that is too small to show when a token is changed."""
    logits = extract_logits(output)
    embeddings = trace.embeddings
    per_token = logits.dim() == 3 and logits.shape[1] == length
    if not tested.adapter.causal or embeddings is None or not per_token or not logits.requires_grad:
        return None
    for query in sorted({0, length // 2}):
        objective = logits[:, query].float().square().sum()
        (grad,) = torch.autograd.grad(objective, embeddings, retain_graph=True, materialize_grads=True)
        size: Tensor = grad.abs().amax((0, 2))  # [L]
        key = int(size[query + 1 :].argmax()) + query + 1
        largest = float(size.max())
        if float(size[key]) > 1e-6 * max(largest, 1e-30):
            message = _(
                "the output at position {query} has a gradient with respect to the later token {key}, "
                "{ratio:.0e} of its largest",
                query=query,
                key=key,
                ratio=float(size[key]) / largest,
            )
            return Verdict(
                "gradients",
                "failed",
                message,
                position=query,
                key=key,
                difference=float(size[key]),
                remedy=FUTURE_GRADIENT_REMEDY,
            )
    return None


def _missing_gradient_verdict(names: list[str], executed: set[str]) -> Verdict:
    """A parameter without gradient is detached if its module was executed, else it may be unused here."""
    detached = [name for name in names if name.rpartition(".")[0] in executed]
    listed = detached or names
    examples = ", ".join(listed[:3]) + (" …" if len(listed) > 3 else "")
    if detached:
        message = _(
            "{count} parameters of modules that ran get no gradient: {names}", count=len(detached), names=examples
        )
        return Verdict("gradients", "failed", message, detached[0].rpartition(".")[0], remedy=DETACHED_REMEDY)
    message = _("{count} parameters were not used: {names}", count=len(names), names=examples)
    return Verdict("gradients", "warning", message, remedy=UNUSED_REMEDY)
