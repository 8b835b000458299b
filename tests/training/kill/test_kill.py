"""kill -9 at any instant: the resumed run is, bit for bit, the run that was never killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headwater.training.loggers import read_jsonl
from headwater.training.storage import CheckpointManager

ROOT = Path(__file__).resolve().parents[3]
PORTIONS = 8
OPERATIONS = 1000  # of the disk: four saves, and the removal of the first two; those that follow are alike


class Zygote:
    def __init__(self):
        paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests" / "training")])
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("zygote.py"))], cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert self.process.stdout.readline() == "ready\n"

    def run(self, folder, **order):
        self.process.stdin.write(json.dumps({"folder": str(folder), **order}) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


@pytest.fixture(scope="module")
def zygote():
    made = Zygote()
    yield made
    made.process.stdin.close()
    made.process.wait(timeout=60)


TIMES = ("time", "seconds", "tokens_per_second", "targets_per_second")


def diary(folder):
    """Everything a run has said of itself but its times: losses, norms, scores, the order of examples; its weights."""
    metrics = [{k: v for k, v in line.items() if k not in TIMES} for line in read_jsonl(folder / "metrics.jsonl")]
    order = (folder / "order.jsonl").read_text()
    return metrics, order, (folder / "end.json").read_text()


@pytest.fixture(scope="module")
def unbroken(zygote, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    took = zygote.run(folder)
    assert took["code"] == 0
    return diary(folder), took["seconds"]


def until_done(zygote, folder, kills):
    """Kill after each of these times; then let it end. Between two deaths the newest checkpoint must be valid."""
    deaths = 0
    for order in kills:
        found = zygote.run(folder, **order)
        if found["code"] == 0:
            break
        assert found["code"] == -signal.SIGKILL
        deaths += 1
        checkpoints = CheckpointManager(folder / "checkpoints", "run")
        if (folder / "checkpoints").is_dir() and checkpoints.paths():
            assert not checkpoints.latest_valid().skipped, "a committed checkpoint is never half there"
    else:
        assert zygote.run(folder)["code"] == 0
    return deaths


def random_kills(zygote, unbroken, folder, wanted, seed):
    """Runs, each killed a few times at random instants, until there were enough deaths."""
    (lines, seconds), draw, deaths, runs = unbroken, random.Random(seed), 0, 0
    while deaths < wanted:
        here = folder / f"{runs}"
        kills = [{"kill": draw.uniform(0.02, 0.9 * seconds)} for _ in range(draw.randint(1, 4))]
        deaths += until_done(zygote, here, kills)
        assert diary(here) == lines, f"run {runs} of seed {seed}"
        runs += 1
    return deaths


def test_10_kills_at_random_instants(zygote, unbroken, tmp_path):
    assert random_kills(zygote, unbroken, tmp_path, 10, seed=1) >= 10


def test_kills_within_saving_and_within_deleting(zygote, unbroken, tmp_path):
    """The process kills itself at the n-th operation of the disk: within the third save, and while an old one goes."""
    lines, _ = unbroken
    for number, at in enumerate((1, 9, 27, 55, 62, 70, 75, 78, 80, 83)):
        assert until_done(zygote, tmp_path / f"{number}", [{"at": at}]) == 1
        assert diary(tmp_path / f"{number}") == lines, f"killed at operation {at}"


def test_a_kill_after_the_last_line_of_the_log(zygote, unbroken, tmp_path):
    """All steps are done and the stop is logged: resumed, the run ends again, and is logged to have ended once."""
    lines, _ = unbroken
    for _repeat in range(2):
        assert zygote.run(tmp_path / "run")["code"] == 0
        assert diary(tmp_path / "run") == lines


def test_the_comparison_is_not_blind(zygote, unbroken, tmp_path):
    """A journal that loses its last step, a loss in the last digit, an order of examples turned round: each is seen."""
    lines, _ = unbroken
    folder = tmp_path / "run"
    assert until_done(zygote, folder, [{"at": 40}]) == 1
    assert diary(folder) == lines
    for name, old, new in (
        ("metrics.jsonl", '"loss": ', '"loss": 1'),
        ("order.jsonl", "[", "[1, "),
        ("end.json", "a", "b"),
    ):
        path = folder / name
        kept = path.read_text()
        path.write_text(kept.replace(old, new, 1))
        assert diary(folder) != lines, name
        path.write_text(kept)
    assert diary(folder) == lines


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 22))
def test_500_kills_25_of_each_seed(zygote, unbroken, tmp_path, seed):
    assert random_kills(zygote, unbroken, tmp_path, 25, seed) >= 25


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1, 1 + PORTIONS))
def test_a_kill_at_every_operation_of_the_disk(first, zygote, unbroken, tmp_path):
    """Every operation of the first four saves, in portions that workers share: 40 minutes of one processor in all."""
    lines, _ = unbroken
    for at in range(first, 1 + OPERATIONS, PORTIONS):
        assert until_done(zygote, tmp_path / f"{at}", [{"at": at}]) == 1
        assert diary(tmp_path / f"{at}") == lines, f"killed at operation {at}"
