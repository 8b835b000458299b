"""Binary files are recognized by their first bytes, and the error message gives advice."""

from __future__ import annotations

import gzip
import io
import sqlite3
import tarfile
import zipfile
from pathlib import Path

import pytest

from headwater.data.readers.byte_streams import refuse_binary
from headwater.data.summary import summarize_files
from headwater.errors import BadFile


def zipped(*names: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in names:
            archive.writestr(name, "content")
    return buffer.getvalue()


def tarred() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a.txt"))
    return buffer.getvalue()


FILES = {
    "report.txt": (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj", "a PDF document.*plain text"),
    "letter.docx": (zipped("_rels/.rels", "[Content_Types].xml", "word/document.xml"), r"Word document.*plain text"),
    "sheet.xlsx": (zipped("[Content_Types].xml", "xl/workbook.xml"), r"Excel workbook.*as CSV"),
    "talk.pptx": (zipped("[Content_Types].xml", "ppt/presentation.xml"), "PowerPoint"),
    "letter.odt": (zipped("mimetype", "content.xml"), "OpenDocument"),
    "book.epub": (zipped("mimetype", "META-INF/container.xml"), "EPUB"),
    "data.zip": (zipped("a.txt"), "zip archive.*unpack it"),
    "torn.zip": (zipped("a.txt")[:40], "zip archive.*unpack it"),
    "old.doc": (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(100), "old Microsoft Office"),
    "letter.rtf": (b"{\\rtf1\\ansi hello}", "an RTF document"),
    "rows.parquet": (b"PAR1\x15\x04\x15\x10", "a Parquet file.*CSV or JSONL"),
    "rows.arrow": (b"ARROW1\x00\x00" + bytes(40), "an Arrow file"),
    "photo.txt": (b"\x89PNG\r\n\x1a\n" + bytes(40), "a PNG image"),
    "photo.jpg": (b"\xff\xd8\xff\xe0\x00\x10JFIF", "a JPEG image"),
    "sound.wav": (b"RIFF\x24\x08\x00\x00WAVEfmt ", "a WAV recording"),
    "sound.flac": (b"fLaC\x00\x00\x00\x22", "a FLAC recording"),
    "sound.mp3": (b"ID3\x04\x00\x00", "an MP3 recording"),
    "film.mp4": (b"\x00\x00\x00\x20ftypisom", "an MP4 recording"),
    "model.gguf": (b"GGUF\x03\x00\x00\x00", "a GGUF model"),
    "data.tar": (tarred(), "a tar archive.*unpack"),
    "data.tar.gz": (gzip.compress(tarred()), "a tar archive.*unpack"),
    "scan.pdf.gz": (gzip.compress(b"%PDF-1.4\n"), "a PDF document"),
    "data.xz": (b"\xfd7zXZ\x00\x00", "an xz file"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_binary_file_is_named_with_advice(tmp_path: Path, name: str) -> None:
    data, words = FILES[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(BadFile, match=words) as caught:
        summarize_files(tmp_path / name)
    assert "\n" not in str(caught.value) and "; " in str(caught.value)


def test_a_database_is_named(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "data.txt") as base:
        base.execute("create table t (a text)")
    base.close()
    with pytest.raises(BadFile, match="an SQLite database.*export the table as CSV"):
        summarize_files(tmp_path / "data.txt")


@pytest.mark.parametrize("text", ["PAR1 is a gene\n", "GGUF: a format\n", "fLaC of sound\n", "BZhours\n", "%PD\n",
                                  "ID3 tags\n", "RIFF and WAVE\n", "abcdftyp\n", "PK\n"])  # fmt: skip
def test_a_text_that_starts_like_a_binary_file_is_read(text: str) -> None:
    refuse_binary(Path("a.txt"), text.encode())
