"""A model whose weights are no numbers is refused with the same words by the compiled step and by the modules."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import headwater
from headwater.core import (
    Attention,
    Block,
    Causal,
    Embeddings,
    FeedForward,
    GatedFeedForward,
    LayerNorm,
    LMHead,
    Model,
    Rotary,
    Stack,
    Transformer,
    pre,
)
from headwater.cpu.build import decode_library, unavailable_reason
from headwater.errors import CheckFailed
from headwater.generation.beam import Beam, beam_search
from headwater.generation.engine import Engine
from headwater.generation.native import NativeDecoder
from headwater.generation.request import Request
from headwater.quantization.layers import (
    BLOCK_FORMATS,
    QuantizedEmbedding,
    QuantizedLinear,
    QuantizedModule,
    quantize,
    replace_module,
)

needs_a_compiler = pytest.mark.skipif(decode_library() is None, reason=f"no compiled step here: {unavailable_reason()}")
FORMATS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"]
LAYER = "decoder.layers.1."
WHERE = {
    "table": "decoder.embed.tokens.weight",
    "norm": LAYER + "self_attn_norm.weight",
    "norm bias": LAYER + "ffn_norm.bias",
    "q": LAYER + "self_attn.q.weight",
    "k": LAYER + "self_attn.k.weight",
    "v": LAYER + "self_attn.v.weight",
    "out": LAYER + "self_attn.out.weight",
    "up": LAYER + "ffn.up.weight",
    "gate": LAYER + "ffn.gate.weight",
    "down": LAYER + "ffn.down.weight",
    "head": "head.out.weight",
    "bias of k": LAYER + "self_attn.k.bias",
    "bias of down": LAYER + "ffn.down.bias",
    "bias of head": "head.out.bias",
    "final norm": "decoder.final_norm.weight",
}
PROMPTS = {"a row at a time": [(1, 2)], "many rows": [tuple(range(n, n + 9)) for n in range(5)]}
REFUSED = "the model's logits must be numbers, got NaN or inf"


def built(stored: str, gated: bool = True, act: str = "silu") -> Transformer:
    attn = Attention(4, kv_heads=2, position=Rotary(), mask=Causal(), bias="qkvo")
    ffn = (GatedFeedForward if gated else FeedForward)(96, act, bias=True)
    block = Block((pre(LayerNorm(), self_attn=attn), pre(LayerNorm(), ffn=ffn)))
    stack = Stack(64, Embeddings(50), (block,) * 2, LayerNorm())
    model = Model(decoder=stack, head=LMHead(50, bias=True)).build(seed=0).eval()
    if stored in ("Q8_0", "Q4_1"):
        quantize(model, "int8" if stored == "Q8_0" else "int4")
    if stored == "Q4_0":
        for path, module in list(model.named_modules()):
            if isinstance(module, torch.nn.Linear):
                replace_module(
                    model, path, QuantizedLinear(q4_0(module.weight), BLOCK_FORMATS["Q4_0"], module.bias.detach())
                )
    if stored[0] == "Q":
        table = model.decoder.embed.tokens.weight.detach()
        blocks = q4_0(table)
        replace_module(model, "decoder.embed.tokens", QuantizedEmbedding(blocks, BLOCK_FORMATS["Q4_0"]))
    return model.to({"F16": torch.float16, "BF16": torch.bfloat16}.get(stored, torch.float32))


def q4_0(weight: torch.Tensor) -> torch.Tensor:
    """Blocks of 32 in four bits: d = max|w| / 7, nibbles of w / d + 8."""
    blocks = weight.detach().reshape(-1, 32)
    d = (blocks.abs().amax(1, keepdim=True) / 7).half()
    q = (blocks / d.float() + 8).round().clamp(0, 15).to(torch.uint8)
    made = torch.cat((d.view(torch.uint8), q[:, :16] | q[:, 16:] << 4), 1)
    return made.view(len(weight), -1)


@torch.no_grad()
def spoil(model: Transformer, path: str, bad: float, everywhere: bool = True) -> None:
    owner, _, name = path.rpartition(".")
    module = model.get_submodule(owner)
    if name == "weight" and isinstance(module, QuantizedModule):
        module.blocks = module.blocks.clone()
        scales = module.blocks.view(-1, module.block_format.type_size).view(torch.float16)[:, 0]
    else:
        scales = getattr(module, name).view(-1)
    scales[slice(None) if everywhere else slice(5, 6)] = bad


def faults(model: Transformer, prompts, fast: bool) -> list[str]:
    """Without the place: torch's fused attention hides queries or keys that are all NaN while there are few of them
    (torch 2: fewer keys than a vector has lanes), so the modules may refuse one token later.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not fast:
            patch.setattr(NativeDecoder, "try_build", lambda model: None)
        engine = Engine(model)
        rows = [engine.submit(Request(prompt, max_tokens=3)) for prompt in prompts]
        engine.run()
    assert (NativeDecoder.try_build(model) is not None) or not fast
    assert all(isinstance(row.fault, CheckFailed | None) for row in rows)
    return [re.sub(r" after token \d+", "", str(row.fault)) for row in rows]


@needs_a_compiler
@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("prompts", PROMPTS)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("stored", FORMATS)
def test_c_and_the_modules_refuse_alike(stored: str, where: str, prompts: str, bad: float):
    model = built(stored)
    assert faults(model, PROMPTS[prompts], True) == ["None"] * len(PROMPTS[prompts])
    spoil(model, WHERE[where], bad)
    plain = faults(model, PROMPTS[prompts], False)
    assert faults(model, PROMPTS[prompts], True) == plain
    assert all(REFUSED in fault for fault in plain)


@needs_a_compiler
@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("where", ["q", "k", "v", "out", "up", "gate", "down", "norm", "bias of k"])
def test_a_single_nan_is_enough(stored: str, where: str):
    model = built(stored)
    spoil(model, WHERE[where], math.nan, everywhere=False)
    for prompts in PROMPTS.values():
        assert all(REFUSED in fault for fault in faults(model, prompts, True))


@needs_a_compiler
@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh", "relu", "quick_gelu"])
@pytest.mark.parametrize("gated", [True, False])
def test_no_activation_hides_it(act: str, gated: bool):
    model = built("F32", gated, act)
    spoil(model, WHERE["gate" if gated else "up"], math.nan)
    for prompts in PROMPTS.values():
        assert all(REFUSED in fault for fault in faults(model, prompts, True))


@needs_a_compiler
@pytest.mark.parametrize("stored", FORMATS)
def test_beams_refuse_it_too(stored: str):
    model = built(stored)
    spoil(model, WHERE["v"], math.nan)
    with pytest.raises(CheckFailed, match="logits must be numbers"):
        beam_search(model, [Request((1, 2), max_tokens=3)], Beam(2))


SCRIPT = """
import sys, torch, headwater
model = headwater.decoder(50, d_model=64, heads=4, layers=2).build(seed=0).eval()
headwater.generate(model, [1, 2, 3], max_tokens=2)
with torch.no_grad():
    model.decoder.layers[0].self_attn.v.weight.fill_(float("nan"))
try:
    print(headwater.generate(model, [1, 2, 3], max_tokens=2))
except headwater.errors.Fault as fault:
    print(type(fault).__name__, fault)
"""


def test_with_and_without_c_the_words_are_the_same():
    said = []
    for fast in ("1", "0"):
        env = {**os.environ, "HEADWATER_FAST": fast, "PYTHONPATH": str(Path(headwater.__file__).parents[1])}
        done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert said[0] == said[1] and said[0].startswith("CheckFailed") and REFUSED in said[0]
