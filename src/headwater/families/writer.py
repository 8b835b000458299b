"""The inverse of a family's reader: from a spec to the config.json that `transformers` opens.

A writer may guess: `export.py` reads its config back with the family's own reader and compares the two specs, so a
config that does not describe the model is never written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor

from headwater.core import (
    Attention,
    CrossAttention,
    FeedForward,
    GatedFeedForward,
    LayerNorm,
    Model,
    RMSNorm,
    Stack,
    Tokens,
)
from headwater.families.family import ACTIVATIONS

Config = dict[str, Any]

# What follows the family's prefix in the name of a class of transformers, for each head.
CLASSES = {
    "language": "ForCausalLM",
    "states": "Model",
    "pooled": "Model",
    "class": "ForSequenceClassification",
    "tags": "ForTokenClassification",
    "span": "ForQuestionAnswering",
    "next": "ForNextSentencePrediction",
    "pretraining": "ForPreTraining",
}
MAX_POSITIONS = 2048  # written for position encodings that have no table and so no end
PUBLIC_ACTIVATIONS = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}  # the first public name of each


def no_constants(spec: Model, config: Config) -> dict[str, Tensor]:
    return {}


@dataclass(frozen=True)
class Writer:
    """config: a spec -> the settings of config.json; None where the model has other stacks than the family.

    classes: the class of transformers for each head, written as `architectures`.
    constants: tensors that transformers expects in the file although they are computed, not learned.
    """

    name: str
    config: Callable[[Model], Config | None]
    classes: Mapping[str, str]
    constants: Callable[[Model, Config], dict[str, Tensor]] = no_constants


WRITERS: dict[str, Writer] = {}


def writer(
    model_type: str,
    prefix: str,
    language: str = "ForCausalLM",
    constants: Callable[[Model, Config], dict[str, Tensor]] = no_constants,
) -> Callable[[Callable[[Model], Config | None]], Callable[[Model], Config | None]]:
    """Register the writer of a model_type. prefix: how its classes are called in transformers (Llama, Bert)."""
    ends = {**CLASSES, "language": language}

    def register(config: Callable[[Model], Config | None]) -> Callable[[Model], Config | None]:
        classes = {kind: prefix + end for kind, end in ends.items()}
        WRITERS[model_type] = Writer(model_type, config, classes, constants)
        return config

    return register


@dataclass(frozen=True)
class StackSizes:
    """What a config.json says of one stack, taken from its first attention, feed-forward and norm."""

    d_model: int
    layers: int
    embed: Tokens
    attn: Attention
    ffn: FeedForward | GatedFeedForward
    norm: LayerNorm | RMSNorm
    dropout: float

    @property
    def heads(self) -> int:
        return self.attn.heads

    @property
    def head_dim(self) -> int:
        return self.attn.head_dim or self.d_model // self.attn.heads

    @property
    def activation(self) -> str:
        return PUBLIC_ACTIVATIONS.get(self.ffn.activation, self.ffn.activation)


def sizes_of(stack: Stack | None) -> StackSizes | None:
    """None where there is no stack, or it lacks attention, a feed-forward layer or a norm."""
    if stack is None or not isinstance(stack.embed, Tokens):
        return None
    attn = first(stack.layers, Attention)
    ffn = first(stack.layers, FeedForward, GatedFeedForward)
    norm = first(stack.layers, LayerNorm, RMSNorm)
    if attn is None or ffn is None or norm is None or isinstance(attn, CrossAttention):
        return None
    dropout = getattr(stack.layers[0], "dropout", 0.0)
    return StackSizes(stack.d_model, len(stack.order) or len(stack.layers), stack.embed, attn, ffn, norm, dropout)


def decoder_sizes(spec: Model) -> StackSizes | None:
    """The sizes of a decoder-only model; None for any other."""
    return sizes_of(spec.decoder) if spec.encoder is None else None


def encoder_sizes(spec: Model) -> StackSizes | None:
    """The sizes of an encoder-only model; None for any other."""
    return sizes_of(spec.encoder) if spec.decoder is None else None


def first(tree: Any, *kinds: type[Any]) -> Any:
    """The first part of these kinds in a tree of parts, depth first; None where there is none."""
    if isinstance(tree, kinds):
        return tree
    inside = tree if isinstance(tree, tuple) else ()
    if is_dataclass(tree):
        inside = tuple(getattr(tree, f.name) for f in fields(tree))
    return next((found for item in inside if (found := first(item, *kinds)) is not None), None)


def head_dropout(spec: Model) -> float:
    """The dropout before a classifier; 0 for other heads."""
    return float(getattr(spec.head, "dropout", 0.0))
