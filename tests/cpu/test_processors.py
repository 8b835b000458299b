"""The C kernels for other processors: without VNNI, AVX-512, or AVX at all. All their tests pass there too."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from headwater.cpu.build import unavailable_reason

ROOT = Path(__file__).resolve().parents[2]
VNNI, AVX512, AVX2 = "-mno-avx512vnni", "-mno-avx512f", "-mno-avx -mno-avx2 -mno-avx512f"
DECODE_TESTS = (
    "test_decode_contract.py",
    "test_decode_nan.py",
    "test_decode_step.py",
    "test_decode_threads.py",
    "test_int8.py",
    "test_native_decoder.py",
    "test_odd_specs.py",
    "test_quantized_layers.py",
    "test_source_panels.py",
)
TRAINING_TESTS = ("test_favor.py", "test_linear.py", "test_lsh_attention.py", "test_training_threads.py")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(unavailable_reason()), reason=f"nothing is compiled here: {unavailable_reason()}"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="these are flags for x86-64"),
]


@pytest.mark.parametrize(
    ("flags", "tests"),
    [(VNNI, DECODE_TESTS), (AVX2, DECODE_TESTS), (AVX512, TRAINING_TESTS), (AVX2, TRAINING_TESTS)],
    ids=["decode-vnni", "decode-avx2", "training-avx512", "training-avx2"],
)
def test_without(flags: str, tests: tuple[str, ...]):
    env = {**os.environ, "HEADWATER_CFLAGS": flags, "PYTHONPATH": str(ROOT / "src")}
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow"]
    command = [sys.executable, "-m", "pytest", *options, *(f"tests/cpu/{name}" for name in tests)]
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:]
