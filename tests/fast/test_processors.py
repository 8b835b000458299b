"""The step for other processors: without VNNI, and without AVX at all. All tests of this folder pass there too."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from headwater.machine.build import missing

ROOT = Path(__file__).resolve().parents[2]
WITHOUT = {"VNNI": "-mno-avx512vnni", "AVX2": "-mno-avx -mno-avx2 -mno-avx512f"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=f"nothing is compiled here: {missing()}"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="these are flags for x86-64"),
]


@pytest.mark.parametrize("feature", WITHOUT)
def test_without(feature: str):
    env = {**os.environ, "HEADWATER_CFLAGS": WITHOUT[feature], "PYTHONPATH": str(ROOT / "src")}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
        "tests/fast",
    ]
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:]
