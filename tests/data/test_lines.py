"""Bytes to lines: encodings are detected or refused, invalid bytes are located, nothing is lost, memory is bounded."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.data.readers.byte_streams import open_bytes
from headwater.data.readers.lines import (
    DEFAULT_DECODE_OPTIONS,
    STATELESS_ENCODINGS,
    BadRows,
    DecodeOptions,
    LineSplitter,
    file_encoding,
    iter_line_chunks,
    iter_lines,
)
from headwater.errors import BadFile, BadSetting, NotFound
from headwater.i18n import use_language

CHINESE = "今天天气很好，我们去公园散步吧。\n他说：这本书很有意思，你应该看看。\n" * 5
WESTERN = "Le café est très bon, n'est-ce pas ?\nDie Männer hören schöne Lieder.\nEl niño comió piñas.\n" * 5


def read(path: Path, decode_options: DecodeOptions = DEFAULT_DECODE_OPTIONS) -> list[str]:
    return [line.text for line in iter_lines(path, decode_options, BadRows())]


@pytest.mark.parametrize(
    ("text", "written", "result"),
    [
        (CHINESE, "utf-8", "utf-8"),
        (CHINESE, "utf-8-sig", "utf-8"),
        (CHINESE, "utf-16", "utf-16-le"),
        (WESTERN, "utf-16-le", "utf-16-le"),
        (WESTERN, "utf-16-be", "utf-16-be"),
        (WESTERN, "utf-32", "utf-32-le"),
        (CHINESE, "gbk", "gb18030"),
        (CHINESE, "gb18030", "gb18030"),
        (WESTERN, "latin-1", "latin-1"),
        ("It’s a very “good” and plain – if naïve – café\n" * 5, "cp1252", "cp1252"),
    ],
)
def test_an_encoding_is_detected_and_decoded_exactly(tmp_path: Path, text: str, written: str, result: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode(written))
    assert file_encoding(path, DEFAULT_DECODE_OPTIONS).name == result
    assert read(path) == text.split("\n")[:-1]


@pytest.mark.parametrize("name", ["big5", "shift_jis", "koi8-r", "euc-kr"])
def test_an_uncertain_encoding_is_refused_unless_named(tmp_path: Path, name: str) -> None:
    text = {"big5": "今天天氣很好，我們去公園", "koi8-r": "Сегодня хорошая погода", "shift_jis": "今日はいい天気ですね",
            "euc-kr": "오늘은 날씨가 좋습니다"}[name] + "\n"  # fmt: skip
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode(name) * 20)
    assert read(path, DecodeOptions(encoding=name)) == [text.rstrip("\n")] * 20
    with pytest.raises(BadFile, match=r"byte 0 is not UTF-8.*name it"):
        file_encoding(path, DEFAULT_DECODE_OPTIONS)


def test_an_unknown_encoding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x\n")
    with pytest.raises(BadSetting, match="no text encoding is called 'utf-9'"):
        read(tmp_path / "a", DecodeOptions(encoding="utf-9"))
    with pytest.raises(BadSetting, match="strict, skip or replace"):
        DecodeOptions(errors="ignore")


def test_invalid_bytes_are_located_skipped_or_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("gut für alle\nübrig".encode() + b" \xff kaputt\n" + "schön und größer\n".encode())
    with pytest.raises(BadFile, match=r"byte 21 \(line 2\) is 0xFF, not valid utf-8"):
        read(path)
    result = list(iter_lines(path, DecodeOptions(errors="skip"), BadRows()))
    assert [(line.number, line.error) for line in result] == [(1, ""), (2, "not valid utf-8"), (3, "")]
    bad_rows = BadRows()
    kept = [line.text for line in iter_lines(path, DecodeOptions(errors="replace"), bad_rows)]
    assert kept[1] == "übrig � kaputt"
    assert bad_rows.repaired == 1


ROWS = st.lists(st.text(st.characters(exclude_characters="\n", exclude_categories=("Cs",)), max_size=30), max_size=20)


@given(ROWS, st.sampled_from(["utf-8", "utf-16-le", "utf-16-be", "utf-32-le"]), st.sampled_from([16, 20, 64]))
def test_chunks_joined_are_the_text(tmp_path_factory, rows: list[str], name: str, longest: int) -> None:
    """Every character of a line is kept, also NUL, U+2028 and a lone CR; only a CR before the line feed is removed."""
    rows = [*(row.rstrip("\r") for row in rows), "end"]
    path = tmp_path_factory.mktemp("lines") / "a.txt"
    path.write_bytes("\r\n".join(rows).encode(name))
    got, text = [], ""
    for piece in iter_line_chunks(path, DecodeOptions(encoding=name, max_line_bytes=longest), BadRows()):
        text += piece.text
        if piece.is_complete:
            got.append(text)
            text = ""
    has_bom = rows[0][:1] == "\ufeff"
    assert got[1:] == rows[1:]
    assert got[0] == (rows[0][1:] if has_bom else rows[0])


@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(tmp_path_factory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("bytes") / "a.txt"
    path.write_bytes(data)
    for invalid in ("strict", "skip", "replace"):
        try:
            result = list(iter_lines(path, DecodeOptions(errors=invalid), BadRows()))
        except BadFile as fault:
            assert "\n" not in str(fault)
        else:
            assert [line.number for line in result] == list(range(1, len(result) + 1))


@pytest.mark.parametrize("block", [1, 3, 7, 2**20])
def test_offsets_do_not_depend_on_the_blocks(block: int) -> None:
    data = b"one\n\ntwenty-one is longer than sixteen bytes\nend"
    splitter = LineSplitter(b"\n", 16, offset=0)
    chunks = [chunk for start in range(0, len(data), block) for chunk in splitter.feed(data[start : start + block])]
    chunks += splitter.flush()
    assert all(data[chunk.offset : chunk.offset + len(chunk.data)] == chunk.data for chunk in chunks)
    assert [chunk.number for chunk in chunks if chunk.is_last] == [1, 2, 3, 4]


def test_a_line_too_long_is_one_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("short\n" + "x" * 100 + "\nshort\n")
    result = list(iter_lines(path, DecodeOptions(max_line_bytes=64), BadRows()))
    assert [(line.number, line.text, line.error) for line in result] == [
        (1, "short", ""), (2, "", "longer than 64 bytes"), (3, "short", "")]  # fmt: skip


def test_gzip_is_detected_by_its_bytes_and_a_bomb_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "named.txt"
    path.write_bytes(gzip.compress(b"a\nb\n"))
    assert read(path) == ["a", "b"]
    bomb = tmp_path / "bomb.gz"
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    bomb.write_bytes(b"".join(packer.compress(bytes(2**20)) for _ in range(40)) + packer.flush())
    with pytest.raises(BadFile, match="refused"):
        sum(len(line.text) for line in iter_line_chunks(bomb, DEFAULT_DECODE_OPTIONS, BadRows()))
    nested = tmp_path / "nested.gz"
    nested.write_bytes(gzip.compress(gzip.compress(b"a\n")))
    with pytest.raises(BadFile, match="gzip inside gzip"):
        read(nested)
    short = tmp_path / "short.gz"
    short.write_bytes(gzip.compress(os.urandom(1000))[:500])
    with pytest.raises(BadFile, match="damaged gzip"):
        read(short)


def test_the_kind_of_a_special_file_is_translated(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadFile) as caught:
        read(tmp_path / "pipe")
    with use_language("zh"):
        assert "管道" in str(caught.value) and "pipe;" not in str(caught.value)


def test_special_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "zip").write_bytes(b"PK\x03\x04rest")
    (tmp_path / "empty").write_bytes(b"\n \n")
    messages = {"pipe": "it is a pipe", "loop": "form a loop", ".": "it is a folder", "zip": "zip archive",
            "empty": "is empty"}  # fmt: skip
    for name, words in messages.items():
        with pytest.raises(BadFile, match=words):
            read(tmp_path / name)
    with pytest.raises(BadFile, match="it is a device"), open_bytes(Path("/dev/zero")):
        pass
    with pytest.raises(NotFound, match="no file is at"):
        read(tmp_path / "absent")


SMALL_MEMORY = """
import resource, sys
from pathlib import Path
from headwater.data.readers.formats import read_documents
from headwater.data.readers.lines import DEFAULT_DECODE_OPTIONS, BadRows
resource.setrlimit(resource.RLIMIT_AS, (600 * 2**20,) * 2)
print(sum(len(p.text) for p in read_documents((Path(sys.argv[1]),), DEFAULT_DECODE_OPTIONS, BadRows())))
"""


@pytest.mark.parametrize("size", [2**28, pytest.param(2**31, marks=pytest.mark.slow)])
def test_one_endless_line_fits_in_little_memory(tmp_path: Path, size: int) -> None:
    path = tmp_path / "sparse.txt"
    with path.open("wb") as file:
        file.write(b"begin")
        file.truncate(size)
    here = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src"), "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SMALL_MEMORY, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, env=here, check=False)
    assert done.stdout.strip() == str(size + 1), done.stderr[-500:]


PARTS = [
    b"plain",
    b"\r",
    b"\n",
    b"\n\n",
    "é".encode(),
    "好".encode(),
    "好".encode("gbk"),
    b"\xff",
    b"\xc3",
    b"x" * 40,
    b"\t",
]
BYTES = st.lists(st.sampled_from(PARTS), max_size=25).map(b"".join)


@given(BYTES, st.sampled_from(["utf-8", "gb18030", "latin-1", "cp1252"]), st.sampled_from([1, 3, 7, 64, 2**20]),
       st.sampled_from([16, 64, 2**20]), st.sampled_from(["strict", "skip", "replace"]))  # fmt: skip
def test_lines_decoded_together_are_those_decoded_alone(tmp_path_factory, data, name, block, longest, invalid) -> None:
    path = tmp_path_factory.mktemp("together") / "a.txt"
    path.write_bytes(b"begin " + data)
    result = []
    for stateless in (STATELESS_ENCODINGS, ()):
        bad_rows = BadRows()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("headwater.data.readers.lines.STATELESS_ENCODINGS", stateless)
            patch.setattr("headwater.data.readers.lines.BLOCK_BYTES", block)
            read_so_far: list[object] = []
            try:
                read_so_far.extend(iter_line_chunks(path, DecodeOptions(name, invalid, longest), bad_rows))
            except BadFile as fault:
                read_so_far.append(str(fault))
        result.append((read_so_far, bad_rows.repaired))
    assert result[0] == result[1]


@pytest.mark.parametrize("block", [4, 9, 2**20])
def test_an_invalid_byte_is_located_after_lines_decoded_in_one_call(tmp_path: Path, monkeypatch, block: int) -> None:
    monkeypatch.setattr("headwater.data.readers.lines.BLOCK_BYTES", block)
    path = tmp_path / "a.txt"
    path.write_bytes("été\n".encode() * 10 + b"bad \xff\n")
    with pytest.raises(BadFile, match=r"byte 64 \(line 11\) is 0xFF"):
        read(path)
