"""What every test shares: no display, no network, one language, Hypothesis without a stopwatch, no disk, threads.

Torch has one thread, because workers share the processors; in the folders of MACHINE_THREADS it has as many as the
machine (HEADWATER_TEST_THREADS), as it has for users.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.forks import Forks

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

# Temporary folders are in memory where it has room: a checkpoint syncs every file, and a disk would be waited for
# thousands of times. Power cuts are simulated (training/shim.py), so no proof rests on a real disk.
MEMORY = Path("/dev/shm")
if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= 4 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

ROOT = Path(__file__).resolve().parent.parent
MACHINE_THREADS = ("cpu", "generation", "real")
UNPLOTTED = ("cli", "tasks", "training")  # hundreds of short runs, whose plots would take longer than their steps

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


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """The machine's threads in the folders of MACHINE_THREADS; afterwards as many as before."""
    if request.path.relative_to(ROOT / "tests").parts[0] not in MACHINE_THREADS:
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(int(os.environ.get("HEADWATER_TEST_THREADS") or os.cpu_count() or 1))
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def plot_run(request: pytest.FixtureRequest) -> Iterator[Callable | None]:
    """In the folders of UNPLOTTED a run is not plotted, unless a test asks for `plots`. The function that would."""
    if request.path.relative_to(ROOT / "tests").parts[0] not in UNPLOTTED:
        yield None
        return
    from headwater.training import plots

    real = plots.plot_run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "plot_run", lambda run: [])
        yield real


@pytest.fixture
def plots(plot_run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are plotted."""
    monkeypatch.setattr("headwater.training.plots.plot_run", plot_run)


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """Runs `python -c` in processes that need not import torch and headwater again."""
    made = Forks(tmp_path_factory.mktemp("forks"))
    yield made
    made.close()


@pytest.fixture
def forked_pickles(forks: Forks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pickles are read in a process of their own, as ever, but one that is forked."""
    from headwater.weights import pickles

    run = types.SimpleNamespace(run=forks.run, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(pickles, "subprocess", run)


@pytest.fixture(scope="session")
def public_files() -> Path:
    """Public data sets (data/) and weights (weights/), for proofs on real files: HEADWATER_DATA names their folder."""
    if not (named := os.environ.get("HEADWATER_DATA")):
        pytest.skip("needs public data sets and weights; HEADWATER_DATA does not name a folder of them")
    return Path(named)


THREADS = (2, 3, 4, 8)


@pytest.fixture
def same_bits() -> Iterator[Callable]:
    """Asserts that run() gives the same bits with 1, 2, 3, 4 and 8 threads, or with some of these."""
    import torch

    def check(run: Callable[[], torch.Tensor], threads: tuple[int, ...] = THREADS) -> None:
        torch.set_num_threads(1)
        want = run()
        assert want.isfinite().all()
        for count in threads:
            torch.set_num_threads(count)
            differ = int((run() != want).sum())
            assert differ == 0, f"{count} threads: {differ} of {want.numel()} numbers differ from those of 1 thread"

    before = torch.get_num_threads()
    yield check
    torch.set_num_threads(before)
