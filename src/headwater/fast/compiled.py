"""step.c, compiled once for this machine on first use and kept in the user's cache. No compiler: it steps aside.

HEADWATER_FAST=0 turns it off. The library is found again by the hash of its source, its flags and the processor.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("step.c")
# Sums may be taken in any order; -ffast-math would also turn subnormal numbers off in the whole process.
SUMS = ("-fassociative-math", "-freciprocal-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno")
FLAGS = ("-O3", "-march=native", *SUMS, "-shared", "-fPIC")
SECONDS = 120


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled step, or None where this machine cannot have it (then missing() says why)."""
    if missing():
        return None
    try:
        return _opened(_compiled())
    except (OSError, subprocess.SubprocessError):
        return None


@lru_cache(maxsize=1)
def missing() -> str:
    """Why there is no compiled step, in words; empty where there is one or could be."""
    if os.environ.get("HEADWATER_FAST") == "0":
        return "HEADWATER_FAST=0 turns it off"
    if compiler() is None:
        return "it needs a C compiler, and there is no cc, gcc or clang; install one (apt-get install gcc)"
    return ""


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
    for name in ("step", "widen", "product", "best", "threads"):
        getattr(made, name).restype = None
    made.threads(torch.get_num_threads())
    return made


def _compiled() -> Path:
    sources = [path.read_bytes() for path in (SOURCE, *sorted(SOURCE.parent.glob("*.h")))]
    told = [*sources, *(flag.encode() for flag in FLAGS), _processor()]
    name = hashlib.sha256(b"\0".join(told)).hexdigest()[:24] + ".so"
    target = _cache() / name
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / name
        command = [str(compiler()), *FLAGS, str(SOURCE), "-o", str(made), "-lm"]
        for openmp in (["-fopenmp"], []):  # some compilers have no OpenMP: one thread is still right
            if subprocess.run(command + openmp, capture_output=True, timeout=SECONDS, check=False).returncode == 0:
                made.replace(target)  # appears whole, whoever else compiles at the same time
                return target
    raise OSError("the compiler refused step.c")


def _cache() -> Path:
    """The user's own folder, which no one else may write to: a library is code."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "headwater"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid == os.getuid() and not folder.stat().st_mode & 0o022:
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="headwater-"))


def _processor() -> bytes:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith("flags")).encode()
    except (OSError, StopIteration):
        return platform.processor().encode()
