"""BigBird: BERT whose attention reads blocks of tokens, as transformers computes it in evaluation."""

from __future__ import annotations

from dataclasses import fields, replace

from headwater.core import (
    Attention,
    ClassificationHead,
    Embeddings,
    FeedForward,
    LayerNorm,
    LMHead,
    MLMTransform,
    Model,
    NoHead,
    Pooler,
    TokenClassificationHead,
)
from headwater.core.base import HeadSpec
from headwater.errors import BadFile
from headwater.families.bert import (
    BERT_HEAD_NAMES,
    BODY_TEMPLATE,
    TOKEN_CLASSIFIER_NAMES,
    bert_like_config,
    classifier_dropout,
    encoder_spec,
)
from headwater.families.config_writers import ConfigDict, find_part, register_config_writer
from headwater.families.registry import read_activation, register_family
from headwater.i18n import _
from headwater.parts import swap
from headwater.variants.bigbird import AnswerSpanHead, BigBirdAttention, FirstBlockInEvaluation
from headwater.variants.multi_task_head import MultiTaskHead
from headwater.weights.hf_config import HFConfig
from headwater.weights.name_map import NameMap, name_map

ATTENTION_TYPES = ("block_sparse", "original_full")
IGNORED_POOLER = name_map("[bert.]pooler  -")
BIGBIRD_HEAD_NAMES: dict[str, NameMap] = {
    "language": IGNORED_POOLER + BERT_HEAD_NAMES["language"],
    "hidden_states": IGNORED_POOLER + BERT_HEAD_NAMES["hidden_states"],
    "pooler": name_map("[bert.]pooler  head.dense"),
    "sequence_classification": IGNORED_POOLER
    + name_map("classifier.dense  head.pooler.dense\nclassifier.out_proj  head.out"),
    "token_classification": IGNORED_POOLER + TOKEN_CLASSIFIER_NAMES,
    "question_answering": IGNORED_POOLER
    + name_map("""
        qa_classifier.intermediate.dense  head.up
        qa_classifier.output.dense        head.down
        qa_classifier.output.LayerNorm    head.norm
        qa_classifier.qa_outputs          head.out
    """),
    "pretraining": name_map("[bert.]pooler  head.next_sentence.pooler.dense") + BERT_HEAD_NAMES["pretraining"],
}


def bigbird_attention(config: HFConfig, plain: Attention) -> Attention:
    """The attention of attention_type: blocks, or full attention."""
    block_size = config.get_int("block_size", default=64)
    random_blocks = FirstBlockInEvaluation(config.get_int("num_random_blocks", minimum=0, default=3))
    if config.get_str("attention_type", choices=ATTENTION_TYPES, default="block_sparse") == "original_full":
        return plain
    settings = {field.name: getattr(plain, field.name) for field in fields(plain)}
    return BigBirdAttention(**settings, block_size=block_size, random_blocks=random_blocks)


def bigbird_sizes(attention: BigBirdAttention | None) -> ConfigDict:
    """The keys of config.json that say which blocks are seen; the inverse of bigbird_attention()."""
    if attention is None:
        return {"attention_type": "original_full"}
    count = attention.random_blocks.count
    return {"attention_type": "block_sparse", "block_size": attention.block_size, "num_random_blocks": count}


@register_family("big_bird", body_names=name_map(BODY_TEMPLATE.format("bert")), head_names=BIGBIRD_HEAD_NAMES)
def read_bigbird_spec(config: HFConfig, head_type: str) -> Model:
    """BERT with blocks. A decoder (is_decoder) is refused: with blocks, the published one sees the future."""
    _refuse_decoder(config)
    norm = LayerNorm(config.get_float("layer_norm_eps", default=1e-12))
    activation = read_activation(config, "hidden_act", default="gelu_new")
    dropout = classifier_dropout(config)
    lm_head = LMHead(config.get_int("vocab_size"), bias=True, transform=MLMTransform(activation, norm))
    heads: dict[str, HeadSpec] = {
        "language": lm_head,
        "hidden_states": NoHead(),
        "pooler": Pooler(),
        "sequence_classification": ClassificationHead(
            len(config.get_labels()), Pooler(activation=activation), dropout=dropout
        ),
        "token_classification": TokenClassificationHead(len(config.get_labels()), dropout),
        "question_answering": AnswerSpanHead(
            config.get_int("intermediate_size"),
            config.get_int("sep_token_id", minimum=0, default=66),
            activation,
            norm,
            config.get_float("hidden_dropout_prob", default=0.1),
        ),
        "pretraining": MultiTaskHead((("language", lm_head), ("next_sentence", ClassificationHead(2)))),
    }
    model = encoder_spec(config, heads[head_type])
    model = swap(model, FeedForward, lambda ffn: replace(ffn, activation=activation))
    bias = "qkvo" if config.get_bool("use_bias", default=True) else "o"
    model = swap(model, Attention, lambda plain: bigbird_attention(config, replace(plain, bias=bias)))
    if not config.get_bool("rescale_embeddings", default=False):
        return model
    return swap(model, Embeddings, lambda embed: replace(embed, scale=config.get_int("hidden_size") ** 0.5))


def _refuse_decoder(config: HFConfig) -> None:
    if config.get_bool("is_decoder", default=False):
        raise BadFile(
            _(
                "{where}: is_decoder is true; a BigBird decoder with blocks sees the tokens it predicts, "
                "so only the encoder can be loaded; set is_decoder to false",
                where=config.where,
            )
        )


@register_config_writer("big_bird", "BigBird", lm_suffix="ForMaskedLM")
def bigbird_config(spec: Model) -> ConfigDict | None:
    """The inverse of read_bigbird_spec()."""
    config = bert_like_config(spec)
    attention = find_part(spec.encoder, Attention)
    if config is None or attention is None or spec.encoder is None:
        return None
    separator = getattr(spec.head, "separator", None)
    return config | {
        **bigbird_sizes(find_part(spec.encoder, BigBirdAttention)),
        "use_bias": "q" in attention.bias,
        "rescale_embeddings": getattr(spec.encoder.embed, "scale", 1.0) != 1.0,
        **({} if separator is None else {"sep_token_id": separator}),
    }
