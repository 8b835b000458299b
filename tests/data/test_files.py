"""A folder of files: compatible files are read, the others are listed, and an ambiguous folder is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headwater.data.examples import TextPair
from headwater.data.readers.detect import detect_source
from headwater.data.summary import summarize_files
from headwater.errors import BadFile

PAIRS = "".join(f"good morning {n}\tguten Morgen {n}\n" for n in range(30))
LABELS = "text\tlabel\n" + "".join(f"a film of the year {n}\t{'good' if n % 2 else 'bad'}\n" for n in range(30))
CHATS = "".join(json.dumps({"messages": [{"role": "user", "content": "Hi"}]}) + "\n" for _ in range(30))


def fill(folder: Path, **files: str | bytes) -> Path:
    for name, content in files.items():
        path = folder / name.replace("__", ".")
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def test_compatible_files_are_read_and_the_others_listed(tmp_path: Path) -> None:
    fill(tmp_path, train__tsv=PAIRS, valid__tsv=PAIRS.replace("morning", "night"), notes__txt="remember\nthe milk\n",
         photo__png=b"\x89PNG\r\n\x1a\n" + bytes(99), empty__txt="", chat__jsonl=CHATS)  # fmt: skip
    result = summarize_files(tmp_path)
    assert result.task == "seq2seq" and {name: facts.rows for name, facts in result.splits.items()} == {
        "train": 30, "valid": 30}  # fmt: skip
    assert result.notes == (
        "read from the folder: train.tsv, valid.tsv; not read: chat.jsonl, empty.txt, notes.txt, photo.png",
    )


def test_a_folder_of_unrelated_tables_is_refused(tmp_path: Path) -> None:
    fill(tmp_path, reviews__tsv=LABELS, pairs__tsv=PAIRS)
    with pytest.raises(BadFile, match=r"files of 2 kinds: pairs.tsv; reviews.tsv; name the files you mean"):
        summarize_files(tmp_path)
    (tmp_path / "reviews.tsv").rename(tmp_path / "train.tsv")
    assert summarize_files(tmp_path).task == "classification"  # the name decides
    assert summarize_files([tmp_path / "train.tsv"]).notes == ()


def test_source_code_is_not_a_parallel_corpus(tmp_path: Path) -> None:
    fill(tmp_path, model__c="int main() {\n}\n", model__h="void f();\n", pairs__tsv=PAIRS)
    result = detect_source([tmp_path])
    assert [part.paths[0].name for part in result.file_groups] == ["pairs.tsv"]
    (tmp_path / "pairs.tsv").unlink()
    fill(tmp_path, train__en="a house\n", train__de="ein Haus\n")
    result = detect_source([tmp_path])
    assert [path.name for part in result.file_groups for path in part.paths] == ["train.de", "train.en"]
    assert result.notes == ("not read, without a counterpart in de and en: model.c, model.h",)


def test_a_parallel_folder_is_read_with_any_suffixes(tmp_path: Path) -> None:
    fill(tmp_path, all__nl="list files\n", all__cm="ls\n")
    assert summarize_files(tmp_path).splits["train"].samples == (TextPair("ls", "list files"),)


def test_texts_of_one_kind_are_read_together(tmp_path: Path) -> None:
    fill(tmp_path, one__txt="it was\n", two__txt="the best\n", script__py="import os\n", tool__py="import re\n")
    with pytest.raises(BadFile, match=r"files of 2 kinds: one.txt, two.txt; script.py, tool.py; name"):
        summarize_files(tmp_path)
    (tmp_path / "script.py").unlink(), (tmp_path / "tool.py").unlink()
    assert summarize_files(tmp_path).splits["train"].rows == 2


def test_a_folder_without_a_readable_file_is_explained(tmp_path: Path) -> None:
    fill(tmp_path, photo__png=b"\x89PNG\r\n\x1a\n" + bytes(99))
    with pytest.raises(BadFile, match="holds images without a class"):
        summarize_files(tmp_path)
    fill(tmp_path, chat__jsonl=CHATS)
    (tmp_path / "photo.png").unlink()
    with pytest.raises(BadFile, match="no answer: no message is of the assistant"):
        summarize_files(tmp_path)
