"""The laws: equalities that hold for every model, whatever parts it is made of.

A law is a function of a Case that raises AssertionError where it is broken; `where` says to which cases it applies.
Masks: True = may attend. B rows, Q tokens, D model width.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable

import torch
from combinations import VOCAB, Case
from law_tools import (
    APPLIES,
    LAWS,
    LENGTHS,
    SOURCES,
    alone,
    batch_of_sources,
    grads,
    ids,
    law,
    padded,
    pull,
    same,
    sources,
    texts,
)
from naive_mask import visible
from torch import Tensor

from headwater import core as hw
from headwater.core.embeddings import ModelInputs
from headwater.parts import REGISTRY, from_dict, to_dict

__all__ = ["APPLIES", "LAWS"]

# ------------------------------------------------------------------------------------------------- a batch, and alone


@law()
def batched_is_alone(case: Case) -> None:
    batch = ids(5, rows=3, seed=7)
    source = ids(4, rows=3, seed=8) if case.both else None
    with torch.no_grad():
        together = case.model()(batch, source=source)
        for n in range(3):
            own = None if source is None else source[n : n + 1]
            same(together[n : n + 1], case.model()(batch[n : n + 1], source=own), f"row {n}")


def padded_is_unpadded(case: Case, side: str, source_side: str) -> None:
    batch, keep = padded(texts(), side)
    with torch.no_grad():
        out = case.model()(batch, attention_mask=keep, **batch_of_sources(case, source_side))
    for n, want in enumerate(alone(case)):
        same(out[n][keep[n]][None], want, f"row {n} of a batch padded on the {side}, source on the {source_side}")


@law()
def padded_right_is_unpadded(case: Case) -> None:
    padded_is_unpadded(case, "right", "left")


@law()
def padded_left_is_unpadded(case: Case) -> None:
    padded_is_unpadded(case, "left", "right")


@law()
def padded_anywhere_is_unpadded(case: Case) -> None:
    padded_is_unpadded(case, "holes", "holes")


@law(lambda case: not case.pooled)
def packed_is_alone(case: Case) -> None:
    """Documents in one row, padding (0) before, between and after them, give what each gives by itself."""
    rows, documents = _packed(texts())
    packed = {"document_ids": documents}
    if case.both:
        packed["source"], packed["source_document_ids"] = _packed(texts(SOURCES, seed=50))
    with torch.no_grad():
        out = case.model()(rows, **packed)
    for n, want in enumerate(alone(case)):
        same(out[documents == n + 1][None], want, f"document {n + 1}")


def _packed(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Padding, the first text, padding, all other texts side by side, padding; and the number of each token's text."""
    gap, numbers = ids(1, seed=77), [torch.full_like(row, n + 1) for n, row in enumerate(rows)]
    zero = torch.zeros_like(gap)
    return torch.cat([gap, rows[0], gap, *rows[1:], gap], 1), torch.cat([zero, numbers[0], zero, *numbers[1:], zero], 1)


# --------------------------------------------------------------------------------------------------- cached, and whole

CACHES = {
    "dynamic": lambda model, rows: hw.dynamic_cache(model),
    "sliding": lambda model, rows: hw.sliding_cache(model),
    "static": lambda model, rows: hw.static_cache(model, rows, 16),
}
STRIDES = {"dynamic": (1,) * 8, "sliding": (1, 1, 3, 1, 2), "static": (4, 1, 1, 2)}
SIDES = {"dynamic": ("left",), "sliding": ("left", "right"), "static": ("right",)}


@law(lambda case: case.causal)
def cached_is_whole(case: Case) -> None:
    """Token by token and in strides, with every kind of cache."""
    model, text = case.model(), ids(8, rows=2, seed=3)
    with torch.no_grad():
        memory = model.encode(ids(6, rows=2, seed=4)) if case.both else None
        whole = model.decode(text, memory=memory)
        for kind, make in CACHES.items():
            cache = make(model, 2)
            steps = [model.decode(part, memory=memory, cache=cache) for part in text.split(STRIDES[kind], 1)]
            same(torch.cat(steps, 1), whole, f"{kind} cache, strides {STRIDES[kind]}")


