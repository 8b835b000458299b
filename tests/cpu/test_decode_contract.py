"""What decode_step.c takes on trust is checked before it is called: what does not fit never reaches it."""

from __future__ import annotations

import os
import sys

import pytest
import torch
from torch import nn

import headwater
from headwater.core import (
    Attention,
    Block,
    Causal,
    Embeddings,
    GatedFeedForward,
    LayerNorm,
    Learned,
    LMHead,
    Model,
    RMSNorm,
    Rotary,
    Stack,
    pre,
)
from headwater.cpu.build import TensorMismatch, decode_constants, decode_library, unavailable_reason
from headwater.cpu.decode import ScratchBuffers, c_matrix
from headwater.cpu.loss import topk_logprobs
from headwater.errors import BadInput
from headwater.families.builders import transformer
from headwater.generation.forward import encode_sources, forward_last
from headwater.generation.kv_cache import BatchKVCache
from headwater.generation.native import NativeDecoder, NativeEncoder
from headwater.quantization.layers import BLOCK_FORMATS, QUANTIZERS, QuantizedEmbedding, QuantizedLinear, quantize
from headwater.text.train import train_tokenizer
from headwater.weights.native import save_native

needs_a_compiler = pytest.mark.skipif(decode_library() is None, reason=f"no compiled step here: {unavailable_reason()}")
NORM = LayerNorm()


def block(d_ff: int = 96, heads: int = 4, norm=NORM) -> Block:
    attn = Attention(heads, kv_heads=2, position=Rotary(), mask=Causal(), bias="qkvo", qk_norm=RMSNorm())
    return Block((pre(norm, self_attn=attn), pre(norm, ffn=GatedFeedForward(d_ff, bias=True))))


def decoder(*blocks: Block, vocab: int = 50) -> Model:
    return Model(decoder=Stack(64, Embeddings(vocab, Learned(40)), blocks, NORM), head=LMHead(vocab, bias=True))


def built(spec: Model):
    return spec.build(seed=0).eval()


def scores(model, fast: bool) -> torch.Tensor:
    slots = BatchKVCache(model, ["a"])
    slots.native_decoder = (model, NativeDecoder.try_build(model) if fast else None)
    return torch.cat([forward_last(model, slots, [[1, 2, 3, 4, 5, 6]]), forward_last(model, slots, [[7]])])


# ------------------------------------------------------------------------------------------------ a model that differs


@needs_a_compiler
@pytest.mark.parametrize("sizes", [(64, 128), (128, 64), (96, 4096), (96, 96, 128)])
def test_layers_of_unequal_width_are_left_to_the_modules(sizes: tuple[int, ...]):
    model = built(decoder(*map(block, sizes)))
    assert NativeDecoder.try_build(model) is None
    assert torch.equal(scores(model, True), scores(model, False))
    assert NativeDecoder.try_build(built(decoder(*map(block, (96,) * len(sizes))))) is not None


def shrunk(linear: nn.Linear, rows: int = 0, columns: int = 0) -> nn.Parameter:
    weight = linear.weight.detach()
    return nn.Parameter(weight[: len(weight) - rows, : weight.shape[1] - columns].contiguous())


@needs_a_compiler
@pytest.mark.parametrize(
    "name", ["self_attn.q", "self_attn.k", "self_attn.v", "self_attn.out", "ffn.up", "ffn.gate", "ffn.down"]
)
@pytest.mark.parametrize("how", ["fewer rows", "fewer columns", "a shorter bias", "strided", "a longer bias", "double"])
def test_a_matrix_that_is_not_what_c_reads(name: str, how: str):
    model = built(decoder(block(), block()))
    linear = model.decoder.layers[1].get_submodule(name)
    assert NativeDecoder.try_build(model) is not None
    if how == "fewer rows":
        linear.weight = shrunk(linear, rows=32)
    elif how == "fewer columns":
        linear.weight = shrunk(linear, columns=32)
    elif how == "a shorter bias":
        linear.bias = nn.Parameter(linear.bias.detach()[:-1].clone())
    elif how == "a longer bias":
        linear.bias = nn.Parameter(torch.zeros(len(linear.bias) + 32))
    elif how == "strided":
        linear.weight = nn.Parameter(linear.weight.detach().repeat(1, 2)[:, ::2])
    else:
        linear.double()
    assert NativeDecoder.try_build(model) is None


