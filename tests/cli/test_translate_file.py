"""headwater translate RUN FILE --out OUT: lines stay in order, and a killed command resumes to the same file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from headwater import cli
from headwater.cli import outputs
from headwater.cli.inputs import InputEntry
from headwater.data.dates import dates_dataset


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("translate")
    (folder / "pairs.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in dates_dataset("train", 60)))
    few = ["--size", "xs", "--max-steps", "2", "--batch-tokens", "400", "--eval-examples", "5", "--quiet"]
    assert cli.main(["train", str(folder / "pairs.tsv"), "--out", str(folder / "run"), *few]) == 0
    return folder / "run"


@pytest.fixture
def source(tmp_path):
    lines = [a for a, _ in dates_dataset("train", 40)]
    lines[7] = ""
    (tmp_path / "in.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return tmp_path / "in.txt"


OPTIONS = {"as_text": False, "column": None, "format": "lines", "json": False, "beam": 2}


def translate(*words):
    return cli.main([str(word) for word in ("translate", *words, "--beam", 2)])


def test_the_lines_of_a_file_in_their_order(run, source, tmp_path, capsys):
    out = tmp_path / "out.txt"
    assert translate(run, source, "--out", out) == 0
    assert "40 rows" in capsys.readouterr().err and not list(tmp_path.glob("out.txt.*"))
    lines = out.read_text(encoding="utf-8").split("\n")
    assert len(lines) == 41 and lines[7] == lines[40] == ""
    assert translate(run, source, "--out", out) != 0
    assert "already exists" in capsys.readouterr().err


def test_an_incomplete_part_is_resumed_to_the_same_file(run, source, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(outputs, "WINDOW", 8)
    expected, out = tmp_path / "expected.txt", tmp_path / "out.txt"
    assert translate(run, source, "--out", expected) == 0
    text = expected.read_bytes()
    ends = [0]
    for line in text.splitlines(keepends=True):
        ends.append(ends[-1] + len(line))
    windows = [[rows, ends[rows]] for rows in (8, 16, 24, 32, 40)]
    predicted = []
    predict_entries = outputs.predict_entries
    monkeypatch.setattr(
        outputs, "predict_entries", lambda some, predict: predicted.append(len(some)) or predict_entries(some, predict)
    )
    for size, num_windows, torn in ((0, 0, ""), (3, 0, "[8"), (len(text) // 2, 5, ""), (len(text) - 1, 4, "[40, 1")):
        part = outputs.ResumableFile(out, {**OPTIONS, "run": str(run), "texts": [str(source)]})
        part.part_path.write_bytes(text[:size])
        with part.job_path.open("a") as job:
            job.write("".join(json.dumps(window) + "\n" for window in windows[:num_windows]) + torn)
        predicted.clear()
        assert translate(run, source, "--out", out) == 0
        assert out.read_bytes() == text
        num_done = max([rows for rows, end in windows[:num_windows] if end <= size], default=0)
        assert sum(predicted) == 40 - num_done, "finished windows are not predicted again"
        out.unlink()


def test_other_options_do_not_resume_it(run, source, tmp_path, capsys):
    out = tmp_path / "out.txt"
    options = {**OPTIONS, "run": str(run), "texts": [str(source)], "beam": 5}
    outputs.ResumableFile(out, options).part_path.write_bytes(b"a\n")
    assert translate(run, source, "--out", out) != 0
    assert "was started with beam 5, got 2; use the same value, or remove the file" in capsys.readouterr().err


def test_killed_in_the_middle(run, source, tmp_path):
    """kill -9 between two windows, and in one: the same file in the end."""
    expected, out = tmp_path / "expected.txt", tmp_path / "out.txt"
    lines = source.read_text(encoding="utf-8") * 6
    source.write_text(lines, encoding="utf-8")
    script = "import sys, headwater.cli as c, headwater.cli.outputs as o; o.WINDOW = 32; sys.exit(c.main(sys.argv[1:]))"
    command = [sys.executable, "-c", script, "translate", str(run), str(source), "--beam", "2", "--out"]
    subprocess.run([*command, str(expected)], check=True, capture_output=True, timeout=300)
    process = subprocess.Popen([*command, str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    part = out.with_name("out.txt.part")
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline and not (part.exists() and part.stat().st_size):
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert part.exists() and not out.exists()
    subprocess.run([*command, str(out)], check=True, capture_output=True, timeout=300)
    assert out.read_bytes() == expected.read_bytes()


def test_batches_of_similar_length_keep_the_order():
    batches = []

    def make(lines):
        batches.append([len(line) for line in lines])
        return [line.upper() for line in lines]

    window = [chr(97 + i % 26) * (1 + i * 7 % 90) for i in range(100)]
    assert outputs.predict_entries([InputEntry(line) for line in window], make) == [line.upper() for line in window]
    assert all(batch == sorted(batch) and len(batch) <= outputs.BATCH_SIZE for batch in batches) and len(batches) == 4
