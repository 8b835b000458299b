"""Conversations, preference pairs and prompts: rows of chat files, recognised by their keys, whatever the file.

messages                            OpenAI: [{"role": "user", "content": …}, …]
conversations                       ShareGPT: [{"from": "human", "value": …}, …]
instruction, input, output          Alpaca, perhaps with system and history
prompt, completion                  text, or lists of messages
prompt, chosen, rejected            a preference pair; the prompt may be what both begin with
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

from headwater.data.examples import EXAMPLE_FORMATS, Cells, ExampleFormat, Roles, text_cell
from headwater.i18n import _

ROLES = {
    "human": "user",
    "user": "user",
    "prompter": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "system": "system",
    "developer": "system",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
}
ANSWER_KEYS = ("output", "response", "completion", "answer")
CONVERSATION_KEYS = ("messages", "conversations", "conversation")


class ChatTurn(NamedTuple):
    """One message of a conversation. role: system, user, assistant or tool."""

    role: str
    content: str


Turns = tuple[ChatTurn, ...]


def as_messages(turns: Sequence[ChatTurn]) -> list[dict[str, str]]:
    """Messages as a chat template reads them."""
    return [turn._asdict() for turn in turns]


class Conversation(NamedTuple):
    """An example of instruction tuning: messages, of which those of the assistant are learned."""

    turns: Turns

    @property
    def prompt(self) -> Turns:
        """The messages before the last answer."""
        return self.turns[: self.last_answer]

    @property
    def answer(self) -> str:
        """The last answer."""
        return self.turns[self.last_answer].content

    @property
    def last_answer(self) -> int:
        """The index of the last answer."""
        return max(i for i, turn in enumerate(self.turns) if turn.role == "assistant")

    @property
    def input_text(self) -> str:
        return join_turns(self.prompt)

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(turn.content for turn in self.turns)

    @property
    def labels(self) -> tuple[str, ...]:
        return ()

    @classmethod
    def from_cells(cls, cells: Cells, roles: Roles, document: int) -> Self:
        turns = conversation_turns(cells, roles)
        if not any(turn.role == "assistant" for turn in turns):
            raise ValueError(_("no answer: no message is of the assistant"))
        if not any(turn.role != "system" for turn in turns[: cls(turns).last_answer]):
            raise ValueError(_("no prompt: nothing stands before the answer"))
        return cls(turns)


class PreferencePair(NamedTuple):
    """A prompt with a better and a worse answer. margin: how much better, where the rows say so."""

    prompt: Turns
    chosen: str
    rejected: str
    margin: float = 0.0

    @property
    def input_text(self) -> str:
        return join_turns(self.prompt)

    @property
    def texts(self) -> tuple[str, ...]:
        return (*(turn.content for turn in self.prompt), self.chosen, self.rejected)

    @property
    def labels(self) -> tuple[str, ...]:
        return ()

    @classmethod
    def from_cells(cls, cells: Cells, roles: Roles, document: int) -> Self:
        for side in ("chosen", "rejected"):
            if cells.get(side) is None:
                raise ValueError(_("no {role}", role=side))
        prompt, chosen, rejected = _preference_parts(cells)
        if not prompt:
            raise ValueError(_("no prompt: nothing stands before the answer"))
        if chosen.strip() == rejected.strip():
            raise ValueError(_("chosen and rejected are equal"))
        margin = cells.get("margin")
        return cls(prompt, chosen, rejected, 0.0 if margin is None else float(margin))


class PromptExample(NamedTuple):
    """A prompt that the model answers in training, and the row it stands in, for the reward function."""

    prompt: Turns
    row_json: str = "{}"

    @property
    def columns(self) -> dict[str, Any]:
        """The cells of the row by column name."""
        columns: dict[str, Any] = json.loads(self.row_json)
        return columns

    @property
    def prompt_text(self) -> str:
        """The prompt as text: the one message, or all with their roles."""
        return self.prompt[0].content if len(self.prompt) == 1 else join_turns(self.prompt)

    @property
    def input_text(self) -> str:
        return join_turns(self.prompt)

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(turn.content for turn in self.prompt)

    @property
    def labels(self) -> tuple[str, ...]:
        return ()

    @classmethod
    def from_cells(cls, cells: Cells, roles: Roles, document: int) -> Self:
        turns = _prompt_turns(cells, roles)
        while turns and turns[-1].role == "assistant":
            turns = turns[:-1]
        if not turns:
            raise ValueError(_("no prompt: nothing stands before the answer"))
        return cls(turns, json.dumps(dict(cells), ensure_ascii=False, sort_keys=True))


# ------------------------------------------------------------------------------------------------ turns of a row


def conversation_turns(cells: Cells, roles: Roles) -> Turns:
    """The messages of a row. roles: columns chosen by the user, source and target; else the keys tell."""
    if "source" in roles and "target" in roles:
        source, target = (text_cell(role, cells.get(roles[role])) for role in ("source", "target"))
        return ChatTurn("user", source), ChatTurn("assistant", target)
    if key := next((key for key in CONVERSATION_KEYS if isinstance(cells.get(key), list)), ""):
        return _with_system(cells, read_turns(cells[key]))
    prompt = _prompt_turns(cells, roles)
    key = next((key for key in ANSWER_KEYS if not _is_blank(cells.get(key))), "")
    if not key:
        raise ValueError(_("no answer: no message is of the assistant"))
    return (*prompt, *_answer_turns(cells[key]))


def _prompt_turns(cells: Cells, roles: Roles) -> Turns:
    """The messages before the answer."""
    if "source" in roles:
        return (ChatTurn("user", text_cell("source", cells.get(roles["source"]))),)
    if key := next((key for key in CONVERSATION_KEYS if isinstance(cells.get(key), list)), ""):
        return _with_system(cells, read_turns(cells[key]))
    if not _is_blank(cells.get("instruction")):
        text = text_cell("instruction", cells["instruction"])
        extra = cells.get("input") or cells.get("context")
        user = text if _is_blank(extra) else f"{text}\n{text_cell('input', extra)}"
        return _with_system(cells, (*_history(cells.get("history")), ChatTurn("user", user)))
    key = next((key for key in ("prompt", "question", "query", "text") if not _is_blank(cells.get(key))), "")
    if not key:
        raise ValueError(
            _("no known keys: it needs messages, conversations, instruction and output, or prompt and completion")
        )
    value = cells[key]
    turns = read_turns(value) if isinstance(value, list) else (ChatTurn("user", text_cell(key, value)),)
    return _with_system(cells, turns)


def read_turns(messages: Any) -> Turns:
    """Messages with role and content (OpenAI), or with from and value (ShareGPT)."""
    turns: list[ChatTurn] = []
    for message in messages:
        if not isinstance(message, dict):
            raise ValueError(_("a message is not an object with role and content, or from and value"))
        role = message.get("role", message.get("from"))
        if role not in ROLES:
            raise ValueError(_("no role {role!r}: it is system, user, assistant or tool", role=str(role)[:30]))
        content = message.get("content", message.get("value"))
        if content is None and message.get("tool_calls"):
            content = json.dumps(message["tool_calls"], ensure_ascii=False)
        if isinstance(content, list):  # parts of a message: only texts
            content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
        turns.append(ChatTurn(ROLES[role], text_cell("content", content)))
    return tuple(turns)


def _with_system(cells: Cells, turns: Turns) -> Turns:
    system = cells.get("system")
    if _is_blank(system) or (turns and turns[0].role == "system"):
        return turns
    return (ChatTurn("system", text_cell("system", system)), *turns)


def _history(rounds: Any) -> list[ChatTurn]:
    """Alpaca's history: earlier rounds, each an instruction and its answer."""
    return [
        ChatTurn(role, text_cell("history", text))
        for each in rounds or []
        for role, text in zip(("user", "assistant"), each, strict=True)
    ]


