"""The one door to the `tokenizers` library: what goes in was checked, what comes out badly becomes a BadFile.

The library is written in Rust; where it gives up it raises a PanicException, which is no Exception and would
end the program past every handler. Here it is caught and told like any other fault.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import tokenizers

from headwater.errors import BadFile, Fault
from headwater.text.check import checked
from headwater.weights.files import shown

T = TypeVar("T")


def guarded(call: Callable[[], T], where: object, fault: type[Fault] = BadFile) -> T:
    """Run a call into the library; whatever it throws becomes one line."""
    try:
        return call()
    except Exception as error:
        raise fault(f"{where}: the tokenizer refuses: {shown(error, 120)}") from None
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise fault(f"{where}: the tokenizer gave up: {shown(error, 120)}") from None


def build(spec: dict[str, Any], where: object) -> tokenizers.Tokenizer:
    """A tokenizer from the contents of a tokenizer.json. Control tokens typed as text stay text."""
    spec = checked(spec, where)
    text = json.dumps(spec, ensure_ascii=False)
    engine: tokenizers.Tokenizer = guarded(lambda: tokenizers.Tokenizer.from_str(text), where)
    engine.encode_special_tokens = True
    for token in spec["added_tokens"]:
        if engine.token_to_id(token["content"]) != token["id"]:
            raise BadFile(
                f"{where}: the added token {shown(token['content'])} must have the id {token['id']}, "
                f"the vocabulary makes it {engine.token_to_id(token['content'])}"
            )
    guarded(
        lambda: engine.encode("a"), where
    )  # a template that names absent tokens fails here, not at the user's first text
    return engine
