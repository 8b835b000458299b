"""A library in the cache that is damaged is noticed and compiled anew; what cannot be compiled is said in words."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headwater.cpu import build

pytestmark = pytest.mark.skipif(build.find_compiler() is None, reason="there is no C compiler here")

ASK = """
import sys
from pathlib import Path
from headwater.cpu import build
made = build.load_library(Path(sys.argv[1]))
print(made.answer() if made else "nothing", build.unavailable_reason())
"""

ANSWER = "int answer(void) { return 42; }"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "kernels"
    made.mkdir()
    (made / "answer.c").write_text(ANSWER)
    return made


def ask(folder: Path, **env: str) -> str:
    """What a fresh process gets from the library of the folder."""
    given = {"XDG_CACHE_HOME": str(folder.parent / "cache"), "PATH": "/usr/local/bin:/usr/bin:/bin", **env}
    source = str(Path(build.__file__).parents[2])
    run = subprocess.run(
        [sys.executable, "-c", ASK, str(folder)], env={**given, "PYTHONPATH": source}, capture_output=True, text=True
    )
    assert run.returncode == 0, f"ended with {run.returncode}: {run.stderr[-300:]}"
    return run.stdout.strip()


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache in which the library has been compiled once."""
    made = tmp_path_factory.mktemp("first") / "kernels"
    made.mkdir()
    (made / "answer.c").write_text(ANSWER)
    assert ask(made) == "42"
    return made.parent / "cache"


@pytest.fixture
def compiled(folder: Path, first: Path) -> Path:
    """The folder, its library being in the cache."""
    shutil.copytree(first, folder.parent / "cache", copy_function=shutil.copy2)
    return folder


def cached(folder: Path) -> Path:
    (found,) = (folder.parent / "cache" / "headwater").glob("*.so")
    return found


DAMAGES = {
    "cut short": lambda whole: whole[: len(whole) // 2],
    "empty": lambda whole: b"",
    "garbage": lambda whole: b"\x7fELF" + bytes(range(256)) * 8,
    "one bit": lambda whole: whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_library_is_compiled_anew(damage: str, compiled: Path):
    whole = cached(compiled).read_bytes()
    cached(compiled).write_bytes(DAMAGES[damage](whole))
    assert ask(compiled) == "42"
    assert build._is_intact(cached(compiled))


def test_a_whole_library_is_used_as_it_is(compiled: Path):
    before = cached(compiled).stat().st_mtime_ns
    assert ask(compiled) == "42"
    assert cached(compiled).stat().st_mtime_ns == before


def test_what_cannot_be_compiled_is_said(folder: Path):
    (folder / "answer.c").write_text("int answer(void) { return nowhere; }")
    assert "nothing kernels could not be compiled: " in (said := ask(folder))
    assert "nowhere" in said


def test_a_cache_that_others_may_write_to_is_not_used_and_nothing_is_left_behind(folder: Path, tmp_path: Path):
    cache, temporary = tmp_path / "cache" / "headwater", tmp_path / "temporary"
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    temporary.mkdir()
    assert ask(folder, TMPDIR=str(temporary)) == "42"
    assert list(cache.iterdir()) == list(temporary.iterdir()) == []
