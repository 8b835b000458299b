"""headwater.check on every family: none sees the future, the padding, or another row."""

from __future__ import annotations

import pytest
from made import CONFIGS, tiny

import headwater

DECODERS = ["gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma", "gpt_neox", "mixtral"]


@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_keeps_the_laws(family):
    report = headwater.check(tiny(family).model, probes=2)
    assert report.ok, str(report)
    kept = {verdict.law for verdict in report.verdicts if verdict.state == "kept"}
    assert "numbers" in kept
    assert "future" in kept or family not in DECODERS


def test_a_leak_is_seen():
    from headwater.core import Everyone, Past
    from headwater.parts import swap

    leaky = swap(tiny("llama").spec, Past, lambda rule: Everyone()).build(seed=0)
    assert not headwater.check(leaky, causal=True, probes=2).ok
