"""BERT, RoBERTa, DistilBERT and Megatron-BERT: bidirectional encoders, pretrained with masked language modeling."""

from __future__ import annotations

from headwater.core import (
    Attention,
    Block,
    ClassificationHead,
    Embeddings,
    FeedForward,
    LayerNorm,
    Learned,
    LMHead,
    MLMTransform,
    Model,
    NoHead,
    Normal,
    Pooler,
    Stack,
    TokenClassificationHead,
    post,
    pre,
)
from headwater.core.base import HeadSpec
from headwater.families.config_writers import ConfigDict, encoder_sizes, head_dropout, register_config_writer
from headwater.families.registry import read_activation, register_family
from headwater.variants.multi_task_head import MultiTaskHead
from headwater.weights.hf_config import HFConfig
from headwater.weights.name_map import NameMap, name_map


def encoder_spec(config: HFConfig, head: HeadSpec, position_offset: int = 0) -> Model:
    """The encoder of BERT and RoBERTa. position_offset: rows of the position table before position 0."""
    norm = LayerNorm(config.get_float("layer_norm_eps", default=1e-12))
    dropout = config.get_float("hidden_dropout_prob", default=0.1)
    attn = Attention(
        config.get_int("num_attention_heads"),
        bias="qkvo",
        dropout=config.get_float("attention_probs_dropout_prob", default=0.1),
    )
    ffn = FeedForward(config.get_int("intermediate_size"), read_activation(config, "hidden_act"))
    embed = Embeddings(
        config.get_int("vocab_size"),
        Learned(config.get_int("max_position_embeddings"), position_offset),
        token_types=config.get_int("type_vocab_size", minimum=0, default=2),
        norm=norm,
        dropout=dropout,
    )
    block = Block((post(norm, self_attn=attn), post(norm, ffn=ffn)), dropout)
    stack = Stack(config.get_int("hidden_size"), embed, (block,) * config.get_num_layers("num_hidden_layers"))
    std = config.get_float("initializer_range", default=0.02)
    return Model(encoder=stack, head=head, tied=tied_weights(head), init=(("*", Normal(std)),))


def tied_weights(head: HeadSpec) -> tuple[tuple[str, str], ...]:
    """The output projection of a language modeling head is tied to the token embeddings."""
    if isinstance(head, LMHead):
        return (("head.out", "encoder.embed.tokens"),)
    if isinstance(head, MultiTaskHead):
        return (("head.language.out", "encoder.embed.tokens"),)
    return ()


def classifier_dropout(config: HFConfig) -> float:
    """The dropout before a classifier: classifier_dropout, or that of the hidden states."""
    return config.get_float("classifier_dropout", default=config.get_float("hidden_dropout_prob", default=0.1))


def bert_like_config(spec: Model) -> ConfigDict | None:
    """The keys of config.json that BERT and its relatives have in common; the inverse of encoder_spec()."""
    sizes = encoder_sizes(spec)
    if sizes is None:
        return None
    position = sizes.embed.position
    return {
        "vocab_size": sizes.embed.vocab,
        "hidden_size": sizes.d_model,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "intermediate_size": sizes.ffn.d_ff,
        "hidden_act": sizes.activation,
        "max_position_embeddings": position.size if isinstance(position, Learned) else 512,
        "type_vocab_size": max(sizes.embed.token_types, 1),  # transformers adds row 0 of this table to every token
        "layer_norm_eps": sizes.norm.eps,
        "hidden_dropout_prob": sizes.dropout,
        "attention_probs_dropout_prob": sizes.attn.dropout,
        "classifier_dropout": head_dropout(spec),
    }


