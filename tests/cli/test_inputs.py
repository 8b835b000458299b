"""Inputs of a command: a mistyped file name is an error, and a table is returned with columns added."""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
from pathlib import Path

import pytest

import headwater
from headwater import cli
from headwater.cli.inputs import EXTENSIONS, looks_like_file, resolve_file
from headwater.data.readers.files import FORMAT_BY_SUFFIX
from headwater.errors import NotFound


class FakePredictor:
    """A predictor whose outputs are functions of its inputs, so that every row can be checked."""

    def __init__(self, task, columns=None):
        self.task, self.columns, self.read = task, columns or {}, []

    def __call__(self, texts, **options):
        self.read += texts
        return [OUTPUTS[self.task](text) for text in texts]


def label_of(text):
    first, second = (text, "") if isinstance(text, str) else text
    prob = round(1 / (1 + len(first) + len(second)), 4)
    return {"long" if len(first) > 12 else "short": 1 - prob, "other": prob}


def tags_of(words):
    return [(word, "B-X" if word[0].isupper() else "O") for word in words]


OUTPUTS = {
    "classification": label_of,
    "seq2seq": lambda text: text[::-1],
    "token-classification": lambda text: tags_of(text.split() if isinstance(text, str) else text),
}


@pytest.fixture
def fake_predictor(monkeypatch):
    def plant(task, columns=None):
        run = FakePredictor(task, columns)
        monkeypatch.setattr("headwater.training.predict.load_run", lambda folder, result=None: run)
        return run

    return plant


