"""GPT-2: a pre-norm decoder with learned positions."""

from __future__ import annotations

from headwater.core import (
    Attention,
    Block,
    Causal,
    ClassificationHead,
    Embeddings,
    FeedForward,
    LastToken,
    LayerNorm,
    Learned,
    LMHead,
    Model,
    NoHead,
    Pooled,
    Stack,
    TokenClassificationHead,
    pre,
    scaled_normal,
)
from headwater.families.config_writers import DEFAULT_MAX_POSITIONS, ConfigDict, decoder_sizes, register_config_writer
from headwater.families.registry import read_activation, register_family
from headwater.weights.hf_config import HFConfig
from headwater.weights.name_map import name_map

BODY_NAMES = name_map("""
    [transformer.]wte                        decoder.embed.tokens
    [transformer.]wpe                        decoder.embed.position.table
    [transformer.]h.{i}.ln_1                 decoder.layers.{i}.self_attn_norm
    [transformer.]h.{i}.attn.c_attn          decoder.layers.{i}.self_attn.{q,k,v}  : transpose, split
    [transformer.]h.{i}.attn.c_proj          decoder.layers.{i}.self_attn.out      : transpose
    [transformer.]h.{i}.ln_2                 decoder.layers.{i}.ffn_norm
    [transformer.]h.{i}.mlp.c_fc             decoder.layers.{i}.ffn.up             : transpose
    [transformer.]h.{i}.mlp.c_proj           decoder.layers.{i}.ffn.down           : transpose
    [transformer.]ln_f                       decoder.final_norm
    [transformer.]h.{i}.attn.bias            -
    [transformer.]h.{i}.attn.masked_bias     -
""")
HEAD_NAMES = {
    "language": name_map("lm_head  head.out"),
    "hidden_states": name_map("lm_head  -"),
    "sequence_classification": name_map("score  head.out"),
    "token_classification": name_map("classifier  head.out"),
    "question_answering": name_map("qa_outputs  head.out"),
}


@register_family("gpt2", body_names=BODY_NAMES, head_names=HEAD_NAMES)
def read_gpt2_spec(config: HFConfig, head_type: str) -> Model:
    """A pre-norm decoder with learned positions and a tied head."""
    norm = LayerNorm(config.get_float("layer_norm_epsilon", default=1e-5))
    vocab = config.get_int("vocab_size")
    d_model = config.get_int("n_embd", "hidden_size")
    num_layers = config.get_num_layers("n_layer", "num_hidden_layers")
    config.ignore("n_ctx")
    attn = Attention(
        config.get_int("n_head", "num_attention_heads"),
        bias="qkvo",
        mask=Causal(),
        dropout=config.get_float("attn_pdrop", default=0.1),
    )
    ffn = FeedForward(
        config.get_int("n_inner", default=4 * d_model),
        read_activation(config, "activation_function", default="gelu_new"),
    )
    block = Block((pre(norm, self_attn=attn), pre(norm, ffn=ffn)), config.get_float("resid_pdrop", default=0.1))
    position = Learned(config.get_int("n_positions", "max_position_embeddings"))
    embed = Embeddings(vocab, position, dropout=config.get_float("embd_pdrop", default=0.1))
    heads = {
        "language": LMHead(vocab),
        "hidden_states": NoHead(),
        "sequence_classification": ClassificationHead(len(config.get_labels()), Pooled(LastToken()), bias=False),
        "token_classification": TokenClassificationHead(len(config.get_labels())),
        "question_answering": TokenClassificationHead(2),
    }
    tied = (("head.out", "decoder.embed.tokens"),) if head_type == "language" else ()
    init = scaled_normal(num_layers, config.get_float("initializer_range", default=0.02))
    stack = Stack(d_model, embed, (block,) * num_layers, norm)
    return Model(decoder=stack, head=heads[head_type], tied=tied, init=init)


@register_config_writer("gpt2", "GPT2", lm_suffix="LMHeadModel")
def gpt2_config(spec: Model) -> ConfigDict | None:
    """The inverse of read_gpt2_spec()."""
    sizes = decoder_sizes(spec)
    if sizes is None:
        return None
    position = sizes.embed.position
    return {
        "vocab_size": sizes.embed.vocab,
        "n_embd": sizes.d_model,
        "n_layer": sizes.num_layers,
        "n_head": sizes.num_heads,
        "n_inner": sizes.ffn.d_ff,
        "n_positions": position.size if isinstance(position, Learned) else DEFAULT_MAX_POSITIONS,
        "activation_function": sizes.activation,
        "layer_norm_epsilon": sizes.norm.eps,
        "attn_pdrop": sizes.attn.dropout,
        "resid_pdrop": sizes.dropout,
        "embd_pdrop": sizes.embed.dropout,
    }
