"""Chat files: rows recognised by their keys, their messages, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.data.conversations import ChatTurn, Conversation, PreferencePair, PromptExample
from headwater.data.readers.detect import SourceOptions, detect_source
from headwater.data.readers.lines import BadRows
from headwater.data.summary import summarize_files
from headwater.errors import BadFile, BadSetting

HI = (ChatTurn("user", "Hi"), ChatTurn("assistant", "Hello"))
MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
TURNS = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read(path: Path, **options) -> tuple[list, BadRows, str]:
    bad_rows = BadRows()
    source = detect_source([path], (), SourceOptions(**options))
    return list(source.examples("train", bad_rows)), bad_rows, source.task


@pytest.mark.parametrize(
    ("row", "turns"),
    [
        ({"messages": MESSAGES}, HI),
        ({"id": "1", "conversations": TURNS}, HI),
        ({"conversations": TURNS, "system": "Be brief."}, (ChatTurn("system", "Be brief."), *HI)),
        ({"prompt": MESSAGES[:1], "completion": MESSAGES[1:]}, HI),
        ({"prompt": "Hi", "completion": "Hello"}, HI),
        ({"instruction": "Hi", "input": "", "output": "Hello"}, HI),
        ({"instruction": "Say", "input": "Hi", "output": "Hello"}, (ChatTurn("user", "Say\nHi"), HI[1])),
        ({"instruction": "Again", "history": [["Hi", "Hello"]], "output": "Yes"},
         (*HI, ChatTurn("user", "Again"), ChatTurn("assistant", "Yes"))),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, MESSAGES[1]]}, HI),
        ({"question": "Hi", "answer": "Hello"}, HI),
    ],
)  # fmt: skip
def test_each_shape_becomes_the_same_messages(row, turns) -> None:
    assert Conversation.from_cells(row, {}, 0).turns == turns


def test_tool_calls_are_answers_and_their_results_are_not() -> None:
    row = {"conversations": [TURNS[0], {"from": "function_call", "value": "{}"}, {"from": "observation", "value": "1"},
                             TURNS[1]]}  # fmt: skip
    roles = [turn.role for turn in Conversation.from_cells(row, {}, 0).turns]
    assert roles == ["user", "assistant", "tool", "assistant"]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": MESSAGES[:1]}, "no answer"),
        ({"messages": MESSAGES[1:]}, "no prompt"),
        ({"messages": [{"role": "king", "content": "Hi"}]}, "no role 'king'"),
        ({"messages": ["Hi"]}, "not an object with role"),
        ({"messages": [{"role": "user", "content": ""}, MESSAGES[1]]}, "empty content"),
        ({"something": "else"}, "no known keys"),
        ({"instruction": "Hi", "output": "  "}, "no answer"),
    ],
)
def test_what_is_no_conversation_is_refused(row, words) -> None:
    with pytest.raises(ValueError, match=words):
        Conversation.from_cells(row, {}, 0)


def test_a_mixed_file_is_read_row_by_row_and_bad_rows_are_located(tmp_path: Path) -> None:
    rows = [
        {"messages": MESSAGES},
        {"conversations": TURNS},
        {"instruction": "Hi", "output": "Hello"},
        {"messages": []},
    ]
    examples, bad_rows, task = read(write_rows(tmp_path / "chat.jsonl", rows))
    assert task == "chat" and [example.turns for example in examples] == [HI] * 3
    assert bad_rows.summary_lines() == ["1 × no answer: no message is of the assistant (chat.jsonl:4)"]
    assert "format     OpenAI messages, ShareGPT, Alpaca" in str(summarize_files(tmp_path / "chat.jsonl"))


def test_instructions_are_chat_for_a_decoder_and_text_to_text_otherwise(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"instruction": "Hi", "output": "Hello"}] * 3)
    assert read(path)[2] == "seq2seq"
    assert read(path, instruction_task="chat")[2] == "chat"
    assert read(path, instruction_task="chat", task="seq2seq")[2] == "seq2seq"
    assert read(path, task="chat")[0][0].turns == HI


def test_columns_of_the_user_are_the_prompt_and_the_answer(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"nl": "list files", "cmd": "ls"}])
    examples, _, task = read(path, task="chat", columns={"source": "nl", "target": "cmd"})
    assert task == "chat" and examples[0].answer == "ls" and examples[0].prompt[0].content == "list files"


def test_a_file_without_answers_is_refused_in_one_line(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "chat.jsonl", [{"messages": MESSAGES[:1]}] * 3)
    with pytest.raises(BadFile, match="no row that can be used; 3 × no answer") as caught:
        summarize_files(path)
    assert "\n" not in str(caught.value)


def test_another_task_than_the_rows_are_for_is_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "chat.jsonl", [{"messages": MESSAGES}] * 3)
    with pytest.raises(BadSetting, match="OpenAI messages rows, which are for chat, not seq2seq; leave --task out"):
        summarize_files(path, task="seq2seq")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Hi", "chosen": "Hello", "rejected": "Go"},
        {"prompt": MESSAGES[:1], "chosen": MESSAGES[1:], "rejected": [{"role": "assistant", "content": "Go"}]},
        {"conversations": TURNS[:1], "chosen": TURNS[1], "rejected": {"from": "gpt", "value": "Go"}},
        {"chosen": MESSAGES, "rejected": [MESSAGES[0], {"role": "assistant", "content": "Go"}]},
        {"chosen": "\n\nHuman: Hi\n\nAssistant: Hello", "rejected": "\n\nHuman: Hi\n\nAssistant: Go"},
        {"instruction": "Hi", "chosen": "Hello", "rejected": "Go", "margin": 0.5},
    ],
)
def test_preference_pairs_of_each_shape(row) -> None:
    pair = PreferencePair.from_cells(row, {}, 0)
    assert (pair.prompt, pair.chosen, pair.rejected) == (HI[:1], "Hello", "Go")
    assert pair.margin == row.get("margin", 0.0)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "Hi", "chosen": "Go", "rejected": "Go "}, "chosen and rejected are equal"),
        ({"prompt": "Hi", "chosen": "Go"}, "no rejected"),
        ({"chosen": "Hello", "rejected": "Go"}, "no prompt"),
        ({"prompt": "Hi", "chosen": MESSAGES, "rejected": "Go"}, "one answer each"),
    ],
)
def test_pairs_that_teach_nothing_are_refused(row, words) -> None:
    with pytest.raises(ValueError, match=words):
        PreferencePair.from_cells(row, {}, 0)


def test_a_prompt_keeps_its_row_for_the_reward_function() -> None:
    example = PromptExample.from_cells({"prompt": "2 + 2?", "answer": "4"}, {}, 0)
    assert example.prompt_text == "2 + 2?" and example.columns["answer"] == "4"
    assert PromptExample.from_cells({"messages": MESSAGES}, {}, 0).prompt == HI[:1]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "from", "value", "text"]), inner, max_size=3)
    ),
    max_leaves=8,
)
KEYS = st.sampled_from(
    ["messages", "conversations", "prompt", "completion", "instruction", "output", "history", "chosen", "rejected"]
)


@given(st.dictionaries(KEYS, JSON, max_size=4))
def test_any_row_is_read_or_refused_in_words(row) -> None:
    """The reader counts ValueError, KeyError and TypeError as bad rows; nothing else may come."""
    for example_type in (Conversation, PreferencePair, PromptExample):
        try:
            example = example_type.from_cells(row, {}, 0)
        except (ValueError, KeyError, TypeError):
            continue
        assert example.input_text and hash(example) is not None
