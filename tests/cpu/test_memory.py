"""Memory given back is no longer the process's; large blocks come in few pages, and are the zeros they should be."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headwater.cpu import memory
from headwater.cpu.memory import return_freed_memory

HOLES = """
import sys, torch
from headwater.cpu.memory import return_freed_memory

def held():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1]) / 1024

if sys.argv[1] == "yes":
    assert return_freed_memory()
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


FRESH = """
import resource, sys, torch
from headwater.cpu import memory

make = memory.empty_huge_pages if sys.argv[1] == "ours" else torch.empty
make(2**24).fill_(1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
make(2**24).fill_(1)  # 64 MB
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def large_pages_on_request():
    """With "always" torch's memory has large pages too, and there is nothing to compare."""
    switch = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return switch.exists() and "[madvise]" in switch.read_text()


@pytest.mark.skipif(not large_pages_on_request(), reason="this system does not give large pages on request (madvise)")
def test_a_large_block_comes_in_few_pages():
    faults = {}
    for whose in ("ours", "torch's"):
        said = subprocess.run([sys.executable, "-c", FRESH, whose], capture_output=True, text=True, check=True)
        faults[whose] = int(said.stdout)
    assert faults["ours"] < faults["torch's"] / 2


@pytest.mark.parametrize("shape", [(3,), (2, 5), (0, 4), (2**23 + 5,)])
def test_zeros_are_zeros_and_may_be_written(shape):
    for _ in range(2):  # the second time in memory that was written
        made = memory.lazy_zeros(*shape)
        assert (
            made.shape == shape
            and not made.any()
            and made.dtype == memory.empty_huge_pages(*shape).dtype == torch.float32
        )
        made += 1


def test_a_library_without_the_switch_is_no_error(monkeypatch):
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    assert not return_freed_memory()
