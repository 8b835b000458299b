"""Model families: for each model_type, a function from config.json to a spec and a map of weight names.

Importing this package registers all of them.
"""

from __future__ import annotations

from headwater.families import (
    albert,
    bark,
    bart,
    bert,
    bigbird,
    bigbird_pegasus,
    clip,
    clip_writers,
    dallebart,
    fairseq,
    gpt2,
    llama,
    longformer,
    longt5,
    musicgen,
    neox,
    reformer,
    t5,
    transfoxl,
    vit,
    whisper,
)
from headwater.families.registry import FAMILIES, Family, detect_head_type, find_family, register_family

__all__ = [
    "FAMILIES",
    "Family",
    "albert",
    "bark",
    "bart",
    "bert",
    "bigbird",
    "bigbird_pegasus",
    "clip",
    "clip_writers",
    "dallebart",
    "detect_head_type",
    "fairseq",
    "find_family",
    "gpt2",
    "llama",
    "longformer",
    "longt5",
    "musicgen",
    "neox",
    "reformer",
    "register_family",
    "t5",
    "transfoxl",
    "vit",
    "whisper",
]
