"""What a user can get wrong, and the line that says so: what must hold, what came, what to do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headwater import core as hw
from headwater.errors import BadInput, BadSetting, Fault, TooLong, Unavailable
from headwater.families import builders
from headwater.parts import swap
from headwater.variants.mean_pool_bridge import MeanPoolBridge
from headwater.variants.parallel_block import ParallelBlock
from headwater.variants.rope_scaling import LinearScaling, Llama3Scaling

SIZES = {"d_model": 16, "heads": 4, "layers": 1, "d_ff": 16, "dropout": 0.0}
IDS, KEEP = torch.zeros(2, 5, dtype=torch.long), torch.ones(2, 5, dtype=torch.bool)


def spec(**changes) -> hw.Model:
    return builders.decoder(11, **{**SIZES, **changes})


DECODER = spec().build(seed=0)
BOTH = builders.transformer(11, 11, **SIZES).build(seed=0)
LEARNED = spec(position="learned", max_positions=4).build(seed=0)


def swapped(kind, **fields) -> hw.Model:
    return swap(spec(), kind, lambda part: replace(part, **fields))


FFN = hw.FeedForward(8)
BRANCH = spec().decoder.layers[0].branches[0]
SETTINGS = {
    "heads that do not divide": (lambda: spec(heads=3).on_meta(), "Attention: heads must divide d_model (16), got 3"),
    "groups that do not divide": (lambda: spec(kv_heads=3), "Attention: kv_heads must divide heads (4), got 3"),
    "no heads": (lambda: spec(heads=0), "Attention: heads must be at least 1, got 0"),
    "no width": (lambda: hw.Stack(0, hw.Embeddings(3), ()), "Stack: d_model must be at least 1, got 0"),
    "no hidden width": (lambda: spec(d_ff=0), "FeedForward: d_ff must be at least 1, got 0"),
    "no words": (lambda: builders.decoder(0, **SIZES), "Embeddings: vocab must be at least 1, got 0"),
    "head of no width": (lambda: spec(head_dim=0), "Attention: head_dim must be at least 1, got 0"),
    "an odd head to turn": (
        lambda: spec(position="rotary", head_dim=3).on_meta(),
        "Rotary: the rotated width must be even",
    ),
    "an odd width of sines": (
        lambda: spec(d_model=15, heads=3).on_meta(),
        "Sinusoidal: the width must be even, got 15",
    ),
    "dropout of 1.5": (lambda: spec(dropout=1.5), "dropout must be from 0 up to 1, got 1.5; 0.1 is usual"),
    "dropout of everything": (lambda: spec(dropout=1.0), "dropout must be from 0 up to 1, got 1.0"),
    "dropout in a head": (
        lambda: hw.TokenClassificationHead(3, dropout=1.5),
        "TokenClassificationHead: dropout must be from 0 up to 1, got 1.5",
    ),
    "dropout in attention": (
        lambda: spec(attention_dropout=-0.1),
        "Attention: dropout must be from 0 up to 1, got -0.1",
    ),
    "an unknown activation": (lambda: spec(activation="gelo"), "got 'gelo'; did you mean 'gelu'"),
    "an unknown norm": (lambda: spec(norm="layr"), "norm must be one of layer, rms, got 'layr'; did you mean 'layer'"),
    "an unknown placement": (lambda: spec(norm_position="prae"), "got 'prae'; did you mean 'pre'"),
    "an unknown position": (lambda: spec(position="rotery"), "got 'rotery'; did you mean 'rotary'"),
    "an unknown back end": (lambda: spec(backend="flash"), "backend must be one of sdpa, eager, xformers, got 'flash'"),
    "an unknown size": (
        lambda: builders.decoder(9, d_modl=8),
        "there is no size called 'd_modl'; did you mean 'd_model'",
    ),
    "two vocabularies in one": (
        lambda: builders.transformer(9, 8, shared=True),
        "shared tables need one vocabulary, got 9 and 8",
    ),
    "a bias nobody has": (lambda: hw.Attention(2, bias="qx"), "bias must name projections out of 'qkvo', got 'qx'"),
    "sines in attention": (lambda: hw.Attention(2, position=hw.Sinusoidal()), "position must act on attention"),
    "rotary at the embedding": (
        lambda: hw.Embeddings(9, hw.Rotary()),
        "Embeddings: position must act on the embedding",
    ),
    "no stack": (lambda: hw.Model(), "Model: encoder or decoder must be given"),
    "two widths": (
        lambda: hw.Model(encoder=BOTH.spec.encoder, decoder=replace(BOTH.spec.decoder, d_model=20)).on_meta(),
        "encoder and decoder must have one d_model, got (16, 20); make them equal",
    ),
    "two roles alike": (lambda: hw.Block((BRANCH, BRANCH)), "roles must be given and differ"),
    "no branches": (lambda: hw.Block(()), "Block: roles must be given and differ"),
    "a role that is no name": (lambda: hw.Branch("self attn", FFN), "Branch: role must be a name"),
    "two layers for one branch": (lambda: hw.pre(hw.NoNorm(), a=FFN, b=FFN), "one role=layer must be given"),
    "a norm after a parallel sum": (
        lambda: ParallelBlock((hw.post(hw.LayerNorm(), ffn=hw.FeedForward(8)),)),
        "ParallelBlock: branches must not have a post_norm",
    ),
    "an order of layers that are not": (
        lambda: replace(spec().decoder, order=(0, 1)),
        "order must name layers below 1",
    ),
    "a window of nothing": (lambda: hw.SlidingWindow(0), "SlidingWindow: size must be at least 1, got 0"),
    "a table that begins after its end": (lambda: hw.Learned(2, offset=2), "Learned: size must be above offset, got 2"),
    "a share above the head": (
        lambda: hw.Rotary(partial_factor=1.5),
        "Rotary: partial_factor must be above 0 and at most 1, got 1.5",
    ),
    "a theta below one": (lambda: hw.Rotary(0.5), "Rotary: theta must be above 1, got 0.5; 10000 is usual"),
    "sines of a negative base": (lambda: hw.Sinusoidal(-1), "Sinusoidal: base must be above 1, got -1.0"),
    "bands the wrong way round": (
        lambda: Llama3Scaling(8, 4, 1, 64),
        "low_freq_factor must be above 0 and below high_freq_factor, got (4.0, 1.0)",
    ),
    "a factor that squeezes": (lambda: LinearScaling(0.5), "LinearScaling: factor must be at least 1, got 0.5"),
    "tied to nowhere": (
        lambda: hw.Model(decoder=spec().decoder, tied=(("decoder.embed.tokens", "head.oat"),)).on_meta(),
        "tied: every path must name a module, got 'head.oat'; see model.named_modules()",
    ),
    "tied in two shapes": (
        lambda: replace(spec(), head=hw.LMHead(12)).on_meta(),
        "tied: head.out and decoder.embed.tokens must have one shape, got ((12, 16), (11, 16)); untie them",
    ),
    "tied without a weight": (
        lambda: replace(spec(), tied=(("decoder.dropout", "decoder.embed.tokens"),)).on_meta(),
        "tied: both paths must have a weight",
    ),
    "weights without a rule": (
        lambda: replace(spec(), init=(("*.tokens.weight", hw.Normal(1)),)).build(),
        "init: some rule must match every path, got 'decoder.layers.0.self_attn.q.weight'; end the rules with",
    ),
    "sizes beyond all machines": (
        lambda: builders.decoder(2**31 - 1, **{**SIZES, "d_model": 2**31 - 1, "heads": 1, "d_ff": 8}).on_meta(),
        "every tensor must have a size a machine can name",
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_wrong_setting(name):
    make, words = SETTINGS[name]
    one_line(BadSetting, make, words)


def one_line(kind: type[Fault], make, words: str) -> None:
    with pytest.raises(kind) as caught:
        make()
    said = str(caught.value)
    assert words in said, said
    assert "\n" not in said and "; " in said and len(said) < 300, said


INPUTS = {
    "an id past the table": (lambda: DECODER(IDS + 11), "embed: ids must be from 0 to 10, got 11; use the tokenizer"),
    "an id below zero": (lambda: DECODER(IDS - 1), "embed: ids must be from 0 to 10, got -1"),
    "fractions": (lambda: DECODER(IDS.float()), "ids must be int64 or int32 [batch, length], got float32 (2, 5)"),
    "yes and no": (lambda: DECODER(KEEP), "ids must be int64 or int32 [batch, length], got bool (2, 5)"),
    "bytes": (lambda: DECODER(IDS.byte()), "ids must be int64 or int32 [batch, length], got uint8 (2, 5)"),
    "one row without a batch": (lambda: DECODER(IDS[0]), "ids must be int64 or int32 [batch, length], got int64 (5,)"),
    "three dimensions": (lambda: DECODER(IDS[None]), "ids must be int64 or int32 [batch, length], got int64 (1, 2, 5)"),
    "no tokens": (lambda: DECODER(IDS[:, :0]), "ids must be int64 or int32 [batch, length], got int64 (2, 0)"),
    "a list": (lambda: DECODER([[1, 2]]), "ids must be int64 or int32 [batch, length], got list"),
    "a mask of numbers": (
        lambda: DECODER(IDS, attention_mask=KEEP.long()),
        "attention_mask must be bool, got int64 (2, 5); True = real token",
    ),
    "a mask of fractions": (
        lambda: DECODER(IDS, attention_mask=KEEP.float()),
        "attention_mask must be bool, got float32 (2, 5)",
    ),
    "a mask that is a list": (lambda: DECODER(IDS, attention_mask=[True]), "attention_mask must be bool, got list"),
    "a mask for other tokens": (
        lambda: DECODER(IDS, attention_mask=KEEP[:, :4]),
        "attention_mask must have the shape of ids (2, 5), got bool (2, 4)",
    ),
    "a square mask": (
        lambda: DECODER(IDS, attention_mask=torch.ones(2, 5, 5, dtype=torch.bool)),
        "attention_mask must have the shape of ids (2, 5), got bool (2, 5, 5)",
    ),
    "one row for all": (
        lambda: DECODER(IDS, attention_mask=KEEP[:1]),
        "attention_mask must have the shape of ids (2, 5), got bool (1, 5)",
    ),
    "documents of fractions": (
        lambda: DECODER(IDS, document_ids=IDS.float()),
        "document_ids must be int, got float32 (2, 5); use .long()",
    ),
    "places of another shape": (
        lambda: DECODER(IDS, positions=IDS[:, :3]),
        "positions must have the shape of ids (2, 5), got int64 (2, 3)",
    ),
    "global tokens without a use": (
        lambda: DECODER(IDS, global_tokens=KEEP),
        "model: no layer that reads ids has global tokens, got some; leave global_tokens out",
    ),
    "global tokens as positions": (
        lambda: DECODER(IDS, global_tokens=IDS),
        "model: global_tokens must be bool, got int64 (2, 5); True = sees all tokens",
    ),
    "kinds where there are none": (
        lambda: DECODER(IDS, token_types=IDS),
        "embed: this model has no token types, got some",
    ),
    "a source too many": (lambda: DECODER(IDS, source=IDS), "model: it has one stack and takes no source, got one"),
    "a source too few": (
        lambda: BOTH(IDS),
        "model: an encoder-decoder needs a source, got none; call model(ids, source=...)",
    ),
    "a source of fractions": (
        lambda: BOTH(IDS, source=IDS.float()),
        "source must be int64 or int32 [batch, length], got float32",
    ),
    "a source with other rows": (
        lambda: BOTH(IDS, source=torch.zeros(3, 5, dtype=torch.long)),
        "model: source and ids must have as many rows, got 3 and 2",
    ),
    "a source mask of another shape": (
        lambda: BOTH(IDS, source=IDS, source_attention_mask=KEEP[:, :2]),
        "attention_mask must have the shape of source (2, 5), got bool (2, 2)",
    ),
    "a source id past the table": (lambda: BOTH(IDS, source=IDS + 20), "embed: ids must be from 0 to 10, got 20"),
    "half packed": (
        lambda: BOTH(IDS, source=IDS, document_ids=IDS + 1),
        "document_ids and source_document_ids belong together",
    ),
    "half packed the other way": (
        lambda: BOTH(IDS, source=IDS, source_document_ids=IDS + 1),
        "document_ids and source_document_ids belong together, got one of them; give both or neither",
    ),
    "no memory": (lambda: BOTH.decode(IDS), "cross_attn: it reads a source, got none"),
    "states for a memory": (
        lambda: BOTH.decode(IDS, memory=torch.zeros(2, 5, 16)),
        "memory must come from encode(), got float32",
    ),
    "encoding without an encoder": (lambda: DECODER.encode(IDS), "only an encoder can read a source, there is none"),
    "packed and pooled": (
        lambda: replace(BOTH.spec, bridge=MeanPoolBridge(2)).build(seed=0)(
            IDS, source=IDS, document_ids=IDS + 1, source_document_ids=IDS + 1
        ),
        "bridge: packed documents cannot be pooled, got some; give one document per row",
    ),
    "a cache of another model": (
        lambda: DECODER.decode(IDS, cache=hw.dynamic_cache(LEARNED)),
        "cache: it was made for another model; make one with dynamic_cache(model), sliding_cache or static_cache",
    ),
    "a growing cache of another batch": (
        lambda: used_by(hw.dynamic_cache(DECODER)),
        "cache: it holds 3 rows, got 2; use one cache",
    ),
    "a padded step of another batch": (
        lambda: used_by(hw.dynamic_cache(DECODER), attention_mask=KEEP),
        "cache: it holds 3 rows, got 2; use one cache for one batch, or reorder()",
    ),
    "a rolling cache of another batch": (lambda: used_by(hw.sliding_cache(DECODER)), "cache: it holds 3 rows, got 2"),
    "a fixed cache of another batch": (
        lambda: DECODER.decode(IDS, attention_mask=KEEP, cache=hw.static_cache(DECODER, 3, 9)),
        "cache: it was created for 3 rows, got 2; create one for that batch size",
    ),
    "a rolling cache that is to go back": (lambda: _crop_rolling(), "cache: a sliding cache cannot be cropped"),
}


def used_by(cache, **given):
    """A cache that has read three rows is given two."""
    DECODER.decode(torch.zeros(3, 2, dtype=torch.long), cache=cache)
    DECODER.decode(IDS, cache=cache, **given)


def _crop_rolling():
    model = swapped(hw.Attention, mask=hw.SlidingWindow(2)).build(seed=0)
    cache = hw.sliding_cache(model)
    model.decode(IDS, cache=cache)
    cache.crop(2)


@pytest.mark.parametrize("name", INPUTS)
def test_a_wrong_input(name):
    make, words = INPUTS[name]
    one_line(BadInput, make, words)


LONG = {
    "past the learned table": (
        lambda: LEARNED(IDS),
        "position.table: there are 4 positions, got a token at position 4; shorten",
    ),
    "past it by a cache": (
        lambda: _too_many_steps(),
        "position.table: there are 4 positions, got a token at position 4",
    ),
    "past a fixed cache": (
        lambda: DECODER.decode(IDS, cache=hw.static_cache(DECODER, 2, 4)),
        "cache: its length is 4 tokens, got token 5; create a longer one",
    ),
}


def _too_many_steps():
    cache = hw.dynamic_cache(LEARNED)
    for _ in range(5):
        LEARNED.decode(IDS[:, :1], cache=cache)


@pytest.mark.parametrize("name", LONG)
def test_too_long(name):
    make, words = LONG[name]
    one_line(TooLong, make, words)


def test_padding_takes_no_places():
    """Four real tokens fit into a table of four, however wide the batch."""
    keep = torch.tensor([[False] * 3 + [True] * 4, [True] * 4 + [False] * 3])
    assert LEARNED(torch.zeros(2, 7, dtype=torch.long), attention_mask=keep).isfinite().all()


def test_a_refused_step_leaves_the_cache_as_it_was():
    cache = hw.static_cache(DECODER, 2, 6)
    with torch.no_grad():
        whole = DECODER(torch.cat((IDS, IDS[:, :1] + 3), 1))
        DECODER.decode(IDS, cache=cache)
        for wrong in (IDS[:, :2], IDS[:1, :1]):
            with pytest.raises(BadInput):
                DECODER.decode(wrong, cache=cache)
        assert torch.allclose(DECODER.decode(IDS[:, :1] + 3, cache=cache), whole[:, -1:], atol=1e-5)


def test_more_than_the_machine_has():
    huge = builders.decoder(2**31 - 1, d_model=2**20, heads=1, layers=1, d_ff=8, dropout=0.0)
    one_line(Unavailable, lambda: huge.build(seed=0), "GB for weights; choose smaller sizes")


def test_a_cache_of_an_equal_model_is_welcome():
    """Equal parts are equal: a copy's cache fits."""
    assert DECODER.decode(IDS, cache=hw.dynamic_cache(spec().build(seed=3))).shape == (2, 5, 11)
