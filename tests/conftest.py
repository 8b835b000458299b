"""What every test shares: one thread, no display, no network, one language, and Hypothesis without a stopwatch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SETTINGS = {
    "OMP_NUM_THREADS": "1",  # two workers on two cores: more threads only wait for each other
    "MPLBACKEND": "Agg",
    "HEADWATER_LANG": "en",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
for name, value in SETTINGS.items():  # before torch or matplotlib is imported by any test
    os.environ.setdefault(name, value)
os.environ.pop("HEADWATER_TRACEBACK", None)

ROOT = Path(__file__).resolve().parent.parent

try:
    import hypothesis
except ModuleNotFoundError:
    pass
else:
    # A shared machine may stall any example, so no deadline; the same examples for everybody, so no surprise in review.
    hypothesis.settings.register_profile("house", deadline=None, derandomize=True, print_blob=True)
    hypothesis.settings.load_profile("house")


@pytest.fixture(autouse=True)
def one_language() -> Iterator[None]:
    """The command sets these for its children; the next test begins as this one did."""
    names = ("HEADWATER_LANG", "HEADWATER_TRACEBACK")
    before = {name: os.environ.get(name) for name in names}
    yield
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Large public data beside the repository, where somebody has put it."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("needs ../shared/data beside the repository; it is not there")
    return folder


THREADS = (2, 3, 4, 8)


@pytest.fixture
def same_bits() -> Iterator[Callable]:
    """Asserts that run() gives the same bits with 1, 2, 3, 4 and 8 threads; afterwards there are as many as before."""
    import torch

    def check(run: Callable[[], torch.Tensor]) -> None:
        torch.set_num_threads(1)
        want = run()
        assert want.isfinite().all()
        for count in THREADS:
            torch.set_num_threads(count)
            differ = int((run() != want).sum())
            assert differ == 0, f"{count} threads: {differ} of {want.numel()} numbers differ from those of 1 thread"

    before = torch.get_num_threads()
    yield check
    torch.set_num_threads(before)