BODY_TEMPLATE = """
    [{0}.]embeddings.word_embeddings                      encoder.embed.tokens
    [{0}.]embeddings.position_embeddings                  encoder.embed.position.table
    [{0}.]embeddings.token_type_embeddings                encoder.embed.token_types
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
TOKEN_CLASSIFIER_NAMES = name_map("classifier  head.out")
QA_HEAD_NAMES = name_map("qa_outputs  head.out")

# -------------------------------------------------------------------------------------------------------------- BERT


def _mlm_head_names(prefix: str) -> str:
    return f"""
    cls.predictions.decoder              {prefix}.out
    cls.predictions.bias                 {prefix}.out.bias
    cls.predictions.transform.dense      {prefix}.transform.dense
    cls.predictions.transform.LayerNorm  {prefix}.transform.norm
"""


IGNORED_POOLER = "[bert.]pooler.dense  -\n"
BERT_HEAD_NAMES: dict[str, NameMap] = {
    "language": name_map(_mlm_head_names("head") + IGNORED_POOLER + "cls.seq_relationship  -"),
    "hidden_states": name_map(
        IGNORED_POOLER + "cls.predictions.decoder -\ncls.predictions.bias -\ncls.seq_relationship -\n"
        "cls.predictions.transform.dense -\ncls.predictions.transform.LayerNorm -"
    ),
    "pooler": name_map("[bert.]pooler.dense  head.dense"),
    "sequence_classification": name_map("[bert.]pooler.dense  head.pooler.dense\nclassifier  head.out"),
    "next_sentence": name_map("[bert.]pooler.dense  head.pooler.dense\ncls.seq_relationship  head.out"),
    "token_classification": TOKEN_CLASSIFIER_NAMES + name_map(IGNORED_POOLER),
    "question_answering": QA_HEAD_NAMES + name_map(IGNORED_POOLER),
    "pretraining": name_map(
        _mlm_head_names("head.language")
        + "[bert.]pooler.dense  head.next_sentence.pooler.dense\ncls.seq_relationship  head.next_sentence.out"
    ),
}


@register_family("bert", body_names=name_map(BODY_TEMPLATE.format("bert")), head_names=BERT_HEAD_NAMES)
def read_bert_spec(config: HFConfig, head_type: str) -> Model:
    """BERT's encoder, with the head of its pretraining or of a task."""
    eps = config.get_float("layer_norm_eps", default=1e-12)
    lm_head = LMHead(
        config.get_int("vocab_size"),
        bias=True,
        transform=MLMTransform(read_activation(config, "hidden_act"), LayerNorm(eps)),
    )
    heads = {
        "language": lm_head,
        "hidden_states": NoHead(),
        "pooler": Pooler(),
        "sequence_classification": ClassificationHead(len(config.get_labels()), dropout=classifier_dropout(config)),
        "next_sentence": ClassificationHead(2),
        "token_classification": TokenClassificationHead(len(config.get_labels()), classifier_dropout(config)),
        "question_answering": TokenClassificationHead(2),
        "pretraining": MultiTaskHead((("language", lm_head), ("next_sentence", ClassificationHead(2)))),
    }
    return encoder_spec(config, heads[head_type])


@register_config_writer("bert", "Bert", lm_suffix="ForMaskedLM")
def bert_config(spec: Model) -> ConfigDict | None:
    return bert_like_config(spec)


# ----------------------------------------------------------------------------------------------------------- RoBERTa

IGNORED_ROBERTA_POOLER = name_map("[roberta.]pooler.dense  -")
IGNORED_LM_HEAD = name_map("lm_head.dense  -\nlm_head.layer_norm  -\nlm_head.decoder  -\nlm_head.bias  -")
ROBERTA_HEAD_NAMES: dict[str, NameMap] = {
    "language": IGNORED_ROBERTA_POOLER
    + name_map("""
        lm_head.decoder     head.out
        lm_head.bias        head.out.bias
        lm_head.dense       head.transform.dense
        lm_head.layer_norm  head.transform.norm
    """),
    "hidden_states": IGNORED_ROBERTA_POOLER + IGNORED_LM_HEAD,
    "pooler": name_map("[roberta.]pooler.dense  head.dense"),
    "sequence_classification": IGNORED_ROBERTA_POOLER
    + name_map("classifier.dense  head.pooler.dense\nclassifier.out_proj  head.out"),
    "token_classification": IGNORED_ROBERTA_POOLER + TOKEN_CLASSIFIER_NAMES,
    "question_answering": IGNORED_ROBERTA_POOLER + QA_HEAD_NAMES,
}


