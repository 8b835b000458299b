"""headwater.check on every family: no position depends on the future, the padding, or another row."""

from __future__ import annotations

import pytest
from tiny_models import CONFIGS, tiny

import headwater

DECODERS = ["gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma", "gpt_neox", "mixtral"]


@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_keeps_the_laws(family):
    report = headwater.check(tiny(family).model, num_probes=2)
    assert report.ok, str(report)
    kept = {verdict.law for verdict in report.verdicts if verdict.status == "passed"}
    assert "numbers" in kept
    assert "future" in kept or family not in DECODERS


def test_a_leak_is_seen():
    from headwater.core import Bidirectional, Causal
    from headwater.parts import swap

    leaky = swap(tiny("llama").spec, Causal, lambda rule: Bidirectional()).build(seed=0)
    assert not headwater.check(leaky, causal=True, num_probes=2).ok
