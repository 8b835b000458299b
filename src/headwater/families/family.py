"""What a family is, and the list of them by model_type. What is known of a family stands in its own file alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headwater.core import Model
from headwater.errors import BadFile, nearest
from headwater.weights.names import Names
from headwater.weights.settings import Settings

# What stands at the end of a public architecture name, and the head it means.
ARCHITECTURES = {
    "LMHeadModel": "language",
    "ForCausalLM": "language",
    "ForMaskedLM": "language",
    "ForConditionalGeneration": "language",
    "MTModel": "language",
    "ForSequenceClassification": "class",
    "ForTokenClassification": "tags",
    "ForQuestionAnswering": "span",
    "ForNextSentencePrediction": "next",
    "ForPreTraining": "pretraining",
    "Model": "states",
}

# Public names of activations, and ours.
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
}


@dataclass(frozen=True)
class Family:
    """read(config, head) -> parts. names: the table of the body; heads: for each kind of head, the table of its own.

    optional: our names that a file may lack, which then stay zero.
    """

    name: str
    read: Callable[[Settings, str], Model]
    names: Names
    heads: Mapping[str, Names]
    optional: tuple[str, ...] = ()
    gguf: Any = field(default=None, compare=False)


FAMILIES: dict[str, Family] = {}


def family(
    *model_types: str, names: Names, heads: Mapping[str, Names], optional: tuple[str, ...] = ()
) -> Callable[[Callable[[Settings, str], Model]], Callable[[Settings, str], Model]]:
    """Register a reader for one or more model_types."""

    def keep(read: Callable[[Settings, str], Model]) -> Callable[[Settings, str], Model]:
        for name in model_types:
            FAMILIES[name] = Family(name, read, names, heads, optional)
        return read

    return keep


def find(model_type: str, where: object = "config.json") -> Family:
    if model_type not in FAMILIES:
        raise BadFile(
            f"{where}: model_type {model_type[:60]!r} is not a family known here; {nearest(model_type, FAMILIES)}"
        )
    return FAMILIES[model_type]


def head_kind(relation: Family, architectures: list[str]) -> str:
    """Which head a checkpoint was saved with; the family's first where the file does not say."""
    for architecture in architectures:
        for end, kind in ARCHITECTURES.items():
            if architecture.endswith(end) and kind in relation.heads:
                return kind
    return next(iter(relation.heads))


def act(c: Settings, *names: str, default: str = "gelu") -> str:
    """An activation by its public name."""
    return ACTIVATIONS[c.word(*names, known=ACTIVATIONS, default=default)]
