"""Conversations as token ids with a mask of the learned tokens: the answers and their end of turn.

The mask is by position: a prompt is rendered as the model will read it, and what the whole conversation has beyond it
is the answer. No token is masked by its id, so an end of turn that is also the padding token is learned.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from headwater.data.collate import IGNORE_INDEX, TrainBatch, packed_causal_batch
from headwater.data.conversations import ChatTurn, as_messages
from headwater.data.ragged import PackedRows, Ragged, build_packed_rows
from headwater.errors import BadInput, BadSetting
from headwater.i18n import _
from headwater.text.chat import chat_escape_char, encode_rendered, render_escaped
from headwater.text.tokenizer import Tokenizer

MAX_MERGED_TOKENS = 2  # of the end of a prompt, that may merge with the beginning of the answer


class AnswerRow(NamedTuple):
    """Token ids, and which of them are learned."""

    ids: list[int]
    learned: list[bool]


class ChatEncoder:
    """Encodes prompts and answers in the chat template of a tokenizer; without a template, as one plain text.

    eos_ids are the tokens that end an answer: those that the template writes, and the tokenizer's own.
    """

    def __init__(self, tokenizer: Tokenizer, eos_id: int) -> None:
        self.tokenizer = tokenizer
        self.eos_id = eos_id
        self.special_ids = {n for n in map(tokenizer.token_to_id, tokenizer.special_tokens) if n is not None}
        self.eos_ids: dict[int, None] = {eos_id: None}
        self.uses_template = bool(tokenizer.chat_template)

    # ------------------------------------------------------------------------------------------------- prompts

    def prompt_ids(self, turns: Sequence[ChatTurn]) -> list[int]:
        """The ids that the model reads before it answers."""
        return self._encode(turns, True) if self.uses_template else self._plain_ids(self._single_text(turns))

    def answer_row(self, prompt: Sequence[ChatTurn], answer: str) -> AnswerRow:
        """A prompt and its answer, of which the answer and its end are learned."""
        return self.conversation_rows([*prompt, ChatTurn("assistant", answer)])[-1]

    # ------------------------------------------------------------------------------------------- conversations

    def conversation_rows(self, turns: Sequence[ChatTurn]) -> list[AnswerRow]:
        """A conversation as one row with all its answers; an answer that the template rewrites later has its own."""
        if not self.uses_template:
            return [self._plain_row(turns)]
        answers = [i for i, turn in enumerate(turns) if turn.role == "assistant"]
        full = self._encode(turns[: answers[-1] + 1], False)
        learned = [False] * (len(full) + 1)
        rows: list[AnswerRow] = []
        for i in answers:
            ids = full if i == answers[-1] else self._encode(turns[: i + 1], False)
            start = self._answer_start(turns[:i], ids)
            end = self._turn_end(ids, start)
            if i == answers[-1] and ids[end - 1] not in self.special_ids:
                ids = [*ids[:end], self.eos_id]  # the template ends no answer: the text ends with it
                full = ids
                end += 1
            if ids[:end] == full[:end]:
                learned[start:end] = [True] * (end - start)
            else:
                rows.append(AnswerRow(ids[:end], [False] * start + [True] * (end - start)))
            if ids[end - 1] in self.special_ids:
                self.eos_ids[ids[end - 1]] = None
        size = max(n for n, is_learned in enumerate(learned) if is_learned) + 1
        return [*rows, AnswerRow(full[:size], learned[:size])]

    def check_generation_prompt(self, turns: Sequence[ChatTurn]) -> None:
        """Refuse a template that does not say where an answer begins: its beginning would have to be guessed."""
        if not self.uses_template:
            return
        last = max(i for i, turn in enumerate(turns) if turn.role == "assistant")
        messages = as_messages(turns[: last + 1])
        escape_char = chat_escape_char(messages, {})
        with_prompt, without, full = (
            render_escaped(self.tokenizer, rows, escape_char, add_generation_prompt=prompt)
            for rows, prompt in ((messages[:-1], True), (messages[:-1], False), (messages, False))
        )
        rest = full.removeprefix(with_prompt).lstrip()
        begins = turns[last].content.strip()[:12]
        if with_prompt == without and not rest.startswith(begins):
            raise BadSetting(
                _(
                    "the chat template must end a prompt where the answer begins (add_generation_prompt), it writes "
                    "{text!r} first; give --chat-template plain, or a template with a generation prompt",
                    text=rest[: max(0, rest.find(begins))][:40],
                )
            )

    def _answer_start(self, prompt: Sequence[ChatTurn], ids: Sequence[int]) -> int:
        """The position of the first token of an answer."""
        prompt_ids = self._encode(prompt, True)
        start = common_prefix(prompt_ids, ids)
        if start < len(prompt_ids) - MAX_MERGED_TOKENS or start >= len(ids):
            raise BadInput(_("the chat template does not begin a conversation with its prompt"))
        return start

    def _turn_end(self, ids: Sequence[int], start: int) -> int:
        """The position after the end of a turn: after the last special token of the answer, if it has one."""
        ends = [n for n in range(start, len(ids)) if ids[n] in self.special_ids]
        return ends[-1] + 1 if ends else len(ids)

    def _encode(self, turns: Sequence[ChatTurn], add_generation_prompt: bool) -> list[int]:
        messages = as_messages(turns)
        escape_char = chat_escape_char(messages, {})
        text = render_escaped(self.tokenizer, messages, escape_char, add_generation_prompt=add_generation_prompt)
        return encode_rendered(self.tokenizer, text, escape_char)

    # ---------------------------------------------------------------------------------------- without a template

    def _plain_row(self, turns: Sequence[ChatTurn]) -> AnswerRow:
        prompt = self._single_text(turns[:-1])
        prompt_ids = self._plain_ids(prompt)
        ids = [*self._plain_ids(prompt + turns[-1].content), self.eos_id]
        start = common_prefix(prompt_ids, ids)
        return AnswerRow(ids, [False] * start + [True] * (len(ids) - start))

    def _plain_ids(self, text: str) -> list[int]:
        """The ids of the beginning of a text: with what the tokenizer puts before one, without what ends it."""
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        before = self.tokenizer.encode(text)[: -len(ids) or None] if ids else []
        return [*[n for n in before if n in self.special_ids and n != self.eos_id], *ids]

    def _single_text(self, turns: Sequence[ChatTurn]) -> str:
        if len(turns) != 1:
            raise BadInput(_("chat_template none takes one prompt and one answer; plain takes a conversation"))
        return turns[0].content


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """The number of equal ids at the beginning of both."""
    size = min(len(a), len(b))
    return next((n for n in range(size) if a[n] != b[n]), size)


# ---------------------------------------------------------------------------------------------------- rows as arrays


class AnswerRows(NamedTuple):
    """Many rows: ids, and the mask of learned tokens as 0 and 1."""

    ids: Ragged
    learned: Ragged

    @classmethod
    def from_rows(cls, rows: Iterable[AnswerRow]) -> AnswerRows:
        rows = list(rows)
        ids = Ragged.from_rows([row.ids for row in rows])
        return cls(ids, Ragged.from_rows([row.learned for row in rows], np.uint8))

    def take(self, rows: np.ndarray) -> AnswerRows:
        return AnswerRows(self.ids.take(rows), self.learned.take(rows))

    def truncate(self, max_length: int) -> AnswerRows:
        return AnswerRows(self.ids.truncate(max_length), self.learned.truncate(max_length))

    @property
    def num_learned(self) -> np.ndarray:
        """[N] learned tokens of each row. The first token of a text has nothing before it, and is never learned."""
        return np.array([int(self.learned[i][1:].sum()) for i in range(len(self.ids))], np.int64)


def answer_batch(rows: AnswerRows, groups: list[np.ndarray], width: int, pad_id: int) -> TrainBatch:
    """Rows of documents that share a row (groups); the targets are the learned tokens of each document."""
    packed = build_packed_rows(rows.ids, groups, width, pad_id)
    learned = build_packed_rows(rows.learned, groups, width, 0).ids
    return mask_targets(packed_causal_batch(PackedRows(packed.ids, packed.document_ids)), learned)


def mask_targets(batch: TrainBatch, learned: np.ndarray) -> TrainBatch:
    """The batch with targets only where the next token is learned. learned [B, Q]: 1 for a learned token."""
    next_learned = np.zeros(learned.shape, bool)
    next_learned[:, :-1] = learned[:, 1:] > 0
    batch.targets[~next_learned] = IGNORE_INDEX
    return batch


def text_spans(tokenizer: Tokenizer, row: AnswerRow) -> list[tuple[str, bool]]:
    """The text of a row in spans of learned and of not learned tokens; special tokens are shown."""
    spans: list[tuple[list[int], bool]] = []
    for token, learned in zip(row.ids, row.learned, strict=True):
        if not spans or spans[-1][1] != learned:
            spans.append(([], learned))
        spans[-1][0].append(token)
    return [(tokenizer.decode_bytes(ids).decode("utf-8", "replace"), learned) for ids, learned in spans]