@register_family(
    "roberta",
    "xlm-roberta",
    "camembert",
    body_names=name_map(BODY_TEMPLATE.format("roberta")),
    head_names=ROBERTA_HEAD_NAMES,
)
def read_roberta_spec(config: HFConfig, head_type: str) -> Model:
    """As BERT, but positions start after the padding id, and the masked LM head always has exact GELU."""
    eps = config.get_float("layer_norm_eps", default=1e-12)
    heads = {
        "language": LMHead(config.get_int("vocab_size"), bias=True, transform=MLMTransform("gelu", LayerNorm(eps))),
        "hidden_states": NoHead(),
        "pooler": Pooler(),
        "sequence_classification": ClassificationHead(len(config.get_labels()), dropout=classifier_dropout(config)),
        "token_classification": TokenClassificationHead(len(config.get_labels()), classifier_dropout(config)),
        "question_answering": TokenClassificationHead(2),
    }
    return encoder_spec(
        config, heads[head_type], position_offset=config.get_int("pad_token_id", minimum=0, default=1) + 1
    )


@register_config_writer("roberta", "Roberta", lm_suffix="ForMaskedLM")
def roberta_config(spec: Model) -> ConfigDict | None:
    config = bert_like_config(spec)
    if config is None:
        return None
    position = getattr(getattr(spec.encoder, "embed", None), "position", None)
    return config | {"pad_token_id": max(getattr(position, "offset", 0) - 1, 0)}


# -------------------------------------------------------------------------------------------------------- DistilBERT

