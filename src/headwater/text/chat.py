"""Chat templates: render and encode a conversation with the Jinja template of a model.

A template is a program that comes with the weights, so it is not trusted. It is rendered in Jinja's sandbox, in a
subprocess with a memory limit and without write access, which is killed after RENDER_TIMEOUT seconds
(chat_sandbox.py). The process is started for the first conversation and reused.
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
from headwater.i18n import _
from headwater.io.files import quote
from headwater.text.special_tokens import unused_character
from headwater.text.tokenizer import Tokenizer

MAX_TEMPLATE_CHARACTERS = 200_000
MAX_REQUEST_CHARACTERS = 8_000_000
RENDER_TIMEOUT = 1.2  # seconds

ChatMessage = Mapping[str, Any]


def render_chat(
    template: str, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True, **variables: Any
) -> str:
    """Render a conversation. add_generation_prompt ends it where the assistant's turn begins."""
    if len(template) > MAX_TEMPLATE_CHARACTERS:
        raise BadFile(
            _(
                "a chat template must have at most {max_characters:,} characters, this one has {num_characters:,}",
                max_characters=MAX_TEMPLATE_CHARACTERS,
                num_characters=len(template),
            )
        )
    values = {"messages": list(messages), "add_generation_prompt": add_generation_prompt, **variables}
    request = json.dumps({"template": template, "values": values}) + "\n"
    if len(request) > MAX_REQUEST_CHARACTERS:
        raise BadInput(
            _(
                "a conversation must have at most {max_characters:,} characters, this one has {num_characters:,}",
                max_characters=MAX_REQUEST_CHARACTERS,
                num_characters=len(request),
            )
        )
    reply = SANDBOX.send(request.encode())
    if "text" in reply:
        return reply["text"]
    if "refused" in reply:
        raise BadInput(_("the chat template refuses these messages: {reason}", reason=quote(reply["refused"], 200)))
    raise BadFile(
        _(
            "the chat template fails: {error}; correct it, or choose another with --chat-template",
            error=quote(reply.get("failed"), 200),
        )
    )


def encode_chat(
    tokenizer: Tokenizer, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True, **variables: Any
) -> list[int]:
    """Token ids of a conversation. Special tokens of the template are parsed; the same text in a message stays text.

    A special token in a message is escaped with a character that no message contains. After rendering only the
    template's own are parsed as special tokens, and the escape character is removed.
    """
    if not tokenizer.chat_template:
        raise BadInput(_("this model has no chat template; give it a plain prompt"))
    escape_char = chat_escape_char(messages, variables)
    text = render_escaped(tokenizer, messages, escape_char, add_generation_prompt=add_generation_prompt, **variables)
    return encode_rendered(tokenizer, text, escape_char)


def chat_escape_char(messages: Sequence[ChatMessage], variables: Mapping[str, Any]) -> str:
    """A character that no message contains."""
    return unused_character(json.dumps([list(messages), variables], ensure_ascii=False, default=str))


def render_escaped(
    tokenizer: Tokenizer,
    messages: Sequence[ChatMessage],
    escape_char: str,
    *,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> str:
    """The text of a conversation, in which the special tokens of its messages are escaped."""
    names = {f"{role}_token": token for role, token in tokenizer.special_tokens_map.items()}
    escaped = {
        key: tokenizer.special_tokenizer.escape_specials(value, escape_char)
        for key, value in {"messages": list(messages), **variables}.items()
    }
    return render_chat(
        tokenizer.chat_template,
        escaped.pop("messages"),
        add_generation_prompt=add_generation_prompt,
        **names,
        **escaped,
    )


def encode_rendered(tokenizer: Tokenizer, text: str, escape_char: str) -> list[int]:
    """Token ids of a rendered conversation: its special tokens are parsed, escaped ones stay text."""
    return tokenizer.encode(text, add_special_tokens=False, parse_special=True, escape_char=escape_char)


class ChatSandbox:
    """The subprocess that renders templates, one per process, one conversation at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner_pid = 0

    def send(self, request: bytes) -> dict[str, str]:
        """Send a request to the subprocess and return its reply; on timeout the subprocess is killed."""
        with self._lock:
            process = self._ensure_started()
            try:
                reply = _exchange(process, request, time.monotonic() + RENDER_TIMEOUT)
            except (OSError, ValueError):
                reply = None
            if reply is None:
                self.stop()
                raise BadFile(
                    _(
                        "the chat template was stopped: it took more than {timeout} s, or ended its process",
                        timeout=RENDER_TIMEOUT,
                    )
                )
            return reply

    def stop(self) -> None:
        """End the subprocess."""
        if self._process is not None and self._owner_pid == os.getpid():
            self._process.kill()
            self._process.communicate()
        self._process = None

    def _ensure_started(self) -> subprocess.Popen[bytes]:
        """Start the subprocess, if it does not run."""
        if self._process is None or self._owner_pid != os.getpid() or self._process.poll() is not None:
            script = Path(__file__).with_name("chat_sandbox.py")
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={"PATH": os.defpath},
                close_fds=True,
                cwd=script.parent,
            )
            self._owner_pid = os.getpid()
            if _exchange(self._process, b'{"template": "ready", "values": {}}\n', time.monotonic() + 30) != {
                "text": "ready"
            }:
                raise BadFile(_("the process that renders chat templates does not start; is jinja2 installed?"))
        return self._process


def _exchange(process: subprocess.Popen[bytes], request: bytes, deadline: float) -> dict[str, str] | None:
    """Send a line and read a line; None on timeout or when the subprocess has ended."""
    assert process.stdin and process.stdout
    process.stdin.write(request)
    process.stdin.flush()
    reply = b""
    while not reply.endswith(b"\n"):
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        part = os.read(process.stdout.fileno(), 1 << 20) if ready else b""
        if not part:
            return None
        reply += part
    result: dict[str, str] = json.loads(reply)
    return result


SANDBOX = ChatSandbox()
