"""Faults of a server, and how any fault is told to a stranger: typed, in one line, without paths or tracebacks."""

from __future__ import annotations

import re
from typing import Any

from headwater.errors import Fault
from headwater.inspection.words import chinese

_PATH = re.compile(r"(?:[A-Za-z]:)?(?:[/\\][^\s/\\:;,'\"()]+)+[/\\](?=[^\s/\\:;,'\"()])|(?<![\w.])/(?=[^\s/:;,'\"()]+)")
MOST = 400


class Refused(Fault):
    """A request that no page of ours makes: another host's, another site's, or without the token."""

    http_code = 403


class NoToken(Fault):
    http_code = 401


class NotHere(Fault):
    """A path, or a method on it, that does not exist."""

    http_code = 404


class WrongMethod(Fault):
    http_code = 405


class WrongType(Fault):
    http_code = 415


class Busy(Fault):
    """The queue is full; the page asks again a little later."""

    http_code = 503


class Forgotten(Fault):
    """A trace that is no longer kept; the page makes it anew."""

    http_code = 410


def told(fault: Fault) -> dict[str, Any]:
    """What the page is told, in both languages where both are known.

    Folders are cut from paths: what lies where is nobody's business but the terminal's.

    >>> told(Fault("/srv/models/x/config.json: not valid JSON; mend it"))["error"]["message"]
    'config.json: not valid JSON; mend it'
    """
    en = fault.args[0] if fault.args else ""
    message, zh = (" ".join(_PATH.sub("", said).split())[:MOST] for said in (str(fault), chinese(en)))
    error = {"kind": type(fault).__name__, "message": message}
    return {"error": error | ({"message_zh": zh} if zh != message else {})}
