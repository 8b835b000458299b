"""Headwater: one Transformer core in PyTorch, and the model families built from it.

Importing this is fast: a public name is imported from its module, and torch with it, on first access.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from headwater.errors import BadFile, BadInput, BadSetting, CheckFailed, Fault, NotFound, TooLong, Unavailable, nearest

if TYPE_CHECKING:
    from headwater.checker.api import check
    from headwater.families.adapters import load_adapter, save_adapter
    from headwater.families.builders import decoder, encoder, transformer
    from headwater.families.load import embed, load, save
    from headwater.families.presets import preset
    from headwater.generation.api import generate, stream
    from headwater.generation.sampling_params import SamplingParams
    from headwater.inspection.api import inspect
    from headwater.inspection.costs import count
    from headwater.inspection.hooks import watch
    from headwater.training.api import resume, train
    from headwater.training.config import TrainConfig
    from headwater.transcription.api import transcribe
    from headwater.tuning.api import tune

__version__ = "0.1.0"

# Every public name that is imported on first access, and its module.
LAZY_IMPORTS = {
    "SamplingParams": "headwater.generation.sampling_params",
    "TrainConfig": "headwater.training.config",
    "check": "headwater.checker.api",
    "count": "headwater.inspection.costs",
    "decoder": "headwater.families.builders",
    "embed": "headwater.families.load",
    "encoder": "headwater.families.builders",
    "generate": "headwater.generation.api",
    "inspect": "headwater.inspection.api",
    "load": "headwater.families.load",
    "load_adapter": "headwater.families.adapters",
    "preset": "headwater.families.presets",
    "resume": "headwater.training.api",
    "save": "headwater.families.load",
    "save_adapter": "headwater.families.adapters",
    "stream": "headwater.generation.api",
    "train": "headwater.training.api",
    "transcribe": "headwater.transcription.api",
    "transformer": "headwater.families.builders",
    "tune": "headwater.tuning.api",
    "watch": "headwater.inspection.hooks",
}

__all__ = [
    "BadFile",
    "BadInput",
    "BadSetting",
    "CheckFailed",
    "Fault",
    "NotFound",
    "SamplingParams",
    "TooLong",
    "TrainConfig",
    "Unavailable",
    "__version__",
    "check",
    "count",
    "decoder",
    "embed",
    "encoder",
    "generate",
    "inspect",
    "load",
    "load_adapter",
    "preset",
    "resume",
    "save",
    "save_adapter",
    "stream",
    "train",
    "transcribe",
    "transformer",
    "tune",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name in LAZY_IMPORTS:
        value = getattr(importlib.import_module(LAZY_IMPORTS[name]), name)
    elif not name.startswith("_") and importlib.util.find_spec(f"headwater.{name}"):
        value = importlib.import_module(f"headwater.{name}")  # headwater.core, headwater.reference, …
    else:
        raise AttributeError(f"headwater has no name {name!r}; {nearest(name, __all__)}")
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
