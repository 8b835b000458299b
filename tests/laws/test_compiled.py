"""Compiled = eager, in one graph; exported = eager. Compiling is slow, so most runs are left to `make test-all`."""

from __future__ import annotations

import pytest
import torch
from combinations import CASES, Case
from law_tools import ids, same

from headwater import core as hw
from headwater.families import builders

SIZES = {"d_model": 16, "heads": 4, "layers": 2, "d_ff": 24, "dropout": 0.0}
QUICK = {
    "decoder, rotary": builders.decoder(23, position="rotary", norm_position="pre", norm="rms", gated=True, **SIZES),
    "encoder, relative": builders.encoder(23, position="relative", kv_heads=2, **SIZES),
    "both, learned": builders.transformer(23, position="learned", max_positions=32, backend="eager", **SIZES),
}


def ask(model, text, source, **given):
    return model(text, **({"source": source} if source is not None else {}), **given)


def inputs(spec: hw.Model, rows: int = 2, length: int = 6):
    both = spec.encoder is not None and spec.decoder is not None
    return ids(length, rows, seed=1), ids(5, rows, seed=2) if both else None


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled_is_eager(spec: hw.Model, backend: str, **given) -> None:
    model = spec.build(seed=0).eval()
    text, source = inputs(spec)
    fast = torch.compile(model, fullgraph=True, backend=backend)
    found = []
    for run in (model, fast):
        model.zero_grad()
        out = ask(run, text, source, **given)
        (out * torch.sin(torch.arange(out.numel()).view(out.shape))).sum().backward()
        found.append((out.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}))
    same(found[1][0], found[0][0], "compiled", limit=1e-5)
    for name, grad in found[0][1].items():
        same(found[1][1][name], grad, name, limit=1e-4)


KEEP = torch.tensor([[True] * 6, [False, False, True, True, True, True]])


@pytest.mark.parametrize("name", QUICK)
def test_one_graph(name):
    compiled_is_eager(QUICK[name], "aot_eager", attention_mask=KEEP)


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_compiled_for_real(name):
    compiled_is_eager(QUICK[name], "inductor")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES[::6], ids=lambda case: case.name)
def test_one_graph_for_many(case: Case):
    compiled_is_eager(case.spec, "eager", attention_mask=KEEP)


@pytest.mark.slow
def test_packed_documents_in_one_graph():
    compiled_is_eager(QUICK["decoder, rotary"], "aot_eager", document_ids=torch.tensor([[1, 1, 1, 2, 2, 0]] * 2))


def test_a_window_in_one_graph():
    spec = hw.Model(hw.LMHead(23), _narrow(QUICK["decoder, rotary"].decoder))
    model, text = spec.build(seed=0).eval(), ids(230, seed=1)
    same(torch.compile(model, fullgraph=True, backend="aot_eager")(text), model(text), "window", limit=1e-5)


def _narrow(stack):
    from dataclasses import replace

    from headwater.parts import swap

    return swap(stack, hw.Attention, lambda a: replace(a, mask=hw.SlidingWindow(8)))


def decode_with(spec: hw.Model, backend: str) -> None:
    """A fixed cache and one graph for every step: the shapes never change, so it is compiled once."""
    model = spec.build(seed=0).eval()
    text, source = inputs(spec, length=9)
    step = torch.compile(model.decode, fullgraph=True, backend=backend, dynamic=False)
    with torch.no_grad():
        memory = model.encode(source) if source is not None else None
        whole = model.decode(text, memory=memory)
        cache = hw.static_cache(model, 2, 16)
        model.decode(text[:, :4], memory=memory, cache=cache)
        torch._dynamo.utils.counters.clear()
        steps = [step(text[:, n : n + 1], memory=memory, cache=cache) for n in range(4, 9)]
    same(torch.cat(steps, 1), whole[:, 4:], "steps", limit=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "a step was compiled again"


def test_decoding_compiles_once():
    decode_with(QUICK["decoder, rotary"], "eager")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["decoder, rotary", "both, learned"])
def test_decoding_compiles_once_for_every_shape(name, backend):
    decode_with(QUICK[name], backend)


def exported(spec: hw.Model):
    model = spec.build(seed=0).eval()
    text, source = inputs(spec)
    given = {"source": source} if source is not None else {}
    program = torch.export.export(model, (text,), given)
    return program.module(), model


@pytest.mark.parametrize("name", QUICK)
def test_exported_is_eager(name):
    spec = QUICK[name]
    program, model = exported(spec)
    text, source = ids(6, 2, seed=7), ids(5, 2, seed=8) if "both" in name else None
    same(ask(program, text, source), ask(model, text, source), "exported", limit=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES[::9], ids=lambda case: case.name)
def test_exported_is_eager_for_many(case: Case):
    program, model = exported(case.spec)
    text, source = inputs(case.spec)
    same(ask(program, text, source), ask(model, text, source), "exported", limit=1e-5)


def test_any_length_is_exported_once():
    spec, length = QUICK["decoder, rotary"], torch.export.Dim("length", min=2, max=64)
    model = spec.build(seed=0).eval()
    program = torch.export.export(model, (ids(6, 2),), dynamic_shapes={"ids": {1: length}})
    for n in (3, 17):
        same(program.module()(ids(n, 2, seed=n)), model(ids(n, 2, seed=n)), f"length {n}", limit=1e-5)


def test_a_model_that_asks_python_does_not_fit_into_one_graph(monkeypatch):
    """The planted fault: a decision on values breaks the graph, and the law sees it."""
    from headwater.core.embeddings import ModelInputs

    monkeypatch.setattr(ModelInputs, "contiguous_mask", property(lambda self: bool(self.ids.max() > 3)))
    with pytest.raises((torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError)):
        compiled_is_eager(QUICK["decoder, rotary"], "eager")
