"""The process in which chat templates are rendered: it knows Jinja and nothing else, and has little to spend.

Run as a script by chat.py. Each line in is {"template": ..., "values": {...}}; each line out is {"text": ...},
{"refused": ...} when the template itself objects to the messages, or {"failed": ...}. A template that takes too long is
ended from outside; one that takes too much memory meets the limit set here.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

MOST_TEXT, MOST_MEMORY, MOST_FILES = 4_000_000, 768 << 20, 16


class Objection(Exception):
    """raise_exception(...) in a template: these messages do not fit it."""


def object_to(message: object = "") -> NoReturn:
    raise Objection(str(message)[:300])


def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


class Sandbox(ImmutableSandboxedEnvironment):
    """A template that reaches for what is forbidden is refused at once, not given an empty text."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        raise SecurityError(f"access to {attribute!r} of a {type(obj).__name__} is forbidden")


@functools.lru_cache(maxsize=16)
def compiled(text: str) -> jinja2.Template:
    sandbox = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], cache_size=0)
    sandbox.filters["tojson"] = to_json
    sandbox.globals |= {"raise_exception": object_to, "strftime_now": lambda pattern: time.strftime(str(pattern)[:100])}
    return sandbox.from_string(text)


def render(template: str, values: dict[str, Any]) -> str:
    parts, said = [], 0
    for part in compiled(template).generate(**values):
        said += len(part)
        if said > MOST_TEXT:
            raise MemoryError(f"a text of more than {MOST_TEXT:,} characters")
        parts.append(part)
    return "".join(parts)


def answer(line: str) -> dict[str, str]:
    try:
        request = json.loads(line)
        return {"text": render(request["template"], request["values"])}
    except Objection as objection:
        return {"refused": str(objection)}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"[:300]}


def limit() -> None:
    try:
        import resource
    except ImportError:  # not a POSIX machine: the time limit from outside is what is left
        return
    limits = (
        (resource.RLIMIT_AS, MOST_MEMORY),
        (resource.RLIMIT_NOFILE, MOST_FILES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    )
    for kind, most in limits:
        try:
            resource.setrlimit(kind, (most, most))
        except (ValueError, OSError):
            continue


def main() -> None:
    limit()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer(line)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
