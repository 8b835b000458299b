"""The registry of published codecs by model_type: how each reads its config.json and names its tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headwater.codecs.base import CodecSpec
from headwater.weights.hf_config import HFConfig
from headwater.weights.name_map import NameMap

ReadSpec = Callable[[HFConfig], CodecSpec]


@dataclass(frozen=True)
class CodecFamily:
    """A published codec. write_config: the inverse of read_spec."""

    read_spec: ReadSpec
    write_config: Callable[[Any], dict[str, object]]
    names: NameMap
    optional: tuple[str, ...] = ()  # patterns of parameters that a file may lack


CODEC_FAMILIES: dict[str, CodecFamily] = {}


def register_codec(
    model_type: str, names: NameMap, write_config: Callable[[Any], dict[str, object]], optional: tuple[str, ...] = ()
) -> Callable[[ReadSpec], ReadSpec]:
    """Decorator: register the spec reader of a model_type."""

    def register(read_spec: ReadSpec) -> ReadSpec:
        CODEC_FAMILIES[model_type] = CodecFamily(read_spec, write_config, names, optional)
        return read_spec

    return register
