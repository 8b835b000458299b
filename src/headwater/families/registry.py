"""The registry of model families by model_type: how each reads its config.json and maps its weight names.

A new family is a file of its own, imported in families/__init__.py: a function with @register_family, and its name map.
To be exported it needs a config writer too (config_writers.py), and a place in FAMILY_ORDER (export.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from headwater.core import Model
from headwater.errors import BadFile, nearest
from headwater.i18n import _
from headwater.weights.hf_config import HFConfig
from headwater.weights.name_map import NameMap

# The suffix of a transformers class name, and the head type it means.
HEAD_BY_ARCHITECTURE = {
    "LMHeadModel": "language",
    "ForCausalLM": "language",
    "ModelWithLMHead": "language",
    "ForMaskedLM": "language",
    "ForConditionalGeneration": "language",
    "MTModel": "language",
    "ForSequenceClassification": "sequence_classification",
    "ForTokenClassification": "token_classification",
    "ForQuestionAnswering": "question_answering",
    "ForNextSentencePrediction": "next_sentence",
    "ForPreTraining": "pretraining",
    "ModelWithProjection": "projection",
    "ForImageClassification": "image_classification",
    "ForAudioClassification": "audio_classification",
    "ForImageClassificationWithTeacher": "distilled",
    "ForMaskedImageModeling": "masked_image",
    "Model": "hidden_states",
}

LABELED_HEADS = (
    "sequence_classification",
    "token_classification",
    "image_classification",
    "distilled",
    "audio_classification",
)

# transformers' names of activations, and those of headwater.core.
ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}


@dataclass(frozen=True)
class Family:
    """A model family: how to read its config.json, and how its tensors are named.

    read_spec        (config, head type) -> the model's spec
    body_names       the name map of the body
    head_names       for each head type, the name map of the head
    optional_params  patterns of parameters that a checkpoint may lack, which then keep their initial values
    """

    name: str
    read_spec: Callable[[HFConfig, str], Model]
    body_names: NameMap
    head_names: Mapping[str, NameMap]
    optional_params: tuple[str, ...] = ()

    def is_optional(self, param: str) -> bool:
        """Whether a checkpoint may lack a parameter."""
        return any(fnmatchcase(param, pattern) for pattern in self.optional_params)


FAMILIES: dict[str, Family] = {}


def register_family(
    *model_types: str, body_names: NameMap, head_names: Mapping[str, NameMap], optional_params: tuple[str, ...] = ()
) -> Callable[[Callable[[HFConfig, str], Model]], Callable[[HFConfig, str], Model]]:
    """Decorator: register the spec reader of one or more model_types."""

    def register(read_spec: Callable[[HFConfig, str], Model]) -> Callable[[HFConfig, str], Model]:
        for name in model_types:
            FAMILIES[name] = Family(name, read_spec, body_names, head_names, optional_params)
        return read_spec

    return register


def find_family(model_type: str, where: object = "config.json") -> Family:
    """The family of a model_type; an unknown one is a BadFile that suggests the nearest."""
    if model_type not in FAMILIES:
        raise BadFile(
            _(
                "{where}: model_type {model_type!r} is not a known family; {nearest}",
                where=where,
                model_type=model_type[:60],
                nearest=nearest(model_type, FAMILIES),
            )
        )
    return FAMILIES[model_type]


def detect_head_type(family: Family, architectures: list[str]) -> str:
    """The head type a checkpoint was saved with; the family's first where `architectures` does not name one."""
    for architecture in architectures:
        for suffix, head_type in HEAD_BY_ARCHITECTURE.items():
            if architecture.endswith(suffix) and head_type in family.head_names:
                return head_type
    return next(iter(family.head_names))


def read_activation(config: HFConfig, *names: str, default: str = "gelu") -> str:
    """Read an activation by its name in transformers."""
    return ACTIVATIONS[config.get_str(*names, choices=ACTIVATIONS, default=default)]