DISTILBERT_NAMES = name_map("""
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
DISTILBERT_HEAD_NAMES: dict[str, NameMap] = {
    "language": name_map("""
        vocab_transform   head.transform.dense
        vocab_layer_norm  head.transform.norm
        vocab_projector   head.out
    """),
    "hidden_states": name_map("vocab_transform  -\nvocab_layer_norm  -\nvocab_projector  -"),
    "sequence_classification": name_map("pre_classifier  head.pooler.dense\nclassifier  head.out"),
    "token_classification": TOKEN_CLASSIFIER_NAMES,
    "question_answering": QA_HEAD_NAMES,
}


@register_family("distilbert", body_names=DISTILBERT_NAMES, head_names=DISTILBERT_HEAD_NAMES)
def read_distilbert_spec(config: HFConfig, head_type: str) -> Model:
    """BERT with half of the layers, without token types and pooler."""
    config.get_bool("sinusoidal_pos_embds", default=False)  # the table is in the file either way
    norm = LayerNorm(1e-12)
    dropout = config.get_float("dropout", default=0.1)
    activation = read_activation(config, "activation")
    attn = Attention(config.get_int("n_heads"), bias="qkvo", dropout=config.get_float("attention_dropout", default=0.1))
    branches = (
        post(norm, self_attn=attn),
        post(norm, ffn=FeedForward(config.get_int("hidden_dim"), activation, dropout=dropout)),
    )
    embed = Embeddings(
        config.get_int("vocab_size"), Learned(config.get_int("max_position_embeddings")), norm=norm, dropout=dropout
    )
    stack = Stack(config.get_int("dim"), embed, (Block(branches),) * config.get_num_layers("n_layers"))
    heads = {
        "language": LMHead(config.get_int("vocab_size"), bias=True, transform=MLMTransform(activation, norm)),
        "hidden_states": NoHead(),
        "sequence_classification": ClassificationHead(
            len(config.get_labels()), Pooler(activation="relu"), config.get_float("seq_classif_dropout", default=0.2)
        ),
        "token_classification": TokenClassificationHead(len(config.get_labels()), dropout),
        "question_answering": TokenClassificationHead(2),
    }
    std = config.get_float("initializer_range", default=0.02)
    return Model(encoder=stack, head=heads[head_type], tied=tied_weights(heads[head_type]), init=(("*", Normal(std)),))


@register_config_writer("distilbert", "DistilBert", lm_suffix="ForMaskedLM")
def distilbert_config(spec: Model) -> ConfigDict | None:
    """The inverse of read_distilbert_spec()."""
    sizes = encoder_sizes(spec)
    if sizes is None:
        return None
    position = sizes.embed.position
    return {
        "vocab_size": sizes.embed.vocab,
        "dim": sizes.d_model,
        "n_layers": sizes.num_layers,
        "n_heads": sizes.num_heads,
        "hidden_dim": sizes.ffn.d_ff,
        "activation": sizes.activation,
        "max_position_embeddings": position.size if isinstance(position, Learned) else 512,
        "dropout": sizes.embed.dropout,
        "attention_dropout": sizes.attn.dropout,
        "seq_classif_dropout": head_dropout(spec),
    }


# --------------------------------------------------------------------------------------------------
# Megatron-BERT: BERT with pre-norm and a final norm, and none after the embeddings.


BODY_NAMES = name_map("""
    [bert.]embeddings.word_embeddings                 encoder.embed.tokens
    [bert.]embeddings.position_embeddings             encoder.embed.position.table
    [bert.]embeddings.token_type_embeddings           encoder.embed.token_types
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


@register_family("megatron-bert", body_names=BODY_NAMES, head_names=BERT_HEAD_NAMES)
def read_megatron_bert_spec(config: HFConfig, head_type: str) -> Model:
    """A pre-norm encoder with a final norm."""
    norm = LayerNorm(config.get_float("layer_norm_eps", default=1e-12))
    dropout = config.get_float("hidden_dropout_prob", default=0.1)
    vocab = config.get_int("vocab_size")
    activation = read_activation(config, "hidden_act")
    attn = Attention(
        config.get_int("num_attention_heads"),
        bias="qkvo",
        dropout=config.get_float("attention_probs_dropout_prob", default=0.1),
    )
    ffn = FeedForward(config.get_int("intermediate_size"), activation)
    position = Learned(config.get_int("max_position_embeddings"))
    embed = Embeddings(vocab, position, token_types=config.get_int("type_vocab_size", default=2), dropout=dropout)
    block = Block((pre(norm, self_attn=attn), pre(norm, ffn=ffn)), dropout)
    lm_head = LMHead(vocab, bias=True, transform=MLMTransform(activation, norm))
    heads = {
        "language": lm_head,
        "hidden_states": NoHead(),
        "pooler": Pooler(),
        "sequence_classification": ClassificationHead(len(config.get_labels()), dropout=classifier_dropout(config)),
        "next_sentence": ClassificationHead(2),
        "token_classification": TokenClassificationHead(len(config.get_labels()), classifier_dropout(config)),
        "question_answering": TokenClassificationHead(2),
        "pretraining": MultiTaskHead((("language", lm_head), ("next_sentence", ClassificationHead(2)))),
    }
    stack = Stack(config.get_int("hidden_size"), embed, (block,) * config.get_num_layers("num_hidden_layers"), norm)
    std = config.get_float("initializer_range", default=0.02)
    return Model(encoder=stack, head=heads[head_type], tied=tied_weights(heads[head_type]), init=(("*", Normal(std)),))


@register_config_writer("megatron-bert", "MegatronBert", lm_suffix="ForMaskedLM")
def megatron_bert_config(spec: Model) -> ConfigDict | None:
    return bert_like_config(spec)
