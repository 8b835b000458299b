"""BERT, RoBERTa and DistilBERT: post-norm encoders that read both ways, trained to fill in masked words."""

from __future__ import annotations

from typing import Any

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
from headwater.families.family import act, family
from headwater.families.writer import Config, encoder_sizes, head_dropout, writer
from headwater.weights.names import Names, table
from headwater.weights.settings import Settings


def encoder(c: Settings, head: Any, first: int = 0) -> Model:
    norm, hidden = LayerNorm(c.number("layer_norm_eps", default=1e-12)), c.number("hidden_dropout_prob", default=0.1)
    attn = Attention(
        c.size("num_attention_heads"), bias="qkvo", dropout=c.number("attention_probs_dropout_prob", default=0.1)
    )
    ffn = FeedForward(c.size("intermediate_size"), act(c, "hidden_act"))
    embed = Tokens(
        c.size("vocab_size"),
        Learned(c.size("max_position_embeddings"), first),
        kinds=c.size("type_vocab_size", least=0, default=2),
        norm=norm,
        dropout=hidden,
    )
    block = Block((post(norm, self_attn=attn), post(norm, ffn=ffn)), hidden)
    stack = Stack(c.size("hidden_size"), embed, (block,) * c.layers("num_hidden_layers"))
    std = c.number("initializer_range", default=0.02)
    return Model(encoder=stack, head=head, tied=tied(head), init=(("*", Normal(std)),))


def tied(head: Any) -> tuple[tuple[str, str], ...]:
    """The vocabulary's scores use the token table."""
    homes = {"LanguageHead": "head.out", "Several": "head.language.out"}
    name = homes.get(type(head).__name__)
    return ((name, "encoder.embed.tokens"),) if name else ()


def drop(c: Settings) -> float:
    """Before a classifier: its own dropout, or where it has none that of the hidden states."""
    return c.number("classifier_dropout", default=c.number("hidden_dropout_prob", default=0.1))


def settings(spec: Model) -> Config | None:
    """What the config.json of BERT and its close kin says; the inverse of encoder()."""
    s = encoder_sizes(spec)
    if s is None:
        return None
    position = s.embed.position
    return {
        "vocab_size": s.embed.vocab,
        "hidden_size": s.d_model,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "intermediate_size": s.ffn.d_ff,
        "hidden_act": s.activation,
        "max_position_embeddings": position.size if isinstance(position, Learned) else 512,
        "type_vocab_size": max(s.embed.kinds, 1),  # transformers adds row 0 of this table to every token
        "layer_norm_eps": s.norm.eps,
        "hidden_dropout_prob": s.dropout,
        "attention_probs_dropout_prob": s.attn.dropout,
        "classifier_dropout": head_dropout(spec),
    }


BODY = """
    [{0}.]embeddings.word_embeddings                      encoder.embed.tokens
    [{0}.]embeddings.position_embeddings                  encoder.embed.position.table
    [{0}.]embeddings.token_type_embeddings                encoder.embed.kinds
    [{0}.]embeddings.LayerNorm                            encoder.embed.norm
    [{0}.]encoder.layer.{{i}}.attention.self.query        encoder.layers.{{i}}.self_attn.q
    [{0}.]encoder.layer.{{i}}.attention.self.key          encoder.layers.{{i}}.self_attn.k
    [{0}.]encoder.layer.{{i}}.attention.self.value        encoder.layers.{{i}}.self_attn.v
    [{0}.]encoder.layer.{{i}}.attention.output.dense      encoder.layers.{{i}}.self_attn.out
    [{0}.]encoder.layer.{{i}}.attention.output.LayerNorm  encoder.layers.{{i}}.self_attn_post_norm
    [{0}.]encoder.layer.{{i}}.intermediate.dense          encoder.layers.{{i}}.ffn.up
    [{0}.]encoder.layer.{{i}}.output.dense                encoder.layers.{{i}}.ffn.down
    [{0}.]encoder.layer.{{i}}.output.LayerNorm            encoder.layers.{{i}}.ffn_post_norm
    [{0}.]embeddings.position_ids                         -
    .gamma = .weight
    .beta = .bias
"""
TAGS = table("classifier  head.out")
SPAN = table("qa_outputs  head.out")

