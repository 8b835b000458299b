"""After a fault, a cancellation or Ctrl-C the next call is as in a fresh process: generate, beams and the engine."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.errors import Fault
from headwater.families.builders import decoder
from headwater.generation.api import generate, stream
from headwater.generation.beam import Beam
from headwater.generation.engine import Engine
from headwater.generation.penalties import SuppressTokens
from headwater.generation.request import Request
from headwater.generation.sampling import Temperature
from headwater.generation.speculative import PromptLookup

SIZES = {"d_model": 32, "heads": 4, "layers": 2, "position": "rotary", "norm_position": "pre", "norm": "rms"}
ASKED = [
    {"max_tokens": 9},
    {"max_tokens": 9, "temperature": 0.8, "seed": 3},
    {"max_tokens": 9, "temperature": 0.8, "strategy": "look up"},
    {"max_tokens": 6, "strategy": "beam"},
]
WAYS = {"look up": PromptLookup(), "beam": Beam(3), None: None}


def made():
    """In float32: the compiled step does the work wherever there is a compiler."""
    return decoder(40, **SIZES).build(seed=0).eval()


def answers(model):
    asked = [{**one, "strategy": WAYS[one.get("strategy")]} for one in ASKED]
    return [list(generate(model, [1, 2, 1, 2, 5], **one).ids) for one in asked]


@pytest.fixture(scope="module")
def fresh():
    """What a process says that has done nothing else."""
    script = "import json, test_recovery as t; print(json.dumps(t.answers(t.made())))"
    here = __file__.rpartition("/")[0]
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=here, capture_output=True, text=True, timeout=120, check=True
    )
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def model():
    return made()


# ------------------------------------------------------------------------------------------------------ every trouble


def refused(model):
    with pytest.raises(Fault):
        generate(model, [1, 99], max_tokens=3)
    with pytest.raises(Fault):
        generate(model, [1], temperature=float("nan"))


def nothing_left(model):
    for way in WAYS.values():
        with pytest.raises(Fault):
            generate(model, [1, 2], max_tokens=4, suppress_tokens=list(range(40)), strategy=way)


def too_wide(model):
    """A beam beyond the vocabulary is refused, or answers with what there is."""
    for width in (40, 41, 500):
        try:
            assert len(generate(model, [1, 2], max_tokens=2, strategy=Beam(width)).ids) == 2
        except Fault as fault:
            assert "\n" not in str(fault)


def broken_for_a_while(model):
    weight = model.decoder.final_norm.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(torch.nan)
    try:
        for way in WAYS.values():
            with pytest.raises(Fault, match="weights are broken"):
                generate(model, [1, 2], max_tokens=4, strategy=way)
    finally:
        with torch.no_grad():
            weight.copy_(kept)


def interrupted_in_a_layer(model):
    def interrupt(*_):
        raise KeyboardInterrupt

    for way in WAYS.values():
        hook = model.decoder.layers[1].ffn.register_forward_hook(interrupt)
        try:
            with pytest.raises(KeyboardInterrupt):
                generate(model, [1, 2, 3], max_tokens=4, strategy=way)
        finally:
            hook.remove()


def interrupted_while_streaming(model):
    for way in (None, PromptLookup()):
        events = stream(model, [1, 2, 1, 2], max_tokens=9, temperature=1.0, strategy=way)
        next(events)
        with pytest.raises(KeyboardInterrupt):
            events.throw(KeyboardInterrupt)


def left_in_the_middle(model):
    events = stream(model, [1, 2, 1, 2], max_tokens=9)
    next(events)
    events.close()


def out_of_time(model):
    assert generate(model, [1, 2], max_tokens=30, timeout=1e-9).finish_reason == "timeout"


TROUBLES = [refused, nothing_left, too_wide, broken_for_a_while, interrupted_in_a_layer, interrupted_while_streaming,
            left_in_the_middle, out_of_time]  # fmt: skip


@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda trouble: trouble.__name__)
def test_the_next_call_is_a_fresh_one(model, fresh, trouble):
    trouble(model)
    assert answers(model) == fresh
    assert not torch.is_inference_mode_enabled() and torch.is_grad_enabled()


# --------------------------------------------------------------------------------------------------------- the engine


@settings(max_examples=25)
@given(st.lists(st.sampled_from(["fault", "cancel", "interrupt", "answer"]), max_size=8), st.booleans())
def test_an_engine_after_errors_equals_a_fresh_one(model, fresh, troubles, guesses):
    engine = Engine(model, max_num_seqs=2, max_prefill_tokens=8, drafter=PromptLookup() if guesses else None)
    asked = Request((1, 2, 1, 2, 5), processors=(Temperature(0.8),), max_tokens=9, seed=3)
    for trouble in troubles:
        row = engine.submit(Request((7, 8, 9), max_tokens=6))
        bad = (
            engine.submit(Request((7, 8), processors=(SuppressTokens(tuple(range(40))),), max_tokens=6))
            if trouble == "fault"
            else None
        )
        layer = model.decoder.layers[0].ffn
        hook = layer.register_forward_hook(_interrupt) if trouble == "interrupt" else None
        try:
            engine.step()
            engine.step()
        except KeyboardInterrupt:
            assert trouble == "interrupt"
        finally:
            hook.remove() if hook else None
        if trouble == "cancel":
            engine.cancel(row)
        assert bad is None or bad.finish_reason == "error" or not bad.events
    last = engine.submit(asked)
    engine.run()
    assert last.output_ids == fresh[1]
    assert last.finish_reason and not engine.waiting


def _interrupt(*_):
    raise KeyboardInterrupt
