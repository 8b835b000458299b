"""Files that are not text, told by their first bytes (magic numbers) and refused with advice."""

from __future__ import annotations

import zipfile
from pathlib import Path

from headwater.errors import BadFile

START = 264  # bytes of a file that are looked at; the mark of tar is at 257

ARCHIVES = ((b"7z\xbc\xaf\x27\x1c", "a 7z archive"), (b"Rar!\x1a\x07", "a RAR archive"), 
            (b"\xfd7zXZ\x00", "an xz file"), (b"\x28\xb5\x2f\xfd", "a Zstandard file"))  # fmt: skip
DOCUMENTS = ((b"%PDF-", "a PDF document"), (b"{\\rtf", "an RTF document"),
             (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an old Microsoft Office document"))  # fmt: skip
TABLES = ((b"PAR1", "a Parquet file"), (b"ARROW1\x00\x00", "an Arrow file"), (b"\x89HDF\r\n\x1a\n", "an HDF5 file"))
MEDIA = ((b"\x89PNG\r\n\x1a\n", "a PNG image"), (b"\xff\xd8\xff", "a JPEG image"), (b"GIF87a", "a GIF image"),
         (b"GIF89a", "a GIF image"), (b"II*\x00", "a TIFF image"), (b"MM\x00*", "a TIFF image"),
         (b"fLaC", "a FLAC recording"), (b"OggS\x00", "an Ogg recording"), (b"ID3\x02", "an MP3 recording"),
         (b"ID3\x03", "an MP3 recording"), (b"ID3\x04", "an MP3 recording"), (b"\xff\xfb", "an MP3 recording"),
         (b"\x1aE\xdf\xa3", "a Matroska video"))  # fmt: skip
RIFF = {b"WAVE": "a WAV recording", b"WEBP": "a WebP image", b"AVI ": "an AVI video"}
MODELS = ((b"GGUF", "a GGUF model"), (b"\x80\x02", "a Python pickle"), (b"\x80\x03", "a Python pickle"),
          (b"\x80\x04", "a Python pickle"), (b"\x80\x05", "a Python pickle"), (b"\x93NUMPY", "a NumPy array"),
          (b"\x7fELF", "a program"))  # fmt: skip
SQLITE, ZIP = b"SQLite format 3\x00", b"PK\x03\x04"


def refuse_binary(path: Path, start: bytes) -> None:
    """Raise BadFile when a file that begins with these bytes is not text."""
    if start.startswith(ZIP):
        _refuse_zip(path)
    if kind := _kind(start, DOCUMENTS):
        raise BadFile(f"{path} is {kind}, which is not read; save its text as a plain text file (.txt) and give that")
    if kind := _kind(start, TABLES):
        raise BadFile(f"{path} is {kind}, which is not read; write its rows as CSV or JSONL and give that")
    if start.startswith(SQLITE):
        raise BadFile(f"{path} is an SQLite database, which is not read; export the table as CSV and give that")
    if kind := _kind(start, MEDIA) or _riff(start) or _mp4(start):
        raise BadFile(f"{path} is {kind}, which is not read; give text, a table or JSONL")
    if kind := _kind(start, MODELS):
        raise BadFile(f"{path} is {kind}, not data to learn from; give text, a table or JSONL")
    if kind := _kind(start, ARCHIVES) or _tar_or_bzip2(start):
        raise BadFile(f"{path} is {kind}, which is not read; unpack it and give the files inside")


def _kind(start: bytes, known: tuple[tuple[bytes, str], ...]) -> str:
    return next((kind for mark, kind in known if start.startswith(mark) and _is_binary(start, mark)), "")


def _is_binary(start: bytes, mark: bytes) -> bool:
    """A text may begin with the letters of PAR1, GGUF or fLaC; a file of that kind goes on with control characters."""
    return mark not in (b"PAR1", b"GGUF", b"fLaC") or b"\0" <= start[4:5] < b" "


def _riff(start: bytes) -> str:
    return RIFF.get(start[8:12], "") if start.startswith(b"RIFF") else ""


def _mp4(start: bytes) -> str:
    return "an MP4 recording" if start[:3] == b"\0\0\0" and start[4:8] == b"ftyp" else ""


def _tar_or_bzip2(start: bytes) -> str:
    if start[257:262] == b"ustar":
        return "a tar archive"
    return "a bzip2 file" if start.startswith(b"BZh") and start[4:10] == b"1AY&SY" else ""


def _refuse_zip(path: Path) -> None:
    """Office documents are zip archives; what stands inside tells them apart."""
    inside = _names(path)
    if "word/document.xml" in inside:
        raise BadFile(f"{path} is a Word document (docx), which is not read; save it as plain text (.txt)")
    if "xl/workbook.xml" in inside:
        raise BadFile(f"{path} is an Excel workbook (xlsx), which is not read; save the sheet as CSV (UTF-8)")
    if "ppt/presentation.xml" in inside:
        raise BadFile(f"{path} is a PowerPoint file (pptx), which is not read; save its text as a .txt file")
    if "content.xml" in inside and "mimetype" in inside:
        raise BadFile(f"{path} is an OpenDocument file, which is not read; save a text as .txt, a sheet as CSV (UTF-8)")
    if "META-INF/container.xml" in inside:
        raise BadFile(f"{path} is an EPUB book, which is not read; convert it to plain text (.txt)")
    raise BadFile(f"{path} is a zip archive, which is not read; unpack it and give the files inside")


def _names(path: Path) -> frozenset[str]:
    """The names of the files in a zip archive; none when its directory is damaged."""
    try:
        with zipfile.ZipFile(path) as archive:
            return frozenset(archive.namelist())
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return frozenset()
