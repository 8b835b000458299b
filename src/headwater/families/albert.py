"""ALBERT: BERT whose layers share their weights, with a factorized (narrow) token embedding."""

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
)
from headwater.errors import BadFile
from headwater.families.bert import QA_HEAD_NAMES, TOKEN_CLASSIFIER_NAMES, bert_like_config, tied_weights
from headwater.families.config_writers import ConfigDict, encoder_sizes, register_config_writer
from headwater.families.registry import read_activation, register_family
from headwater.i18n import _
from headwater.variants.multi_task_head import MultiTaskHead
from headwater.weights.hf_config import HFConfig
from headwater.weights.name_map import name_map

LAYER_PREFIX = "[albert.]encoder.albert_layer_groups.{i}.albert_layers.0"
BODY_NAMES = name_map(f"""
    [albert.]embeddings.word_embeddings           encoder.embed.tokens
    [albert.]embeddings.position_embeddings       encoder.embed.position.table
    [albert.]embeddings.token_type_embeddings     encoder.embed.token_types
    [albert.]embeddings.LayerNorm                 encoder.embed.norm
    [albert.]encoder.embedding_hidden_mapping_in  encoder.embed.projection
    {LAYER_PREFIX}.attention.query                       encoder.layers.{{i}}.self_attn.q
    {LAYER_PREFIX}.attention.key                         encoder.layers.{{i}}.self_attn.k
    {LAYER_PREFIX}.attention.value                       encoder.layers.{{i}}.self_attn.v
    {LAYER_PREFIX}.attention.dense                       encoder.layers.{{i}}.self_attn.out
    {LAYER_PREFIX}.attention.LayerNorm                   encoder.layers.{{i}}.self_attn_post_norm
    {LAYER_PREFIX}.ffn                                   encoder.layers.{{i}}.ffn.up
    {LAYER_PREFIX}.ffn_output                            encoder.layers.{{i}}.ffn.down
    {LAYER_PREFIX}.full_layer_layer_norm                 encoder.layers.{{i}}.ffn_post_norm
    [albert.]embeddings.position_ids              -
""")
MLM_HEAD_TEMPLATE = """
    predictions.decoder    {0}.out
    predictions.bias       {0}.out.bias
    predictions.dense      {0}.transform.dense
    predictions.LayerNorm  {0}.transform.norm
"""
IGNORED_POOLER = name_map("[albert.]pooler  -\nsop_classifier.classifier  -")
IGNORED_LM_HEAD = name_map(
    "predictions.decoder  -\npredictions.bias  -\npredictions.dense  -\npredictions.LayerNorm  -"
)
HEAD_NAMES = {
    "language": name_map(MLM_HEAD_TEMPLATE.format("head")) + IGNORED_POOLER,
    "hidden_states": IGNORED_POOLER + IGNORED_LM_HEAD,
    "pooler": name_map("[albert.]pooler  head.dense"),
    "sequence_classification": name_map("[albert.]pooler  head.pooler.dense\nclassifier  head.out"),
    "token_classification": TOKEN_CLASSIFIER_NAMES + IGNORED_POOLER,
    "question_answering": QA_HEAD_NAMES + IGNORED_POOLER,
    "pretraining": name_map(
        MLM_HEAD_TEMPLATE.format("head.language")
        + "[albert.]pooler  head.next_sentence.pooler.dense\nsop_classifier.classifier  head.next_sentence.out"
    ),
}


@register_family("albert", body_names=BODY_NAMES, head_names=HEAD_NAMES)
def read_albert_spec(config: HFConfig, head_type: str) -> Model:
    """An encoder whose layers share the weights of num_hidden_groups layers."""
    # layers and the groups whose weights they share
    norm = LayerNorm(config.get_float("layer_norm_eps", default=1e-12))
    dropout = config.get_float("hidden_dropout_prob", default=0.0)
    num_layers = config.get_num_layers("num_hidden_layers")
    num_groups = config.get_num_layers("num_hidden_groups", default=1)
    if config.get_int("inner_group_num", default=1) != 1 or num_groups > num_layers:
        raise BadFile(
            _(
                "{where}: a group of layers must be one layer, and there may be no more groups than layers",
                where=config.where,
            )
        )

    # one block and the embeddings
    embedding_size = config.get_int("embedding_size", default=128)
    activation = read_activation(config, "hidden_act", default="gelu_new")
    attn = Attention(
        config.get_int("num_attention_heads"),
        bias="qkvo",
        dropout=config.get_float("attention_probs_dropout_prob", default=0.0),
    )
    ffn = FeedForward(config.get_int("intermediate_size"), activation)
    block = Block((post(norm, self_attn=attn), post(norm, ffn=ffn)), dropout)
    embed = Embeddings(
        config.get_int("vocab_size"),
        Learned(config.get_int("max_position_embeddings")),
        token_types=config.get_int("type_vocab_size", default=2),
        norm=norm,
        width=embedding_size,
        dropout=dropout,
    )
    order = tuple(i * num_groups // num_layers for i in range(num_layers))  # which group each layer is

    # the head, by its type
    classifier_dropout = config.get_float("classifier_dropout_prob", default=0.1)
    lm_head = LMHead(
        config.get_int("vocab_size"), bias=True, transform=MLMTransform(activation, norm), width=embedding_size
    )
    heads = {
        "language": lm_head,
        "hidden_states": NoHead(),
        "pooler": Pooler(),
        "sequence_classification": ClassificationHead(len(config.get_labels()), dropout=classifier_dropout),
        "token_classification": TokenClassificationHead(len(config.get_labels()), classifier_dropout),
        "question_answering": TokenClassificationHead(2),
        "pretraining": MultiTaskHead(
            (("language", lm_head), ("next_sentence", ClassificationHead(2, dropout=classifier_dropout)))
        ),
    }

    stack = Stack(config.get_int("hidden_size"), embed, (block,) * num_groups, order=order)
    std = config.get_float("initializer_range", default=0.02)
    return Model(encoder=stack, head=heads[head_type], tied=tied_weights(heads[head_type]), init=(("*", Normal(std)),))


@register_config_writer("albert", "Albert", lm_suffix="ForMaskedLM")
def albert_config(spec: Model) -> ConfigDict | None:
    """The inverse of read_albert_spec()."""
    sizes = encoder_sizes(spec)
    config = bert_like_config(spec)
    if sizes is None or config is None or spec.encoder is None:
        return None
    config["num_hidden_groups"] = len(spec.encoder.layers)
    config["embedding_size"] = sizes.embed.width or sizes.d_model
    config["classifier_dropout_prob"] = config["classifier_dropout"]
    return config
