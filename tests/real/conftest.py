"""Models with real weights: each comes in a package of its own, and is skipped in plain words where it is not there."""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Callable
from pathlib import Path

import pytest

from headwater.cli import main
from headwater.errors import Unavailable
from headwater.families.hub import HUB, find_installed


def where(name: str) -> Path:
    """The files of a known model."""
    try:
        return find_installed(name)
    except Unavailable:
        pytest.skip(f"needs the weights in the package {HUB[name].package}; make models installs it")


@pytest.fixture(scope="session")
def files() -> Callable[[str], Path]:
    return where


def message_of(*words: object) -> str:
    """What a command prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main([str(word) for word in words]) == 0
    return out.getvalue()


@pytest.fixture(scope="session")
def command() -> Callable[..., str]:
    return message_of


def pickled(path: Path) -> dict:
    """The pickle itself, for comparison; the package never reads one outside of its child process."""
    import torch

    class Passed:
        def __new__(cls, *given: object) -> Passed:
            return object.__new__(cls)

        def __setstate__(self, state: object) -> None:
            pass

    names = ("numpy.ndarray", "numpy.dtype", "numpy.core.multiarray._reconstruct")
    with torch.serialization.safe_globals([argparse.Namespace, *((Passed, name) for name in names)]):
        return torch.load(path, map_location="cpu", weights_only=True)


@pytest.fixture(scope="session")
def unpickled() -> Callable[[Path], dict]:
    return pickled