@pytest.fixture
def run_cli(capsys, monkeypatch):
    def run(*words, pipe=None):
        if pipe is not None:
            data = pipe if isinstance(pipe, bytes) else pipe.encode()
            stream = io.TextIOWrapper(io.BytesIO(data), "utf-8", errors="surrogateescape", newline="\n")
            monkeypatch.setattr(sys, "stdin", stream)  # as Python opens it: \r is kept
        code = cli.main([str(word) for word in words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


# ------------------------------------------------------------------------------------------- a mistyped file name

VERBS = {
    "classify": "classification",
    "tag": "token-classification",
    "translate": "seq2seq",
    "summarize": "seq2seq",
    "backtranslate": "seq2seq",
    "answer": "question-answering",
}
NAMES = ["nofile.csv", "nofile.tsv", "nofile.txt", "nofile.jsonl", "nofile.json", "nofile.csv.gz", "NOFILE.CSV",
         "my data.csv", "folder/nofile", "./nofile", "数据.csv"]  # fmt: skip


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", NAMES)
def test_a_mistyped_file_name_is_an_error_and_not_a_text(fake_predictor, run_cli, tmp_path, monkeypatch, verb, name):
    monkeypatch.chdir(tmp_path)
    run = fake_predictor(VERBS[verb])
    more = {"backtranslate": ["--out", "x.tsv"], "answer": ["--text", "-"]}.get(verb, [])
    code, out, err = run_cli(verb, "RUN", name, *more, pipe="a text")
    assert (code, out, err.count("\n"), run.read) == (NotFound.exit_code, "", 1, [])
    assert err.startswith(f"error: no file {name!r}; give an existing file")
    assert list(tmp_path.iterdir()) == [], "no file is written"


def test_backtranslate_takes_files_and_nothing_else(fake_predictor, run_cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fake_predictor("seq2seq")
    code, _, err = run_cli("backtranslate", "RUN", "nofile", "--out", "x.tsv")
    assert code == 6 and err == "error: no file 'nofile'; give an existing file\n" and not Path("x.tsv").exists()


@pytest.mark.parametrize("verb", ["embed", "generate", "inspect"])
def test_the_rule_holds_where_a_model_is_loaded(run_cli, verb, monkeypatch):
    monkeypatch.setattr("headwater.families.load.load", lambda name: type("Model", (), {"tokenizer": 1})())
    monkeypatch.setattr("headwater.cli.inspect.load_model", lambda name: type("Model", (), {"tokenizer": 1})())
    code, out, err = run_cli(verb, "MODEL", "nofile.txt")
    assert (code, out, err.count("\n")) == (6, "", 1) and "no file 'nofile.txt'" in err and "--as-text" in err


def test_all_files_are_checked_before_one_is_read(fake_predictor, run_cli, tmp_path):
    run = fake_predictor("classification")
    (tmp_path / "there.txt").write_text("one\n")
    code, out, _ = run_cli("classify", "RUN", tmp_path / "there.txt", tmp_path / "nowhere.txt")
    assert (code, out, run.read) == (6, "", [])


@pytest.mark.parametrize(
    "text", ["a text", "1987/03/15", "5/10", "3.5", "see and/or use it", "What is new?", "mp3", "é"]
)
def test_a_text_is_a_text(fake_predictor, run_cli, text):
    run = fake_predictor("seq2seq")
    assert run_cli("translate", "RUN", text) == (0, text[::-1] + "\n", "") and run.read == [text]


def test_as_text_treats_every_argument_as_text(fake_predictor, run_cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("there.txt").write_text("inside\n")
    fake_predictor("seq2seq")
    assert run_cli("translate", "RUN", "nofile.csv", "there.txt", "-", "--as-text")[1] == "vsc.elifon\ntxt.ereht\n-\n"
    assert run_cli("translate", "RUN", "there.txt")[1] == "edisni\n"


def test_a_folder_and_a_pipe_are_no_files(tmp_path):
    with pytest.raises(headwater.BadFile, match="it is a folder"):
        resolve_file(f"{tmp_path}/")
    assert resolve_file("a" * 5000) is None and resolve_file("one\ntwo.csv") is None


def test_every_extension_that_train_knows_is_a_file_name():
    assert set(FORMAT_BY_SUFFIX) <= set(EXTENSIONS)
    assert all(looks_like_file("x" + end) for end in EXTENSIONS)


# --------------------------------------------------------------------------------------------------- lines of a pipe


def test_a_carriage_return_is_no_part_of_a_line(fake_predictor, run_cli, tmp_path):
    run = fake_predictor("seq2seq")
    (tmp_path / "texts.txt").write_bytes("one\r\n二\r\n".encode())
    assert (
        run_cli("translate", "RUN", pipe="one\r\n二\r\n")[1] == run_cli("translate", "RUN", tmp_path / "texts.txt")[1]
    )
    assert sorted(run.read) == ["one", "one", "二", "二"]


# ------------------------------------------------------------------------------------------------------------ tables

ROWS = [
    {"id": "1", "text": 'He said "no", twice', "stars": "5"},
    {"id": "2", "text": "two\nlines, and a comma", "stars": "1"},
    {"id": "3", "text": "电影很好，非常好看", "stars": ""},
    {"id": "4", "text": "", "stars": "2"},
    {"id": "5", "text": "tab\there and \r too", "stars": "3"},
]


def written(path, rows, delimiter=",", newline="\n"):
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, list(rows[0]), delimiter=delimiter, lineterminator=newline, quoting=csv.QUOTE_ALL)
        table.writeheader()
        table.writerows(rows)
    return path


def parsed(text, delimiter=","):
    return list(csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter))


@pytest.mark.parametrize("delimiter", [",", ";"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_a_csv_gets_a_label_and_a_probability_column(fake_predictor, run_cli, tmp_path, delimiter, newline):
    run = fake_predictor("classification", {"text": "text", "label": "stars"})
    path = written(tmp_path / "in.csv", ROWS, delimiter, newline)
    code, out, err = run_cli("classify", "RUN", path)
    rows = parsed(out, delimiter)
    assert code == 0 and err == "in.csv: reading column text\n"
    assert [{name: row[name] for name in ("id", "text", "stars")} for row in rows] == ROWS
    for row in rows:
        label, prob = next(iter(label_of(row["text"]).items()))
        assert (row["label"], row["probability"]) == ((label, str(prob)) if row["text"] else ("", ""))
    assert sorted(text for text, _ in run.read) == sorted(row["text"] for row in ROWS if row["text"])


@pytest.mark.parametrize(
    ("verb", "task", "role", "added", "expected_output"),
    [
        ("translate", "seq2seq", "source", "translation", lambda text: text[::-1]),
        ("summarize", "seq2seq", "source", "summary", lambda text: text[::-1]),
        (
            "tag",
            "token-classification",
            "words",
            "tags",
            lambda text: " ".join(tag for _, tag in OUTPUTS["token-classification"](text)),
        ),
    ],
)
def test_each_verb_names_its_column(fake_predictor, run_cli, tmp_path, verb, task, role, added, expected_output):
    fake_predictor(task, {role: "text"})
    code, out, _ = run_cli(verb, "RUN", written(tmp_path / "in.csv", ROWS))
    assert code == 0 and [row[added] for row in parsed(out)] == [expected_output(row["text"]) for row in ROWS]


def test_an_output_table_can_be_an_input_table(fake_predictor, run_cli, tmp_path):
    """An existing column is kept, and the new one gets another name."""
    fake_predictor("classification", {"text": "text"})
    once = run_cli("classify", "RUN", written(tmp_path / "in.csv", ROWS))[1]
    (tmp_path / "again.csv").write_text(once, encoding="utf-8", newline="")
    code, out, _ = run_cli("classify", "RUN", tmp_path / "again.csv")
    again = parsed(out)
    assert code == 0 and list(again[0])[-2:] == ["predicted_label", "predicted_probability"]
    assert [{name: row[name] for name in parsed(once)[0]} for row in again] == parsed(once)
    assert all(row["label"] == row["predicted_label"] for row in again)


def test_tsv_has_no_quotes_and_keeps_its_lines(fake_predictor, run_cli, tmp_path):
    fake_predictor("seq2seq", {"source": "en"})
    (tmp_path / "in.tsv").write_text('en\tid\n"Hello"\t1\n你好\t2\n', encoding="utf-8")
    assert (
        run_cli("translate", "RUN", tmp_path / "in.tsv")[1]
        == 'en\tid\ttranslation\n"Hello"\t1\t"olleH"\n你好\t2\t好你\n'
    )


def test_a_table_without_a_header_stays_without(fake_predictor, run_cli, tmp_path):
    fake_predictor("seq2seq", {"source": "1", "target": "2"})
    (tmp_path / "in.tsv").write_text("Good morning\tx\nSee you soon\ty\n")
    assert (
        run_cli("translate", "RUN", tmp_path / "in.tsv")[1]
        == "Good morning\tx\tgninrom dooG\nSee you soon\ty\tnoos uoy eeS\n"
    )


def test_json_lines_keep_their_values(fake_predictor, run_cli, tmp_path):
    rows = [
        {"id": 1, "text": "二 \n two", "more": [1, None]},
        {"id": 2.5, "text": "x", "more": {"a": True}},
        {"id": 3, "text": None},
    ]
    path = tmp_path / "in.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode()))
    fake_predictor("classification", {"text": "text"})
    code, out, _ = run_cli("classify", "RUN", path)
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [{k: row[k] for k in original} for row, original in zip(rows, rows, strict=True)] == rows
    assert [row["label"] for row in rows] == ["short", "short", None]
    as_json = run_cli("classify", "RUN", written(tmp_path / "in.csv", ROWS), "--json")[1]
    assert [json.loads(line)["id"] for line in as_json.splitlines()] == ["1", "2", "3", "4", "5"]


def test_a_list_of_words_stays_a_list(fake_predictor, run_cli, tmp_path):
    run = fake_predictor("token-classification", {"words": "tokens"})
    (tmp_path / "in.jsonl").write_text('{"tokens": ["New York", "is", "Big"]}\n')
    assert json.loads(run_cli("tag", "RUN", tmp_path / "in.jsonl")[1])["tags"] == ["B-X", "O", "B-X"]
    assert run.read == [["New York", "is", "Big"]]


def test_two_texts_are_two_columns(fake_predictor, run_cli, tmp_path):
    run = fake_predictor("classification", {"text": "premise", "second": "hypothesis", "label": "label"})
    (tmp_path / "in.csv").write_text("premise,hypothesis\nIt rains,It is wet\n")
    assert run_cli("classify", "RUN", tmp_path / "in.csv")[0] == 0 and run.read == [("It rains", "It is wet")]
    (tmp_path / "one.csv").write_text("premise,id\nIt rains,1\n")
    code, _, err = run_cli("classify", "RUN", tmp_path / "one.csv")
    assert code == 2 and "the model reads two texts" in err and "'hypothesis'" in err


def test_the_column_is_that_of_training_or_the_one_that_is_named(fake_predictor, run_cli, tmp_path):
    rows = [{"text": "first", "body": "second"}]
    run = fake_predictor("classification", {"text": "body"})
    run_cli("classify", "RUN", written(tmp_path / "in.csv", rows))
    run_cli("classify", "RUN", tmp_path / "in.csv", "--column", "text")
    assert run.read == [("second", ""), ("first", "")]
    run = fake_predictor("classification", {"text": "elsewhere"})
    run_cli("classify", "RUN", tmp_path / "in.csv")
    assert run.read == [("first", "")], "as training would choose"
    code, out, err = run_cli("classify", "RUN", tmp_path / "in.csv", "--column", "txt")
    assert (code, out) == (2, "") and "no column is called 'txt'" in err and err.count("\n") == 1
    code, _, err = run_cli("classify", "RUN", "a text", "--column", "text")
    assert code == 2 and "--column text needs a table" in err


def test_a_malformed_row_is_an_error(fake_predictor, run_cli, tmp_path):
    fake_predictor("classification", {"text": "text"})
    (tmp_path / "in.csv").write_text("id,text\n1,one\n2,two,three\n")
    code, _, err = run_cli("classify", "RUN", tmp_path / "in.csv")
    assert code == 5 and "in.csv:3 is not a row of the table: 3 columns instead of 2" in err
    (tmp_path / "in.jsonl").write_text('{"text": {"a": 1}}\n')
    code, _, err = run_cli("classify", "RUN", tmp_path / "in.jsonl")
    assert code == 3 and "column 'text' must be text, it is a dict" in err


def test_tables_of_one_command_must_have_the_same_columns(fake_predictor, run_cli, tmp_path):
    fake_predictor("classification", {"text": "text"})
    one, two = written(tmp_path / "one.csv", ROWS), written(tmp_path / "two.csv", ROWS)
    assert len(parsed(run_cli("classify", "RUN", one, two)[1])) == 2 * len(ROWS)
    other = written(tmp_path / "other.csv", [{"text": "x", "b": "y"}])
    assert "must have the same columns" in run_cli("classify", "RUN", one, other)[2]
    assert "tables and texts must not be mixed" in run_cli("classify", "RUN", one, "a text")[2]
    twice = tmp_path / "twice.csv"
    twice.write_text("text,a,a\nx,1,2\n")
    code, _, err = run_cli("classify", "RUN", twice, "--column", "text")
    assert code == 5 and "'a'" in err and "rename one" in err


def test_a_pipe_may_be_a_table(fake_predictor, run_cli, tmp_path):
    fake_predictor("classification", {"text": "text"})
    path = written(tmp_path / "in.csv", ROWS, newline="\r\n")
    from_file = run_cli("classify", "RUN", path)[1]
    assert run_cli("classify", "RUN", "--format", "csv", pipe=path.read_bytes())[1] == from_file
    assert run_cli("classify", "RUN", "-", "--format", "csv", pipe=path.read_bytes())[1] == from_file


def test_a_large_table_is_streamed(fake_predictor, run_cli, tmp_path, monkeypatch):
    """Rows are predicted in batches, so a table need not fit into memory."""
    from headwater.cli import inputs, outputs

    seen, max_pending = [0], [0]
    entries = inputs.InputTable.entries

    def counted(table):
        for entry in entries(table):
            seen[0] += 1
            yield entry

    run = fake_predictor("classification", {"text": "text"})
    call = FakePredictor.__call__

    def predict(self, texts, **options):
        max_pending[0] = max(max_pending[0], seen[0] - len(self.read))
        return call(self, texts, **options)

    monkeypatch.setattr(inputs.InputTable, "entries", counted)
    monkeypatch.setattr(FakePredictor, "__call__", predict)
    assert run_cli("classify", "RUN", written(tmp_path / "in.csv", [{"text": f"row {n}"} for n in range(1000)]))[0] == 0
    assert len(run.read) == 1000 and max_pending[0] <= outputs.BATCH_SIZE


# ------------------------------------------------------------------------------------------------------- into a file


@pytest.mark.parametrize("verb", ["classify", "translate", "summarize", "tag"])
def test_out_writes_what_is_printed(fake_predictor, run_cli, tmp_path, verb):
    fake_predictor(VERBS[verb], {"text": "text", "source": "text", "words": "text"})
    path, out = written(tmp_path / "in.csv", ROWS), tmp_path / "out.csv"
    printed = run_cli(verb, "RUN", path)[1]
    code, nothing, err = run_cli(verb, "RUN", path, "--out", out)
    assert (code, nothing) == (0, "") and "5 rows" in err and out.read_bytes().decode() == printed
    code, _, err = run_cli(verb, "RUN", path, "--out", out)
    assert code == 2 and "must be a new file" in err


def test_an_interrupted_table_is_resumed(fake_predictor, run_cli, tmp_path, monkeypatch):
    """Rows may contain newlines: rows are counted, not lines."""
    monkeypatch.setattr("headwater.cli.outputs.WINDOW", 8)
    rows = [{"id": str(n), "text": f"line one of {n}\nline two"} for n in range(40)]
    path, out = written(tmp_path / "in.csv", rows), tmp_path / "out.csv"
    fake_predictor("seq2seq", {"source": "text"})
    expected = run_cli("translate", "RUN", path)[1]
    run = fake_predictor("seq2seq", {"source": "text"})
    monkeypatch.setattr(FakePredictor, "__call__", stop_after(FakePredictor.__call__, 3))
    with pytest.raises(ZeroDivisionError):
        run_cli("translate", "RUN", path, "--out", out)
    assert len(run.read) == 24 and not out.exists()
    monkeypatch.undo()
    monkeypatch.setattr("headwater.cli.outputs.WINDOW", 8)
    run = FakePredictor("seq2seq", {"source": "text"})
    monkeypatch.setattr("headwater.training.predict.load_run", lambda folder, result=None: run)
    assert run_cli("translate", "RUN", path, "--out", out)[0] == 0
    assert len(run.read) == 16 and out.read_bytes().decode() == expected and len(parsed(expected)) == 40
    assert not list(tmp_path.glob("out.csv.*"))


def stop_after(call, times):
    def predict(self, texts, **options):
        if len(self.read) >= 8 * times:
            raise ZeroDivisionError
        return call(self, texts, **options)

    return predict
