"""ALBERT: BERT whose layers share one set of weights, over a narrow token table."""

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
    post,
)
from headwater.errors import BadFile
from headwater.families.bert import SPAN, TAGS, settings, tied
from headwater.families.family import act, family
from headwater.families.writer import Config, encoder_sizes, writer
from headwater.weights.names import table
from headwater.weights.settings import Settings

LAYER = "[albert.]encoder.albert_layer_groups.{i}.albert_layers.0"
NAMES = table(f"""
    [albert.]embeddings.word_embeddings           encoder.embed.tokens
    [albert.]embeddings.position_embeddings       encoder.embed.position.table
    [albert.]embeddings.token_type_embeddings     encoder.embed.kinds
    [albert.]embeddings.LayerNorm                 encoder.embed.norm
    [albert.]encoder.embedding_hidden_mapping_in  encoder.embed.project
    {LAYER}.attention.query                       encoder.layers.{{i}}.self_attn.q
    {LAYER}.attention.key                         encoder.layers.{{i}}.self_attn.k
    {LAYER}.attention.value                       encoder.layers.{{i}}.self_attn.v
    {LAYER}.attention.dense                       encoder.layers.{{i}}.self_attn.out
    {LAYER}.attention.LayerNorm                   encoder.layers.{{i}}.self_attn_post_norm
    {LAYER}.ffn                                   encoder.layers.{{i}}.ffn.up
    {LAYER}.ffn_output                            encoder.layers.{{i}}.ffn.down
    {LAYER}.full_layer_layer_norm                 encoder.layers.{{i}}.ffn_post_norm
    [albert.]embeddings.position_ids              -
""")
MASKED = """
    predictions.decoder    {0}.out
    predictions.bias       {0}.out.bias
    predictions.dense      {0}.transform.dense
    predictions.LayerNorm  {0}.transform.norm
"""
NO_POOLER = table("[albert.]pooler  -\nsop_classifier.classifier  -")
NO_WORDS = table("predictions.decoder  -\npredictions.bias  -\npredictions.dense  -\npredictions.LayerNorm  -")
HEADS = {
    "language": table(MASKED.format("head")) + NO_POOLER,
    "states": NO_POOLER + NO_WORDS,
    "pooled": table("[albert.]pooler  head.dense"),
    "class": table("[albert.]pooler  head.pooled.dense\nclassifier  head.out"),
    "tags": TAGS + NO_POOLER,
    "span": SPAN + NO_POOLER,
    "pretraining": table(
        MASKED.format("head.language")
        + "[albert.]pooler  head.next.pooled.dense\nsop_classifier.classifier  head.next.out"
    ),
}


@family("albert", names=NAMES, heads=HEADS)
def albert(c: Settings, kind: str) -> Model:
    norm, hidden = LayerNorm(c.number("layer_norm_eps", default=1e-12)), c.number("hidden_dropout_prob", default=0.0)
    layers, groups = c.layers("num_hidden_layers"), c.layers("num_hidden_groups", default=1)
    if c.size("inner_group_num", default=1) != 1 or groups > layers:
        raise BadFile(f"{c.where}: a group of layers must be one layer, and there may be no more groups than layers")
    width, words = c.size("embedding_size", default=128), act(c, "hidden_act", default="gelu_new")
    attn = Attention(
        c.size("num_attention_heads"), bias="qkvo", dropout=c.number("attention_probs_dropout_prob", default=0.0)
    )
    block = Block((post(norm, self_attn=attn), post(norm, ffn=FeedForward(c.size("intermediate_size"), words))), hidden)
    embed = Tokens(
        c.size("vocab_size"),
        Learned(c.size("max_position_embeddings")),
        kinds=c.size("type_vocab_size", default=2),
        norm=norm,
        width=width,
        dropout=hidden,
    )
    order = tuple(i * groups // layers for i in range(layers))
    drop = c.number("classifier_dropout_prob", default=0.1)
    language = LanguageHead(c.size("vocab_size"), bias=True, transform=Transform(words, norm), width=width)
    heads = {
        "language": language,
        "states": NoHead(),
        "pooled": Pool(),
        "class": ClassHead(len(c.labels()), dropout=drop),
        "tags": TokenHead(len(c.labels()), drop),
        "span": TokenHead(2),
        "pretraining": Several((("language", language), ("next", ClassHead(2, dropout=drop)))),
    }
    stack = Stack(c.size("hidden_size"), embed, (block,) * groups, order=order)
    std = c.number("initializer_range", default=0.02)
    return Model(encoder=stack, head=heads[kind], tied=tied(heads[kind]), init=(("*", Normal(std)),))


@writer("albert", "Albert", language="ForMaskedLM")
def albert_config(spec: Model) -> Config | None:
    s, said = encoder_sizes(spec), settings(spec)
    if s is None or said is None or spec.encoder is None:
        return None
    groups = {"num_hidden_groups": len(spec.encoder.layers), "embedding_size": s.embed.width or s.d_model}
    return said | groups | {"classifier_dropout_prob": said.pop("classifier_dropout")}
