"""HTTP errors of the server, and the JSON body of an error: typed, one line, without paths or tracebacks."""

from __future__ import annotations

import re
from typing import Any

from headwater.errors import Fault
from headwater.i18n import translated

_PATH = re.compile(r"(?:[A-Za-z]:)?(?:[/\\][^\s/\\:;,'\"()]+)+[/\\](?=[^\s/\\:;,'\"()])|(?<![\w.])/(?=[^\s/:;,'\"()]+)")
MAX_MESSAGE_CHARS = 400


class Forbidden(Fault):
    """403: the Host or Origin header is not this server's."""

    http_code = 403


class Unauthorized(Fault):
    """401: the request has no valid token."""

    http_code = 401


class RouteNotFound(Fault):
    """404: no route has this path."""

    http_code = 404


class MethodNotAllowed(Fault):
    """405: the route does not have this HTTP method."""

    http_code = 405


class UnsupportedMediaType(Fault):
    """415: the body is not plain JSON."""

    http_code = 415


class Busy(Fault):
    """503: the queue is full; the page retries a little later."""

    http_code = 503


class Expired(Fault):
    """410: the trace was evicted from the cache; the page requests a new one."""

    http_code = 410


def error_body(fault: Fault) -> dict[str, Any]:
    """The JSON body of an error: type, message and, where it is translated, message_zh.

    Directories are removed from paths, so that a client learns nothing about the file system.

    >>> error_body(Fault("/srv/models/x/config.json: not valid JSON; fix it"))["error"]["message"]
    'config.json: not valid JSON; fix it'
    """
    message = _one_line(str(fault))
    message_zh = _one_line(translated(fault.args[0], "zh") if fault.args else "")
    error = {"type": type(fault).__name__, "message": message}
    if message_zh != message:
        error["message_zh"] = message_zh
    return {"error": error}


def _one_line(text: str) -> str:
    """A message without directories, on one line, of bounded length."""
    return " ".join(_PATH.sub("", text).split())[:MAX_MESSAGE_CHARS]
