"""What a user can mend, as a small tree; the command line and the server turn each into one line.

    Fault              anything the user can mend                            exit 1   HTTP 400
    ├─ BadSetting      a value in a spec, a flag or a settings file          exit 2   HTTP 422
    ├─ BadInput        tensors, ids or text a model cannot take              exit 3   HTTP 422
    │  └─ TooLong      more tokens than there are places                     exit 4   HTTP 413
    ├─ BadFile         a file that is missing, cut short, hostile or not ours exit 5  HTTP 422
    ├─ NotFound        a model, run or name that is not there                exit 6   HTTP 404
    ├─ Unavailable     something this machine or installation lacks          exit 7   HTTP 501
    └─ CheckFailed     a model broke a law it must keep                      exit 8   HTTP 422

A message says what must hold, what came, and what to do, in one line.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class Fault(Exception):
    exit_code, http_code = 1, 400


class BadSetting(Fault):
    exit_code, http_code = 2, 422


class BadInput(Fault):
    exit_code, http_code = 3, 422


class TooLong(BadInput):
    exit_code, http_code = 4, 413


class BadFile(Fault):
    exit_code, http_code = 5, 422


class NotFound(Fault):
    exit_code, http_code = 6, 404


class Unavailable(Fault):
    exit_code, http_code = 7, 501


class CheckFailed(Fault):
    exit_code, http_code = 8, 422


def out_of_memory(error: BaseException) -> bool:
    """Whether the machine has no more memory, or no more threads, however Python, torch or the loader say it.

    >>> [out_of_memory(error) for error in (MemoryError(), RuntimeError("can't start new thread"), KeyError("x"))]
    [True, True, False]
    """
    said = str(error).lower()
    return isinstance(error, MemoryError) or any(sign in said for sign in _NO_MEMORY)


_NO_MEMORY = (
    "can't allocate memory",
    "cannot allocate memory",
    "can't start new thread",
    "failed to map segment",
    "out of memory",
)


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest known one, or the first of them all.

    >>> nearest("rmsnrom", ["rmsnorm", "layernorm"])
    "did you mean 'rmsnorm'?"
    >>> nearest("rmsnrom", ["RMSNorm", "LayerNorm"])
    "did you mean 'RMSNorm'?"
    >>> nearest("zebra", ["b", "a"])
    'known: a, b'
    """
    names = sorted(known)
    spelt = {known_name.lower(): known_name for known_name in names}
    close = difflib.get_close_matches(name.lower(), spelt, 1)
    if close:
        return f"did you mean {spelt[close[0]]!r}?"
    return "known: " + ", ".join(names[:20]) + (" …" if len(names) > 20 else "")