@needs_a_compiler
@pytest.mark.parametrize(
    "path",
    [
        "decoder.final_norm",
        "decoder.layers.1.self_attn_norm",
        "decoder.layers.0.ffn_norm",
        "decoder.layers.1.self_attn.q_norm",
        "decoder.layers.0.self_attn.k_norm",
    ],
)
def test_a_norm_that_is_not_what_c_reads(path: str):
    for name in ("weight", "bias"):
        for change in (lambda t: t[:-1].clone(), lambda t: t.repeat(2)[::2], lambda t: t.repeat(2)):
            model = built(decoder(block(), block()))
            norm = model.get_submodule(path)
            if getattr(norm, name, None) is not None:
                setattr(norm, name, nn.Parameter(change(getattr(norm, name).detach())))
                assert NativeDecoder.try_build(model) is None


@needs_a_compiler
@pytest.mark.parametrize("path", ["head.out", "decoder.embed.tokens"])
def test_a_table_or_head_that_is_not_what_c_reads(path: str):
    for change in (lambda t: t[:, :32].contiguous(), lambda t: t[:-1].clone(), lambda t: t.repeat(1, 2)):
        model = built(decoder(block(), block()))
        module = model.get_submodule(path)
        module.weight = nn.Parameter(change(module.weight.detach()))
        assert NativeDecoder.try_build(model) is None


@needs_a_compiler
def test_packed_blocks_that_are_not_what_c_reads():
    for path, change in {
        "decoder.layers.0.self_attn.q": lambda b: b[:-32],
        "decoder.layers.1.ffn.down": lambda b: b[:, :-34],
        "decoder.layers.1.self_attn.out": lambda b: b.repeat(1, 2)[:, ::2],
        "head.out": lambda b: b.to(torch.int8),
    }.items():
        model = built(decoder(block(), block()))
        quantize(model, "int8")
        assert NativeDecoder.try_build(model) is not None
        module = model.get_submodule(path)
        module.blocks = change(module.blocks)
        assert NativeDecoder.try_build(model) is None


@needs_a_compiler
def test_a_rotation_wider_than_a_head_is_not_known():
    model = built(decoder(block(), block()))
    model.decoder.position_encodings[0].inv_freq = torch.ones(9)
    assert NativeDecoder.try_build(model) is None


@needs_a_compiler
def test_a_branch_of_another_name_is_left_to_the_modules():
    attn = Attention(4, mask=Causal())
    model = built(decoder(Block((pre(NORM, self_attn=attn), pre(NORM, mlp=GatedFeedForward(96))))))
    assert NativeDecoder.try_build(model) is None
    assert scores(model, True).shape == (2, 50)


@needs_a_compiler
def test_weights_that_move_while_c_holds_them_stay_alive():
    """model.half() gives every parameter other memory; what C points to is kept alive."""
    model = built(decoder(block(), block()))
    want, slots = scores(model, True), BatchKVCache(model, ["a"])
    first = forward_last(model, slots, [[1, 2, 3, 4, 5, 6]])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = torch.full_like(parameter, 7.0)
    spoilt = [torch.full_like(parameter, -7.0) for parameter in model.parameters()]
    torch.testing.assert_close(torch.cat([first, forward_last(model, slots, [[7]])]), want)
    assert spoilt


def test_a_matrix_in_parts_of_blocks_is_a_misfit():
    with pytest.raises(TensorMismatch, match="whole blocks of 32"):
        c_matrix(torch.zeros(4, 40), "F32", 4, 40)
    with pytest.raises(TensorMismatch, match="C needs"):
        c_matrix(torch.zeros(4, 64), "F32", 4, 32)
    with pytest.raises(TensorMismatch, match="C needs"):
        c_matrix(torch.zeros(4, 34, dtype=torch.uint8), "Q4_0", 4, 32)


