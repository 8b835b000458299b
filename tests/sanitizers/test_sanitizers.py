"""The C kernels under the compiler's sanitizers: no data race, no byte out of bounds, nothing undefined.

The tests of tests/cpu run again in a process of their own, with libraries that are compiled with a sanitizer. A
planted fault of each kind shows that it would be seen.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headwater.cpu.build import find_compiler, unavailable_reason

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
RUNTIME = {"address": "libasan.so", "thread": "libtsan.so"}
FOUND = 66  # the exit code of a process in which a sanitizer has found something

ADDRESS = {
    "HEADWATER_CFLAGS": "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-sanitize=alignment -g -O1",
    "ASAN_OPTIONS": f"detect_leaks=0:exitcode={FOUND}",
    "UBSAN_OPTIONS": f"print_stacktrace=1:exitcode={FOUND}",
}
THREAD = {
    "HEADWATER_CFLAGS": f"-fsanitize=thread -g -O1 {HERE / 'openmp.c'}",
    "TSAN_OPTIONS": f"halt_on_error=1:exitcode={FOUND}:ignore_noninstrumented_modules=1:report_signal_unsafe=0",
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(unavailable_reason()), reason=f"nothing is compiled here: {unavailable_reason()}"),
]


def preloaded(kind: str) -> str:
    """The sanitizer's own library, which must be loaded before all others, and that of C++, whose throw it replaces."""
    names = (RUNTIME[kind], "libstdc++.so.6")
    found = [
        subprocess.run(
            [str(find_compiler()), f"-print-file-name={name}"], capture_output=True, text=True
        ).stdout.strip()
        for name in names
    ]
    for name, path in zip(names, found, strict=True):
        if not Path(path).is_absolute():
            pytest.skip(f"the compiler has no {name}")
    return " ".join(found)


def run_tests(kind: str, root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    settings = ADDRESS if kind == "address" else THREAD
    env = {
        **os.environ,
        **settings,
        "LD_PRELOAD": preloaded(kind),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(root / "src"),
    }
    # The report of a sanitizer goes to the process's own stderr: pytest must not capture it.
    options = ["-q", "-x", "-n", "0", "-p", "no:cacheprovider", "--capture=no", "-m", "not slow"]
    command = [sys.executable, "-m", "pytest", *options, *words]
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)


@pytest.mark.parametrize("file", ["test_decode_threads.py", "test_training_threads.py"])
def test_threads_never_race(file: str):
    run = run_tests("thread", ROOT, f"tests/cpu/{file}")
    assert run.returncode == 0, (run.stdout + run.stderr)[-4000:]


def test_nothing_is_out_of_bounds_or_undefined():
    """Without test_memory.py, which needs glibc's own malloc, and without those that compile libraries of their own."""
    left_out = [f"--ignore=tests/cpu/{name}.py" for name in ("test_memory", "test_build", "test_layout")]
    run = run_tests("address", ROOT, "tests/cpu", *left_out)
    assert run.returncode == 0, (run.stdout + run.stderr)[-4000:]


PLANTED = {
    "thread": (
        "    SYNC_IF_MANY(t)                                      /* the quantized y is overwritten below",
        "                                                         /* the quantized y is overwritten below",
        "data race",
    ),
    "address": (
        "for (int b = 0; b < n / 32; b++, x += 32) {",
        "for (int b = 0; b <= n / 32 + 64; b++, x += 32) {",
        "AddressSanitizer",
    ),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_fault_is_found(kind: str, tmp_path: Path):
    """A missing barrier, and a loop that runs too far, in a copy of the sources."""
    right, wrong, words = PLANTED[kind]
    ours = shutil.ignore_patterns("__pycache__")
    for name in ("src", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ours)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (source,) = (path for path in (tmp_path / "src/headwater/cpu/csrc").glob("*.[ch]") if right in path.read_text())
    source.write_text(source.read_text().replace(right, wrong))
    run = run_tests(kind, tmp_path, "tests/cpu/test_decode_threads.py", "-k", "prompt and Q8_0")
    assert run.returncode == FOUND and words in run.stdout + run.stderr, (run.stdout + run.stderr)[-2000:]
