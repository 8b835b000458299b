"""Megatron-BERT: BERT with a norm before each branch and one after the last layer, and none after the embedding."""

from __future__ import annotations

from headwater.core import (
    Attention,
    Block,
    ClassHead,
    FeedForward,
    LanguageHead,
    LayerNorm,
    Learned,
    Model,
    NoHead,
    Normal,
    Pool,
    Several,
    Stack,
    TokenHead,
    Tokens,
    Transform,
    pre,
)
from headwater.families.bert import BERT_HEADS, drop, settings, tied
from headwater.families.family import act, family
from headwater.families.writer import Config, writer
from headwater.weights.names import table
from headwater.weights.settings import Settings

NAMES = table("""
    [bert.]embeddings.word_embeddings                 encoder.embed.tokens
    [bert.]embeddings.position_embeddings             encoder.embed.position.table
    [bert.]embeddings.token_type_embeddings           encoder.embed.kinds
    [bert.]encoder.layer.{i}.attention.ln             encoder.layers.{i}.self_attn_norm
    [bert.]encoder.layer.{i}.attention.self.query     encoder.layers.{i}.self_attn.q
    [bert.]encoder.layer.{i}.attention.self.key       encoder.layers.{i}.self_attn.k
    [bert.]encoder.layer.{i}.attention.self.value     encoder.layers.{i}.self_attn.v
    [bert.]encoder.layer.{i}.attention.output.dense   encoder.layers.{i}.self_attn.out
    [bert.]encoder.layer.{i}.ln                       encoder.layers.{i}.ffn_norm
    [bert.]encoder.layer.{i}.intermediate.dense       encoder.layers.{i}.ffn.up
    [bert.]encoder.layer.{i}.output.dense             encoder.layers.{i}.ffn.down
    [bert.]encoder.ln                                 encoder.final_norm
    [bert.]embeddings.position_ids                    -
""")


@family("megatron-bert", names=NAMES, heads=BERT_HEADS)
def megatron_bert(c: Settings, kind: str) -> Model:
    norm, hidden = LayerNorm(c.number("layer_norm_eps", default=1e-12)), c.number("hidden_dropout_prob", default=0.1)
    vocab, activation = c.size("vocab_size"), act(c, "hidden_act")
    attn = Attention(
        c.size("num_attention_heads"), bias="qkvo", dropout=c.number("attention_probs_dropout_prob", default=0.1)
    )
    ffn = FeedForward(c.size("intermediate_size"), activation)
    position = Learned(c.size("max_position_embeddings"))
    embed = Tokens(vocab, position, kinds=c.size("type_vocab_size", default=2), dropout=hidden)
    block = Block((pre(norm, self_attn=attn), pre(norm, ffn=ffn)), hidden)
    words = LanguageHead(vocab, bias=True, transform=Transform(activation, norm))
    heads = {
        "language": words,
        "states": NoHead(),
        "pooled": Pool(),
        "class": ClassHead(len(c.labels()), dropout=drop(c)),
        "next": ClassHead(2),
        "tags": TokenHead(len(c.labels()), drop(c)),
        "span": TokenHead(2),
        "pretraining": Several((("language", words), ("next", ClassHead(2)))),
    }
    stack = Stack(c.size("hidden_size"), embed, (block,) * c.layers("num_hidden_layers"), norm)
    std = c.number("initializer_range", default=0.02)
    return Model(encoder=stack, head=heads[kind], tied=tied(heads[kind]), init=(("*", Normal(std)),))


@writer("megatron-bert", "MegatronBert", language="ForMaskedLM")
def megatron_bert_config(spec: Model) -> Config | None:
    return settings(spec)