# ------------------------------------------------------------------------------------------------- a call that differs

GIVEN = {
    "a negative token": (-1, 0, 0, 0, 1, -1),
    "a token beyond the table": (50, 0, 0, 0, 1, -1),
    "a negative position": (1, -1, 0, 0, 1, -1),
    "a position beyond the cache": (1, 10_000, 0, 0, 1, -1),
    "a position beyond the learned ones": (1, 40, 0, 0, 1, -1),
    "a negative slot": (1, 0, -1, 0, 1, -1),
    "a slot beyond the cache": (1, 0, 9, 0, 1, -1),
    "sees more than there is": (1, 0, 0, 0, 10_000, -1),
    "sees less than nothing": (1, 0, 0, 0, -1, -1),
    "an adapter of a model without one": (1, 0, 0, 0, 1, 0),
}


@pytest.fixture
def stepper() -> NativeDecoder:
    model = built(decoder(block(), block()))
    slots = BatchKVCache(model, ["a"])
    forward_last(model, slots, [[1, 2, 3]])
    return slots.native_decoder[1]


@needs_a_compiler
@pytest.mark.parametrize("what", GIVEN)
def test_a_token_outside_of_its_bounds_is_a_misfit(what: str, stepper: NativeDecoder):
    assert stepper.c_model.length > 40
    stepper.run([(1, 3, 0, 0, 4, -1)], [0], torch.empty(1, 50))
    with pytest.raises(TensorMismatch, match="a token must lie within"):
        stepper.run([(1, 3, 0, 0, 4, -1), GIVEN[what]], [0], torch.empty(1, 50))


@needs_a_compiler
@pytest.mark.parametrize("asked", [[2], [-1], [1, 0], [0, 0]])
def test_rows_asked_for_are_ascending_and_there(asked: list[int], stepper: NativeDecoder):
    given = [(1, 3, 0, 0, 4, -1), (1, 4, 0, 0, 5, -1)]
    stepper.run(given, [0, 1], torch.empty(2, 50))
    with pytest.raises(TensorMismatch, match="ascending and below 2"):
        stepper.run(given, asked, torch.empty(len(asked), 50))


@needs_a_compiler
@pytest.mark.parametrize("out", [torch.empty(1, 49), torch.empty(2, 50), torch.empty(1, 50).double(), torch.empty(50)])
def test_scores_have_their_room(out: torch.Tensor, stepper: NativeDecoder):
    with pytest.raises(TensorMismatch):
        stepper.run([(1, 3, 0, 0, 4, -1)], [0], out)


@needs_a_compiler
def test_a_cache_is_what_c_reads(stepper: NativeDecoder):
    k = torch.zeros(1, 2, 64, 16)
    stepper.attach_cache([(k, k), (k, k)])
    for odd in (k[:, :1], k[:, :, :32], k.transpose(1, 2), k.double(), torch.zeros(1, 2, 64, 8)):
        with pytest.raises(TensorMismatch):
            stepper.attach_cache([(k, k), (k, odd)])
    with pytest.raises(ValueError, match="shorter"):
        stepper.attach_cache([(k, k)])


