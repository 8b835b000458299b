"""With copied weights the core equals torch's own layers: MultiheadAttention, and the encoder and decoder layer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from headwater import core as hw

D, HEADS, FF, LENGTH = 24, 4, 40, 7


def copy_attention(ours, theirs: nn.MultiheadAttention) -> None:
    """torch keeps q, k and v in one matrix, or in three where their widths differ."""
    for name, weight, bias in zip("qkv", theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3), strict=True):
        getattr(ours, name).weight.data.copy_(weight)
        getattr(ours, name).bias.data.copy_(bias)
    ours.out.load_state_dict(theirs.out_proj.state_dict())


def stack(block, embed_rows: int = 9) -> hw.Stack:
    return hw.Stack(D, hw.Embeddings(embed_rows), (block,))


def branches(placed, causal: bool, cross: bool, activation: str):
    norm, shape = hw.LayerNorm(), {"heads": HEADS, "bias": "qkvo"}
    own = placed(norm, self_attn=hw.Attention(**shape, mask=hw.Causal() if causal else hw.Bidirectional()))
    other = (placed(norm, cross_attn=hw.CrossAttention(**shape)),) if cross else ()
    return hw.Block((own, *other, placed(norm, ffn=hw.FeedForward(FF, activation))))


def roughen(model) -> None:
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))


def copy_norms(ours, theirs, roles: list[str], norm_position: str) -> None:
    end = "_norm" if norm_position == "pre" else "_post_norm"
    for n, role in enumerate(roles):
        getattr(ours, role + end).load_state_dict(getattr(theirs, f"norm{n + 1}").state_dict())
    ours.ffn.up.load_state_dict(theirs.linear1.state_dict())
    ours.ffn.down.load_state_dict(theirs.linear2.state_dict())


PLACED = {"pre": hw.pre, "post": hw.post}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm_position", PLACED)
def test_encoder_layer(norm_position, activation, causal):
    theirs = nn.TransformerEncoderLayer(
        D, HEADS, FF, 0.0, activation, batch_first=True, norm_first=norm_position == "pre", layer_norm_eps=1e-5
    )
    roughen(theirs)
    block = branches(PLACED[norm_position], causal, cross=False, activation=activation)
    model = hw.Model(encoder=stack(block)).build(seed=0)
    layer = model.encoder.layers[0]
    copy_attention(layer.self_attn, theirs.self_attn)
    copy_norms(layer, theirs, ["self_attn", "ffn"], norm_position)
    ids, keep = torch.randint(9, (3, LENGTH)), torch.ones(3, LENGTH, dtype=torch.bool)
    keep[1, 4:] = keep[2, 1:] = False
    x = model.encoder.embed.tokens(ids)
    hidden = nn.Transformer.generate_square_subsequent_mask(LENGTH) < 0 if causal else None
    for train in (True, False):  # torch takes another way in eval mode
        with torch.set_grad_enabled(train):
            want = theirs.train(train)(x, src_mask=hidden, src_key_padding_mask=~keep, is_causal=False)
            assert (model.train(train)(ids, attention_mask=keep) - want)[keep].abs().max() < 1e-5


@pytest.mark.parametrize("norm_position", PLACED)
def test_decoder_layer_and_every_gradient(norm_position):
    theirs = nn.TransformerDecoderLayer(D, HEADS, FF, 0.0, batch_first=True, norm_first=norm_position == "pre")
    roughen(theirs)
    decoder = stack(branches(PLACED[norm_position], causal=True, cross=True, activation="relu"))
    model = hw.Model(encoder=stack(branches(hw.pre, False, False, "relu")), decoder=decoder).build(seed=0)
    layer = model.decoder.layers[0]
    copy_attention(layer.self_attn, theirs.self_attn)
    copy_attention(layer.cross_attn, theirs.multihead_attn)
    copy_norms(layer, theirs, ["self_attn", "cross_attn", "ffn"], norm_position)
    ids, source = torch.randint(9, (2, LENGTH)), torch.randint(9, (2, 4))
    keep = torch.tensor([[True] * 4, [True, True, False, False]])
    memory = model.encode(source, attention_mask=keep)
    hidden = nn.Transformer.generate_square_subsequent_mask(LENGTH) < 0
    want = theirs(model.decoder.embed.tokens(ids), memory.hidden_states, tgt_mask=hidden, memory_key_padding_mask=~keep)
    got = model.decode(ids, memory=memory)
    assert (got - want).abs().max() < 1e-5
    weigh = torch.sin(torch.arange(got.numel())).view(got.shape)
    for out in (got, want):
        (out * weigh).sum().backward(retain_graph=True)
    for ours, their in ((layer.ffn.up, theirs.linear1), (layer.cross_attn.out, theirs.multihead_attn.out_proj)):
        assert (ours.weight.grad - their.weight.grad).abs().max() < 1e-4
    q = torch.cat([getattr(layer.self_attn, name).weight.grad for name in "qkv"])
    assert (q - theirs.self_attn.in_proj_weight.grad).abs().max() < 1e-4


def test_attention_weights_are_torch_s():
    theirs = nn.MultiheadAttention(D, HEADS, batch_first=True)
    roughen(theirs)
    model = hw.Model(encoder=stack(branches(hw.pre, False, False, "relu"))).build(seed=0)
    ours, received = model.encoder.layers[0], []
    copy_attention(ours.self_attn, theirs)
    ours.self_attn.kernel.weights.register_forward_hook(lambda *a: received.append(a[2]))
    ids = torch.randint(9, (2, LENGTH))
    x = ours.self_attn_norm(model.encoder.embed.tokens(ids))
    _, want = theirs(x, x, x, average_attn_weights=False)
    model(ids)
    assert (received[0] - want).abs().max() < 1e-6


def test_a_missing_scale_would_show():
    theirs = nn.MultiheadAttention(D, HEADS, batch_first=True)
    roughen(theirs)
    block = hw.Block((hw.pre(hw.NoNorm(), self_attn=hw.Attention(HEADS, bias="qkvo", scale=1.0)),))
    model = hw.Model(encoder=stack(block)).build(seed=0)
    copy_attention(model.encoder.layers[0].self_attn, theirs)
    ids = torch.randint(9, (2, LENGTH))
    x = model.encoder.embed.tokens(ids)
    assert (model(ids) - x - theirs(x, x, x)[0]).abs().max() > 1e-3
