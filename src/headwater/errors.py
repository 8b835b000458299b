"""Exceptions for mistakes a user can correct; the command line and the server turn each into one line.

    Fault              anything the user can correct                         exit 1   HTTP 400
    ├─ BadSetting      a value in a spec, a flag or a settings file          exit 2   HTTP 422
    ├─ BadInput        tensors, ids or text a model cannot take              exit 3   HTTP 422
    │  └─ TooLong      more tokens than there are positions                  exit 4   HTTP 413
    ├─ BadFile         a file that is damaged, hostile or of another format  exit 5   HTTP 422
    ├─ NotFound        a model, run or name that does not exist              exit 6   HTTP 404
    ├─ Unavailable     something this machine or installation lacks          exit 7   HTTP 501
    └─ CheckFailed     a model breaks a law that it must keep                exit 8   HTTP 422

A message is one line: what is required, the value that was got, and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from headwater.i18n import _


class Fault(Exception):
    """Base class of errors that a user can correct."""

    exit_code = 1
    http_code = 400


class BadSetting(Fault):
    exit_code = 2
    http_code = 422


class BadInput(Fault):
    exit_code = 3
    http_code = 422


class TooLong(BadInput):
    exit_code = 4
    http_code = 413


class BadFile(Fault):
    exit_code = 5
    http_code = 422


class NotFound(Fault):
    exit_code = 6
    http_code = 404


class Unavailable(Fault):
    exit_code = 7
    http_code = 501


class CheckFailed(Fault):
    exit_code = 8
    http_code = 422


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of Python, torch or the loader means that memory or threads are exhausted.

    >>> [is_out_of_memory(error) for error in (MemoryError(), RuntimeError("can't start new thread"), KeyError("x"))]
    [True, True, False]
    """
    message = str(error).lower()
    return isinstance(error, MemoryError) or any(phrase in message for phrase in _OUT_OF_MEMORY_MESSAGES)


_OUT_OF_MEMORY_MESSAGES = (
    "can't allocate memory",
    "cannot allocate memory",
    "can't start new thread",
    "failed to map segment",
    "out of memory",
)


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint about an unknown name: the nearest known one, or the known names.

    >>> nearest("rmsnrom", ["rmsnorm", "layernorm"])
    "did you mean 'rmsnorm'?"
    >>> nearest("rmsnrom", ["RMSNorm", "LayerNorm"])
    "did you mean 'RMSNorm'?"
    >>> nearest("zebra", ["b", "a"])
    'known: a, b'
    """
    names = sorted(known)
    original_spelling = {known_name.lower(): known_name for known_name in names}
    close = difflib.get_close_matches(name.lower(), original_spelling, 1)
    if close:
        return _("did you mean {name!r}?", name=original_spelling[close[0]])
    return _("known: {names}{more}", names=", ".join(names[:20]), more=" …" if len(names) > 20 else "")