@law(lambda case: case.causal)
def cached_batches_are_alone(case: Case) -> None:
    """Prompts of unequal length padded on either side, read at once, then more tokens: as each row alone and whole.

    Among the steps are one in which a row rests (its token is padding) and one of two tokens for some rows.
    """
    more = ids(5, rows=len(LENGTHS), seed=31)
    rests = torch.ones_like(more, dtype=torch.bool)
    rests[1, 1] = rests[2, 3] = rests[0, 4] = False
    for kind, side in [(name, side) for name, sides in SIDES.items() for side in sides]:
        batch, keep = padded(texts(), side)
        whole = torch.cat((batch, more), 1), torch.cat((keep, rests), 1)
        _decode_as_alone(case, CACHES[kind], *whole, f"{kind}, {side}")


def _decode_as_alone(case: Case, make: Callable, batch: Tensor, keep: Tensor, what: str) -> None:
    model, first = case.model(), batch.shape[1] - 5
    with torch.no_grad():
        given = batch_of_sources(case, "left")
        memory = model.encode(given["source"], attention_mask=given["source_attention_mask"]) if case.both else None
        cache = make(model, len(LENGTHS))
        strides = (first, 1, 1, 1, 2)
        pairs = zip(batch.split(strides, 1), keep.split(strides, 1), strict=True)
        steps = [model.decode(part, memory=memory, attention_mask=real, cache=cache) for part, real in pairs]
        got = torch.cat(steps, 1)
        for n, source in enumerate(sources(case)):
            want = model(batch[n : n + 1][:, keep[n]], source=source)
            same(got[n : n + 1][:, keep[n]], want, f"{what}: row {n}")


@law(lambda case: case.causal)
def cache_follows_its_rows(case: Case) -> None:
    """reorder() and crop() leave a cache as if it had only ever read those rows and that many columns."""
    model, text, rows = case.model(), ids(8, rows=3, seed=5), torch.tensor([2, 0, 0])
    with torch.no_grad():
        memory = model.encode(ids(6, rows=3, seed=4)) if case.both else None
        picked = None if memory is None else _rows(memory, rows)
        want = model.decode(text[rows], memory=picked)
        for kind, make in CACHES.items():
            cache = make(model, 3)
            model.decode(text[:, :4], memory=memory, cache=cache)
            if kind != "sliding":
                model.decode(ids(3, rows=3, seed=6), memory=memory, cache=cache)
                cache.crop(4)
            cache.reorder(rows)
            same(model.decode(text[rows, 4:], memory=picked, cache=cache), want[:, 4:], f"{kind} cache")


def _rows(memory: ModelInputs, rows: Tensor) -> ModelInputs:
    return ModelInputs(
        memory.ids[rows],
        None if memory.attention_mask is None else memory.attention_mask[rows],
        hidden_states=memory.hidden_states[rows],
    )


# ------------------------------------------------------------------------------------ the same answer in another way


@law()
def hooked_is_fused(case: Case) -> None:
    """Listening to every attention weight changes no answer, and each row of weights sums to one."""
    model, (batch, keep) = case.model(), padded(texts(), "left")
    captured: dict[str, Tensor] = {}
    with torch.no_grad():
        quiet = model(batch, attention_mask=keep, **batch_of_sources(case, "right"))
        taps = [(n, m) for n, m in model.named_modules() if n.endswith("kernel.weights")]
        hooks = [m.register_forward_hook(lambda *a, n=n: captured.update({n: a[2]})) for n, m in taps]
        loud = model(batch, attention_mask=keep, **batch_of_sources(case, "right"))
        for hook in hooks:
            hook.remove()
    same(loud, quiet, "hooked")
    assert captured.keys() == {name for name, _ in taps}
    for name, weights in captured.items():
        sums = weights.sum(-1)
        assert ((sums - 1).abs() < 1e-9).logical_or(sums == 0).all(), f"{name}: a row sums to neither 1 nor 0"


@law(lambda case: hw.SDPA() in case.kernels)
def sdpa_is_eager(case: Case) -> None:
    """Answers and every gradient, with padding."""
    other = case.with_kernel(hw.Eager()).build(seed=0).double().eval()
    other.load_state_dict(case.model().state_dict())
    batch, keep = padded(texts(), "right")
    found = []
    for model in (case.model(), other):
        out = model(batch, attention_mask=keep, **batch_of_sources(case, "left"))
        found.append((out[keep], grads(model, pull(out[keep]))))
    same(found[0][0], found[1][0], "answers")
    assert found[0][1].keys() == found[1][1].keys()
    for name, grad in found[0][1].items():
        same(grad, found[1][1][name], f"gradient of {name}")