# -------------------------------------------------------------------------------------------------------------- BERT


def _masked(at: str) -> str:
    return f"""
    cls.predictions.decoder              {at}.out
    cls.predictions.bias                 {at}.out.bias
    cls.predictions.transform.dense      {at}.transform.dense
    cls.predictions.transform.LayerNorm  {at}.transform.norm
"""


NO_POOLER = "[bert.]pooler.dense  -\n"
BERT_HEADS: dict[str, Names] = {
    "language": table(_masked("head") + NO_POOLER + "cls.seq_relationship  -"),
    "states": table(NO_POOLER + "cls.predictions.decoder -\ncls.predictions.bias -\ncls.seq_relationship -\n"
                    "cls.predictions.transform.dense -\ncls.predictions.transform.LayerNorm -"),
    "pooled": table("[bert.]pooler.dense  head.dense"),
    "class": table("[bert.]pooler.dense  head.pooled.dense\nclassifier  head.out"),
    "next": table("[bert.]pooler.dense  head.pooled.dense\ncls.seq_relationship  head.out"),
    "tags": TAGS + table(NO_POOLER),
    "span": SPAN + table(NO_POOLER),
    "pretraining": table(
        _masked("head.language") + "[bert.]pooler.dense  head.next.pooled.dense\ncls.seq_relationship  head.next.out"
    ),
}  # fmt: skip


@family("bert", names=table(BODY.format("bert")), heads=BERT_HEADS)
def bert(c: Settings, kind: str) -> Model:
    eps = c.number("layer_norm_eps", default=1e-12)
    words = LanguageHead(c.size("vocab_size"), bias=True, transform=Transform(act(c, "hidden_act"), LayerNorm(eps)))
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
    return encoder(c, heads[kind])


@writer("bert", "Bert", language="ForMaskedLM")
def bert_config(spec: Model) -> Config | None:
    return settings(spec)


# ----------------------------------------------------------------------------------------------------------- RoBERTa

NO_ROBERTA_POOLER = table("[roberta.]pooler.dense  -")
NO_WORDS = table("lm_head.dense  -\nlm_head.layer_norm  -\nlm_head.decoder  -\nlm_head.bias  -")
ROBERTA_HEADS: dict[str, Names] = {
    "language": NO_ROBERTA_POOLER
    + table("""
        lm_head.decoder     head.out
        lm_head.bias        head.out.bias
        lm_head.dense       head.transform.dense
        lm_head.layer_norm  head.transform.norm
    """),
    "states": NO_ROBERTA_POOLER + NO_WORDS,
    "pooled": table("[roberta.]pooler.dense  head.dense"),
    "class": NO_ROBERTA_POOLER + table("classifier.dense  head.pooled.dense\nclassifier.out_proj  head.out"),
    "tags": NO_ROBERTA_POOLER + TAGS,
    "span": NO_ROBERTA_POOLER + SPAN,
}


@family("roberta", "xlm-roberta", "camembert", names=table(BODY.format("roberta")), heads=ROBERTA_HEADS)
def roberta(c: Settings, kind: str) -> Model:
    """As BERT, but places begin after the padding id, and the masked-word head is always exact GELU."""
    eps = c.number("layer_norm_eps", default=1e-12)
    heads = {
        "language": LanguageHead(c.size("vocab_size"), bias=True, transform=Transform("gelu", LayerNorm(eps))),
        "states": NoHead(),
        "pooled": Pool(),
        "class": ClassHead(len(c.labels()), dropout=drop(c)),
        "tags": TokenHead(len(c.labels()), drop(c)),
        "span": TokenHead(2),
    }
    return encoder(c, heads[kind], first=c.size("pad_token_id", least=0, default=1) + 1)


