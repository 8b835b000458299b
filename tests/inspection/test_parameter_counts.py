"""Exact parameter counts without allocating a model: published totals, their formulas, shared tensors counted once."""

from __future__ import annotations

import math
import re
import time

import pytest
import torch
from torch import nn

import headwater
import headwater.core as core
from headwater.errors import NotFound
from headwater.families import builders
from headwater.families.presets import ALIASES, PRESETS, preset
from headwater.inspection.costs import meta_model, module_tree, num_parameters, parameters_by_group
from headwater.inspection.formulas import symbol_values

# Totals as published by the authors of each model, or computed from their table of sizes.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-65b": 65_285_660_672,
    "llama-70b": 68_976_648_192,
    "llama-2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "bert-base": 109_514_298,  # with the masked-language head, without the pooler
    "bert-large": 335_174_458,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_totals(name):
    assert num_parameters(meta_model(preset(name))) == PUBLISHED[name]


def expected_parameters(vocab, d, d_ff, layers):
    """The 2017 Transformer with one shared table: post-norm, biases everywhere, no final norm, no output bias."""
    attention, ffn, norm = 4 * (d * d + d), d * d_ff + d_ff + d_ff * d + d, 2 * d
    return vocab * d + layers * (attention + ffn + 2 * norm) + layers * (2 * attention + ffn + 3 * norm)


@pytest.mark.parametrize(
    ("name", "sizes"),
    {
        "mini": (32, 64, 1),
        "small": (64, 256, 2),
        "medium": (128, 512, 4),
        "base": (512, 2048, 6),
        "big": (1024, 4096, 6),
        "large": (1024, 4096, 24),
    }.items(),
)
def test_parameter_counts_of_the_presets_by_formula(name, sizes):
    assert num_parameters(meta_model(preset(name))) == expected_parameters(37_000, *sizes)
    assert num_parameters(meta_model(preset(name, vocab=100))) == expected_parameters(100, *sizes)


def test_parameter_counts_of_the_2017_paper():
    assert num_parameters(meta_model(preset("base"))) == 63_082_496
    assert num_parameters(meta_model(preset("big"))) == 214_245_376


def test_gpt3_from_its_table_of_sizes():
    d, layers, vocab, positions = 12_288, 96, 50_257, 2_048
    expected = (vocab + positions) * d + layers * (12 * d * d + 13 * d) + 2 * d
    assert num_parameters(meta_model(preset("gpt3"))) == expected == 174_604_259_328  # "175B"


def test_big_has_6_layers_and_large_24():
    """Some texts call 6 layers of 1024 large, others 24: here they are big and large."""
    assert len(preset("big").decoder.layers) == 6 and len(preset("large").decoder.layers) == 24
    assert preset("big").decoder.d_model == preset("large").decoder.d_model == 1024


def test_untied_embeddings_and_a_biased_output_are_counted():
    """Two vocabularies of 10,000, separate tables, an untied output with a bias, 512/8/2048/6: 59.5M, not 65M."""
    spec = core.Model(
        encoder=builders.transformer(10_000).encoder, decoder=builders.transformer(10_000).decoder,
        head=core.LMHead(10_000, bias=True))  # fmt: skip
    counted = headwater.count(spec)
    assert counted.parameters == 59_508_496
    assert counted.groups == {
        "embeddings": 10_240_000,
        "encoder": 18_914_304,
        "decoder": 25_224_192,
        "output": 5_130_000,
    }


def test_layers_are_counted_with_their_feed_forward():
    """A tutorial counts six layers as 6 · 4 · 512² ≈ 6.3M (encoder) and 9.4M (decoder), without feed-forward."""
    counted = headwater.count(builders.transformer(50_000, 50_000, shared=False)).groups
    assert counted["encoder"] == 18_914_304 and counted["decoder"] == 25_224_192
    assert counted["encoder"] > 3 * (without_ffn := 6 * 4 * 512**2) and without_ffn == 6_291_456


# ----------------------------------------------------------------------------------------------------------- the tree


def evaluate_formula(formula: str, sizes: dict[str, int]) -> int:
    """The value of a printed formula: sums of products of numbers, names and powers."""
    powers = {"²": 2, "³": 3}
    result = 0
    for product in formula.split(" + "):
        factors = []
        for factor in product.split("·"):
            name, power = factor.rstrip("²³"), powers.get(factor[-1], 1)
            factors.append(int(name) if name.isdigit() else sizes[name] ** power)
        result += math.prod(factors)
    return result


