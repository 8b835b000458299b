"""Too little data is refused or said, not trained on in silence."""

from __future__ import annotations

import pytest

from headwater.data.examples import TextPair
from headwater.errors import BadInput, BadSetting
from headwater.tasks.language_model import MIN_TRAIN_TOKENS
from headwater.training.api import train
from headwater.training.state import NoteEvent, StopReason

TINY = {"size": "xs", "max_steps": 2, "batch_tokens": 600, "eval_examples": 20}
QUESTION = '{"question": "Who?", "context": "See Ann run.", "answers": [{"text": "Ann", "answer_start": 4}]}\n'


@pytest.mark.parametrize(
    ("name", "text", "counts"),
    [
        ("one.tsv", "one two\teins zwei\n", "rows: 1, different inputs: 1"),
        ("same.tsv", "one two\teins zwei\n" * 10, "rows: 10, different inputs: 1"),
        ("one.jsonl", QUESTION, "rows: 1, different inputs: 1"),
        ("one.conll", "Ada\tB-PER\nleft\tO\n\n", "rows: 1, different inputs: 1"),
    ],
)
def test_what_cannot_be_split_is_refused_with_advice(tmp_path, name, text, counts):
    (tmp_path / name).write_text(text)
    with pytest.raises(BadInput, match=rf"the validation set is empty.*\({counts}\).*--valid FILE, or at least 2 rows"):
        train(tmp_path / name, out=tmp_path / "run", **TINY)
    assert not (tmp_path / "run").exists()


def test_with_two_rows_or_a_file_to_measure_on_it_is_trained(tmp_path):
    (tmp_path / "one.tsv").write_text("one two\teins zwei\n")
    (tmp_path / "other.tsv").write_text("three four\tdrei vier\n")
    received = []
    train(tmp_path / "one.tsv", valid=[tmp_path / "other.tsv"], out=tmp_path / "a", callbacks=[received.append], **TINY)
    notes = [event.text for event in received if isinstance(event, NoteEvent)]
    assert any(note.startswith("only ") and "training tokens" in note for note in notes)
    (tmp_path / "two.tsv").write_text("one two\teins zwei\nthree four\tdrei vier\n")
    assert train(tmp_path / "two.tsv", out=tmp_path / "b", **TINY).result.stop_reason is StopReason.FINISHED


def test_examples_without_a_validation_set_are_refused_too(tmp_path):
    with pytest.raises(BadInput, match="the validation set is empty"):
        train(examples={"train": [TextPair("a b", "c d")], "valid": []}, out=tmp_path / "run", **TINY)


@pytest.mark.parametrize("text", ["hello\n", "hello world this is a text\n"])
def test_a_text_of_a_few_tokens_is_refused(tmp_path, text):
    (tmp_path / "one.txt").write_text(text)
    with pytest.raises((BadInput, BadSetting), match=rf"at least {MIN_TRAIN_TOKENS} tokens|cannot be split"):
        train(tmp_path / "one.txt", out=tmp_path / "run", **TINY)
