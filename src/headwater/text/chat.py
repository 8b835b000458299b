"""Chat templates: a model's own way of writing a conversation.

A template is a program (in Jinja) that came with the weights, so it is trusted with nothing. It is rendered in Jinja's
sandbox, in a process of its own that has little memory, can write no file, and is ended when it takes more than a
second or so (chat_child.py). The process is started at the first conversation and kept for the next.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headwater.errors import BadFile, BadInput
from headwater.text.control import unused
from headwater.text.tokenizer import Tokenizer
from headwater.weights.files import shown

MOST_TEMPLATE, MOST_MESSAGES, MOST_SECONDS = 200_000, 8_000_000, 1.2

Message = Mapping[str, Any]


def render(template: str, messages: Sequence[Message], *, answer: bool = True, **more: Any) -> str:
    """The conversation as the model wants it written. `answer` ends it where the assistant's words begin."""
    if len(template) > MOST_TEMPLATE:
        raise BadFile(f"a chat template must have at most {MOST_TEMPLATE:,} characters, this one has {len(template):,}")
    values = {"messages": list(messages), "add_generation_prompt": answer, **more}
    request = json.dumps({"template": template, "values": values}) + "\n"
    if len(request) > MOST_MESSAGES:
        raise BadInput(f"a conversation must have at most {MOST_MESSAGES:,} characters, this one has {len(request):,}")
    reply = WORKER.ask(request.encode())
    if "text" in reply:
        return reply["text"]
    if "refused" in reply:
        raise BadInput(f"the chat template refuses these messages: {shown(reply['refused'], 200)}")
    raise BadFile(f"the chat template fails: {shown(reply.get('failed'), 200)}")


def encode_chat(tokenizer: Tokenizer, messages: Sequence[Message], *, answer: bool = True, **more: Any) -> list[int]:
    """Ids of a conversation. The template's control tokens act; the same words typed in a message stay words.

    A control token within a message is broken by a character that no message contains. After rendering only unbroken
    ones, the template's own, are cut out as control tokens, and the character is taken away again.
    """
    if not tokenizer.chat_template:
        raise BadInput("this model has no chat template; give it a plain prompt")
    said = json.dumps([list(messages), more], ensure_ascii=False, default=str)
    breaker = unused(said)
    names = {f"{role}_token": token for role, token in tokenizer.specials.items()}
    given = {
        key: tokenizer.control.broken(value, breaker) for key, value in {"messages": list(messages), **more}.items()
    }
    text = render(tokenizer.chat_template, given.pop("messages"), answer=answer, **names, **given)
    return tokenizer.encode(text, special=False, control=True, breaker=breaker)


class Worker:
    """The child process, one for each process of ours. One conversation at a time goes through it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def ask(self, request: bytes) -> dict[str, str]:
        with self._lock:
            child = self._ready()
            try:
                reply = _exchange(child, request, time.monotonic() + MOST_SECONDS)
            except (OSError, ValueError):
                reply = None
            if reply is None:
                self.stop()
                raise BadFile(
                    f"the chat template was stopped: it took more than {MOST_SECONDS} s, or ended its process"
                )
            return reply

    def stop(self) -> None:
        if self._child is not None and self._owner == os.getpid():
            self._child.kill()
            self._child.communicate()
        self._child = None

    def _ready(self) -> subprocess.Popen[bytes]:
        if self._child is None or self._owner != os.getpid() or self._child.poll() is not None:
            script = Path(__file__).with_name("chat_child.py")
            self._child = subprocess.Popen(
                [sys.executable, "-I", str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={"PATH": os.defpath},
                close_fds=True,
                cwd=script.parent,
            )
            self._owner = os.getpid()
            if _exchange(self._child, b'{"template": "ready", "values": {}}\n', time.monotonic() + 30) != {
                "text": "ready"
            }:
                raise BadFile("the process that renders chat templates does not start; is jinja2 installed?")
        return self._child


def _exchange(child: subprocess.Popen[bytes], request: bytes, until: float) -> dict[str, str] | None:
    """Send a line and read a line, or None when time is up or the child is gone."""
    assert child.stdin and child.stdout
    child.stdin.write(request)
    child.stdin.flush()
    reply = b""
    while not reply.endswith(b"\n"):
        ready, _, _ = select.select([child.stdout], [], [], max(0.0, until - time.monotonic()))
        part = os.read(child.stdout.fileno(), 1 << 20) if ready else b""
        if not part:
            return None
        reply += part
    answer: dict[str, str] = json.loads(reply)
    return answer


WORKER = Worker()
