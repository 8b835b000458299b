"""Rows that are conversations rather than pairs of texts: recognised by their keys, and refused with advice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headwater.errors import BadFile


def refuse_chats(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Raise BadFile when the first row is a conversation or a preference pair."""
    row = rows[0]
    if {"chosen", "rejected"} <= row.keys():
        raise BadFile(
            f"{path} holds preference pairs (chosen, rejected), which train does not read yet; convert each "
            "row to prompt and completion, or to instruction, input and output (Alpaca)"
        )
    if isinstance(row.get("messages"), list):
        raise BadFile(
            f"{path} is in the OpenAI chat format (messages), which train does not read yet; convert each row "
            "to prompt and completion, or to instruction, input and output (Alpaca)"
        )
    if isinstance(row.get("conversations"), list) or isinstance(row.get("conversation"), list):
        raise BadFile(
            f"{path} is in the ShareGPT format (conversations), which train does not read yet; convert each row "
            "to prompt and completion, or to instruction, input and output (Alpaca)"
        )
    if isinstance(row.get("prompt"), list) or isinstance(row.get("completion"), list):
        raise BadFile(
            f"{path} has prompts that are lists of messages, which train does not read yet; give prompt and "
            "completion as text, or instruction, input and output (Alpaca)"
        )
