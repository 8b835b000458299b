"""The registry of config.json writers: from a model spec to the config that transformers opens.

A writer may be approximate: export.py reads its config back with the family's own reader and compares the two specs, so
a config that does not describe the model is never written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar, overload

from torch import Tensor

from headwater.core import (
    Attention,
    CrossAttention,
    Embeddings,
    FeedForward,
    GatedFeedForward,
    LayerNorm,
    Model,
    RMSNorm,
    Stack,
)
from headwater.families.registry import ACTIVATIONS

ConfigDict = dict[str, Any]
P = TypeVar("P")
Q = TypeVar("Q")

# For each head type, what follows the family's prefix in the name of its transformers class.
ARCHITECTURE_BY_HEAD = {
    "language": "ForCausalLM",
    "hidden_states": "Model",
    "pooler": "Model",
    "sequence_classification": "ForSequenceClassification",
    "token_classification": "ForTokenClassification",
    "question_answering": "ForQuestionAnswering",
    "next_sentence": "ForNextSentencePrediction",
    "pretraining": "ForPreTraining",
    "similarity": "Model",
    "projection": "ModelWithProjection",
    "image_classification": "ForImageClassification",
    "audio_classification": "ForAudioClassification",
    "distilled": "ForImageClassificationWithTeacher",
    "masked_image": "ForMaskedImageModeling",
}
DEFAULT_MAX_POSITIONS = 2048  # written for position encodings without a table, which have no maximum
# The name of an activation in transformers: the first, where it has several.
HF_ACTIVATIONS = {name: hf_name for hf_name, name in reversed(ACTIVATIONS.items())}


def no_extra_tensors(spec: Model, config: ConfigDict) -> dict[str, Tensor]:
    """The default of ConfigWriter.extra_tensors."""
    return {}


@dataclass(frozen=True)
class ConfigWriter:
    """The config writer of a family: from a spec to config.json.

    write_config   a spec -> the keys of config.json; None where the model has other stacks than the family
    architectures  the transformers class for each head type, written as `architectures`
    extra_tensors  tensors that transformers expects in the file although they are computed, not learned
    """

    name: str
    write_config: Callable[[Model], ConfigDict | None]
    architectures: Mapping[str, str]
    extra_tensors: Callable[[Model, ConfigDict], dict[str, Tensor]] = no_extra_tensors


CONFIG_WRITERS: dict[str, ConfigWriter] = {}


def register_config_writer(
    model_type: str,
    class_prefix: str,
    lm_suffix: str = "ForCausalLM",
    extra_tensors: Callable[[Model, ConfigDict], dict[str, Tensor]] = no_extra_tensors,
) -> Callable[[Callable[[Model], ConfigDict | None]], Callable[[Model], ConfigDict | None]]:
    """Decorator: register the config writer of a model_type. class_prefix: that of its transformers classes (Llama)."""
    suffixes = {**ARCHITECTURE_BY_HEAD, "language": lm_suffix}

    def register(write_config: Callable[[Model], ConfigDict | None]) -> Callable[[Model], ConfigDict | None]:
        architectures = {head_type: class_prefix + suffix for head_type, suffix in suffixes.items()}
        CONFIG_WRITERS[model_type] = ConfigWriter(model_type, write_config, architectures, extra_tensors)
        return write_config

    return register


@dataclass(frozen=True)
class StackSizes:
    """The sizes of one stack that a config.json holds, from its first attention, feed-forward layer and norm."""

    d_model: int
    num_layers: int
    embed: Embeddings
    attn: Attention
    ffn: FeedForward | GatedFeedForward
    norm: LayerNorm | RMSNorm
    dropout: float

    @property
    def num_heads(self) -> int:
        return self.attn.heads

    @property
    def head_dim(self) -> int:
        return self.attn.head_dim or self.d_model // self.attn.heads

    @property
    def activation(self) -> str:
        return HF_ACTIVATIONS.get(self.ffn.activation, self.ffn.activation)


def stack_sizes(stack: Stack | None) -> StackSizes | None:
    """The sizes of a stack; None where there is no stack, or it lacks attention, a feed-forward layer or a norm."""
    if stack is None or not isinstance(stack.embed, Embeddings):
        return None
    attn = find_part(stack.layers, Attention)
    ffn = find_part(stack.layers, FeedForward, GatedFeedForward)
    norm = find_part(stack.layers, LayerNorm, RMSNorm)
    if attn is None or ffn is None or norm is None or isinstance(attn, CrossAttention):
        return None
    dropout = getattr(stack.layers[0], "dropout", 0.0)
    num_layers = len(stack.order) or len(stack.layers)
    return StackSizes(stack.d_model, num_layers, stack.embed, attn, ffn, norm, dropout)


def decoder_sizes(spec: Model) -> StackSizes | None:
    """The sizes of a decoder-only model; None for any other."""
    return stack_sizes(spec.decoder) if spec.encoder is None else None


def encoder_sizes(spec: Model) -> StackSizes | None:
    """The sizes of an encoder-only model; None for any other."""
    return stack_sizes(spec.encoder) if spec.decoder is None else None


@overload
def find_part(spec: Any, part_type: type[P], /) -> P | None: ...
@overload
def find_part(spec: Any, part_type: type[P], other_type: type[Q], /) -> P | Q | None: ...
def find_part(spec: Any, *part_types: type[Any]) -> Any:
    """The first part of these types in a tree of parts, depth first; None where there is none."""
    if isinstance(spec, part_types):
        return spec
    children = spec if isinstance(spec, tuple) else ()
    if is_dataclass(spec):
        children = tuple(getattr(spec, f.name) for f in fields(spec))
    for child in children:
        part = find_part(child, *part_types)
        if part is not None:
            return part
    return None


def head_dropout(spec: Model) -> float:
    """The dropout before a classifier; 0 for other heads."""
    return float(getattr(spec.head, "dropout", 0.0))
