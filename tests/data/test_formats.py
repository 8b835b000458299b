"""Columns of public datasets, instruction formats, and conversations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headwater.data.examples import LabeledText, TextPair
from headwater.data.readers.detect import SourceOptions, detect_source
from headwater.data.readers.lines import BadRows
from headwater.data.summary import summarize_files


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def read(path: Path, **options) -> list:
    return list(detect_source([path], (), SourceOptions(**options)).examples("train", BadRows()))


CONALA = [{"intent": f"how to sort list {n} in python",
           "rewritten_intent": None if n % 9 == 0 else f"sort list `x{n}` in python",
           "snippet": f"sorted(x{n}, key=f)", "question_id": n // 2} for n in range(60)]  # fmt: skip


def test_conala_is_read_from_intent_to_snippet(tmp_path: Path) -> None:
    path = tmp_path / "conala-train.json"
    path.write_text(json.dumps(CONALA))
    assert detect_source([path]).roles == {"source": "intent", "target": "snippet"}


def test_without_known_names_a_full_column_that_is_no_paraphrase_is_the_target(tmp_path: Path) -> None:
    """The same content under meaningless names: a nullable column and a numeric column are not chosen."""
    names = {"intent": "aa", "rewritten_intent": "bb", "snippet": "cc", "question_id": "dd"}
    rows = [{names[key]: value for key, value in row.items()} for row in CONALA]
    assert detect_source([write_rows(tmp_path / "a.jsonl", rows)]).roles == {"source": "aa", "target": "cc"}
    words = ["red", "blue", "green", "black", "white"]
    full = [{"aa": f"the {words[n % 5]} bird sat on wall {n}", "bb": f"the {words[n % 5]} bird was on wall {n}",
             "cc": f"{n} Vögel auf der Mauer"} for n in range(40)]  # fmt: skip
    assert detect_source([write_rows(tmp_path / "b.jsonl", full)]).roles == {"source": "aa", "target": "cc"}


@pytest.mark.parametrize(
    ("columns", "task", "roles"),
    [
        (("question", "answer"), "seq2seq", {"source": "question", "target": "answer"}),
        (("question", "answer", "label"), "classification", None),  # WikiQA: the label is the target
        (("text", "intent"), "classification", {"text": "text", "label": "intent"}),
        (("dialogue", "summary", "id"), "seq2seq", {"source": "dialogue", "target": "summary"}),
        (("invocation", "cmd"), "seq2seq", {"source": "invocation", "target": "cmd"}),
    ],
)
def test_pairs_of_public_datasets(tmp_path: Path, columns, task, roles) -> None:
    rows = [{name: f"{name} of the row {n}" if name not in ("label", "intent") else "ab"[n % 2] for name in columns}
            for n in range(30)]  # fmt: skip
    source = detect_source([write_rows(tmp_path / "a.jsonl", rows)])
    assert source.task == task and source.roles == (roles or source.roles)


ALPACA = [{"instruction": "Name a colour.", "input": "", "output": "Red."},
          {"instruction": "Translate.", "input": "Good morning", "output": "Guten Morgen"},
          {"instruction": "Say hello.", "input": None, "output": "Hello!"},
          {"instruction": "Say bye.", "output": "Bye!"}]  # fmt: skip


def test_alpaca_rows_are_pairs_of_instruction_with_input_and_output(tmp_path: Path) -> None:
    path = tmp_path / "alpaca.json"
    path.write_text(json.dumps(ALPACA))
    expected = [TextPair("Name a colour.", "Red."), TextPair("Translate.\nGood morning", "Guten Morgen"),
                TextPair("Say hello.", "Hello!"), TextPair("Say bye.", "Bye!")]  # fmt: skip
    assert read(path) == expected
    summary = str(summarize_files(path))
    assert "task       seq2seq, from instruction + input to output" in summary
    assert "format     Alpaca (instruction, input, output)" in summary
    table = tmp_path / "alpaca.csv"
    table.write_text("instruction,input,output\nTranslate.,Good morning,Guten Morgen\nSay bye.,,Bye!\n")
    assert read(table) == [expected[1], expected[3]]
    assert read(path, source="input", target="output") == [TextPair("Good morning", "Guten Morgen")]
    chosen = {"source": "instruction", "input": "input", "target": "output"}
    assert read(path, columns=chosen) == expected


def test_prompts_with_completions_and_dolly_rows(tmp_path: Path) -> None:
    rows = [{"prompt": f"ask {n}", "completion": f"say {n}", "id": n} for n in range(3)]
    path = write_rows(tmp_path / "a.jsonl", rows)
    assert read(path)[0] == TextPair("ask 0", "say 0")
    assert "format     prompt/completion (prompt, completion)" in str(summarize_files(path))
    dolly = [{"instruction": "Sum up.", "context": "A long text.", "response": "Short.", "category": "x"}]
    assert read(write_rows(tmp_path / "b.jsonl", dolly)) == [TextPair("Sum up.\nA long text.", "Short.")]


def test_a_task_or_columns_of_the_user_override_the_format(tmp_path: Path) -> None:
    rows = [{"prompt": f"a text {n}", "completion": "yes" if n % 2 else "no"} for n in range(4)]
    path = write_rows(tmp_path / "a.jsonl", rows)
    assert read(path, task="classification")[0] == LabeledText("a text 0", "no")