@needs_a_compiler
def test_homes_and_sources_are_within_the_cache():
    model = built(transformer(50, d_model=64, heads=4, layers=2, d_ff=96))
    slots = BatchKVCache(model, ["a", "b"])
    encode_sources(model, slots, [(3, 4, 5), (6, 7)])
    forward_last(model, slots, [[1], [2]])
    stepper = slots.native_decoder[1]
    length, lengths = stepper.c_model.length, torch.tensor([3, 2], dtype=torch.int32)
    home = torch.zeros(2, length, dtype=torch.int32)
    stepper.set_batch(home, lengths)
    stepper.run([(1, 1, 1, 1, 2, -1)], [0], torch.empty(1, 50))
    for bad in (home - 1, home + 2, home[:, :-1], home.long()):
        with pytest.raises(TensorMismatch):
            stepper.set_batch(bad, lengths)
    for bad in (lengths + 1, lengths - 3, lengths.long()):
        with pytest.raises(TensorMismatch):
            stepper.set_batch(home, bad)
    stepper.set_batch(home[:1], lengths)
    with pytest.raises(TensorMismatch):
        stepper.run([(1, 1, 1, 1, 2, -1)], [0], torch.empty(1, 50))
    for without in (None, lengths[:1]):
        stepper.set_batch(None, without)
        with pytest.raises(TensorMismatch):
            stepper.run([(1, 1, 1, 1, 2, -1)], [0], torch.empty(1, 50))


@needs_a_compiler
def test_an_encoder_has_no_bounds_before_it_has_a_cache():
    model = built(transformer(50, d_model=64, heads=4, layers=2, d_ff=96))
    with pytest.raises(TensorMismatch):
        NativeEncoder.try_build(model).run([(1, 0, 0, 0, 1, -1)], [0], torch.empty(1, 64))


# ------------------------------------------------------------------------------------------------ scratch, and threads


@needs_a_compiler
@pytest.mark.parametrize("threads", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("rows", [1, 4, 6, 8, 33])
def test_scratch_has_room_for_all_that_may_use_it(threads: int, rows: int, stepper: NativeDecoder):
    """Rounded rows lie in whole tiles; each thread has MAX_GEMV_ROWS rows, scores and a panel of its own."""
    whole, most, sizes = stepper.c_model, stepper.max_width, decode_constants()
    room = ScratchBuffers(whole, stepper.qkv_width, most, rows, threads)
    assert room.rows >= rows and room.rows >= sizes["MAX_GEMV_ROWS"] * threads
    assert room.rows % sizes["TILE_ROWS"] == 0
    held = {name: t.numel() for name, t in room.buffers.items()}
    assert held["q"] == held["y"] == held["proj_in"] == room.rows * most and 16 * held["ds"] == held["q"]
    assert held["x"] == room.rows * whole.d_model and held["qkv"] == room.rows * stepper.qkv_width
    assert held["hidden"] == 2 * room.rows * whole.d_ff and held["panels"] == threads * sizes["PANEL_ROWS"] * most
    assert held["scores"] == threads * (whole.length + sizes["SOURCE_ROWS"] * whole.max_source_length)
    assert room.scratch.threads == threads


@needs_a_compiler
def test_another_number_of_threads_has_scratch_of_its_own(stepper: NativeDecoder):
    had, out = torch.get_num_threads(), torch.empty(1, 50)
    try:
        for threads in (1, 3, 2, 2):
            torch.set_num_threads(threads)
            stepper.run([(1, 3, 0, 0, 4, -1)], [0], out)
            assert stepper._scratch.threads == stepper._scratch.scratch.threads == threads
    finally:
        torch.set_num_threads(had)


# -------------------------------------------------------------------------------------------------------- packed layers


def packed_linear(kind: str, rows: int = 7, columns: int = 64, bias: bool = True) -> QuantizedLinear:
    blocks = QUANTIZERS[kind](torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)))
    return QuantizedLinear(blocks, BLOCK_FORMATS[kind], torch.ones(rows) if bias else None)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("kind", sorted(QUANTIZERS))
def test_an_input_of_another_width_is_refused(kind: str, compiled: bool, monkeypatch):
    if not compiled:
        monkeypatch.setattr("headwater.quantization.layers.decode_library", lambda: None)
    layer = packed_linear(kind)
    for shape in ((64, 64 * 64), (3, 32), (2, 128), (64, 1), (0, 63), ()):
        with pytest.raises(BadInput, match="the last dimension of x must be 64, got"):
            layer(torch.randn(shape))
        with pytest.raises((RuntimeError, ValueError)):
            nn.Linear(64, 7)(torch.randn(shape))
    assert layer(torch.randn(0, 64)).shape == (0, 7) and layer(torch.randn(64)).shape == (7,)


