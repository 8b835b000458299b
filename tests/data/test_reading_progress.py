"""Progress of reading large files: one line on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import gzip
import io
from pathlib import Path

import pytest

from headwater import cli, i18n
from headwater.data.examples import TextPair
from headwater.data.readers.byte_streams import ReadingProgress, progress_callback
from headwater.data.readers.lines import DEFAULT_DECODE_OPTIONS, BadRows, iter_lines
from headwater.data.summary import summarize_files
from headwater.training.api import train
from headwater.training.evaluate import evaluate_files


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """A clock that advances by `step` seconds at each call."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def test_every_block_is_reported_and_none_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.data.readers.lines.BLOCK_BYTES", 1000)
    text = b"a line of text\n" * 1000
    captured: list[tuple[str, int, int]] = []
    for name, data in (("a.txt", text), ("a.txt.gz", gzip.compress(text))):
        path = tmp_path / name
        path.write_bytes(data)
        captured.clear()
        with progress_callback(lambda path, done, total: captured.append((path.name, done, total))):
            count = sum(1 for _ in iter_lines(path, DEFAULT_DECODE_OPTIONS, BadRows()))
        done = [bytes_done for _, bytes_done, _ in captured]
        assert count == 1000 and {(result, total) for result, _, total in captured} == {(name, len(data))}
        assert done[-1] == len(data) and max(done) <= len(data) and len(captured) > 10
    captured.clear()
    summarize_files(tmp_path / "a.txt")
    assert captured == []


def test_a_terminal_has_one_line_that_is_cleared() -> None:
    out = Terminal()
    show = ReadingProgress(out, Clock(1.0))
    for done in (45_000_000, 89_000_000):
        show(Path("/data/big.tsv"), done, 89_000_000)
    assert out.getvalue() == "\rreading big.tsv … 45 MB of 89 MB\x1b[K\r\x1b[K"


def test_elsewhere_a_line_every_five_seconds(monkeypatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(i18n, "_process_language", "zh")
    show = ReadingProgress(out, Clock(0.5))
    for done in range(40):
        show(Path("big.tsv"), done * 10**6, 40 * 10**6)
    lines = out.getvalue().splitlines()
    assert 3 <= len(lines) <= 5 and lines[0].startswith("正在读取 big.tsv … ") and lines[0].endswith(" / 40 MB")


def test_a_small_file_is_read_without_output() -> None:
    out = Terminal()
    show = ReadingProgress(out, Clock(0.0001))
    show(Path("a.tsv"), 10, 20), show(Path("a.tsv"), 20, 20)
    assert out.getvalue() == ""


def test_train_shows_the_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command turns it on; --quiet turns it off."""
    monkeypatch.setattr("headwater.data.readers.byte_streams.time.monotonic", Clock(9.0))
    monkeypatch.setattr(ReadingProgress.__init__, "__defaults__", (None, Clock(9.0)))
    (tmp_path / "one.tsv").write_text("one two\teins zwei\n")
    monkeypatch.setattr("headwater.data.readers.lines.BLOCK_BYTES", 8)
    assert cli.main(["train", str(tmp_path / "one.tsv"), "--dry-run"]) == 3
    assert "reading one.tsv … 0 MB of 0 MB" in capsys.readouterr().err
    assert cli.main(["train", str(tmp_path / "one.tsv"), "--dry-run", "--quiet"]) == 3
    assert "reading" not in capsys.readouterr().err


def test_training_and_evaluation_parse_a_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row becomes an example once: for the summary, the split and the tokenizer alike."""
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"number {n}\tNummer {n}\n" for n in range(50)))
    parsed: list[TextPair] = []
    from_cells = TextPair.from_cells

    def counted(*cells: object) -> TextPair:
        parsed.append(from_cells(*cells))
        return parsed[-1]

    monkeypatch.setattr(TextPair, "from_cells", counted)
    train(path, out=tmp_path / "run", size="xs", max_steps=1)
    assert len(parsed) == 50
    evaluate_files(tmp_path / "run", [str(path)])
    assert len(parsed) == 100
