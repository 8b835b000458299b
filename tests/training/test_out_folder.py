"""A folder that cannot be created or written is found before any data is read."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from headwater.errors import BadFile
from headwater.training import setup
from headwater.training.api import train


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A file; reading it would fail the test."""
    monkeypatch.chdir(tmp_path)

    def read(*_):
        raise AssertionError("the data was read")

    monkeypatch.setattr(setup, "read_data", read)
    (tmp_path / "pairs.tsv").write_text("a\tb\n" * 9)
    return tmp_path


def fails(number):
    def call(*_, **__):
        raise OSError(number, os.strerror(number))

    return call


def test_a_file_in_the_way(data):
    for out in ("pairs.tsv/run", "pairs.tsv/a/b"):
        with pytest.raises(BadFile, match="cannot be created or written: not a directory; choose another --out"):
            train("pairs.tsv", out=out)
    with pytest.raises(BadFile, match="pairs.tsv must be a folder, it is a file"):
        train("pairs.tsv", out="pairs.tsv")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS], ids=["permission", "read-only"])
@pytest.mark.parametrize("out", ["run", ""])
def test_a_folder_that_can_not_be_made(data, monkeypatch, number, out):
    monkeypatch.setattr(Path, "mkdir", fails(number))
    with pytest.raises(BadFile, match=f"{out or 'runs'} must be writable, .*: {os.strerror(number).lower()}; choose"):
        train("pairs.tsv", out=out)


def test_a_full_disk(data, monkeypatch):
    monkeypatch.setattr(os, "fsync", fails(errno.ENOSPC))
    with pytest.raises(BadFile, match="no space left on device; choose another --out"):
        train("pairs.tsv", out="a/b/run")
    assert not (data / "a").exists()


def test_nothing_is_left_behind_where_all_is_well(data):
    (data / "there").mkdir()
    for out in ("a/b/run", "there", "there/run", ""):
        with pytest.raises(AssertionError, match="the data was read"):
            train("pairs.tsv", out=out)
    assert sorted(path.name for path in data.rglob("*")) == ["pairs.tsv", "there"]
