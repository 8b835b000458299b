"""A pipe loses its carriage returns as a file does."""

from __future__ import annotations

import io
import sys

import pytest

from headwater.cli import answer, generate


@pytest.mark.parametrize(
    "read", [lambda: generate.given(None, False), lambda: answer._text("-")], ids=["generate", "answer"]
)
def test_lines_of_a_pipe_end_without_carriage_returns(monkeypatch, read):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Once upon\r\na ti\rme\r\n"))
    assert read().rstrip("\n") == "Once upon\na ti\rme"
