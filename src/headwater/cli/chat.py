"""The command headwater chat MODEL: a chat in the terminal. Ctrl-C stops the reply, not the program."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headwater.cli import kernels
from headwater.cli.common import add_adapter_argument, gc_paused, load_model
from headwater.cli.parser import add_sampling_arguments, escape_control, sampling_settings
from headwater.errors import BadFile, BadInput, Fault, TooLong
from headwater.i18n import _

if TYPE_CHECKING:
    from headwater.families.hf_folder import LoadedModel
    from headwater.generation.prefix_cache import Prefix


def add_arguments(parser: argparse.ArgumentParser) -> None:
    help_text = _("a chat model: a folder, a .gguf file or a known name such as smollm2")
    parser.add_argument("model", metavar="MODEL", help=help_text)
    help_text = _("the system prompt")
    parser.add_argument("--system", metavar="TEXT", help=help_text)
    add_adapter_argument(parser)
    add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> None:
    with gc_paused():
        loaded = load_model(args)
    kernels.warn_missing()
    chat = ChatSession(loaded, args.system, sampling_settings(args), str if args.raw else escape_control)
    is_interactive = sys.stdin.isatty()
    if is_interactive:
        print(_("/help lists the commands; Ctrl-D ends"))
    while True:
        try:
            line = input("> " if is_interactive else "").strip()
        except EOFError:
            if is_interactive:
                print()
            return
        except KeyboardInterrupt:
            print()
            continue
        if line and not chat.handle_line(line):
            return


class ChatSession:
    """A chat with its messages; their KV cache is kept, so that each turn prefills only the new tokens."""

    def __init__(
        self, loaded: LoadedModel, system: str | None, settings: dict[str, Any], escape: Callable[[str], str]
    ) -> None:
        if loaded.tokenizer is None:
            raise BadInput(_("chat: the model must have a tokenizer, this one has none; use a chat model"))
        self.loaded = loaded
        self.tokenizer = loaded.tokenizer
        self.settings = settings
        self.escape = escape
        self.system = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = []
        self.prefix: Prefix | None = None

    def handle_line(self, line: str) -> bool:
        """Run a command or reply; False at the end of the chat. An error is printed, and the chat continues."""
        try:
            if line.startswith("/"):
                return self.run_command(*line[1:].split(maxsplit=1))
            self.reply(line)
        except Fault as fault:
            print(_("error: {text}", text=fault), file=sys.stderr)
        return True

    # ------------------------------------------------------------------------------------------------- commands

    def run_command(self, name: str = "help", argument: str = "") -> bool:
        """Run a command such as /save FILE; False for /exit."""
        match name:
            case "exit" | "quit":
                return False
            case "reset":
                self.messages = []
                print(_("a new conversation"))
            case "system":
                self.system = [{"role": "system", "content": argument}] if argument else []
                print(_("system prompt set"))
            case "save" if argument:
                self.save(argument)
            case _:
                print(command_help())
        return True

    def save(self, name: str) -> None:
        """Write the conversation as JSON into a new file."""
        try:
            with open(name, "x", encoding="utf-8") as file:  # "x": an existing file is never overwritten
                json.dump([*self.system, *self.messages], file, ensure_ascii=False, indent=2)
        except OSError as error:
            raise BadFile(
                _(
                    "chat: {name} must be a new file, got: {strerror}; choose another name",
                    name=name,
                    strerror=error.strerror,
                )
            ) from None
        print(_("saved: {name}", name=name))

    # ------------------------------------------------------------------------------------------------- replies

    def reply(self, line: str) -> None:
        """Generate and print the reply to a message."""
        from headwater.generation.api import stream

        self.messages.append({"role": "user", "content": line})
        try:
            ids = self.encode_conversation()
        except Fault:
            self.messages.pop()
            raise
        texts = []
        try:
            for event in stream(self.loaded, ids, prefix=self.prefix, **self.settings):
                texts.append(event.text)
                print(self.escape(event.text), end="", flush=True)
        except KeyboardInterrupt:
            print(_(" [stopped]"), end="")
        print()
        self.messages.append({"role": "assistant", "content": "".join(texts)})

    def encode_conversation(self) -> list[int]:
        """Token ids of the conversation in the chat template; the oldest turns are dropped if it is too long."""
        from headwater.generation.prefix_cache import Prefix
        from headwater.text.chat import encode_chat

        while True:
            ids = encode_chat(self.tokenizer, [*self.system, *self.messages])
            max_positions = self.loaded.max_positions
            max_tokens = self.settings["max_tokens"] or 1
            if max_positions is None or len(ids) + max_tokens <= max_positions:
                break
            if len(self.messages) < 3:
                raise TooLong(
                    _(
                        "chat: the model has {max_positions} positions, the message needs {num_ids}; shorten it",
                        max_positions=max_positions,
                        num_ids=len(ids),
                    )
                )
            self.messages = self.messages[2:]
            print(_("[the oldest turn is dropped]"), file=sys.stderr)
        if self.prefix is None:
            self.prefix = Prefix(self.loaded.model, ids)
        else:
            self.prefix.update(ids)
        return ids


def command_help() -> str:
    """The help of the chat commands."""
    return _(
        "/help           this list\n/reset          a new conversation\n/system TEXT    set the system "
        "prompt\n/save FILE      write the conversation as JSON\n/exit           end (or Ctrl-D)\nCtrl-C "
        "stops the reply"
    )