@pytest.mark.parametrize("kind", sorted(QUANTIZERS))
def test_a_bias_in_any_form_is_the_same_bias(kind: str):
    layer, x = packed_linear(kind), torch.randn(9, 64)
    want = nn.functional.linear(x, layer.weight, torch.arange(7.0))
    for bias in (torch.arange(14.0)[::2] / 2, torch.arange(7.0).double(), torch.arange(7.0).half()):
        layer.bias = nn.Parameter(bias, requires_grad=False)
        torch.testing.assert_close(layer(x), want, rtol=1e-4, atol=1e-4, check_dtype=False)


def test_a_bias_that_learns_gets_its_gradient():
    layer, x = packed_linear("Q8_0"), torch.randn(9, 64)
    layer(x).sum().backward()
    assert torch.equal(layer.bias.grad, torch.full((7,), 9.0))


def test_blocks_and_biases_must_fit():
    blocks, kind = QUANTIZERS["Q8_0"](torch.randn(7, 64)), BLOCK_FORMATS["Q8_0"]
    for odd in (blocks[:, :-1], blocks[0], blocks.to(torch.int8), blocks[:, :0]):
        with pytest.raises(TensorMismatch, match="blocks of Q8_0 must be uint8"):
            QuantizedLinear(odd, kind)
    with pytest.raises(TensorMismatch, match="a bias must have 7 numbers"):
        QuantizedLinear(blocks, kind, torch.ones(8))


@pytest.mark.parametrize("token", [-1, 10, 2**40])
def test_a_packed_table_refuses_what_an_embedding_refuses(token: int):
    weight = torch.randn(10, 64)
    for table in (QuantizedEmbedding(QUANTIZERS["Q8_0"](weight), BLOCK_FORMATS["Q8_0"]), nn.Embedding(10, 64)):
        with pytest.raises(IndexError):
            table(torch.tensor([[1, token]]))
        assert table(torch.empty(2, 0, dtype=torch.long)).shape == (2, 0, 64)
    model = built(headwater.decoder(10, d_model=64, heads=4, layers=1))
    quantize(model)
    assert isinstance(model.decoder.embed.tokens, QuantizedEmbedding)
    with pytest.raises(BadInput, match=f"ids must be from 0 to 9, got {token}"):
        model(torch.tensor([[1, token]]))


def test_the_best_none_and_the_best_of_few():
    scores = torch.randn(3, 5)
    assert topk_logprobs(scores, 0).ids == [[], [], []]
    assert topk_logprobs(scores, 9).ids == topk_logprobs(scores, 5).ids
    assert topk_logprobs(scores[:0], 3).ids == []


# ----------------------------------------------------------------------------------------------- a stranger's folder


GENERATE = "import sys, torch; torch.set_num_threads(2); from headwater.cli import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.parametrize("sizes", [(64, 4096), (64, 128), (4096, 64)])
def test_a_folder_with_layers_of_unequal_width_writes_what_its_modules_write(sizes: tuple[int, int], tmp_path, forks):
    """In processes of their own: what went wrong here once ended the process."""
    tokenizer = train_tokenizer(["the cat sat on the mat", "a dog ran to the cat"] * 20, "bpe", vocab_size=280)
    model = decoder(*(block(d_ff, norm=RMSNorm()) for d_ff in sizes), vocab=len(tokenizer)).build(seed=3)
    save_native(tmp_path, model, {})
    tokenizer.save(tmp_path)
    command = [sys.executable, "-c", GENERATE, "generate", str(tmp_path), "the cat", "--max-tokens", "12"]
    said = []
    for fast in ("1", "0"):
        done = forks.run(command, env={**os.environ, "HEADWATER_FAST": fast}, text=True)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert said[0] == said[1] and said[0].strip()