def _answer_turns(answer: Any) -> Turns:
    if isinstance(answer, dict):
        answer = [answer]
    if isinstance(answer, list):
        return read_turns(answer)
    return (ChatTurn("assistant", text_cell("answer", answer)),)


def _preference_parts(cells: Cells) -> tuple[Turns, str, str]:
    """Prompt, chosen and rejected. Without a prompt of its own it is what both sides begin with."""
    chosen, rejected = (_side_turns(cells[side]) for side in ("chosen", "rejected"))
    common = 0
    while common < min(len(chosen), len(rejected)) - 1 and chosen[common] == rejected[common]:
        common += 1
    tails = chosen[common:], rejected[common:]
    if any(len(tail) != 1 or tail[0].role != "assistant" for tail in tails):
        raise ValueError(_("chosen and rejected must be one answer each, after the same messages"))
    keys = (*CONVERSATION_KEYS, "instruction", "prompt", "question", "query")
    has_prompt = any(not _is_blank(cells.get(key)) for key in keys)
    prompt = _prompt_turns(cells, {}) if has_prompt and not common else chosen[:common]
    return prompt, tails[0][0].content, tails[1][0].content


HH_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant): ?")  # of transcripts in one text, as in hh-rlhf


def _side_turns(side: Any) -> Turns:
    if isinstance(side, str) and len(parts := HH_TURN.split(side)) > 3 and not parts[0].strip():
        names = {"Human": "user", "Assistant": "assistant"}
        pairs = zip(parts[1::2], parts[2::2], strict=True)
        return tuple(ChatTurn(names[name], text_cell("content", text)) for name, text in pairs)
    return _answer_turns(side)


