"""Backend of the tokenizer: wraps the `tokenizers` library; specs are validated first, Rust panics become BadFile.

A Rust panic is raised as PanicException, which is not an Exception: usual handlers miss it, so it is caught here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import tokenizers

from headwater.errors import BadFile, Fault
from headwater.i18n import _
from headwater.io.files import quote
from headwater.text.schema import validate_spec

T = TypeVar("T")


def call_backend(function: Callable[[], T], where: object, error_type: type[Fault] = BadFile) -> T:
    """Call the library; its exceptions and panics become error_type with a message of one line."""
    try:
        return function()
    except Exception as error:
        raise error_type(_("{where}: the tokenizer refuses: {error}", where=where, error=quote(error, 120))) from None
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise error_type(_("{where}: the tokenizer crashed: {error}", where=where, error=quote(error, 120))) from None


def build_backend(spec: dict[str, Any], where: object) -> tokenizers.Tokenizer:
    """Build the backend from the contents of a tokenizer.json. Special tokens in a text are encoded as text."""
    spec = validate_spec(spec, where)
    text = json.dumps(spec, ensure_ascii=False)
    backend: tokenizers.Tokenizer = call_backend(lambda: tokenizers.Tokenizer.from_str(text), where)
    backend.encode_special_tokens = True
    for token in spec["added_tokens"]:
        if backend.token_to_id(token["content"]) != token["id"]:
            raise BadFile(
                _(
                    "{where}: the added token {content} must have the id {id}, the vocabulary gives it {vocab_id}",
                    where=where,
                    content=quote(token["content"]),
                    id=token["id"],
                    vocab_id=backend.token_to_id(token["content"]),
                )
            )
    # a template with unknown tokens fails here, not at the user's first text
    call_backend(lambda: backend.encode("a"), where)
    return backend
