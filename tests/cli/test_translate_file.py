"""headwater translate RUN FILE --out OUT: lines stay in order, and a killed command goes on to the same file."""

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


ASKED = {"as_text": False, "column": None, "format": "lines", "json": False, "beam": 2}


def message_of(*words):
    return cli.main([str(word) for word in ("translate", *words, "--beam", 2)])


def test_the_lines_of_a_file_in_their_order(run, source, tmp_path, capsys):
    out = tmp_path / "out.txt"
    assert message_of(run, source, "--out", out) == 0
    assert "40 rows" in capsys.readouterr().err and not list(tmp_path.glob("out.txt.*"))
    made = out.read_text(encoding="utf-8").split("\n")
    assert len(made) == 41 and made[7] == made[40] == ""
    assert message_of(run, source, "--out", out) != 0
    assert "is there already" in capsys.readouterr().err


def test_a_torn_part_goes_on_to_the_same_file(run, source, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(outputs, "WINDOW", 8)
    whole, out = tmp_path / "whole.txt", tmp_path / "out.txt"
    assert message_of(run, source, "--out", whole) == 0
    text = whole.read_bytes()
    ends = [0]
    for line in text.splitlines(keepends=True):
        ends.append(ends[-1] + len(line))
    windows = [[rows, ends[rows]] for rows in (8, 16, 24, 32, 40)]
    read = []
    answered = outputs.predict_entries
    monkeypatch.setattr(
        outputs, "predict_entries", lambda some, answer: read.append(len(some)) or answered(some, answer)
    )
    for size, noted, torn in ((0, 0, ""), (3, 0, "[8"), (len(text) // 2, 5, ""), (len(text) - 1, 4, "[40, 1")):
        part = outputs.ResumableFile(out, {**ASKED, "run": str(run), "texts": [str(source)]})
        part.part_path.write_bytes(text[:size])
        with part.job_path.open("a") as job:
            job.write("".join(json.dumps(window) + "\n" for window in windows[:noted]) + torn)
        read.clear()
        assert message_of(run, source, "--out", out) == 0
        assert out.read_bytes() == text
        done = max([rows for rows, end in windows[:noted] if end <= size], default=0)
        assert sum(read) == 40 - done, "what is done is not done again"
        out.unlink()


def test_other_settings_do_not_go_on_with_it(run, source, tmp_path, capsys):
    out = tmp_path / "out.txt"
    asked = {**ASKED, "run": str(run), "texts": [str(source)], "beam": 5}
    outputs.ResumableFile(out, asked).part_path.write_bytes(b"a\n")
    assert message_of(run, source, "--out", out) != 0
    assert "was begun with beam 5, got 2; finish it with that, or remove it" in capsys.readouterr().err


def test_killed_in_the_middle(run, source, tmp_path):
    """kill -9 between two windows, and in one: the same file in the end."""
    whole, out = tmp_path / "whole.txt", tmp_path / "out.txt"
    lines = source.read_text(encoding="utf-8") * 6
    source.write_text(lines, encoding="utf-8")
    script = "import sys, headwater.cli as c, headwater.cli.outputs as o; o.WINDOW = 32; sys.exit(c.main(sys.argv[1:]))"
    command = [sys.executable, "-c", script, "translate", str(run), str(source), "--beam", "2", "--out"]
    subprocess.run([*command, str(whole)], check=True, capture_output=True, timeout=300)
    process = subprocess.Popen([*command, str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    part = out.with_name("out.txt.part")
    until = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < until and not (part.exists() and part.stat().st_size):
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert part.exists() and not out.exists()
    subprocess.run([*command, str(out)], check=True, capture_output=True, timeout=300)
    assert out.read_bytes() == whole.read_bytes()


def test_lots_of_like_length_come_back_in_order():
    lots = []

    def make(lines):
        lots.append([len(line) for line in lines])
        return [line.upper() for line in lines]

    window = [chr(97 + i % 26) * (1 + i * 7 % 90) for i in range(100)]
    assert outputs.predict_entries([InputEntry(line) for line in window], make) == [line.upper() for line in window]
    assert all(lot == sorted(lot) and len(lot) <= outputs.BATCH_SIZE for lot in lots) and len(lots) == 4