def _is_blank(value: Any) -> bool:
    return value is None or value == [] or (isinstance(value, str) and not value.strip())


def join_turns(turns: Sequence[ChatTurn]) -> str:
    """Messages as one text, for people and for hashes."""
    return "\n".join(f"{turn.role}: {turn.content}" for turn in turns)


# ----------------------------------------------------------------------------------------------- formats of a file

SHAPES: tuple[tuple[str, Callable[[Cells], bool]], ...] = (
    ("preference", lambda row: {"chosen", "rejected"} <= row.keys()),
    ("OpenAI messages", lambda row: isinstance(row.get("messages"), list)),
    ("ShareGPT", lambda row: any(isinstance(row.get(key), list) for key in CONVERSATION_KEYS[1:])),
    ("prompt/completion", lambda row: isinstance(row.get("prompt"), list) or isinstance(row.get("completion"), list)),
)


def conversation_shape(row: Cells) -> str:
    """The shape of a row that can only be a conversation or a preference pair; '' for any other.

    >>> conversation_shape({"conversations": []}), conversation_shape({"instruction": "a", "output": "b"})
    ('ShareGPT', '')
    """
    return next((name for name, fits in SHAPES if fits(row)), "")


def shape_task(shape: str) -> str:
    """The task that a file of this shape is for."""
    return "preference" if shape == "preference" else "chat"


CHAT_FORMAT = ExampleFormat("chat", Conversation, (), input_role="prompt", by_keys=True)
PREFERENCE_FORMAT = ExampleFormat("preference", PreferencePair, (), input_role="prompt", by_keys=True)
REWARD_FORMAT = ExampleFormat("reward", PreferencePair, (), input_role="text", by_keys=True)
PPO_FORMAT = ExampleFormat("ppo", PromptExample, (), input_role="prompt", by_keys=True)
GRPO_FORMAT = ExampleFormat("grpo", PromptExample, (), input_role="prompt", by_keys=True)
EXAMPLE_FORMATS.update(
    {each.task: each for each in (CHAT_FORMAT, PREFERENCE_FORMAT, REWARD_FORMAT, PPO_FORMAT, GRPO_FORMAT)}
)
