"""Every formula of a walkthrough, evaluated on the matrices that are sent, gives the matrix that is sent."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
import torch
from algebra import Formula

from headwater.core.attention import Attention, CrossAttention
from headwater.core.feedforward import FeedForward, GatedFeedForward
from headwater.core.heads import LMHead, MLMTransform
from headwater.core.norms import LayerNorm, OffsetRMSNorm, RMSNorm
from headwater.core.positions import Rotary
from headwater.core.stack import Block, Branch, pre
from headwater.families.builders import decoder, encoder, transformer
from headwater.inspection.inputs import InspectedModel
from headwater.parts import swap
from headwater.quantization.layers import quantize
from headwater.serving.handlers.walkthrough import walkthrough
from headwater.serving.model_store import OpenModel, StoredModel, build_tiny_model, tiny_tokenizer
from headwater.serving.schemas import WalkthroughRequest
from headwater.variants.experts import Experts
from headwater.variants.parallel_block import ParallelBlock
from headwater.variants.soft_cap import SoftCap

TEXT, SOURCE = "the cat sat on the mat", "the dog 小河"
SMALL = {"d_model": 32, "heads": 4, "layers": 2, "d_ff": 48, "dropout": 0.0}
VOCAB = len(tiny_tokenizer())


def in_parallel(spec):
    return swap(spec, Block, lambda block: ParallelBlock(block.branches, block.dropout))


def with_head(spec, **more):
    return dataclasses.replace(spec, head=dataclasses.replace(spec.head, **more))


def of_attention(spec, kind=Attention, **more):
    return swap(spec, kind, lambda part: dataclasses.replace(part, **more))


def of_embedding(spec, **more):
    stack = dataclasses.replace(spec.encoder, embed=dataclasses.replace(spec.encoder.embed, **more))
    return dataclasses.replace(spec, encoder=stack)


MODELS = {
    "decoder, post-norm, biases": decoder(VOCAB, **SMALL),
    "decoder, pre-norm, no biases": decoder(VOCAB, **SMALL, norm_position="pre", bias=False, position="learned"),
    "decoder, sandwich": decoder(VOCAB, **SMALL, norm_position="sandwich", norm="rms", activation="gelu"),
    "decoder, rotary, grouped, gated": decoder(
        VOCAB, **SMALL, norm_position="pre", norm="rms", kv_heads=2, position="rotary", gated=True, activation="silu"
    ),
    "decoder, part of a head turns": of_attention(
        decoder(VOCAB, **SMALL, norm_position="pre", position="rotary"), position=Rotary(partial_factor=0.5)
    ),
    "decoder, norms on q and k": of_attention(
        decoder(VOCAB, **SMALL, norm_position="pre", position="rotary"), qk_norm=RMSNorm()
    ),
    "decoder, soft cap": of_attention(decoder(VOCAB, **SMALL, norm_position="pre"), kernel=SoftCap(2.0)),
    "decoder, alibi": decoder(VOCAB, **SMALL, norm_position="pre", position="alibi", activation="gelu_tanh"),
    "decoder, relative": decoder(VOCAB, **SMALL, norm_position="pre", position="relative"),
    "decoder, xl": decoder(VOCAB, **SMALL, norm_position="pre", position="xl"),
    "decoder, scaled head": with_head(decoder(VOCAB, **SMALL, norm_position="pre"), scale=0.25, bias=True),
    "decoder, in parallel": in_parallel(decoder(VOCAB, **SMALL, norm_position="pre")),
    "encoder, post-norm": encoder(VOCAB, **SMALL, activation="gelu"),
    "encoder, as BERT": of_embedding(
        with_head(
            encoder(VOCAB, **SMALL, activation="gelu", position="learned"),
            bias=True,
            transform=MLMTransform("gelu", LayerNorm()),
        ),
        token_types=2,
        norm=LayerNorm(1e-12),
    ),
    "encoder-decoder, post-norm": transformer(VOCAB, **SMALL),
    "encoder-decoder, pre-norm": transformer(VOCAB, **SMALL, norm_position="pre", bias=False, norm="rms"),
    "encoder-decoder, norms on q and k": of_attention(
        transformer(VOCAB, **SMALL, norm_position="pre"), kind=CrossAttention, qk_norm=LayerNorm()
    ),
}


def walked(spec, layer=0, head=1, change=lambda model: None):
    loaded = build_tiny_model("tiny decoder")
    loaded.model = spec.build(seed=3).eval()
    with torch.no_grad():
        for name, weight in loaded.model.named_parameters():  # biases and gains that are not 0 and 1
            if name.endswith("bias") or "norm" in name:
                weight.add_(0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name))))
    change(loaded.model)
    opened = OpenModel(StoredModel("x", "random"), (), InspectedModel.wrap(loaded), loaded)
    source = {"source": SOURCE} if opened.inspected.is_encoder_decoder else {}
    return walkthrough(opened, WalkthroughRequest(model="x", text=TEXT, layer=layer, head=head, **source)), loaded


def number(value):
    return -np.inf if value is None else value


def tables(sent):
    """name -> matrix, of all steps; a duplicate name is an error."""
    result: dict[str, np.ndarray] = {}
    for step in sent["steps"]:
        for one in [*step["matrices"], *step["weights"]]:
            assert one["name"] not in result
            values = np.array([[number(v) for v in row] for row in one["values"]], dtype=np.float64)
            assert list(values.shape) == one["shape"], "these models are sent completely"
            result[one["name"]] = values
    return result


def wrong(sent):
    """The formulas whose right-hand side does not equal the matrix of their left-hand side."""
    known, bad = tables(sent), []
    for step in sent["steps"]:
        assert step["formulas"], step
        for text in step["formulas"]:
            formula = Formula(text, step.get("rotary_dims", 0))
            expected = known[formula.result]
            got = np.broadcast_to(formula.value(known), expected.shape)
            seen = np.isfinite(expected)
            same = np.array_equal(seen, np.isfinite(got))
            bad += [] if same and np.allclose(got[seen], expected[seen], rtol=2e-4, atol=2e-5) else [text]
    return bad


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("name", MODELS)
def test_every_formula_is_true(name, layer):
    sent, _ = walked(MODELS[name], layer)
    assert wrong(sent) == []


def test_every_formula_of_packed_weights_is_true():
    sent, _ = walked(MODELS["decoder, rotary, grouped, gated"], 1, change=lambda model: quantize(model, "int8"))
    assert wrong(sent) == []


def test_a_wrong_formula_would_be_seen():
    """The planted faults: formulas without the bias or the norm, and every matrix changed."""
    sent, _ = walked(MODELS["decoder, post-norm, biases"])
    qkv = next(step for step in sent["steps"] if step["type"] == "qkv")
    qkv["formulas"][0] = "q = x W_q"
    assert wrong(sent) == ["q = x W_q"], "the bias is missing"
    sent, _ = walked(MODELS["decoder, pre-norm, no biases"])
    qkv = next(step for step in sent["steps"] if step["type"] == "qkv")
    assert qkv["formulas"][0] == "q = n W_q"
    qkv["formulas"][0] = "q = x W_q"
    assert wrong(sent) == ["q = x W_q"], "the norm is missing"
    for step in sent["steps"]:
        for one in [*step["matrices"], *step["weights"]]:
            before = one["values"]
            one["values"] = [[None if v is None else 1.25 * v + 0.4 for v in row] for row in before]
            assert wrong(sent), f"{one['name']} is in no formula"
            one["values"] = before


def names(sent):
    return [step["type"] for step in sent["steps"]]


def test_the_steps_are_in_the_order_of_the_block():
    pre_norm = names(walked(MODELS["decoder, pre-norm, no biases"])[0])
    attend = ["scores", "mask", "softmax", "weighted_values", "output_projection", "residual_add"]
    assert pre_norm == [
        "embedding",
        "position",
        "norm",
        "qkv",
        *attend,
        "norm",
        "ffn",
        "residual_add",
        "norm",
        "logits",
    ]
    post_norm = names(walked(MODELS["decoder, post-norm, biases"])[0])
    assert post_norm == ["embedding", "position", "qkv", *attend, "norm", "ffn", "residual_add", "norm", "logits"]
    both = names(walked(MODELS["encoder-decoder, pre-norm"])[0])
    assert both == [
        *["embedding", "position", "norm", "qkv", *attend],
        *["norm", "cross_qkv", *attend, "norm", "ffn", "residual_add", "norm", "logits"],
    ]
    rotary = names(walked(MODELS["decoder, rotary, grouped, gated"])[0])
    assert rotary[3:5] == ["qkv", "rotary"]


@pytest.mark.parametrize("name", ["decoder, post-norm, biases", "encoder-decoder, pre-norm"])
def test_a_later_layer_begins_with_the_stream_of_the_one_before(name):
    first, second = tables(walked(MODELS[name], 0)[0]), walked(MODELS[name], 1)[0]
    assert second["steps"][0]["type"] == "residual_stream" and second["steps"][0]["formulas"] == ["x = y_0"]
    np.testing.assert_allclose(tables(second)["x"], first["y_0"], atol=1e-6)
    assert not {"embedding", "position"} & set(names(second))


@pytest.mark.parametrize("name", MODELS)
def test_one_walk_joins_up_from_the_ids_to_the_probabilities(name):
    """The x of a layer is the y of the last one, a head is its slice of Z, and the last row of p is the output."""
    sent, loaded = walked(MODELS[name], 1, head=2)
    known = tables(sent)
    for step in sent["steps"]:
        if step["type"] == "output_projection":
            end = re.match(r"out(\w*) =", step["formulas"][0])[1]
            np.testing.assert_allclose(known[f"z{end}"], known[f"Z{end}"][:, slice(*step["head_columns"])])
    ids = torch.tensor([[token["id"] for token in sent["tokens"]]])
    source = {"source": torch.tensor([[t["id"] for t in sent["source"]]])} if sent["source"] else {}
    with torch.no_grad():
        probs = loaded.model(ids, **source)[0, -1].softmax(-1)
    expected = [float(probs[word["id"]]) for word in sent["top_tokens"]]
    assert [word["prob"] for word in sent["top_tokens"]] == pytest.approx(expected, rel=1e-4)
    assert list(known["p"][-1]) == pytest.approx(expected, rel=1e-3)


def test_a_large_model_sends_its_first_rows_and_columns():
    spec = decoder(VOCAB, **{**SMALL, "d_model": 128, "d_ff": 512}, norm_position="pre", norm="rms")
    for step in walked(spec)[0]["steps"]:
        for one in [*step["matrices"], *step["weights"]]:
            sizes = len(one["values"]), len(one["values"][0])
            assert sizes == tuple(min(64, n) for n in one["shape"])


def with_block(*branches):
    spec = dataclasses.replace(MODELS["encoder, post-norm"], head=LMHead(VOCAB), tied=())
    return dataclasses.replace(spec, encoder=dataclasses.replace(spec.encoder, layers=(Block(branches),)))


def test_a_block_of_any_branches_is_walked():
    own = pre(OffsetRMSNorm(), self_attn=Attention(4))
    more = Branch(
        "more", GatedFeedForward(48, "gelu", bias=True), norm=OffsetRMSNorm(), post_norm=LayerNorm(bias=False)
    )
    sent, _ = walked(with_block(own, more, pre(RMSNorm(), ffn=FeedForward(48, "quick_gelu"))))
    assert wrong(sent) == [] and names(sent).count("ffn") == 2


def test_a_layer_without_a_formula_is_named():
    sent, _ = walked(
        with_block(pre(RMSNorm(), self_attn=Attention(4)), pre(RMSNorm(), ffn=Experts(FeedForward(8), 4, 2)))
    )
    assert [step["formulas"] for step in sent["steps"] if step["type"] == "layer"] == [["f_2 = ExpertsLayer(n_f)"]]
