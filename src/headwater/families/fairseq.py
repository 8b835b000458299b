"""fairseq's Transformer: the model of 2017 with fairseq's names of weights and hyper-parameters.

fairseq saves its arguments inside the checkpoint; `headwater convert` writes those of the model to a config.json, with
the model_type `fairseq` (post-norm, as in the paper) or `fairseq_prenorm`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headwater.core import (
    Attention,
    Block,
    Branch,
    Causal,
    CrossAttention,
    Embeddings,
    FeedForward,
    LayerNorm,
    Learned,
    LMHead,
    Model,
    NoHead,
    NoNorm,
    SinusoidalHalves,
    Stack,
    post,
    pre,
)
from headwater.core.base import NormSpec
from headwater.core.positions import PositionEncoding, SinusoidalEncoding
from headwater.errors import BadFile
from headwater.families.bart import EMBED_NORM, FINAL_NORM, POSITION_TABLE, seq2seq_names
from headwater.families.registry import read_activation, register_family
from headwater.i18n import _
from headwater.parts import must, part
from headwater.weights.hf_config import HFConfig
from headwater.weights.name_map import name_map

PAD_ID = 1  # fairseq's first ids are <s> <pad> </s> <unk>; positions start after the padding id


@part
class FairseqSinusoidal(SinusoidalHalves):
    """Sinusoidal positions: all sines, then all cosines, of (position + offset) · base^(-i / (D/2 - 1)), i < D/2."""

    offset: int = PAD_ID + 1

    def build(self, width: int, heads: int = 1) -> PositionEncoding:
        must(
            width % 2 == 0 and width > 2,
            self,
            _("the width must be even and above 2"),
            width,
            _("choose another d_model"),
        )
        return FairseqSinusoidalEncoding(width, self.base, self.offset)


class FairseqSinusoidalEncoding(SinusoidalEncoding):
    """The module of FairseqSinusoidal."""

    def __init__(self, width: int, base: float, offset: int) -> None:
        super().__init__(width, base, halves=True)
        self.offset = offset

    def init_buffers(self) -> None:
        count = self.inv_freq.numel()
        i = torch.arange(count, dtype=torch.float64, device=self.inv_freq.device)
        self.inv_freq.copy_(self.base ** (-i / (count - 1)))

    def add(self, x: Tensor, positions: Tensor) -> Tensor:
        return super().add(x, positions + self.offset)


# ----------------------------------------------------------------------------------------------------------- settings

_COPIED_KEYS = """
    activation_fn activation_dropout attention_dropout dropout no_scale_embedding
    max_source_positions max_target_positions layernorm_embedding
    encoder_embed_dim encoder_ffn_embed_dim encoder_layers encoder_attention_heads encoder_learned_pos
    decoder_embed_dim decoder_ffn_embed_dim decoder_layers decoder_attention_heads decoder_learned_pos
