"""The comparison of attentions by formula: counted by hand, and against the states and keys that decoding keeps."""

from __future__ import annotations

import json

import pytest

from headwater.cli import main
from headwater.families.attentions import ATTENTIONS
from headwater.families.builders import decoder, encoder
from headwater.generation.forward import forward_last
from headwater.generation.kv_cache import BatchKVCache
from headwater.inspection.attention_costs import FORMULAS, compare_attentions
from headwater.inspection.costs import count, kv_cache_elements

SIZES = {"d_model": 64, "heads": 4, "layers": 2, "position": "rotary", "norm_position": "pre"}


def costs(build, length, **more):
    model = build(50, **SIZES, **more).on_meta()
    return {cost.name.partition(":")[0]: cost for cost in compare_attentions(model, length)}


def test_every_attention_is_compared():
    assert costs(decoder, 100).keys() == ATTENTIONS.keys() and FORMULAS.keys() >= ATTENTIONS.keys()


def test_the_formulas_by_hand():
    length, pair = 4096, 2 * 4 * (16 + 16)  # FLOPs of one query and key, over all heads
    found = costs(decoder, length)
    keys = {"full": 4096, "window": 256, "linear": 16 + 64, "performer": 512 + 64, "xl": 512, "lsh": 128}
    assert {name: found[name].keys for name in keys} == keys
    assert {name: found[name].flops for name in keys} == {name: length * number * pair for name, number in keys.items()}
    assert found["longformer"].flops is None and costs(encoder, length)["longformer"].keys == 513
    assert costs(encoder, length)["bigbird"].keys == 8 * 64 and costs(encoder, length)["xl"].flops is None


def test_what_is_kept_is_what_a_cache_holds():
    for name in ("linear", "performer:features=24", "full"):
        model = decoder(50, **SIZES, attention=name).build(seed=0)
        cache = BatchKVCache(model, [0], max_columns=40)
        forward_last(model, cache, [[1] * 40])
        assert cache.nbytes == 4 * kv_cache_elements(model, 40), name
    assert (
        costs(decoder, 40)["linear"].cached
        == kv_cache_elements(decoder(50, **SIZES, attention="linear").on_meta(), 40) // 2
    )
    assert costs(decoder, 400)["linear"].cached == costs(decoder, 4)["linear"].cached
    assert costs(decoder, 400)["lsh"].cached is None


def test_flops_of_a_model_use_the_same_numbers():
    full, linear = (count(decoder(50, **SIZES, attention=name), length=4096).flops for name in ("full", "linear"))
    assert linear["attention"] == 2 * costs(decoder, 4096)["linear"].flops // 4096 < full["attention"]
    assert full["linear"] == linear["linear"]


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_the_command_compares_where_a_length_is_given(flags, capsys):
    assert main(["show", "gpt2", "--length", "1000", *flags]) == 0
    out = capsys.readouterr().out
    if flags:
        assert [cost["name"].partition(":")[0] for cost in json.loads(out)["attentions"]] == list(ATTENTIONS)
    else:
        assert "keys per query" in out and "linear" in out
    assert main(["show", "gpt2"]) == 0
    assert "keys per query" not in capsys.readouterr().out
