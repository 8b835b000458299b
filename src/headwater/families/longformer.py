"""Longformer and LED: RoBERTa and BART whose encoder has sliding windows and global tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from headwater.core import (
    Attention,
    ClassificationHead,
    LayerNorm,
    Learned,
    LMHead,
    LocalWindow,
    MLMTransform,
    Model,
    NoHead,
    NoNorm,
    Pooler,
    Stack,
    TokenClassificationHead,
    post,
)
from headwater.core.base import BlockSpec
from headwater.core.embeddings import Embeddings
from headwater.families.bart import (
    EMBED_NORM,
    HEAD_NAMES,
    OPTIONAL_BIAS,
    POSITION_TABLE,
    bart_like_config,
    seq2seq_names,
    seq2seq_spec,
)
from headwater.families.bert import (
    BODY_TEMPLATE,
    IGNORED_LM_HEAD,
    QA_HEAD_NAMES,
    ROBERTA_HEAD_NAMES,
    TOKEN_CLASSIFIER_NAMES,
    bert_like_config,
    classifier_dropout,
    encoder_spec,
)
from headwater.families.config_writers import ConfigDict, register_config_writer
from headwater.families.registry import register_family
from headwater.parts import swap
from headwater.variants.longformer import (
    FirstTokenIsGlobal,
    GlobalTokens,
    LongformerAttention,
    NoGlobalTokens,
    QuestionIsGlobal,
)
from headwater.weights.hf_config import HFConfig
from headwater.weights.name_map import NameMap, name_map


def with_windows(stack: Stack, windows: Sequence[int], global_tokens: GlobalTokens) -> Stack:
    """The stack with Longformer's attention in each layer; a window is the sum of both sides."""

    def with_window(layer: BlockSpec, window: int) -> BlockSpec:
        def attention(plain: Attention) -> LongformerAttention:
            settings = {f.name: getattr(plain, f.name) for f in fields(plain)}
            return LongformerAttention(**{**settings, "mask": LocalWindow(window // 2), "global_tokens": global_tokens})

        return swap(layer, Attention, attention)

    return replace(stack, layers=tuple(map(with_window, stack.layers, windows)))


def window_sizes(stack: Stack | None) -> list[int] | None:
    """The attention_window of config.json, one for each layer; None where a layer has another attention."""
    attentions = [getattr(layer, "branches", (None,))[0] for layer in (stack.layers if stack is not None else ())]
    rules = [getattr(getattr(branch, "layer", None), "mask", None) for branch in attentions]
    if not rules or not all(isinstance(rule, LocalWindow) for rule in rules):
        return None
    return [2 * rule.size for rule in rules if isinstance(rule, LocalWindow)]


# -------------------------------------------------------------------------------------------------------- Longformer

LONGFORMER_NAMES = name_map(
    BODY_TEMPLATE.format("longformer")
    + "".join(
        f"[longformer.]encoder.layer.{{i}}.attention.self.{public}_global  "
        f"encoder.layers.{{i}}.self_attn.{short}_global\n"
        for public, short in (("query", "q"), ("key", "k"), ("value", "v"))
    )
)
IGNORED_POOLER = name_map("[longformer.]pooler.dense  -")
LONGFORMER_HEAD_NAMES: dict[str, NameMap] = {
    "language": IGNORED_POOLER + ROBERTA_HEAD_NAMES["language"],
    "hidden_states": IGNORED_POOLER + IGNORED_LM_HEAD,
    "pooler": name_map("[longformer.]pooler.dense  head.dense"),
    "sequence_classification": IGNORED_POOLER + ROBERTA_HEAD_NAMES["sequence_classification"],
    "token_classification": IGNORED_POOLER + TOKEN_CLASSIFIER_NAMES,
    "question_answering": IGNORED_POOLER + QA_HEAD_NAMES,
}


@register_family("longformer", body_names=LONGFORMER_NAMES, head_names=LONGFORMER_HEAD_NAMES)
def read_longformer_spec(config: HFConfig, head_type: str) -> Model:
    """RoBERTa with windows. The first token is global for a classifier, the question for answers, else none."""
    config.ignore("onnx_export")
    eps = config.get_float("layer_norm_eps", default=1e-12)
    heads = {
        "language": LMHead(config.get_int("vocab_size"), bias=True, transform=MLMTransform("gelu", LayerNorm(eps))),
        "hidden_states": NoHead(),
        "pooler": Pooler(),
        "sequence_classification": ClassificationHead(
            len(config.get_labels()), dropout=config.get_float("hidden_dropout_prob", default=0.1)
        ),
        "token_classification": TokenClassificationHead(len(config.get_labels()), classifier_dropout(config)),
        "question_answering": TokenClassificationHead(2),
    }
    rules: dict[str, GlobalTokens] = {
        "sequence_classification": FirstTokenIsGlobal(),
        "question_answering": QuestionIsGlobal(config.get_int("sep_token_id", minimum=0, default=2)),
    }
    offset = config.get_int("pad_token_id", minimum=0, default=1) + 1
    model = encoder_spec(config, heads[head_type], position_offset=offset)
    assert model.encoder is not None
    windows = config.get_int_list("attention_window", minimum=2, layers=len(model.encoder.layers))
    stack = with_windows(model.encoder, windows, rules.get(head_type, NoGlobalTokens()))
    return replace(model, encoder=stack)


@register_config_writer("longformer", "Longformer", lm_suffix="ForMaskedLM")
def longformer_config(spec: Model) -> ConfigDict | None:
    """The inverse of read_longformer_spec()."""
    config = bert_like_config(spec)
    windows = window_sizes(spec.encoder)
    if config is None or windows is None:
        return None
    position = getattr(getattr(spec.encoder, "embed", None), "position", None)
    return config | {"attention_window": windows, "pad_token_id": max(getattr(position, "offset", 0) - 1, 0)}


# --------------------------------------------------------------------------------------------------------------- LED


def _led_names() -> NameMap:
    """BART's names with another prefix, and those of the encoder's attention."""
    layer = "encoder.layers.{i}.self_attn"
    projections = "".join(
        f"[led.]{layer}.longformer_self_attn.{public}  {layer}.{short}\n"
        for public, short in (
            ("query", "q"),
            ("key", "k"),
            ("value", "v"),
            ("query_global", "q_global"),
            ("key_global", "k_global"),
            ("value_global", "v_global"),
        )
    )
    attention_names = name_map(projections + f"[led.]{layer}.output  {layer}.out\n")
    return attention_names + seq2seq_names("post_norm", POSITION_TABLE + EMBED_NORM, prefix="led")


@register_family(
    "led",
    body_names=_led_names(),
    head_names={kind: HEAD_NAMES[kind] for kind in ("language", "hidden_states", "question_answering")},
    optional_params=OPTIONAL_BIAS,
)
def read_led_spec(config: HFConfig, head_type: str) -> Model:
    """BART whose encoder has windows, and whose position tables begin at row 0. No token is global by default."""
    sizes = {
        "encoder": config.get_int("max_encoder_position_embeddings", default=16384),
        "decoder": config.get_int("max_decoder_position_embeddings", default=1024),
    }
    model = seq2seq_spec(config, head_type, post, NoNorm(), Learned(1), LayerNorm())
    assert model.encoder is not None and model.decoder is not None
    windows = config.get_int_list("attention_window", minimum=2, layers=len(model.encoder.layers))
    return replace(
        model,
        encoder=with_positions(with_windows(model.encoder, windows, NoGlobalTokens()), sizes["encoder"]),
        decoder=with_positions(model.decoder, sizes["decoder"]),
    )


def with_positions(stack: Stack, size: int) -> Stack:
    """The stack with a table of `size` learned positions."""
    return swap(stack, Embeddings, lambda embed: replace(embed, position=Learned(size)))


@register_config_writer("led", "LED", lm_suffix="ForConditionalGeneration")
def led_config(spec: Model) -> ConfigDict | None:
    """The inverse of read_led_spec()."""
    config = bart_like_config(spec)
    windows = window_sizes(spec.encoder)
    positions = [getattr(getattr(stack, "embed", None), "position", None) for stack in (spec.encoder, spec.decoder)]
    if config is None or windows is None or not all(isinstance(position, Learned) for position in positions):
        return None
    del config["max_position_embeddings"], config["scale_embedding"]
    return config | {
        "attention_window": windows,
        "max_encoder_position_embeddings": positions[0].size,  # type: ignore[union-attr]
        "max_decoder_position_embeddings": positions[1].size,  # type: ignore[union-attr]
    }