@law()
def recomputed_is_kept(case: Case) -> None:
    """Gradient checkpointing changes no gradient, dropout included."""
    model = copy.deepcopy(case.model()).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.3
        if hasattr(module, "kernel"):
            module.kernel.dropout = 0.2
    found = []
    for on in (False, True):
        model.gradient_checkpointing(on)
        torch.manual_seed(5)
        batch, keep = padded(texts(), "left")
        out = model(batch, attention_mask=keep, **batch_of_sources(case, "left"))
        found.append((out.detach(), grads(model, pull(out))))
    assert torch.equal(found[0][0], found[1][0]), "the answers differ"
    for name, grad in found[0][1].items():
        same(found[1][1][name], grad, f"gradient of {name}")


@law()
def copied_is_same(case: Case) -> None:
    """A deep copy answers alike and shares nothing; a model filled from a state dict answers alike."""
    model, text = case.model(), ids(6, rows=2)
    source = ids(5, rows=2, seed=9) if case.both else None
    filled = case.spec.build(seed=4).double().eval()
    filled.load_state_dict(model.state_dict())
    with torch.no_grad():
        want = model(text, source=source)
        for other in (copy.deepcopy(model), filled):
            assert torch.equal(other(text, source=source), want)
            assert not {p.data_ptr() for p in other.parameters()} & {p.data_ptr() for p in model.parameters()}
            for path, home in case.spec.tied:
                assert other.get_submodule(path).weight is other.get_submodule(home).weight, f"{path} is untied"


@law()
def written_is_read(case: Case) -> None:
    """A spec is what its JSON says and what its printed code makes."""
    spec, names = case.spec, dict(REGISTRY)
    for other in (from_dict(json.loads(json.dumps(to_dict(spec)))), eval(repr(spec), names)):
        assert other == spec and hash(other) == hash(spec) and repr(other) == repr(spec)


@law()
def accumulated_is_full_batch(case: Case) -> None:
    """Gradients of the rows one by one add up to those of the batch."""
    model, text = case.model(), ids(5, rows=3, seed=2)
    source = ids(4, rows=3, seed=9) if case.both else None
    weigh = torch.sin(torch.arange(3 * 5 * VOCAB).double()).view(3, 5, VOCAB)
    whole = grads(model, (model(text, source=source) * weigh).sum())
    parts = []
    for n in range(3):
        out = model(text[n : n + 1], source=None if source is None else source[n : n + 1])
        parts.append(grads(model, (out * weigh[n : n + 1]).sum()))
    for name, grad in whole.items():
        same(sum(part[name] for part in parts), grad, f"gradient of {name}")


