"""Who sees whom, measured: equal to the mask where there is one, and to the rule by hand where there is none."""

from __future__ import annotations

import numpy as np
import pytest

from headwater import core as hw
from headwater.errors import BadSetting
from headwater.families.attentions import ATTENTIONS
from headwater.families.builders import decoder, encoder, transformer
from headwater.inspection import measure_visibility
from headwater.inspection.visibility import Edge, layer_attentions, measure, measure_row
from headwater.variants.bigbird import draw_blocks
from headwater.variants.hierarchy import hierarchical

DISTANCE = np.arange(40)[:, None] - np.arange(40)[None]


def seen(name, causal, length=40):
    return measure_visibility(name, length, causal).attentions[0].seen


def test_masks_are_what_is_measured():
    assert (seen("full", True) == (DISTANCE >= 0)).all() and seen("full", False).all()
    assert (seen("window:size=5", True) == ((DISTANCE >= 0) & (DISTANCE < 5))).all()
    assert (seen("window:size=6", False) == (np.abs(DISTANCE) <= 3)).all()
    for name in ("linear", "performer:features=8"):
        assert (seen(name, True) == (DISTANCE >= 0)).all(), name
    assert seen("linformer:length=40,features=4", False).all()


def test_longformer_sees_a_window_and_the_first_token():
    expected = np.abs(DISTANCE) <= 2
    expected[0] = expected[:, 0] = True
    assert (seen("longformer:window=4", False) == expected).all()


def test_the_memory_ends_where_it_should():
    memory, segment = 12, 10
    start = np.arange(40) // segment * segment
    key = np.arange(40)[None]
    expected = (DISTANCE >= 0) & (key >= start[:, None] - memory)
    assert (seen("xl:memory=12", True) == expected).all()
    assert (seen("xl:memory=11", True) != expected).any(), "a memory off by one would be seen"


def test_chunks_of_hashed_tokens_see_no_later_token_and_few_others():
    matrix = seen("lsh:chunk=4", True)
    assert not matrix[DISTANCE < 0].any() and 1 < matrix.sum(1).mean() < 20


@pytest.mark.parametrize("name", sorted(ATTENTIONS))
def test_every_attention_by_name_can_be_measured_and_drawn(name, tmp_path):
    causal = name == "xl"
    result = measure_visibility(name, 48, causal)
    assert all(each.seen.shape == (48, 48) and each.seen.diagonal().any() for each in result.attentions)
    assert "a token sees at most" in str(result)


def test_a_model_gives_each_kind_once(tmp_path):
    model = transformer(
        20, d_model=32, heads=4, layers=3, encoder_attention="window:size=8", decoder_attention="linear"
    )
    result = measure_visibility(model.build(seed=0), 32)
    assert [each.name for each in result.attentions] == ["LocalWindow", "LinearAttention"]
    assert result.attentions[0].where == "encoder.layers.0.self_attn … encoder.layers.2.self_attn"
    assert result.save(tmp_path / "seen.png").stat().st_size > 5000


def test_a_leak_by_one_would_be_seen():
    rule = hw.And(hw.LocalWindow(40), hw.Bidirectional())
    assert measure(hw.Attention(2, mask=rule), 40)[DISTANCE == -1].all()
    assert not measure(hw.Attention(2, mask=hw.Causal()), 40)[DISTANCE == -1].any()


# ---------------------------------------------------------------------------------------------------- why a key is seen


def edges(name, causal=False, length=40):
    return measure_visibility(name, length, causal).attentions[0].edges


def test_each_edge_is_explained():
    near = np.abs(DISTANCE) <= 2
    longformer = np.where(near, Edge.NEAR, 0)
    longformer[0] = np.where(near[0], Edge.NEAR, Edge.GLOBAL)
    longformer[:, 0] = np.where(near[:, 0], Edge.NEAR, Edge.GLOBAL)
    assert (edges("longformer:window=4") == longformer).all()
    memory = edges("xl:memory=12", True)
    assert ((memory == Edge.MEMORY) == ((memory > 0) & (np.arange(40)[None] < np.arange(40)[:, None] // 10 * 10))).all()
    assert (edges("longt5:radius=3,block=4") == np.where(np.abs(DISTANCE) <= 3, Edge.NEAR, Edge.SUMMARY)).all()
    assert set(np.unique(edges("lsh:chunk=4"))) == {Edge.UNSEEN, Edge.HASHED}
    assert set(np.unique(edges("reformer:chunk=4"))) == {Edge.UNSEEN, Edge.NEAR}
    for name in ("linear", "performer:features=8", "linformer:length=40,features=4"):
        assert (edges(name) == Edge.MIXED).all(), name


def test_random_blocks_are_those_of_the_layer():
    """Of each layer and each head of the model itself."""
    model = encoder(20, d_model=32, heads=4, layers=2, attention="bigbird:block=4,random=1").build(seed=0)
    layers = layer_attentions(model)
    assert [layer.path for layer in layers] == ["encoder.layers.0.self_attn", "encoder.layers.1.self_attn"]
    for number, layer in enumerate(layers):
        drawn = {(4, int(block)) for block in draw_blocks(4, 10, 1, 0, number)[:, 3, 0]}  # of the tokens of block 4
        row = measure_row(layer, 40, 4 * 4 + 1)
        assert {(4, int(key) // 4) for key in np.flatnonzero(row == Edge.RANDOM)} == drawn
        assert np.flatnonzero(row == Edge.GLOBAL).tolist() == [0, 1, 2, 3, 36, 37, 38, 39]
        assert np.flatnonzero(row == Edge.NEAR).tolist() == list(range(12, 24))


def test_chunks_of_a_hierarchical_stack_meet_in_their_summaries():
    model = hierarchical(encoder(20, d_model=16, heads=2, layers=2), chunk=8, layers=1).build(seed=0)
    (layer,) = measure_visibility(model, 40).attentions
    block = np.arange(40) // 8
    assert layer.where == "encoder" and layer.name == "HierarchicalStack"
    assert (layer.edges == np.where(block[:, None] == block[None], Edge.NEAR, Edge.SUMMARY)).all()


@pytest.mark.parametrize("name", ["longformer:window=8", "longt5:radius=3,block=4", "window:size=6", "linear"])
def test_a_row_is_that_of_the_matrix(name):
    model = encoder(20, d_model=32, heads=4, layers=1, attention=name).build(seed=0)
    matrix = measure_visibility(model, 40).attentions[0].edges
    for position in (0, 17, 39):
        assert (measure_row(layer_attentions(model)[0], 40, position) == matrix[position]).all()


def test_a_row_of_a_long_text():
    model = encoder(20, d_model=32, heads=4, layers=1, attention="longformer:window=256").build(seed=0)
    (layer,) = layer_attentions(model)
    row = measure_row(layer, 4096, 2000)
    assert np.flatnonzero(row == Edge.NEAR).tolist() == list(range(2000 - 128, 2000 + 129))
    assert np.flatnonzero(row == Edge.GLOBAL).tolist() == [0]
    with pytest.raises(
        BadSetting, match="length must be from 1 to 4096 and position below it, got 4097 and 0; correct"
    ):
        measure_row(layer, 4097, 0)


@pytest.mark.parametrize("length", [0, 100_000])
def test_a_length_beyond_reason_is_refused(length):
    with pytest.raises(BadSetting, match="length must be from 1 to 512"):
        measure_visibility(decoder(20, d_model=16, heads=2, layers=1).build(), length)
    assert measure_visibility(encoder(20, d_model=16, heads=2, layers=1).build(seed=0), 1).attentions[0].seen.all()
