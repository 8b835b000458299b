"""What a user can get wrong with the attentions for long inputs: one line, before anything is allocated."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import headwater
from headwater import core as hw
from headwater.errors import BadFile, BadInput, BadSetting, Fault, TooLong
from headwater.families import FAMILIES
from headwater.parts import swap
from headwater.variants.axial_positions import AxialPositions
from headwater.variants.bigbird import BigBirdAttention
from headwater.variants.chunked_attention import ChunkedAttention
from headwater.variants.longformer import FirstTokenIsGlobal, LongformerAttention, QuestionIsGlobal, global_tokens_at
from headwater.variants.lsh_attention import LSHAttention
from headwater.variants.transient_global import TransientGlobalAttention
from headwater.weights.hf_config import HFConfig

IDS = torch.zeros(2, 12, dtype=torch.long)
SIZES = {"d_model": 16, "heads": 4, "layers": 2, "d_ff": 16, "dropout": 0.0}


def encoder(attention: hw.Attention) -> hw.Model:
    return swap(headwater.encoder(11, **SIZES), hw.Attention, lambda plain: attention)


LONGFORMER = LongformerAttention(4, mask=hw.LocalWindow(2), global_tokens=FirstTokenIsGlobal())
BIGBIRD = BigBirdAttention(4, block_size=2)
LONGT5 = TransientGlobalAttention(4, mask=hw.LocalWindow(2), block_size=4)
CHUNKS = ChunkedAttention(4, chunk=4)
AXIAL = AxialPositions((2, 4), (3, 5))
DECODER = headwater.decoder(11, **SIZES, attention="lsh:chunk=4").build(seed=0)
BIGBIRD_CONFIG = {
    "model_type": "big_bird", "vocab_size": 11, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 16, "max_position_embeddings": 40, "is_decoder": True,
}  # fmt: skip
LONGFORMER_CONFIG = {
    "model_type": "longformer", "vocab_size": 11, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 16, "max_position_embeddings": 40, "attention_window": [8],
}  # fmt: skip
SETTINGS = {
    "a causal window": (
        lambda: replace(LONGFORMER, mask=hw.SlidingWindow(3)),
        "LongformerAttention: mask must be a window on both sides, got SlidingWindow(size=3); give LocalWindow(size)",
    ),
    "no window": (lambda: replace(LONGFORMER, mask=hw.Bidirectional()), "mask must be a window on both sides"),
    "positions in the attention": (
        lambda: encoder(replace(LONGFORMER, position=hw.RelativeBias())).build(seed=0),
        "LongformerAttention cannot be used with a position encoding that adds a bias to the scores; use position",
    ),
    "chunks of nothing": (
        lambda: replace(CHUNKS, chunk=0),
        "ChunkedAttention: chunk must be at least 1, got 0; 64 is usual",
    ),
    "chunks in a window": (
        lambda: replace(CHUNKS, mask=hw.SlidingWindow(3)),
        "ChunkedAttention: mask must be Causal or Bidirectional, got SlidingWindow(size=3); the chunks are the window",
    ),
    "an odd number of buckets": (
        lambda: LSHAttention(4, buckets=(3,)),
        "LSHAttention: buckets must be even, got (3,); a direction and its opposite are two buckets",
    ),
    "keys apart from queries": (
        lambda: LSHAttention(4, kv_heads=2),
        "LSHAttention: kv_heads and v_head_dim must be left out, got (2, None); queries and keys are one vector",
    ),
    "a grid of another width": (
        lambda: AXIAL.build(16),
        "AxialPositions: widths must add up to d_model (16), got (3, 5); correct one",
    ),
    "summaries of nothing": (
        lambda: replace(LONGT5, block_size=0),
        "TransientGlobalAttention: block_size must be at least 1, got 0; 16 is usual",
    ),
    "summaries without their positions": (
        lambda: replace(LONGT5, position=hw.RelativeBias()),
        "TransientGlobalAttention: position must be RelativeBiasWithSummaries, got RelativeBias(); it says how far",
    ),
    "summaries without a window": (
        lambda: replace(LONGT5, mask=hw.Causal()),
        "TransientGlobalAttention: mask must be a LocalWindow, got Causal(); a decoder takes Attention with",
    ),
    "blocks of nothing": (
        lambda: replace(BIGBIRD, block_size=0),
        "BigBirdAttention: block_size must be at least 1, got 0",
    ),
    "blocks in a decoder": (
        lambda: replace(BIGBIRD, mask=hw.Causal()),
        "BigBirdAttention: mask must be Bidirectional, got Causal(); its last block sees all tokens and is seen by all",
    ),
    "blocks with a bias of positions": (
        lambda: encoder(replace(BIGBIRD, position=hw.Alibi())).build(seed=0),
        "BigBirdAttention cannot be used with a position encoding that adds a bias to the scores; use position",
    ),
    "a window with two halves of another size": (
        lambda: headwater.encoder(11, **SIZES, attention="longformer:window=7"),
        "longformer: window must be even, from 2, got 7; half of it lies on either side",
    ),
    "a window of nothing": (
        lambda: headwater.encoder(11, **SIZES, attention="longformer:window=0"),
        "longformer: window must be even, from 2, got 0; half of it lies on either side",
    ),
    "no round of hashing": (
        lambda: headwater.decoder(11, **SIZES, attention="lsh:rounds=0"),
        "LSHAttention: rounds must be at least 1, got 0; 1 is usual",
    ),
    "a bias beside the positions of Transformer-XL": (
        lambda: headwater.decoder(11, **SIZES, attention="xl", position="alibi"),
        "xl: position must add no bias, for this attention has relative positions of its own, got 'Alibi'; leave",
    ),
    "a bias beside the positions of LongT5": (
        lambda: headwater.encoder(11, **SIZES, attention="longt5", position="alibi"),
        "longt5: position must add no bias, for this attention has relative positions of its own, got 'Alibi'; leave",
    ),
    "the attention of an encoder that is not there": (
        lambda: headwater.decoder(11, **SIZES, encoder_attention="linear"),
        "decoder: encoder_attention must be left out, for this model has one stack, got 'linear'; use attention",
    ),
    "a BigBird decoder": (
        lambda: headwater.decoder(11, **SIZES, attention="bigbird"),
        "attention bigbird reads both directions, a decoder cannot; use window, or encoder_attention",
    ),
    "a decoder": (
        lambda: headwater.decoder(11, **SIZES, attention="longformer"),
        "attention longformer reads both directions, a decoder cannot; use window, or encoder_attention",
    ),
}
FILES = {
    "a decoder that sees the future": (
        lambda: FAMILIES["big_bird"].read_spec(HFConfig(dict(BIGBIRD_CONFIG)), "language"),
        "config.json: is_decoder is true; a BigBird decoder with blocks sees the tokens it predicts",
    ),
    "windows of other layers": (
        lambda: FAMILIES["longformer"].read_spec(HFConfig(dict(LONGFORMER_CONFIG)), "language"),
        "attention_window must be an integer from 2, or 2 of them, got '[8]'",
    ),
}
INPUTS = {
    "packed documents in summaries": (
        lambda: encoder(LONGT5).build(seed=0)(IDS, document_ids=IDS + 1),
        "TransientGlobalAttention cannot be used with packed documents; a summary would join documents",
    ),
    "packed documents in chunks": (
        lambda: encoder(CHUNKS).build(seed=0)(IDS, document_ids=IDS + 1),
        "ChunkedAttention cannot be used with packed documents; chunks would join documents; give each",
    ),
    "chunks in a cache": (
        lambda: DECODER.decode(IDS, cache=hw.dynamic_cache(DECODER)),
        "LSHAttention cannot be used with a KV cache; chunks of a longer row are others; read the whole row again",
    ),
    "packed documents in blocks": (
        lambda: encoder(BIGBIRD).build(seed=0)(IDS, document_ids=IDS + 1),
        "BigBirdAttention cannot be used with packed documents; the first and the last block would see all documents",
    ),
    "blocks padded on the left": (
        lambda: encoder(BIGBIRD).build(seed=0)(IDS, attention_mask=torch.arange(12).expand(2, 12) > 3),
        "BigBirdAttention cannot be used with padding on the left; blocks are counted from the start of a row",
    ),
    "a global token out of range": (
        lambda: global_tokens_at(IDS, [0, 12]),
        "global_tokens: a position must be from 0 to 11, got 12; the row has 12 tokens",
    ),
    "global tokens of another shape": (
        lambda: encoder(LONGFORMER).build(seed=0)(IDS, global_tokens=torch.ones(2, 5, dtype=torch.bool)),
        "model: global_tokens must have the shape of ids (2, 12), got bool (2, 5)",
    ),
    "a question without separators": (
        lambda: encoder(replace(LONGFORMER, global_tokens=QuestionIsGlobal(7))).build(seed=0)(IDS),
        "QuestionIsGlobal: each row must have 3 separators (id 7), got 0; mark the question with global_tokens=",
    ),
}


@pytest.mark.parametrize(
    ("fault", "act", "said"),
    [
        (kind, *case)
        for kind, table in ((BadSetting, SETTINGS), (BadFile, FILES), (BadInput, INPUTS))
        for case in table.values()
    ],
    ids=[*SETTINGS, *FILES, *INPUTS],
)
def test_one_line_says_what_to_do(fault, act, said):
    with pytest.raises(Fault) as caught:
        act()
    assert isinstance(caught.value, fault)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_row_beyond_the_grid_is_refused():
    spec = headwater.encoder(11, **SIZES)
    grid = AxialPositions((2, 4), (6, 10))
    model = swap(spec, hw.Embeddings, lambda embed: replace(embed, position=grid)).build(seed=0)
    assert model(IDS[:, :8]).shape == (2, 8, 11) and model.spec.max_positions == 8
    with pytest.raises(TooLong, match=r"there are 2 · 4 = 8 positions, got a token at position 11; shorten the input"):
        model(IDS)
