"""Memory that is given back is no longer the process's; without the switch the C library keeps what lies between."""

import platform
import subprocess
import sys

import pytest

from headwater.machine.memory import give_back

HOLES = """
import sys, torch
from headwater.machine.memory import give_back

def held():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1]) / 1024

if sys.argv[1] == "yes":
    assert give_back()
torch.empty(2**22).fill_(1)  # 16 MB: freed, it teaches the C library to keep such blocks
blocks = [torch.ones(2**19) for _ in range(100)]  # 2 MB each
full = held()
del blocks[::2]
print(full - held())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the switch")
@pytest.mark.parametrize(("switch", "least", "most"), [("yes", 80, 120), ("no", -5, 20)])
def test_holes_go_back(switch, least, most):
    said = subprocess.run([sys.executable, "-c", HOLES, switch], capture_output=True, text=True, check=True)
    assert least <= float(said.stdout) <= most


def test_a_library_without_the_switch_is_no_error(monkeypatch):
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    assert not give_back()
