"""The C files of a folder, compiled once for this machine on first use and kept in the user's cache.

No compiler: they step aside. HEADWATER_FAST=0 turns them off, HEADWATER_CFLAGS adds flags of the compiler (sanitizers).
A library is found again by the hash of its sources, its flags and the processor. Its own hash stands at its end, so
that a damaged file is noticed and compiled anew.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

FLAGS = ("-O3", "-march=native", "-fno-trapping-math", "-fno-math-errno", "-shared", "-fPIC")
SECONDS = 120
DIGEST = hashlib.sha256().digest_size

_failures: list[str] = []  # why a folder could not be compiled or opened, in words


@lru_cache
def library(folder: Path, *more: str) -> ctypes.CDLL | None:
    """The compiled files, or None where this machine cannot have them (missing() says why). more: flags of its own.

    Whoever calls it has imported torch: both then share one OpenMP, and one set of threads.
    """
    if _turned_off():
        return None
    try:
        return _opened(_compiled(folder, (*FLAGS, *more, *shlex.split(os.environ.get("HEADWATER_CFLAGS", "")))))
    except (OSError, subprocess.SubprocessError) as error:
        _failures.append(f"{folder.name} could not be compiled: {' '.join(str(error).split())[:300]}")
        return None


def missing() -> str:
    """Why nothing is compiled here, in words; empty where it is or could be."""
    return _turned_off() or "; ".join(_failures)


def _turned_off() -> str:
    if os.environ.get("HEADWATER_FAST") == "0":
        return "HEADWATER_FAST=0 turns it off"
    if compiler() is None:
        return "it needs a C compiler, and there is no cc, gcc or clang; install one (apt-get install gcc)"
    return ""


@lru_cache(maxsize=1)
def compiler() -> str | None:
    return next(
        (found for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name and (found := shutil.which(name))), None
    )


def _opened(path: Path) -> ctypes.CDLL:
    """Threads wait a moment for each other before they sleep: long waits starve a busy machine, sleeps cost time."""
    before = os.environ.get("GOMP_SPINCOUNT")
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # OpenMP reads it once, when it is loaded
    made = ctypes.CDLL(str(path))
    if before is None:
        del os.environ["GOMP_SPINCOUNT"]
    return made


def _compiled(folder: Path, flags: tuple[str, ...]) -> Path:
    texts = [path.read_bytes() for path in sorted(folder.glob("*.[ch]"))]
    told = [*texts, *(flag.encode() for flag in flags), _processor()]
    name = hashlib.sha256(b"\0".join(told)).hexdigest()[:24] + ".so"
    target = _cache() / name
    if _intact(target):
        return target
    with tempfile.TemporaryDirectory(dir=target.parent) as room:
        made = Path(room) / name
        command = [str(compiler()), *flags, *map(str, sorted(folder.glob("*.c"))), "-o", str(made), "-lm"]
        said = ""
        for openmp in (["-fopenmp"], []):  # some compilers have no OpenMP: one thread is still right
            run = subprocess.run(command + openmp, capture_output=True, timeout=SECONDS, check=False)
            if run.returncode == 0:
                _seal(made)
                made.replace(target)  # appears whole, whoever else compiles at the same time
                return target
            lines = run.stderr.decode(errors="replace").splitlines()
            said = said or next((line for line in lines if "error" in line), f"it ended with {run.returncode}")
    raise OSError(f"{compiler()} says {said}")


def _intact(path: Path) -> bool:
    """Whether the file is all there: an open library that is cut short ends the process with a bus error."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-DIGEST]).digest() == content[-DIGEST:]


def _seal(path: Path) -> None:
    """Write the hash of the file at its end, and all of it to the disk before it is renamed."""
    with path.open("r+b") as file:
        digest = hashlib.sha256(file.read()).digest()
        file.write(digest)
        file.flush()
        os.fsync(file.fileno())


@lru_cache(maxsize=1)
def _cache() -> Path:
    """The user's own folder, which no one else may write to: a library is code. Else one for this process alone."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "headwater"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid == os.getuid() and not folder.stat().st_mode & 0o022:
            return folder
    except OSError:
        pass
    made = tempfile.mkdtemp(prefix="headwater-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


def _processor() -> bytes:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith("flags")).encode()
    except (OSError, StopIteration):
        return platform.processor().encode()
