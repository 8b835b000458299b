"""One Transformer core, and the whole family that flows from it.

Importing this is quick: a name below is fetched from its module, and torch with it, when it is first asked for.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from headwater.errors import (
    BadFile,
    BadInput,
    BadSetting,
    CheckFailed,
    Fault,
    NotFound,
    TooLong,
    Unavailable,
    nearest,
)

if TYPE_CHECKING:
    from headwater.core.presets import preset
    from headwater.core.shapes import decoder, encoder, transformer
    from headwater.families.embedding import embed
    from headwater.families.loading import load, save
    from headwater.generation.ask import generate, stream
    from headwater.inspection.check import check
    from headwater.inspection.costs import count
    from headwater.inspection.gathering import inspect
    from headwater.inspection.watching import watch
    from headwater.training.teaching import resume, train

__version__ = "0.1.0"

# Every public name that is fetched when asked for, and the module it lives in.
HOMES = {
    "check": "headwater.inspection.check",
    "count": "headwater.inspection.costs",
    "decoder": "headwater.core.shapes",
    "embed": "headwater.families.embedding",
    "encoder": "headwater.core.shapes",
    "generate": "headwater.generation.ask",
    "inspect": "headwater.inspection.gathering",
    "load": "headwater.families.loading",
    "preset": "headwater.core.presets",
    "resume": "headwater.training.teaching",
    "save": "headwater.families.loading",
    "stream": "headwater.generation.ask",
    "train": "headwater.training.teaching",
    "transformer": "headwater.core.shapes",
    "watch": "headwater.inspection.watching",
}

__all__ = [
    "BadFile",
    "BadInput",
    "BadSetting",
    "CheckFailed",
    "Fault",
    "NotFound",
    "TooLong",
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
    "preset",
    "resume",
    "save",
    "stream",
    "train",
    "transformer",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name in HOMES:
        value = getattr(importlib.import_module(HOMES[name]), name)
    elif not name.startswith("_") and importlib.util.find_spec(f"headwater.{name}"):
        value = importlib.import_module(f"headwater.{name}")  # headwater.core, headwater.reference, …
    else:
        raise AttributeError(f"headwater has no name {name!r}; {nearest(name, __all__)}")
    globals()[name] = value  # the next look finds it without passing here
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
