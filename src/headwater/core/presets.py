"""Known sizes by name: preset("base"), preset("gpt2-xl"), preset("llama-70b"). Each is a spec; nothing is allocated.

The six sizes of the 2017 Transformer share one table of 37,000 tokens between source, target and output, as the paper
did for English-German. Two texts call different models `large`: the one with 6 layers is `big` here (the paper's word).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from headwater.core.attention import Attention, CrossAttention
from headwater.core.embed import Tokens
from headwater.core.feedforward import FeedForward, GatedFeedForward
from headwater.core.heads import LanguageHead, Transform
from headwater.core.init import Normal, scaled_normal
from headwater.core.masks import Everyone, Past
from headwater.core.model import Model
from headwater.core.norms import LayerNorm, RMSNorm
from headwater.core.positions import Learned, RelativeBias, Rotary
from headwater.core.shapes import transformer
from headwater.core.stack import Block, Stack, post, pre
from headwater.errors import NotFound, nearest

Size = tuple[Any, ...]


def paper(vocab: int, d_model: int, heads: int, d_ff: int, layers: int) -> Model:
    return transformer(vocab, d_model=d_model, heads=heads, d_ff=d_ff, layers=layers)


def gpt(vocab: int, d_model: int, heads: int, layers: int, longest: int) -> Model:
    attn = Attention(heads, bias="qkvo", sees=Past(), dropout=0.1)
    ffn = FeedForward(4 * d_model, "gelu_tanh")
    block = Block((pre(LayerNorm(), self_attn=attn), pre(LayerNorm(), ffn=ffn)), dropout=0.1)
    stack = Stack(d_model, Tokens(vocab, Learned(longest), dropout=0.1), (block,) * layers, LayerNorm())
    tied = (("head.out", "decoder.embed.tokens"),)
    return Model(decoder=stack, head=LanguageHead(vocab), tied=tied, init=scaled_normal(layers))


def llama(
    vocab: int, d_model: int, heads: int, kv_heads: int, d_ff: int, layers: int, eps: float, theta: float
) -> Model:
    attn, norm = Attention(heads, kv_heads, sees=Past(), position=Rotary(theta)), RMSNorm(eps)
    block = Block((pre(norm, self_attn=attn), pre(norm, ffn=GatedFeedForward(d_ff))))
    stack = Stack(d_model, Tokens(vocab), (block,) * layers, norm)
    return Model(decoder=stack, head=LanguageHead(vocab), init=(("*", Normal(0.02)),))


def bert(vocab: int, d_model: int, heads: int, layers: int) -> Model:
    norm, attn = LayerNorm(1e-12), Attention(heads, bias="qkvo", dropout=0.1)
    block = Block((post(norm, self_attn=attn), post(norm, ffn=FeedForward(4 * d_model, "gelu"))), dropout=0.1)
    stack = Stack(d_model, Tokens(vocab, Learned(512), kinds=2, norm=norm, dropout=0.1), (block,) * layers)
    head = LanguageHead(vocab, bias=True, transform=Transform("gelu", norm))
    return Model(encoder=stack, head=head, tied=(("head.out", "encoder.embed.tokens"),), init=(("*", Normal(0.02)),))


def t5(vocab: int, d_model: int, heads: int, head_dim: int, d_ff: int, layers: int) -> Model:
    norm, shape = RMSNorm(), cast(dict[str, Any], {"heads": heads, "head_dim": head_dim, "scale": 1.0, "dropout": 0.1})

    def stack(sees: Any, two_way: bool, *reads: Any) -> Stack:
        attn = Attention(**shape, sees=sees, position=RelativeBias(two_way=two_way))
        ffn = FeedForward(d_ff, "relu", bias=False, dropout=0.1)
        block = Block((pre(norm, self_attn=attn), *reads, pre(norm, ffn=ffn)), dropout=0.1)
        return Stack(d_model, Tokens(vocab, dropout=0.1), (block,) * layers, norm, dropout=0.1)

    return Model(
        encoder=stack(Everyone(), True),
        decoder=stack(Past(), False, pre(norm, cross_attn=CrossAttention(**shape))),
        head=LanguageHead(vocab, scale=d_model**-0.5),
        tied=(("decoder.embed.tokens", "encoder.embed.tokens"), ("head.out", "decoder.embed.tokens")),
    )


# name -> how it is built, its vocabulary, its sizes in the order of the builder's arguments
PRESETS: dict[str, tuple[Callable[..., Model], int, Size]] = {
    "mini": (paper, 37_000, (32, 2, 64, 1)),
    "small": (paper, 37_000, (64, 4, 256, 2)),
    "medium": (paper, 37_000, (128, 8, 512, 4)),
    "base": (paper, 37_000, (512, 8, 2048, 6)),
    "big": (paper, 37_000, (1024, 16, 4096, 6)),
    "large": (paper, 37_000, (1024, 16, 4096, 24)),
    "gpt2": (gpt, 50_257, (768, 12, 12, 1024)),
    "gpt2-medium": (gpt, 50_257, (1024, 16, 24, 1024)),
    "gpt2-large": (gpt, 50_257, (1280, 20, 36, 1024)),
    "gpt2-xl": (gpt, 50_257, (1600, 25, 48, 1024)),
    "gpt3": (gpt, 50_257, (12_288, 96, 96, 2048)),
    "llama-7b": (llama, 32_000, (4096, 32, 32, 11_008, 32, 1e-6, 1e4)),
    "llama-13b": (llama, 32_000, (5120, 40, 40, 13_824, 40, 1e-6, 1e4)),
    "llama-65b": (llama, 32_000, (8192, 64, 64, 22_016, 80, 1e-6, 1e4)),
    "llama-70b": (llama, 32_000, (8192, 64, 8, 28_672, 80, 1e-5, 1e4)),  # the second generation's: grouped heads
    "llama3-8b": (llama, 128_256, (4096, 32, 8, 14_336, 32, 1e-5, 5e5)),
    "llama3-70b": (llama, 128_256, (8192, 64, 8, 28_672, 80, 1e-5, 5e5)),
    "bert-base": (bert, 30_522, (768, 12, 12)),
    "bert-large": (bert, 30_522, (1024, 16, 24)),
    "t5-small": (t5, 32_128, (512, 8, 64, 2048, 6)),
    "t5-base": (t5, 32_128, (768, 12, 64, 3072, 12)),
    "t5-large": (t5, 32_128, (1024, 16, 64, 4096, 24)),
    "t5-3b": (t5, 32_128, (1024, 32, 128, 16_384, 24)),
    "t5-11b": (t5, 32_128, (1024, 128, 128, 65_536, 24)),
}
ALSO = {"llama-2-70b": "llama-70b", "gpt2-small": "gpt2", "gpt3-175b": "gpt3", "transformer": "base"}


def preset(name: str, vocab: int | None = None) -> Model:
    """The spec of a known model. vocab: another number of tokens than its own."""
    name = ALSO.get(name.lower(), name.lower())
    if name not in PRESETS:
        raise NotFound(f"no preset is called {name!r}; {nearest(name, [*PRESETS, *ALSO])}")
    build, own, sizes = PRESETS[name]
    return build(own if vocab is None else vocab, *sizes)
