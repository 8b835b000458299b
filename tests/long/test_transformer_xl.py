"""Transformer-XL: the memory of earlier segments, adaptive embedding and softmax, the family in its public layout."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import headwater
from headwater import core as hw
from headwater.errors import BadFile, BadInput, BadSetting
from headwater.families import find_family
from headwater.families.builders import decoder, encoder
from headwater.families.transfoxl import transfo_xl_config
from headwater.parts import swap
from headwater.variants.adaptive import AdaptiveEmbeddings, AdaptiveHead, tied_clusters
from headwater.variants.transformer_xl import MemoryGroup, RecurrentAttention, SegmentMemory, segment_memory
from headwater.weights.hf_config import HFConfig

SIZES = {"d_model": 32, "heads": 4, "layers": 2, "norm_position": "pre", "dropout": 0.0}
CONFIG = {
    "vocab_size": 60, "cutoffs": [20, 40], "d_model": 32, "d_embed": 16, "n_head": 4, "d_head": 6, "d_inner": 48,
    "div_val": 2, "n_layer": 2, "mem_len": 10, "clamp_len": 7, "same_length": False,
}  # fmt: skip


def model(attention="xl:memory=6", rule=None) -> hw.Transformer:
    spec = decoder(40, **SIZES, attention=attention)
    if rule is not None:
        spec = swap(spec, RecurrentAttention, lambda part: replace(part, mask=rule))
    built = spec.build(seed=0).double().eval()
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.mul_(3)  # so that a wrong term shows
    return built


def in_segments(built, ids, *cuts):
    memory, outs = segment_memory(built), []
    for a, b in zip((0, *cuts), (*cuts, ids.shape[1]), strict=True):
        outs.append(built.decode(ids[:, a:b], cache=memory))
    return torch.cat(outs, 1)


def test_segments_equal_the_whole_while_all_fits_into_memory():
    built, ids = model("xl:memory=20"), torch.randint(0, 40, (2, 17))
    for cuts in ((9,), (1, 2, 16), (5, 10)):
        torch.testing.assert_close(in_segments(built, ids, *cuts), built(ids))


def test_same_length_makes_segments_equal_the_whole_whatever_the_cut():
    built, ids = model("xl:memory=6", hw.SlidingWindow(6)), torch.randint(0, 40, (2, 25))
    for cuts in ((9,), (1, 2, 20), (5, 10, 15, 20)):
        torch.testing.assert_close(in_segments(built, ids, *cuts), built(ids))


def test_a_memory_off_by_one_would_be_seen(monkeypatch):
    built, ids = model("xl:memory=6", hw.SlidingWindow(6)), torch.randint(0, 40, (2, 25))
    monkeypatch.setattr("headwater.variants.transformer_xl.memory_size", lambda _model: 4)
    assert (in_segments(built, ids, 12) - built(ids)).abs().max() > 1e-3


def test_gradients_reach_keys_and_values_of_the_memory_but_not_what_made_it():
    built, ids = model().train(), torch.randint(0, 40, (1, 12))
    memory = segment_memory(built)
    built.decode(ids[:, :6], cache=memory).sum()
    remembered = [kv for group in memory.group_caches for kv, _empty in group.kv.values()]
    assert len(remembered) == 2 and not any(t.requires_grad for t in remembered)

    def key_gradient(cache):
        built.zero_grad()
        built.decode(ids[:, 6:], cache=cache).square().mean().backward()
        return built.decoder.layers[0].self_attn.k.weight.grad.clone()

    assert (key_gradient(memory) - key_gradient(segment_memory(built))).abs().max() > 1e-6


def test_a_memory_is_saved_and_restored():
    built, ids = model(), torch.randint(0, 40, (2, 18))
    memory = segment_memory(built)
    assert memory.tensors() == {}
    built.decode(ids[:, :9], cache=memory)
    again = segment_memory(built)
    again.load(memory.tensors())
    torch.testing.assert_close(built.decode(ids[:, 9:], cache=again), built.decode(ids[:, 9:], cache=memory))
    with pytest.raises(BadInput, match="memory: it is that of another model"):
        segment_memory(built).load({"7.positions": torch.zeros(1, 1), "7.0.0": torch.zeros(1, 1, 1, 1)})


def test_generation_reads_as_the_whole():
    built, ids = model("xl:memory=20"), torch.randint(0, 40, (1, 9))
    assert headwater.check(built).ok
    cache = hw.dynamic_cache(built)
    chunks = torch.cat([built.decode(ids[:, a:b], cache=cache) for a, b in ((0, 4), (4, 5), (5, 9))], 1)
    torch.testing.assert_close(chunks, built(ids))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: encoder(40, **SIZES, attention="xl").build(), "attention xl remembers what came before"),
        (lambda: decoder(40, **SIZES, attention="xl:memory=0").build(), "memory must be at least 1"),
        (lambda: segment_memory(decoder(40, **SIZES).build()), "every layer must be RecurrentAttention"),
        (lambda: RecurrentAttention(4), "mask must be causal, for memory holds what came before"),
        (
            lambda: model().decode(torch.ones(1, 2, dtype=torch.long), cache=segment_memory(model("xl:memory=7"))),
            "cache: it was made for another model",
        ),
        (lambda: AdaptiveEmbeddings(10, 8, (5, 3)), "cutoffs must rise, between 0 and vocab (10)"),
        (lambda: AdaptiveHead(10, 8, (5,), 16), "div must leave a width for the last cluster"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(call, words):
    with pytest.raises((BadInput, BadSetting)) as fault:
        call()
    assert words in str(fault.value) and "\n" not in str(fault.value)


# ---------------------------------------------------------------------------------------------- adaptive embeddings


def adaptive(div=2, width=16, cutoffs=(20, 40)) -> hw.Transformer:
    spec = decoder(60, **SIZES)
    head = AdaptiveHead(60, width, cutoffs, div)
    stack = replace(spec.decoder, embed=AdaptiveEmbeddings(60, width, cutoffs, div))
    tied = tied_clusters("decoder.embed", head, 32)
    return replace(spec, decoder=stack, head=head, tied=tied).build(seed=0).double().eval()


@pytest.mark.parametrize(("div", "width", "cutoffs"), [(2, 16, (20, 40)), (1, 32, (20,)), (1, 16, ()), (4, 32, (3,))])
def test_adaptive_softmax_is_a_distribution_by_clusters(div, width, cutoffs):
    built, ids = adaptive(div, width, cutoffs), torch.randint(0, 60, (2, 5))
    log_probs = built(ids)
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(2, 5).double())
    log_probs.sum().backward()
    assert all(parameter.grad is not None for parameter in built.parameters())


def test_a_word_has_the_vector_of_its_cluster():
    built = adaptive()
    embed = built.decoder.embed
    word = embed(built.inputs(torch.tensor([[45]])), torch.zeros(1, 1))[0, 0]
    torch.testing.assert_close(word, embed.tables[2].weight[5] @ embed.projections[2].weight.mT)
    assert [tuple(table.weight.shape) for table in embed.tables] == [(20, 16), (20, 8), (20, 4)]
    assert built.head.tables[1].weight is embed.tables[1].weight
    with pytest.raises(BadInput, match="ids must be from 0 to 59, got 60"):
        built(torch.tensor([[60]]))


# --------------------------------------------------------------------------------------------------------- the family


@pytest.mark.parametrize(
    "change",
    [{}, {"pre_lnorm": True}, {"same_length": True}, {"untie_r": False}, {"div_val": 1, "d_embed": 32, "cutoffs": []}],
)
def test_a_config_is_read_and_written_back(change):
    config = {**CONFIG, **change}
    spec = find_family("transfo-xl").read_spec(HFConfig(config), "language")
    written = transfo_xl_config(spec)
    assert find_family("transfo-xl").read_spec(HFConfig(written), "language") == spec


def test_another_tying_is_refused():
    with pytest.raises(BadFile, match="tie_projs must be"):
        find_family("transfo-xl").read_spec(HFConfig({**CONFIG, "tie_projs": [True, True, True]}), "language")


@pytest.mark.parametrize("change", [{}, {"pre_lnorm": True}, {"untie_r": False}, {"div_val": 1, "cutoffs": [20]}])
def test_a_saved_folder_loads_again(change, tmp_path):
    spec = find_family("transfo-xl").read_spec(HFConfig({**CONFIG, **change}), "language")
    built = spec.build(seed=0).eval()
    headwater.save(built, tmp_path / "xl", layout="transformers")
    ids = torch.randint(0, 60, (2, 9))
    assert torch.equal(headwater.load(tmp_path / "xl").model(ids), built(ids))


@pytest.mark.slow
@pytest.mark.skipif("HEADWATER_TRANSFORMERS_4" not in os.environ, reason="names no folder with transformers 4.37.2")
def test_it_equals_the_public_implementation(tmp_path):
    """HEADWATER_TRANSFORMERS_4: a folder made by pip install --no-deps --target, because 5.x has no Transformer-XL."""
    script = Path(__file__).with_name("xl_oracle.py")
    environment = {**os.environ, "PYTHONPATH": os.environ["HEADWATER_TRANSFORMERS_4"]}
    subprocess.run([sys.executable, "-W", "ignore", script, tmp_path], check=True, env=environment, capture_output=True)
    folders = sorted(tmp_path.iterdir())
    assert len(folders) == 6
    for folder in folders:
        answers = load_file(folder / "answers.safetensors")
        (folder / "answers.safetensors").unlink()
        built = headwater.load(folder).model.eval()
        ids, memory = answers["ids"], segment_memory(built)
        assert isinstance(memory, SegmentMemory) and isinstance(memory.group_caches[0], MemoryGroup)
        with torch.no_grad():
            ours = {
                "whole": built(ids),
                "first": built.decode(ids[:, :5], cache=memory),
                "second": built.decode(ids[:, 5:], cache=memory),
                "states": headwater.load(folder, head="hidden_states").model(ids),
            }
        for name, value in ours.items():
            torch.testing.assert_close(value, answers[name], atol=2e-5, rtol=2e-5, msg=f"{folder.name}: {name}")
