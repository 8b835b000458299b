"""The decoding step for other processors: without VNNI, and without AVX at all. All its tests pass there too."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from headwater.cpu.build import unavailable_reason

ROOT = Path(__file__).resolve().parents[2]
WITHOUT = {"VNNI": "-mno-avx512vnni", "AVX2": "-mno-avx -mno-avx2 -mno-avx512f"}
DECODE_TESTS = (
    "test_decode_contract.py",
    "test_decode_nan.py",
    "test_decode_step.py",
    "test_decode_threads.py",
    "test_native_decoder.py",
    "test_odd_specs.py",
    "test_quantized_layers.py",
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(unavailable_reason()), reason=f"nothing is compiled here: {unavailable_reason()}"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="these are flags for x86-64"),
]


@pytest.mark.parametrize("feature", WITHOUT)
def test_without(feature: str):
    env = {**os.environ, "HEADWATER_CFLAGS": WITHOUT[feature], "PYTHONPATH": str(ROOT / "src")}
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow"]
    command = [sys.executable, "-m", "pytest", *options, *(f"tests/cpu/{name}" for name in DECODE_TESTS)]
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:]
