"""headwater chat MODEL: a conversation in the terminal. Ctrl-C stops the answer, not the program."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

from headwater.cli import kernels, sampling
from headwater.cli.language import error_line, say
from headwater.cli.starting import undisturbed
from headwater.cli.terminal import harmless
from headwater.errors import BadFile, Fault, TooLong


def arguments(parser: argparse.ArgumentParser) -> None:
    told = say(
        "a chat model: a folder, a .gguf file or a known name such as smollm2",
        "对话模型：文件夹、.gguf 文件或 smollm2 等名称",
    )
    parser.add_argument("model", metavar="MODEL", help=told)
    told = say("what the model is told before all else", "最先告诉模型的话（系统提示）")
    parser.add_argument("--system", metavar="TEXT", help=told)
    sampling.add(parser)


def run(args: argparse.Namespace) -> None:
    with undisturbed():
        from headwater.families.loading import load

        loaded = load(args.model)
    kernels.note_missing()
    chat = Chat(loaded, args.system, sampling.settings(args), str if args.raw else harmless)
    talkative = sys.stdin.isatty()
    if talkative:
        print(say("/help tells what there is; Ctrl-D ends", "/help 查看命令；Ctrl-D 结束"))
    while True:
        try:
            line = input("> " if talkative else "").strip()
        except EOFError:
            print() if talkative else None
            return
        except KeyboardInterrupt:
            print()
            continue
        if line and not chat.hear(line):
            return


class Chat:
    """messages: the conversation so far. What the model has read of it is kept, so each turn reads only what is new."""

    def __init__(self, loaded: Any, system: str | None, settings: dict[str, Any], shown: Callable[[str], str]) -> None:
        self.loaded, self.settings, self.shown = loaded, settings, shown
        self.system = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = []
        self.prefix: Any = None

    def hear(self, line: str) -> bool:
        """Obey a command or answer; False when the conversation is over. A fault is told, and the talk goes on."""
        try:
            if line.startswith("/"):
                return self.obey(*line[1:].split(maxsplit=1))
            self.answer(line)
        except Fault as fault:
            print(error_line(*fault.args[:1]), file=sys.stderr)
        return True

    # ------------------------------------------------------------------------------------------------- commands

    def obey(self, name: str = "help", rest: str = "") -> bool:
        match name:
            case "exit" | "quit":
                return False
            case "reset":
                self.messages = []
                print(say("a new conversation", "已开始新对话"))
            case "system":
                self.system = [{"role": "system", "content": rest}] if rest else []
                print(say("from now on", "即刻生效"))
            case "save" if rest:
                self.save(rest)
            case _:
                print(commands())
        return True

    def save(self, name: str) -> None:
        try:
            with open(name, "x", encoding="utf-8") as file:  # never over something that is there
                json.dump([*self.system, *self.messages], file, ensure_ascii=False, indent=2)
        except OSError as error:
            raise BadFile(f"chat: {name} must be a new file, got: {error.strerror}; choose another name") from None
        print(say(f"saved: {name}", f"已保存：{name}"))

    # ------------------------------------------------------------------------------------------------- answers

    def answer(self, line: str) -> None:
        from headwater.generation.ask import stream

        self.messages.append({"role": "user", "content": line})
        try:
            ids = self.ids()
        except Fault:
            self.messages.pop()
            raise
        said = []
        try:
            for event in stream(self.loaded, ids, prefix=self.prefix, **self.settings):
                said.append(event.text)
                print(self.shown(event.text), end="", flush=True)
        except KeyboardInterrupt:
            print(say(" [stopped]", " [已停止]"), end="")
        print()
        self.messages.append({"role": "assistant", "content": "".join(said)})

    def ids(self) -> list[int]:
        """The conversation as the model wants it; where it has grown too long, the oldest turns are forgotten."""
        from headwater.generation.prefix import Prefix
        from headwater.text.chat import encode_chat

        while True:
            ids = encode_chat(self.loaded.tokenizer, [*self.system, *self.messages])
            room, asked = self.loaded.longest, self.settings["max_tokens"]
            if room is None or len(ids) + (asked or 1) <= room:
                break
            if len(self.messages) < 3:
                raise TooLong(f"chat: there are {room} places, the message needs {len(ids)}; shorten it")
            self.messages = self.messages[2:]
            print(say("[the oldest turn is forgotten]", "[最早的一轮已忘记]"), file=sys.stderr)
        if self.prefix is None:
            self.prefix = Prefix(self.loaded.model, ids)
        else:
            self.prefix.grow(ids)
        return ids


def commands() -> str:
    return say(
        "/help           this\n/reset          a new conversation\n/system TEXT    what it is told before all else\n"
        "/save FILE      write the conversation as JSON\n/exit           end (or Ctrl-D)\nCtrl-C stops an answer",
        "/help           本帮助\n/reset          开始新对话\n/system 文本    设定系统提示\n"
        "/save 文件      把对话存为 JSON\n/exit           结束（或按 Ctrl-D）\nCtrl-C 停止当前回答",
    )