def all_nodes(node):
    yield node
    for child in node.children:
        yield from all_nodes(child)


@pytest.mark.parametrize("name", PRESETS)
def test_formulas_evaluate_to_the_counts(name):
    model = meta_model(preset(name))
    sizes = {letter: sizes[0] for letter, sizes in symbol_values(model).items()}
    root = module_tree(model)
    assert root.parameters == num_parameters(model)
    for node in all_nodes(root):
        assert sum(child.parameters for child in node.children) <= node.parameters
        if node.formula:
            assert evaluate_formula(node.formula, sizes) * node.repeats == node.parameters, node.path


def test_the_formula_of_attention():
    block = next(n for n in all_nodes(module_tree(meta_model(preset("base")))) if n.name == "layers")
    assert (block.repeats, block.formula) == (6, "4·d_model² + 2·d_model·d_ff + 9·d_model + d_ff")
    assert {n.name: n.formula for n in block.children}["self_attn"] == "4·d_model² + 4·d_model"
    grouped = next(n for n in all_nodes(module_tree(meta_model(preset("llama-70b")))) if n.name == "self_attn")
    assert grouped.formula == "2·d_model·kv_heads·head_dim + 2·d_model²"


def test_shared_tensors_are_counted_once():
    root = module_tree(meta_model(preset("base")))
    shared = {n.path: n.tied_to for n in all_nodes(root) if n.tied_to}
    assert shared == {"decoder.embed.tokens": "encoder.embed.tokens", "head.out": "encoder.embed.tokens"}
    untied = builders.transformer(37_000, 37_000, shared=False)
    assert num_parameters(meta_model(untied)) - root.parameters == 37_000 * 512, (
        "the target's table; its output stays tied"
    )


def test_layers_that_differ_are_not_collapsed():
    narrow, wide = (builders.decoder(10, d_model=8, heads=2, layers=1, d_ff=n).decoder.layers[0] for n in (8, 16))
    spec = core.Model(decoder=core.Stack(8, core.Embeddings(10), (narrow, narrow, wide, narrow)))
    layers = next(n for n in all_nodes(module_tree(meta_model(spec))) if n.name == "layers")
    assert [(n.name, n.repeats) for n in layers.children] == [("0…1", 2), ("2", 1), ("3", 1)]
    assert sum(n.parameters for n in layers.children) == layers.parameters


def test_any_module_has_a_tree():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False), nn.ReLU())
    model[1].weight = model[0].weight
    root = module_tree(model)
    assert root.parameters == 15 and [n.tied_to for n in root.children] == ["", "0"]
    assert parameters_by_group(model) == {"other": 15} and module_tree(nn.ReLU()).parameters == 0


def test_counting_a_large_model_is_fast_and_allocates_nothing():
    times = []
    for _ in range(3):  # a shared machine may stall any one of them
        start = time.perf_counter()
        counted = headwater.count(preset("llama-70b"))
        times.append(time.perf_counter() - start)
    assert min(times) < 1 and counted.parameters == PUBLISHED["llama-70b"]
    assert all(p.is_meta for p in meta_model(preset("llama-70b")).parameters())


def test_a_meta_model_has_the_shapes_of_the_built_model():
    spec = builders.decoder(10, d_model=8, heads=2, layers=2)
    meta_shapes, built_shapes = (
        {n: tuple(p.shape) for n, p in m.state_dict().items()} for m in (meta_model(spec), spec.build(seed=0))
    )
    assert meta_shapes == built_shapes


# ------------------------------------------------------------------------------------------------------------ presets


def test_every_preset_is_a_spec():
    for name in PRESETS:
        spec = preset(name)
        assert spec == preset(name.upper()) and repr(spec).startswith("Model(")
    assert set(ALIASES.values()) <= set(PRESETS) and not set(ALIASES) & set(PRESETS)


@pytest.mark.parametrize("name", ["mini", "small"])
def test_small_presets_run(name):
    model = headwater.preset(name, vocab=20).build(seed=0)
    assert model(torch.ones(2, 3, dtype=torch.long), source=torch.ones(2, 4, dtype=torch.long)).shape == (2, 3, 20)


@pytest.mark.parametrize(("name", "nearest"), [("gpt-2", "gpt2"), ("lama-7b", "llama-7b"), ("bsae", "base")])
def test_an_unknown_preset_is_refused_with_the_nearest(name, nearest):
    with pytest.raises(NotFound, match=re.escape(f"no preset is called {name!r}; did you mean {nearest!r}?")):
        preset(name)
