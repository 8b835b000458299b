"""Every combination of parts the laws run on: each two choices of two axes meet in at least one small model."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from all_pairs import all_pairs

from headwater import core as hw
from headwater.variants.mean_pool_bridge import MeanPoolBridge
from headwater.variants.parallel_block import ParallelBlock
from headwater.variants.rope_scaling import DynamicScaling, LinearScaling, Llama3Scaling, YarnScaling
from headwater.variants.soft_cap import SoftCap
from headwater.variants.transformer_xl import RelativeXL

VOCAB, D_MODEL, HEADS, LAYERS = 23, 16, 4, 2

AT_EMBEDDING = {
    "sinusoidal": hw.Sinusoidal(),
    "sinusoidal halves": hw.SinusoidalHalves(),
    "learned": hw.Learned(20),
    "learned from 2": hw.Learned(22, offset=2),
}
IN_ATTENTION = {
    "rotary": hw.Rotary(),
    "rotary linear": hw.Rotary(scaling=LinearScaling(2)),
    "rotary dynamic": hw.Rotary(scaling=DynamicScaling(2, original_max_positions=64)),
    "rotary llama3": hw.Rotary(100.0, scaling=Llama3Scaling(8, 1, 4, original_max_positions=8)),
    "rotary yarn": hw.Rotary(100.0, scaling=YarnScaling(4, original_max_positions=8)),
    "rotary half": hw.Rotary(partial_factor=0.5),
    "alibi": hw.Alibi(),
    "relative": hw.RelativeBias(8, 6),
    "xl": RelativeXL(),
}
NORMS = {
    "layer": hw.LayerNorm(),
    "layer unbiased": hw.LayerNorm(bias=False),
    "rms": hw.RMSNorm(),
    "offset rms": hw.OffsetRMSNorm(),
}
PLACEMENTS = {"pre": hw.pre, "post": hw.post, "sandwich": hw.sandwich, "parallel": hw.pre}
ATTENTIONS = {
    "heads": {},
    "grouped": {"kv_heads": 2},
    "one key": {"kv_heads": 1},
    "wide heads": {"head_dim": 8},
    "wide values": {"v_head_dim": 5},
    "normed": {"qk_norm": hw.RMSNorm()},
    "biased": {"bias": "qkvo"},
    "half biased": {"bias": "qv", "kv_heads": 2, "v_head_dim": 3},
    "scaled": {"scale": 0.8},
}
CAUSAL = {
    "all": (hw.Causal(),),
    "near": (hw.SlidingWindow(3),),
    "both": (hw.And(hw.Causal(), hw.LocalWindow(2)),),
    "mixed": (hw.Causal(), hw.SlidingWindow(3)),
    "itself": (hw.Causal(), hw.SlidingWindow(1)),
}
OPEN = {
    "all": (hw.Bidirectional(),),
    "near": (hw.LocalWindow(2),),
    "both": (hw.And(hw.LocalWindow(3), hw.LocalWindow(2)),),
    "mixed": (hw.Bidirectional(), hw.LocalWindow(1)),
    "itself": (hw.Bidirectional(), hw.LocalWindow(0)),
}
FEEDS = {"straight": hw.FeedForward, "gated": hw.GatedFeedForward}
KERNELS = {"sdpa": hw.SDPA(), "eager": hw.Eager(), "soft-capped": SoftCap(2.0)}
BRIDGES = {"unpooled": hw.NoBridge(), "pooled": MeanPoolBridge(2)}

AXES = {
    "position": ("none", *AT_EMBEDDING, *IN_ATTENTION),
    "norm": tuple(NORMS),
    "norm_position": tuple(PLACEMENTS),
    "attention": tuple(ATTENTIONS),
    "rule": tuple(CAUSAL),
    "ffn": tuple(FEEDS),
    "activation": tuple(hw.ACTIVATIONS),
    "shape": ("decoder", "encoder", "both"),
    "layers": ("own", "shared"),
    "table": ("tied", "untied"),
    "kernel": tuple(KERNELS),
    "bridge": tuple(BRIDGES),
}


@dataclass(frozen=True)
class Case:
    """A model to which the laws apply, and what a law may want to know of it."""

    name: str
    spec: hw.Model

    def model(self) -> hw.Transformer:
        return built(self.spec)

    @property
    def both(self) -> bool:
        return self.spec.encoder is not None and self.spec.decoder is not None

    @property
    def causal(self) -> bool:
        return self.spec.decoder is not None

    @property
    def pooled(self) -> bool:
        return self.spec.bridge != hw.NoBridge()

    @property
    def kernels(self) -> set:
        stacks = [stack for stack in (self.spec.encoder, self.spec.decoder) if stack is not None]
        branches = [branch for stack in stacks for layer in stack.layers for branch in layer.branches]
        return {branch.layer.kernel for branch in branches if hasattr(branch.layer, "kernel")}

    def with_kernel(self, kernel: object) -> hw.Model:
        """The same model with another back end."""
        from headwater.parts import swap

        spec = self.spec
        for kind in (hw.Attention, hw.CrossAttention):
            spec = swap(spec, kind, lambda attention: replace(attention, kernel=kernel))
        return spec


@functools.lru_cache(maxsize=400)
def built(spec: hw.Model) -> hw.Transformer:
    """The model in eval mode with weights wide enough that a wrong term shows, norms and biases included.

    In float64, so that a law is kept or broken beyond doubt: rounding is eight orders of magnitude below a wrong term.
    """
    model = spec.build(seed=1).double()
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.dim() == 1:
                tensor += 0.3 * torch.randn(tensor.shape, generator=draw, dtype=tensor.dtype)
    return model.eval()


def spec_of(row: dict[str, str]) -> hw.Model:
    shape, shared = row["shape"], row["layers"] == "shared"
    both = shape == "both"
    stacks = {}
    for side in ("encoder", "decoder"):
        if shape in (side, "both"):
            stacks[side] = _stack(row, causal=side == "decoder", reads=both and side == "decoder", shared=shared)
    last = "decoder" if "decoder" in stacks else "encoder"
    tied = (("head.out", f"{last}.embed.tokens"),) if row["table"] == "tied" else ()
    if both and tied:
        tied = (("decoder.embed.tokens", "encoder.embed.tokens"), *tied)
    init = (("*", hw.Normal(0.35)),)
    return hw.Model(hw.LMHead(VOCAB, bias=shared), **stacks, bridge=BRIDGES[row["bridge"]], tied=tied, init=init)


def _stack(row: dict[str, str], causal: bool, reads: bool, shared: bool) -> hw.Stack:
    rules = (CAUSAL if causal else OPEN)[row["rule"]]
    layers = tuple(_block(row, rule, causal, reads) for rule in rules)
    if len(layers) == 1 and not shared:
        layers *= LAYERS
    order = tuple(i % len(layers) for i in range(3)) if shared else ()
    embed = hw.Embeddings(VOCAB, AT_EMBEDDING.get(row["position"], hw.NoPosition()), scale=2.0)
    final = hw.NoNorm() if row["norm_position"] == "post" else NORMS[row["norm"]]
    return hw.Stack(D_MODEL, embed, layers, final, order)


def _block(row: dict[str, str], rule: object, causal: bool, reads: bool) -> object:
    position = IN_ATTENTION.get(row["position"], hw.NoPosition())
    if position == IN_ATTENTION["relative"]:
        position = replace(position, bidirectional=not causal)
    shape = {"heads": HEADS, "kernel": KERNELS[row["kernel"]], **ATTENTIONS[row["attention"]]}
    placed, norm = PLACEMENTS[row["norm_position"]], NORMS[row["norm"]]
    own = placed(norm, self_attn=hw.Attention(**shape, mask=rule, position=position))
    other = (placed(norm, cross_attn=hw.CrossAttention(**shape)),) if reads else ()
    kind = ParallelBlock if row["norm_position"] == "parallel" else hw.Block
    return kind((own, *other, placed(norm, ffn=FEEDS[row["ffn"]](24, row["activation"]))))


def fits(row: dict[str, str]) -> bool:
    """Only a model with two stacks has a bridge."""
    bridged = row.get("bridge") == "pooled" and row.get("shape") in ("decoder", "encoder")
    return not bridged


ROWS = all_pairs(AXES, fits)
CASES = [Case(", ".join(row[axis] for axis in AXES), spec_of(row)) for row in ROWS]


def some(**wanted: str) -> list[Case]:
    """The cases with these choices."""
    return [case for case, row in zip(CASES, ROWS, strict=True) if wanted.items() <= row.items()]
