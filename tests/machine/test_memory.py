"""Memory given back is no longer the process's, memory kept is not mapped anew; without a switch: a little of both."""

import platform
import subprocess
import sys

import pytest

from headwater.machine.memory import give_back, keep

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


LARGE = """
import resource, sys, torch
from headwater.machine.memory import keep

if sys.argv[1] == "yes":
    assert keep()
for _ in range(5):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**24)  # 64 MB
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize() / 2**20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the switch")
@pytest.mark.parametrize(("switch", "least", "most"), [("yes", 0, 8), ("no", 32, 80)])
def test_a_large_block_that_comes_and_goes_is_the_same_memory(switch, least, most):
    said = subprocess.run([sys.executable, "-c", LARGE, switch], capture_output=True, text=True, check=True)
    assert least <= float(said.stdout) <= most


def test_a_library_without_the_switch_is_no_error(monkeypatch):
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    assert not give_back() and not keep()
