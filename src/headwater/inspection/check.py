"""headwater.check(model): does it keep the laws? If not: which module, which places, how much, and what to do.

It runs on ours and on any nn.Module from ids [B, L] to logits. The model is given back as it came: mode, buffers,
gradients, hooks and random numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headwater.errors import BadInput, BadSetting, nearest
from headwater.inspection import remedies
from headwater.inspection.calling import calling, logits_of
from headwater.inspection.claims import Broken, Subject, borrowed
from headwater.inspection.laws import CLAIMED, Probes
from headwater.inspection.numbers import Backward, first_spoilt, objective
from headwater.inspection.report import Report, Verdict
from headwater.inspection.traces import by_place
from headwater.inspection.words import Both, chinese

LAWS = ("numbers", *CLAIMED, "gradients")
SIDES = ("left", "right")
LENGTHS = (13, 17, 11, 19, 23, 29, 31, 37, 41, 43)  # primes: a length no width of the model has is known by its size


def check(
    model: nn.Module,
    call: Callable[..., Any] | None = None,
    step: Callable[..., Any] | None = None,
    *,
    vocab: int | None = None,
    causal: bool | None = None,
    reach: tuple[int | None, int | None] | None = None,
    length: int | None = None,
    probes: int = 4,
    seed: int = 0,
    sides: Iterable[str] = SIDES,
    only: Iterable[str] = LAWS,
) -> Report:
    """Ask the model questions whose answers must agree, and say where they do not.

    call, step: how to call a model whose forward is not understood (see headwater.inspection.calling).
    causal: whether a place may not see later ones; guessed where it is not said, and told in the report.
    reach: how far back and ahead a place may depend on others through all layers together, for attention with windows.
    length, probes: how long the rows are and how many places are changed in them. sides: where rows may be padded.
    """
    began = time.monotonic()
    only, sides = tuple(only), tuple(sides)
    _refuse(model, only, sides, probes, length)
    with borrowed(model):
        model.eval()
        subject = Subject(model, calling(model, call, step, vocab, causal, reach), seed)
        asked = _probes(subject, length, probes, sides)
        verdicts = [verdict for law in LAWS if law in only for verdict in _judged(law, subject, asked)]
        verdicts = [_first_cause(verdict, verdicts) for verdict in verdicts]
    how = subject.how
    told = Both(
        f"{how.told}, {'causal' if how.causal else 'two-way'}, {how.vocab} tokens",
        f"{chinese(how.told)}（{'单向' if how.causal else '双向'}，{how.vocab} 个词元）",
    )
    seconds = round(time.monotonic() - began, 2)
    return Report(type(model).__name__, told, asked.length, seconds, tuple(verdicts), subject.passes)


def _refuse(model: nn.Module, only: tuple[str, ...], sides: tuple[str, ...], probes: int, length: int | None) -> None:
    if not isinstance(model, nn.Module):
        raise BadSetting(
            f"check: model must be an nn.Module, got {type(model).__name__}; a spec is built with .build(seed=0)"
        )
    if any(p.is_meta for p in model.parameters()):
        raise BadInput("check: the model must have weights, this one is on the meta device; build it first")
    for what, given, known in (("law", only, LAWS), ("side", sides, SIDES)):
        for name in given:
            if name not in known:
                raise BadSetting(f"check: there is no {what} {name!r}; {nearest(name, known)}")
    if probes < 1 or (length is not None and length < 4):
        raise BadSetting(f"check: probes must be at least 1 and length at least 4, got {probes} and {length}; use more")


def _probes(subject: Subject, length: int | None, count: int, sides: tuple[str, ...]) -> Probes:
    """Questions that suit the model; one that cannot be asked at all is refused here."""
    widths = {size for p in subject.model.parameters() for size in p.shape}
    usual = next((n for n in LENGTHS if n not in widths), LENGTHS[0])
    back, ahead = dict(subject.how.reach).get("", (None, None))
    needed = (back or 0) + (ahead or 0) + 5
    usual = needed if length is None and usual < needed <= 512 else usual
    pad = getattr(getattr(subject.model, "config", None), "pad_token_id", None)
    draw = torch.Generator().manual_seed(subject.seed)
    avoid = pad if isinstance(pad, int) else -1
    asked = Probes(subject.how, length or usual, count, draw, subject.device, sides, avoid)
    out = subject.answer(asked.ask())
    placed = by_place(out, 2, asked.length) if out.dim() == 3 else None
    if out.dim() not in (2, 3) or (out.dim() == 3 and placed is None):
        shape = tuple(out.shape)
        raise BadInput(
            f"check: answers must be [2, {asked.length}, V] for ids [2, {asked.length}], got {shape}; pass call="
        )
    return replace(asked, per_token=out.dim() == 3)


# ------------------------------------------------------------------------------------------------------------ judging


def _judged(law: str, subject: Subject, asked: Probes) -> list[Verdict]:
    if law == "numbers":
        return _numbers(subject, asked)
    if law == "gradients":
        return _gradients(subject, asked)
    subject.rounding = 0.0
    claims, judged, broken = 0, 0, []
    for claim in CLAIMED[law](asked):
        claims += 1
        try:
            found = subject.judge(claim)
        except BadInput as error:  # it took plain rows, so this is no misunderstanding
            says = str(error).partition(";")[0]
            return [Verdict(law, "broken", Both(says, f"按这条规则问时出错：{says}"), remedy=remedies.REMEDIES[law])]
        judged += bool(found)
        broken += [found] if isinstance(found, Broken) else []
        if broken and (law == "cache" or len(broken) >= asked.count):
            break  # what comes after a wrong cache is wrong because of it
    if broken:
        return _told(subject, broken)
    if claims and not judged:
        return [Verdict(law, "skipped", Both("the answers are not numbers", "回答不是数"))]
    if not claims:
        return [Verdict(law, "skipped", remedies.why_skipped(law, subject.how, asked.per_token))]
    exactly, zh = (
        (f", to {subject.rounding:.0e} of rounding", f"，舍入 {subject.rounding:.0e}") if subject.rounding else ("", "")
    )
    often = Both(f" ({_many(judged, 'comparison')}{exactly})", f"（比较 {judged} 次{zh}）")
    return [Verdict(law, "kept", remedies.KEPT[law] + often)]


def _first_cause(verdict: Verdict, others: list[Verdict]) -> Verdict:
    """A fault that repeats another is not told twice: who sees the padding is moved by it, a leak has a gradient."""
    cause = {"positions": "padding", "gradients": "future"}.get(verdict.law)
    repeats = verdict.state == "broken" and (verdict.law == "positions" or verdict.key is not None)
    if repeats and any(other.law == cause and other.state == "broken" for other in others):
        return Verdict(
            verdict.law, "skipped", Both(f"not judged, for it follows from {cause}", f"不另判：它由 {cause} 引起")
        )
    return verdict


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count != 1 else ''}"


def _told(subject: Subject, broken: list[Broken]) -> list[Verdict]:
    """One verdict for each sentence that was broken, at its worst place. Wrong in evaluation is wrong in training."""
    verdicts = []
    broken = [found for found in broken if not found.claim.a.training] or broken
    for says in dict.fromkeys(found.claim.says for found in broken):
        alike = [found for found in broken if found.claim.says == says]
        worst = max(alike, key=lambda found: found.share)
        claim = worst.claim
        module, _ = subject.where(claim)
        middle = alike[len(alike) // 2].claim  # a place with others on both sides of it
        remedy = remedies.remedy(claim, alike, inverted=subject.where(middle)[1])
        says, row, place = remedies.sentence(alike, worst), worst.row, worst.place
        verdicts.append(Verdict(claim.law, "broken", says, module, row, place, claim.key, worst.gap, remedy))
    return verdicts


# -------------------------------------------------------------------------------------------------- numbers, gradients


def _numbers(subject: Subject, asked: Probes) -> list[Verdict]:
    """Plain rows, and rows padded on either side: a row that sees nothing is where NaN likes to begin."""
    asks = [asked.ask(), *(claim.a for claim in CLAIMED["padding"](asked) if claim.exact)]
    for ask in asks:
        padded = Both(" with padding", "（有填充时）") if set(ask.extras) & {"keep", "source_keep"} else Both("", "")
        found = first_spoilt(subject.trace(ask), *ask.size)
        if found:
            row, place = found.places[0] if found.places else (None, None)
            says = Both(f"{found.what} appears first here", f"{found.what} 最先出现在这里") + padded
            return [Verdict("numbers", "broken", says, found.path, row, place, remedy=remedies.NUMBERS)]
        if subject.answer(ask).isnan().any():
            says = Both("NaN in the answer", "回答里有 NaN") + padded
            says += Both(
                ", though not while the modules are watched: a fused path makes it",
                "，但观察各模块时没有：来自融合的路径",
            )
            return [Verdict("numbers", "broken", says, remedy=remedies.NUMBERS)]
    says = Both(
        f"no NaN and no infinity in any module ({_many(len(asks), 'run')})",
        f"各模块都没有 NaN 和无穷（跑了 {len(asks)} 次）",
    )
    return [Verdict("numbers", "kept", says)]


def _gradients(subject: Subject, asked: Probes) -> list[Verdict]:
    """Every parameter gets a finite gradient; and no gradient flows from an answer to a later token."""
    ask = asked.ask()
    named = [(name, p) for name, p in subject.model.named_parameters() if p.requires_grad]
    subject.model.train(False)
    torch.manual_seed(subject.seed)
    back = Backward(*ask.size)
    with torch.enable_grad(), back.listening(subject.model):
        answer = subject.how.call(ask.ids, **ask.extras)
    total = objective(answer, subject.seed)
    if not total.requires_grad:
        says = Both("no answer depends on a parameter that can learn", "没有回答依赖于可学习的参数")
        return [Verdict("gradients", "skipped", says)]
    late = _late(back, subject, answer, ask.size[1])
    found = torch.autograd.grad(total, [p for _, p in named], allow_unused=True) if named else ()
    without = [name for (name, _), grad in zip(named, found, strict=True) if grad is None]
    given = [(name, grad) for (name, _), grad in zip(named, found, strict=True) if grad is not None]
    spoilt = [name for name, grad in given if not grad.isfinite().all()]
    verdicts = [late] if late else []
    if spoilt:
        says = Both(
            f"the gradient of {spoilt[-1]} is not finite, of {len(spoilt)} parameters in all",
            f"{spoilt[-1]} 的梯度不是有限数，共有 {len(spoilt)} 个参数如此",
        )
        verdicts.append(Verdict("gradients", "broken", says, back.culprit(), remedy=remedies.NUMBERS))
    if without:
        verdicts.append(_without(without, {path for path, *_ in back.passes}))
    says = Both(f"all {len(named)} parameters get a finite gradient", f"全部 {len(named)} 个参数都得到有限的梯度")
    return verdicts or [Verdict("gradients", "kept", says)]


def _late(back: Backward, subject: Subject, answer: Any, length: int) -> Verdict | None:
    """∂ answer_i / ∂ token_j = 0 for j > i: a leak too small for a changed token to show is seen here."""
    out, embedded = logits_of(answer), back.embedded
    if not subject.how.causal or embedded is None or out.dim() != 3 or out.shape[1] != length or not out.requires_grad:
        return None
    for query in sorted({0, length // 2}):
        mine = out[:, query].float().square().sum()
        (grad,) = torch.autograd.grad(mine, embedded, retain_graph=True, materialize_grads=True)
        size: Tensor = grad.abs().amax((0, 2))
        key = int(size[query + 1 :].argmax()) + query + 1
        if float(size[key]) > 1e-6 * max(float(size.max()), 1e-30):
            share = float(size[key]) / float(size.max())
            says = Both(
                f"the answer at place {query} has a gradient to the later token {key}, {share:.0e} of its largest",
                f"位置 {query} 的回答对后面的词元 {key} 有梯度，是最大梯度的 {share:.0e}",
            )
            return Verdict("gradients", "broken", says, None, None, query, key, float(size[key]), remedies.LATE)
    return None


def _without(names: list[str], ran: set[str]) -> Verdict:
    """A parameter without gradient in a module that ran is cut off; in one that did not run it may be unused here."""
    cut = [name for name in names if name.rpartition(".")[0] in ran]
    some = ", ".join((cut or names)[:3]) + (" …" if len(cut or names) > 3 else "")
    if cut:
        says = Both(
            f"{len(cut)} parameters of modules that ran get no gradient: {some}",
            f"运行过的模块里有 {len(cut)} 个参数没有梯度：{some}",
        )
        return Verdict("gradients", "broken", says, cut[0].rpartition(".")[0], remedy=remedies.CUT)
    says = Both(f"{len(names)} parameters were not used: {some}", f"有 {len(names)} 个参数没有用到：{some}")
    return Verdict("gradients", "noted", says, remedy=remedies.UNUSED)
