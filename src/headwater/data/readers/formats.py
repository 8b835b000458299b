"""File formats: detection, and readers of parallel text, plain text, CoNLL and SQuAD files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

from headwater.data.examples import DocumentChunk, LabeledText, QAExample, TaggedTokens, TextPair
from headwater.data.readers.files import FORMAT_BY_SUFFIX
from headwater.data.readers.lines import BadRows, DecodeOptions, TextLine, iter_line_chunks, iter_lines, skip_bad_lines
from headwater.data.readers.tables import read_json
from headwater.errors import BadFile
from headwater.i18n import _

# --------------------------------------------------------------------------------------------------- format detection

TAG_PATTERN = re.compile(r"(O|[BIESLUM][-_].+|[A-Z]{1,6}\$?)$")
SAMPLE_LINES = 400


def detect_format(path: Path, decode_options: DecodeOptions) -> str:
    """The format of a file, by its suffix or else its first lines: tsv, csv, jsonl, json, squad, conll or text."""
    by_suffix = FORMAT_BY_SUFFIX.get(Path(path.name.lower().removesuffix(".gz")).suffix, "")
    if by_suffix == "":
        return detect_format_from_lines(read_first_lines(path, decode_options))
    if by_suffix == "json":
        return _detect_json_format(path, decode_options)
    return by_suffix


def read_first_lines(path: Path, decode_options: DecodeOptions, count: int = SAMPLE_LINES) -> list[str]:
    """The first lines of a file; invalid bytes are replaced rather than refused."""
    lenient = DecodeOptions(
        decode_options.encoding,
        "replace" if decode_options.errors == "strict" else decode_options.errors,
        decode_options.max_line_bytes,
    )
    return [line.text for line in islice(iter_line_chunks(path, lenient, BadRows()), count)]


def detect_format_from_lines(lines: list[str]) -> str:
    """The format of a file whose suffix does not name one, from its first lines.

    >>> detect_format_from_lines(["Hi.\\tSalut.", "Run!\\tCours !"])
    'tsv'
    >>> detect_format_from_lines(["EU\\tB-ORG", "rejects\\tO", "", "Peter\\tB-PER", "left\\tO"])
    'conll'
    """
    nonblank = [text for text in lines if text.strip()]
    if not nonblank:
        return "text"
    if nonblank[0].lstrip()[0] in "{[":
        return "jsonl" if _is_object(nonblank[0]) else "json"
    if _is_conll(lines, nonblank):
        return "conll"
    num_tabs = [text.count("\t") for text in nonblank]
    most_common = max(set(num_tabs), key=num_tabs.count)
    is_table = most_common >= 1 and num_tabs.count(most_common) >= 0.9 * len(num_tabs)
    return "tsv" if is_table else "text"


def _is_conll(lines: list[str], nonblank: list[str]) -> bool:
    """CoNLL: several lines, some blank; the others have two columns or more, and the last column is a tag."""
    rows = [
        text.split("\t") if "\t" in text else text.split() for text in nonblank if not text.startswith("-DOCSTART-")
    ]
    if len(rows) < 4 or len(nonblank) == len(lines) or len(rows[0]) < 2:
        return False
    tags = sum(len(row) >= 2 and bool(TAG_PATTERN.match(row[-1].strip())) for row in rows)
    return tags >= 0.98 * len(rows)


def _detect_json_format(path: Path, decode_options: DecodeOptions) -> str:
    """A .json file may be a list of objects, SQuAD data, or JSONL under the wrong name."""
    lines = [text for text in read_first_lines(path, decode_options) if text.strip()]
    if len(lines) > 1 and _is_object(lines[0]) and _is_object(lines[1]):
        return "jsonl"
    return "squad" if lines and lines[0].lstrip().startswith("{") else "json"  # a single object can only be SQuAD data


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


# ---------------------------------------------------------------------------- parallel text, plain text, CoNLL, SQuAD

CHUNK_CHARACTERS = 2**16  # characters of a DocumentChunk


def read_parallel(source: Path, target: Path, decode_options: DecodeOptions, bad_rows: BadRows) -> Iterator[TextPair]:
    """Parallel text: line n of one file with line n of the other. Files of different length are refused."""
    sides = zip_longest(iter_lines(source, decode_options, bad_rows), iter_lines(target, decode_options, bad_rows))
    for number, (left, right) in enumerate(sides, 1):
        if left is None or right is None:
            short, long = (source, target) if left is None else (target, source)
            raise BadFile(
                _(
                    "{short} has {count} lines and {long} has more; line n of one must translate line n of the other",
                    short=short,
                    count=number - 1,
                    long=long,
                )
            )
        if left.error or right.error:
            bad_rows.add(source if left.error else target, number, left.error or right.error)
        elif left.text.strip() and right.text.strip():
            yield TextPair(left.text, right.text)
        else:
            empty = [path.name for path, line in ((source, left), (target, right)) if not line.text.strip()]
            bad_rows.add(source, number, _("empty in {empty}", empty=" and ".join(empty)))


def read_labeled_files(
    paths: tuple[Path, ...], decode_options: DecodeOptions, bad_rows: BadRows
) -> Iterator[LabeledText]:
    """Classification with one file per class, one text per line; the label is the suffix: reviews.pos, reviews.neg."""
    for path in paths:
        label = Path(path.name.removesuffix(".gz")).suffix.lstrip(".")
        for line in skip_bad_lines(path, iter_lines(path, decode_options, bad_rows), bad_rows):
            if line.text.strip():
                yield LabeledText(line.text, label)


def read_documents(
    paths: tuple[Path, ...], decode_options: DecodeOptions, bad_rows: BadRows
) -> Iterator[DocumentChunk]:
    """Plain text: each file is one document, newlines kept, in chunks that end at a line end where possible."""
    for document, path in enumerate(paths):
        chunk: list[str] = []
        size = 0
        for line in skip_bad_lines(path, iter_line_chunks(path, decode_options, bad_rows), bad_rows):
            text = line.text + "\n" if line.is_complete else line.text
            chunk.append(text)
            size += len(text)
            if size >= CHUNK_CHARACTERS:
                yield DocumentChunk("".join(chunk), document)
                chunk = []
                size = 0
        if chunk:
            yield DocumentChunk("".join(chunk), document)


def read_conll(path: Path, decode_options: DecodeOptions, bad_rows: BadRows) -> Iterator[TaggedTokens]:
    """CoNLL: one word per line, its tag in the last column, blank lines between sentences.

    A sentence with a bad line is dropped.
    """
    sentence: list[list[str]] = []
    bad_line = 0  # number of the sentence's first bad line
    reason = ""
    for line in chain(iter_lines(path, decode_options, bad_rows), [TextLine(0, "")]):
        if line.text.strip() or line.error:
            columns = _conll_columns(line.text)
            if columns is None:
                continue
            if not bad_line and (line.error or len(columns) < 2 or (sentence and len(columns) != len(sentence[0]))):
                bad_line = line.number
                reason = line.error or _("wrong number of columns: {num_columns}", num_columns=len(columns))
            sentence.append(columns)
            continue
        if bad_line:
            bad_rows.add(path, bad_line, reason)
        elif sentence:
            yield TaggedTokens(tuple(row[0] for row in sentence), tuple(row[-1] for row in sentence))
        sentence = []
        bad_line = 0


def _conll_columns(text: str) -> list[str] | None:
    """The columns of one line; None for a comment line or -DOCSTART-."""
    if text.startswith("-DOCSTART-") or (text.startswith("# ") and " = " in text):
        return None
    return [cell.strip() for cell in text.split("\t")] if "\t" in text else text.split()


def read_squad(path: Path, decode_options: DecodeOptions, bad_rows: BadRows) -> Iterator[QAExample]:
    """SQuAD 1.1 and 2.0. A question whose answer is not in its context at answer_start is a bad row."""
    number = 0
    for paragraph in _squad_paragraphs(path, read_json(path, decode_options, bad_rows)):
        for item in paragraph["qas"]:
            number += 1
            try:
                answers = () if item.get("is_impossible") else item["answers"]
                yield QAExample.checked(item["question"], paragraph["context"], answers, str(item.get("id", "")))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                bad_rows.add(path, number, _("not a question with answers: {error}", error=_error_message(error)))


def _squad_paragraphs(path: Path, document: Any) -> Iterator[dict[str, Any]]:
    try:
        for article in document["data"]:
            for paragraph in article["paragraphs"]:
                if isinstance(paragraph["context"], str) and isinstance(paragraph["qas"], list):
                    yield paragraph
    except (KeyError, TypeError) as error:
        raise BadFile(
            _(
                "{path} must be SQuAD JSON (data, paragraphs, context, qas), it lacks {error}",
                path=path,
                error=_error_message(error),
            )
        ) from None


def _error_message(error: BaseException) -> str:
    return _("no {error}", error=error) if isinstance(error, KeyError) else str(error)[:80]