@writer("roberta", "Roberta", language="ForMaskedLM")
def roberta_config(spec: Model) -> Config | None:
    said = settings(spec)
    if said is None:
        return None
    first = getattr(getattr(spec.encoder, "embed", None), "position", None)
    return said | {"pad_token_id": max(getattr(first, "first", 0) - 1, 0)}


# -------------------------------------------------------------------------------------------------------- DistilBERT

DISTIL = table("""
    [distilbert.]embeddings.word_embeddings                    encoder.embed.tokens
    [distilbert.]embeddings.position_embeddings                encoder.embed.position.table
    [distilbert.]embeddings.LayerNorm                          encoder.embed.norm
    [distilbert.]transformer.layer.{i}.attention.q_lin         encoder.layers.{i}.self_attn.q
    [distilbert.]transformer.layer.{i}.attention.k_lin         encoder.layers.{i}.self_attn.k
    [distilbert.]transformer.layer.{i}.attention.v_lin         encoder.layers.{i}.self_attn.v
    [distilbert.]transformer.layer.{i}.attention.out_lin       encoder.layers.{i}.self_attn.out
    [distilbert.]transformer.layer.{i}.sa_layer_norm           encoder.layers.{i}.self_attn_post_norm
    [distilbert.]transformer.layer.{i}.ffn.lin1                encoder.layers.{i}.ffn.up
    [distilbert.]transformer.layer.{i}.ffn.lin2                encoder.layers.{i}.ffn.down
    [distilbert.]transformer.layer.{i}.output_layer_norm       encoder.layers.{i}.ffn_post_norm
    [distilbert.]embeddings.position_ids                       -
""")
DISTIL_HEADS: dict[str, Names] = {
    "language": table("""
        vocab_transform   head.transform.dense
        vocab_layer_norm  head.transform.norm
        vocab_projector   head.out
    """),
    "states": table("vocab_transform  -\nvocab_layer_norm  -\nvocab_projector  -"),
    "class": table("pre_classifier  head.pooled.dense\nclassifier  head.out"),
    "tags": TAGS,
    "span": SPAN,
}


@family("distilbert", names=DISTIL, heads=DISTIL_HEADS)
def distilbert(c: Settings, kind: str) -> Model:
    """BERT with half of the layers, without token types or pooler."""
    c.flag("sinusoidal_pos_embds", default=False)  # the table is in the file either way
    norm, hidden, words = LayerNorm(1e-12), c.number("dropout", default=0.1), act(c, "activation")
    attn = Attention(c.size("n_heads"), bias="qkvo", dropout=c.number("attention_dropout", default=0.1))
    branches = post(norm, self_attn=attn), post(norm, ffn=FeedForward(c.size("hidden_dim"), words, dropout=hidden))
    embed = Tokens(c.size("vocab_size"), Learned(c.size("max_position_embeddings")), norm=norm, dropout=hidden)
    stack = Stack(c.size("dim"), embed, (Block(branches),) * c.layers("n_layers"))
    heads = {
        "language": LanguageHead(c.size("vocab_size"), bias=True, transform=Transform(words, norm)),
        "states": NoHead(),
        "class": ClassHead(len(c.labels()), Pool(activation="relu"), c.number("seq_classif_dropout", default=0.2)),
        "tags": TokenHead(len(c.labels()), hidden),
        "span": TokenHead(2),
    }
    std = c.number("initializer_range", default=0.02)
    return Model(encoder=stack, head=heads[kind], tied=tied(heads[kind]), init=(("*", Normal(std)),))


@writer("distilbert", "DistilBert", language="ForMaskedLM")
def distilbert_config(spec: Model) -> Config | None:
    s = encoder_sizes(spec)
    if s is None:
        return None
    position = s.embed.position
    return {
        "vocab_size": s.embed.vocab,
        "dim": s.d_model,
        "n_layers": s.layers,
        "n_heads": s.heads,
        "hidden_dim": s.ffn.d_ff,
        "activation": s.activation,
        "max_position_embeddings": position.size if isinstance(position, Learned) else 512,
        "dropout": s.embed.dropout,
        "attention_dropout": s.attn.dropout,
        "seq_classif_dropout": head_dropout(spec),
    }