@law()
def counted_is_built(case: Case) -> None:
    """The skeleton holds no memory, answers in shapes, and counts what the built model has."""
    meta_model, model = case.spec.on_meta(), case.model()
    tensors = [*meta_model.parameters(), *meta_model.buffers()]
    assert all(tensor.is_meta for tensor in tensors)
    assert sum(p.numel() for p in meta_model.parameters()) == sum(p.numel() for p in model.parameters())
    assert {n: p.shape for n, p in meta_model.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
    source = ids(4, rows=2).to("meta") if case.both else None
    assert meta_model(ids(5, rows=2).to("meta"), source=source).shape == (2, 5, VOCAB)


# --------------------------------------------------------------------------------------------------- who sees whom


@law()
def sees_exactly_what_it_may(case: Case) -> None:
    """The gradient of every answer with respect to every token is exactly zero where the rules forbid, nowhere else.

    Row b of the batch asks about token b; documents, padding and the source are in it too.
    """
    real, here = [n != 7 for n in range(9)], [1, 1, 1, 1, 1, 1, 2, 2, 2]  # token 7 is padding
    source_real, there = [True, True, True, False], [1, 1, 2, 2]
    _sees(case, [True] * 9, None, [True] * 4, None)
    _sees(case, real, None, source_real, None)
    if not case.pooled:
        _sees(case, real, here, source_real, there)


Real, Documents = list[bool], list[int] | None


def _sees(case: Case, real: Real, here: Documents, source_real: Real, there: Documents) -> None:
    given = {"attention_mask": real if not all(real) else None, "document_ids": here}
    if case.both:
        given |= {"source_attention_mask": source_real if not all(source_real) else None, "source_document_ids": there}
    rows = {name: torch.tensor(value).expand(len(real), -1) for name, value in given.items() if value is not None}
    if case.both:
        rows["source"] = ids(len(source_real), seed=3).expand(len(real), -1)
    captured = _gradients(case, ids(len(real), seed=1).expand(len(real), -1), rows)
    side = "decoder" if case.causal else "encoder"
    _matches(captured[side], visible(getattr(case.spec, side), real, here), real, "token")
    if case.both:
        inner, columns = visible(case.spec.encoder, source_real, there), range(len(source_real))
        for n in [n for n in range(len(real)) if real[n]]:
            own = [s for s in columns if source_real[s] and (there is None or there[s] == here[n])]
            seen = [any(inner[start][s] for start in own) for s in columns]
            _matches(captured["encoder"][n : n + 1], [seen], [True], f"source, token {n}")


def _gradients(case: Case, batch: Tensor, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """By stack, [Q, S]: how much answer n of row n depends on each embedded token."""
    model, embedded = case.model(), {}
    stacks = {
        name: stack for name, stack in (("encoder", model.encoder), ("decoder", model.decoder)) if stack is not None
    }

    def listen(name: str) -> Callable:
        def hook(module: object, args: object, out: Tensor) -> Tensor:
            embedded[name] = out.detach().requires_grad_()
            return embedded[name]

        return hook

    hooks = [stack.embed.register_forward_hook(listen(name)) for name, stack in stacks.items()]
    out = model(batch, **given)
    for hook in hooks:
        hook.remove()
    asked = out[torch.arange(len(out)), torch.arange(len(out))]
    pull(asked).backward()
    model.zero_grad(set_to_none=True)
    return {name: x.grad.abs().amax(-1) for name, x in embedded.items()}


def _matches(captured: Tensor, want: list[list[bool]], rows: list[bool], what: str) -> None:
    for q, row in enumerate(want):
        if not rows[q]:
            continue
        for k, may in enumerate(row):
            assert captured[q, k].isfinite(), f"{what} {q}: the gradient is not finite"
            if may:
                assert captured[q, k] > 0, f"{what} {q} does not see {k}, which it may"
            else:
                assert captured[q, k] == 0, f"{what} {q} sees {k}, which is hidden (gradient {captured[q, k]:.1e})"


@law()
def hidden_changes_nothing(case: Case) -> None:
    """Other ids in the padding, and for a decoder in the future, leave each answer as it is to the last bit."""
    model, (batch, keep) = case.model(), padded(texts(), "right", extra=2)
    given = batch_of_sources(case, "right")
    with torch.no_grad():
        want = model(batch, attention_mask=keep, **given)
        other = {**given, "source": (given["source"] + ~given["source_attention_mask"]) % VOCAB} if case.both else {}
        got = model((batch + ~keep) % VOCAB, attention_mask=keep, **other)
        assert torch.equal(got[keep], want[keep]), "the padding shows"
        if case.causal:
            source = ids(4, rows=2) if case.both else None
            text = ids(8, rows=2, seed=6)
            changed = torch.cat((text[:, :5], (text[:, 5:] + 1) % VOCAB), 1)
            before, after = (model(t, source=source)[:, :5] for t in (text, changed))
            assert torch.equal(before, after), "the future shows"


@law()
def blind_rows_are_finite(case: Case) -> None:
    """A row and a source of nothing but padding: answers and gradients are finite, and no other row changes."""
    model, (batch, keep) = case.model(), padded(texts(), "right")
    given = batch_of_sources(case, "right")
    with torch.no_grad():
        want = model(batch, attention_mask=keep, **given)[:2]
    keep[2] = False
    if case.both:
        given["source_attention_mask"][2] = False
    out = model(batch, attention_mask=keep, **given)
    assert out.isfinite().all(), "a row that sees nothing has answers that are not finite"
    same(out[:2][keep[:2]], want[keep[:2]], "the other rows")
    for name, grad in grads(model, pull(out)).items():
        assert grad.isfinite().all(), f"gradient of {name} is not finite"
