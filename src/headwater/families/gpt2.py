"""GPT-2: a pre-norm decoder with learned places."""

from __future__ import annotations

from headwater.core import (
    Attention,
    Block,
    ClassHead,
    FeedForward,
    LanguageHead,
    LastToken,
    LayerNorm,
    Learned,
    Model,
    NoHead,
    Past,
    Picked,
    Stack,
    TokenHead,
    Tokens,
    pre,
    scaled_normal,
)
from headwater.families.family import act, family
from headwater.families.writer import MAX_POSITIONS, Config, decoder_sizes, writer
from headwater.weights.names import table
from headwater.weights.settings import Settings

NAMES = table("""
    [transformer.]wte                        decoder.embed.tokens
    [transformer.]wpe                        decoder.embed.position.table
    [transformer.]h.{i}.ln_1                 decoder.layers.{i}.self_attn_norm
    [transformer.]h.{i}.attn.c_attn          decoder.layers.{i}.self_attn.{q,k,v}  : transposed, split
    [transformer.]h.{i}.attn.c_proj          decoder.layers.{i}.self_attn.out      : transposed
    [transformer.]h.{i}.ln_2                 decoder.layers.{i}.ffn_norm
    [transformer.]h.{i}.mlp.c_fc             decoder.layers.{i}.ffn.up             : transposed
    [transformer.]h.{i}.mlp.c_proj           decoder.layers.{i}.ffn.down           : transposed
    [transformer.]ln_f                       decoder.final_norm
    [transformer.]h.{i}.attn.bias            -
    [transformer.]h.{i}.attn.masked_bias     -
""")
HEADS = {
    "language": table("lm_head  head.out"),
    "states": table("lm_head  -"),
    "class": table("score  head.out"),
    "tags": table("classifier  head.out"),
    "span": table("qa_outputs  head.out"),
}


@family("gpt2", names=NAMES, heads=HEADS)
def gpt2(c: Settings, kind: str) -> Model:
    norm, vocab = LayerNorm(c.number("layer_norm_epsilon", default=1e-5)), c.size("vocab_size")
    d_model, layers = c.size("n_embd", "hidden_size"), c.layers("n_layer", "num_hidden_layers")
    c.read_by_now("n_ctx")
    attn = Attention(
        c.size("n_head", "num_attention_heads"), bias="qkvo", sees=Past(), dropout=c.number("attn_pdrop", default=0.1)
    )
    ffn = FeedForward(c.size("n_inner", default=4 * d_model), act(c, "activation_function", default="gelu_new"))
    block = Block((pre(norm, self_attn=attn), pre(norm, ffn=ffn)), c.number("resid_pdrop", default=0.1))
    places = Learned(c.size("n_positions", "max_position_embeddings"))
    embed = Tokens(vocab, places, dropout=c.number("embd_pdrop", default=0.1))
    heads = {
        "language": LanguageHead(vocab),
        "states": NoHead(),
        "class": ClassHead(len(c.labels()), Picked(LastToken()), bias=False),
        "tags": TokenHead(len(c.labels())),
        "span": TokenHead(2),
    }
    tied = (("head.out", "decoder.embed.tokens"),) if kind == "language" else ()
    init = scaled_normal(layers, c.number("initializer_range", default=0.02))
    return Model(decoder=Stack(d_model, embed, (block,) * layers, norm), head=heads[kind], tied=tied, init=init)


@writer("gpt2", "GPT2", language="LMHeadModel")
def gpt2_config(spec: Model) -> Config | None:
    s = decoder_sizes(spec)
    if s is None:
        return None
    position = s.embed.position
    return {
        "vocab_size": s.embed.vocab,
        "n_embd": s.d_model,
        "n_layer": s.layers,
        "n_head": s.heads,
        "n_inner": s.ffn.d_ff,
        "n_positions": position.size if isinstance(position, Learned) else MAX_POSITIONS,
        "activation_function": s.activation,
        "layer_norm_epsilon": s.norm.eps,
        "attn_pdrop": s.attn.dropout,
        "resid_pdrop": s.dropout,
        "embd_pdrop": s.embed.dropout,
    }