"""

# With any other value the model computes something that is not supported.
SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    "adaptive_softmax_cutoff": (None, False),
    "adaptive_input": (None, False),
    "cross_self_attention": (None, False),
    "no_cross_attention": (None, False),
    "encoder_layers_to_keep": (None,),
    "decoder_layers_to_keep": (None,),
    "no_token_positional_embeddings": (None, False),
}


def fairseq_args_to_config(args: dict[str, Any], where: object) -> dict[str, Any]:
    """config.json from the arguments in a fairseq checkpoint; values that are not supported are rejected."""
    for name, supported in SUPPORTED_VALUES.items():
        if args.get(name) not in supported:
            raise BadFile(
                _(
                    "{where}: fairseq's {name} = {value!r} is not supported; it must be unset",
                    where=where,
                    name=name,
                    value=str(args[name])[:40],
                )
            )
    prenorm = {bool(args.get(f"{side}_normalize_before")) for side in ("encoder", "decoder")}
    d_model = args.get("decoder_embed_dim")
    dims = {args.get(name) or d_model for name in ("encoder_embed_dim", "decoder_input_dim", "decoder_output_dim")}
    if len(prenorm) > 1 or dims != {d_model}:
        raise BadFile(
            _("{where}: encoder and decoder must have the same width and norm position; they differ", where=where)
        )
    return {
        "model_type": "fairseq_prenorm" if prenorm == {True} else "fairseq",
        "pad_token_id": PAD_ID,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
        **{name: args[name] for name in _COPIED_KEYS.split() if args.get(name) is not None},
    }


# ------------------------------------------------------------------------------------------------------------- family

EXTRA_RULES = POSITION_TABLE + EMBED_NORM + "[{prefix}.]{side}.embed_positions._float_tensor  -\n"
HEAD_NAMES = {
    "language": name_map("[model.]decoder.output_projection  head.out"),
    "hidden_states": name_map("[model.]decoder.output_projection  -"),
}


@register_family("fairseq", body_names=seq2seq_names("post_norm", EXTRA_RULES), head_names=HEAD_NAMES)
def read_fairseq_spec(config: HFConfig, head_type: str) -> Model:
    return _seq2seq_spec(config, head_type, post, NoNorm())


@register_family("fairseq_prenorm", body_names=seq2seq_names("norm", EXTRA_RULES + FINAL_NORM), head_names=HEAD_NAMES)
def read_fairseq_prenorm_spec(config: HFConfig, head_type: str) -> Model:
    return _seq2seq_spec(config, head_type, pre, LayerNorm())


def _seq2seq_spec(config: HFConfig, head_type: str, make_branch: Callable[..., Branch], final_norm: NormSpec) -> Model:
    """The encoder-decoder, from fairseq's arguments. make_branch: pre or post."""
    target_vocab = config.get_int("vocab_size", "target_vocab_size")
    source_vocab = config.get_int("source_vocab_size", default=target_vocab)
    has_lm_head = head_type == "language"
    return Model(
        encoder=_stack_spec(config, "encoder", source_vocab, make_branch, final_norm),
        decoder=_stack_spec(config, "decoder", target_vocab, make_branch, final_norm),
        head=LMHead(target_vocab) if has_lm_head else NoHead(),
        tied=(("head.out", "decoder.embed.tokens"),) if has_lm_head else (),
    )


def _stack_spec(
    config: HFConfig, side: str, vocab: int, make_branch: Callable[..., Branch], final_norm: NormSpec
) -> Stack:
    """The encoder or the decoder, from fairseq's arguments."""
    d_model = config.get_int(f"{side}_embed_dim")
    dropout = config.get_float("dropout", default=0.1)
    norm = LayerNorm()

    # Branches of a block.
    attn_args: dict[str, Any] = {
        "heads": config.get_int(f"{side}_attention_heads"),
        "bias": "qkvo",
        "dropout": config.get_float("attention_dropout", default=0.0),
    }
    ffn_dropout = config.get_float("activation_dropout", default=0.0)
    activation = read_activation(config, "activation_fn", default="relu")
    ffn = make_branch(norm, ffn=FeedForward(config.get_int(f"{side}_ffn_embed_dim"), activation, dropout=ffn_dropout))
    if side == "encoder":
        branches: tuple[Branch, ...] = (make_branch(norm, self_attn=Attention(**attn_args)), ffn)
    else:
        self_attn = make_branch(norm, self_attn=Attention(**attn_args, mask=Causal()))
        cross_attn = make_branch(norm, cross_attn=CrossAttention(**attn_args))
        branches = (self_attn, cross_attn, ffn)

    # Embeddings.
    max_positions = config.get_int(f"max_{'source' if side == 'encoder' else 'target'}_positions", default=1024)
    learned = config.get_bool(f"{side}_learned_pos", default=False)
    embed = Embeddings(
        vocab,
        Learned(max_positions + PAD_ID + 1, offset=PAD_ID + 1) if learned else FairseqSinusoidal(),
        1.0 if config.get_bool("no_scale_embedding", default=False) else d_model**0.5,
        norm=norm if config.get_bool("layernorm_embedding", default=False) else NoNorm(),
        dropout=dropout,
    )
    num_layers = config.get_num_layers(f"{side}_layers")
    return Stack(d_model, embed, (Block(branches, dropout),) * num_layers, final_norm)
