"""The family, one short file a relation: a function from a public config.json to parts, and a table of weight names."""

from __future__ import annotations

from headwater.families.family import FAMILIES, Family, family, find, head_kind

from headwater.families import albert, bart, bert, fairseq, gpt2, llama, megatron, neox, t5  # isort: skip  # each registers its relations

__all__ = [
    "FAMILIES",
    "Family",
    "albert",
    "bart",
    "bert",
    "fairseq",
    "family",
    "find",
    "gpt2",
    "head_kind",
    "llama",
    "megatron",
    "neox",
    "t5",
]
