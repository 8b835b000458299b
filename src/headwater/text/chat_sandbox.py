"""Subprocess that renders chat templates (Jinja sandbox) under memory and file limits.

Run as a script by chat.py. Each line in is {"template": ..., "values": {...}}; each line out is {"text": ...},
{"refused": ...} when the template itself rejects the messages, or {"failed": ...}. A template that takes too long
is killed from outside; memory is limited here.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

MAX_OUTPUT_CHARACTERS = 4_000_000
MAX_MEMORY_BYTES = 768 << 20
MAX_OPEN_FILES = 16


class TemplateRefusal(Exception):
    """raise_exception(...) in a template: it refuses these messages."""


def raise_exception(message: object = "") -> NoReturn:
    raise TemplateRefusal(str(message)[:300])


def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Jinja sandbox in which access to a forbidden attribute raises, instead of giving an empty text."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        raise SecurityError(f"access to {attribute!r} of a {type(obj).__name__} is forbidden")


@functools.lru_cache(maxsize=16)
def compile_template(text: str) -> jinja2.Template:
    """Compile a template in the sandbox, with the functions that chat templates use."""
    sandbox = TemplateEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], cache_size=0
    )
    sandbox.filters["tojson"] = to_json
    sandbox.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda pattern: time.strftime(str(pattern)[:100]),
    }
    return sandbox.from_string(text)


def render_template(template: str, values: dict[str, Any]) -> str:
    """Render a template; MemoryError above MAX_OUTPUT_CHARACTERS."""
    parts: list[str] = []
    size = 0
    for part in compile_template(template).generate(**values):
        size += len(part)
        if size > MAX_OUTPUT_CHARACTERS:
            raise MemoryError(f"a text of more than {MAX_OUTPUT_CHARACTERS:,} characters")
        parts.append(part)
    return "".join(parts)


def handle_request(line: str) -> dict[str, str]:
    """The reply to one line of input."""
    try:
        request = json.loads(line)
        return {"text": render_template(request["template"], request["values"])}
    except TemplateRefusal as refusal:
        return {"refused": str(refusal)}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"[:300]}


def set_resource_limits() -> None:
    """Limit memory and open files of this process, and forbid it to write files."""
    try:
        import resource
    except ImportError:  # not POSIX: only the time limit from outside applies
        return
    limits = (
        (resource.RLIMIT_AS, MAX_MEMORY_BYTES),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    )
    for kind, limit in limits:
        try:
            resource.setrlimit(kind, (limit, limit))
        except (ValueError, OSError):
            continue


def main() -> None:
    """Reply to each line until the input ends."""
    set_resource_limits()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(handle_request(line)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
