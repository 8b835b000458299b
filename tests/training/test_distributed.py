"""Many processes follow the curve of one, copied or sharded; see the same examples; may change in number and in way."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.training.small import trainer

from headwater.errors import BadSetting, Unavailable
from headwater.training.diagnostics import FIRST_REPORT_STEP, STEPS_BETWEEN_REPORTS, StragglerDetector
from headwater.training.distributed import SingleProcess

ROOT = Path(__file__).resolve().parents[2]
ENV = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests" / "training")]),
    "OMP_NUM_THREADS": "1",
}


class Workers:
    def __init__(self, *within):
        self.process = subprocess.Popen(
            [*within, sys.executable, str(Path(__file__).with_name("workers.py"))],
            env=ENV, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert self.process.stdout.readline() == "ready\n"

    def __call__(self, world, folder, steps=50, **order):
        order = {"world": world, "folder": str(folder), "steps": steps, **order}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def results(self, *given, **order):
        """What every process found, all of them having ended well."""
        found = self(*given, **order)
        assert not any(found["codes"]), found
        return found["said"]


@pytest.fixture(scope="module")
def workers():
    made = Workers()
    yield made
    made.process.stdin.close()
    made.process.wait(timeout=60)


@pytest.fixture(scope="module")
def alone(workers, tmp_path_factory):
    return workers.results(1, tmp_path_factory.mktemp("alone") / "c")[0]


def close(lines, wanted):
    """Losses to 1e-6, norms too as far as rounding lets them, examples exactly, in their order."""
    assert len(lines) == len(wanted)
    for got, want in zip(map(json.loads, lines), map(json.loads, wanted), strict=True):
        assert got[0] == want[0] and got[3] == want[3]
        assert got[1] == pytest.approx(want[1], abs=1e-6, rel=1e-6)
        assert got[2] == pytest.approx(want[2], rel=1e-3)


def same_weights(got, want):
    for name, total in got.items():
        if not name.endswith(".k.bias"):  # softmax does not see it: its gradient is rounding, which Adam makes large
            assert total == pytest.approx(want[name], abs=1e-4, rel=1e-4), name


WAYS = {
    "copied": {},
    "sharded": {"fsdp": True},
    "sharded, in pieces, computed twice, averaged": {
        "fsdp": True,
        "micro_batch_tokens": 60,
        "gradient_checkpointing": True,
        "ema": 0.9,
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_follow_the_curve_of_one(workers, alone, tmp_path, way):
    first, second = workers.results(2, tmp_path / "c", settings=WAYS[way])
    assert first["lines"] == second["lines"] and first["weights"] == second["weights"]
    close(first["lines"], alone["lines"])
    same_weights(first["weights"], alone["weights"])


def test_a_parameter_that_no_loss_depends_on_stays_as_it_is(workers, tmp_path):
    alone, pair = (workers.results(world, tmp_path / f"{world}" / "c", 12, unused=True) for world in (1, 2))
    assert pair[0]["weights"] == pair[1]["weights"] and pair[0]["weights"]["unused"] == 4.0
    close(pair[0]["lines"], alone[0]["lines"])


def test_each_process_holds_its_part_of_weights_and_moments(workers, tmp_path):
    copied, sharded = (workers.results(2, tmp_path / f"{n}" / "c", 1, settings={"fsdp": bool(n)}) for n in (0, 1))
    for plain, one, other in zip(copied, sharded, reversed(sharded), strict=True):
        assert one["held"] + other["held"] == plain["held"]
        assert one["moments"] < 0.6 * plain["moments"]


def test_a_run_may_change_its_number_of_processes_and_its_way(workers, alone, tmp_path):
    """1 process, 2 with a part each, 1 again, 3 with copies, 2 with parts: the curve and the order of one."""
    plan = ((1, False, 8), (2, True, 17), (1, False, 22), (3, False, 33), (2, True, None))
    lines = []
    for world, shard, stop in plan:
        said = workers.results(world, tmp_path / "c", stop=stop, settings={"fsdp": shard})[0]
        first = json.loads(said["lines"][0])[0]
        lines = lines[: first - 1] + said["lines"]
    close(lines, alone["lines"])


@pytest.mark.parametrize("shard", [False, True])
def test_a_nan_on_one_process_is_skipped_by_all_and_named_by_the_first(workers, tmp_path, shard):
    first, second = workers.results(2, tmp_path / "c", steps=12, poison=6, settings={"fsdp": shard})
    assert first["weights"] == second["weights"] and all(x == x for x in first["weights"].values())
    assert [json.loads(line)[0] for line in first["lines"] if "NaN" in line] == [7]
    assert len(first["notes"]) == 1 and "the loss is NaN or inf, though every module's output" in first["notes"][0]


def test_a_killed_process_ends_the_others_soon_and_the_run_goes_on(workers, alone, tmp_path):
    found = workers(2, tmp_path / "c", kill=[1, 13])
    assert found["codes"] == [Unavailable.exit_code, -signal.SIGKILL] and found["seconds"] < 60
    fault = found["said"][0]["fault"]
    assert fault.startswith("step 14 needs all processes, process 1 does not answer (") and "--resume" in fault
    lines = workers.results(2, tmp_path / "c")[0]["lines"]
    close(lines, alone["lines"][10:])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_whoever_is_killed_whenever_all_end_and_the_run_goes_on_to_the_same_end(workers, alone, tmp_path, seed):
    """Three kills of one run at random instants, with copies or parts; then it is let go on."""
    draw, deaths = random.Random(seed), 0
    settings = {"fsdp": seed % 2 == 1}
    for _ in range(3):
        found = workers(2, tmp_path / "c", die=[draw.randrange(2), draw.uniform(0.0, 0.8)], settings=settings)
        assert set(found["codes"]) <= {0, -signal.SIGKILL, Unavailable.exit_code} and found["seconds"] < 60, found
        deaths += -signal.SIGKILL in found["codes"]
    first, second = workers.results(2, tmp_path / "c", settings=settings)
    assert deaths and first["lines"] == second["lines"] and first["weights"] == second["weights"]
    begun = json.loads(first["lines"][0])[0] if first["lines"] else 51
    close(first["lines"], alone["lines"][begun - 1 :])
    same_weights(first["weights"], alone["weights"])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_hangs_is_named_after_the_timeout(workers, alone, tmp_path, rank):
    found = workers(2, tmp_path / "c", freeze=[rank, 13], timeout=4.0)
    assert found["codes"][1 - rank] == Unavailable.exit_code and found["seconds"] < 60
    fault = found["said"][1 - rank]["fault"]
    assert fault.startswith(f"step 14 needs all processes, process {rank} does not answer (Timed out")
    lines = workers.results(2, tmp_path / "c")[0]["lines"]
    begun = json.loads(lines[0])[0]
    assert begun == 11 or (begun, rank) == (6, 0), "the first process may hang while it still writes step 10"
    close(lines, alone["lines"][begun - 1 :])


def test_ranks_that_were_all_paused_go_on(workers, alone, tmp_path):
    """A laptop that sleeps, a job that is suspended, for longer than the timeout of a collective."""
    first, second = workers.results(2, tmp_path / "c", pause=[13, 5], timeout=4.0)
    assert first["lines"] == second["lines"]
    close(first["lines"], alone["lines"])


def test_a_rank_that_is_done_does_not_wait_for_the_first_that_still_writes(workers, alone, tmp_path):
    first, second = workers.results(2, tmp_path / "c", linger=5, timeout=4.0)
    assert first["lines"] == second["lines"] and len(first["lines"]) == 50


def test_a_slow_process_is_named_and_not_ended(workers, tmp_path):
    first, _ = workers.results(2, tmp_path / "c", steps=25, slow=0.2)
    assert len(first["lines"]) == 25
    assert any(note.startswith("process 1 takes ") and "times as long as the others" in note for note in first["notes"])


def test_the_pace_of_equals_is_not_remarked_upon():
    pace = StragglerDetector()
    assert not any(pace.update([1.0, 1.2, 1.1]) for _ in range(100))
    said = [pace.update([1.0, 4.0, 1.0]) for _ in range(STEPS_BETWEEN_REPORTS)]
    assert sum(map(bool, said)) == 1 and next(filter(None, said)).startswith("process 1 takes ")
    assert not any(StragglerDetector().update([1.0, 9.0]) for _ in range(FIRST_REPORT_STEP - 1))


MEET = """
import json, os, sys
from datetime import timedelta
from headwater.training import distributed
from headwater.errors import Fault
distributed.RENDEZVOUS_TIMEOUT = timedelta(seconds=3)
places = json.loads(sys.argv[1])
children = {}
for name, place in places.items():
    read, write = os.pipe()
    if os.fork() == 0:
        os.environ.update(place)
        try:
            distributed.init_distributed()
        except Fault as fault:
            os.write(write, str(fault).encode())
        os._exit(0)
    os.close(write)
    children[name] = read
print(json.dumps({name: os.read(read, 10_000).decode() for name, read in children.items()}))
"""


MEETINGS = {
    "port taken": {},
    "nobody there": {"RANK": "1", "MASTER_PORT": "1"},
    "no such name": {"RANK": "1", "MASTER_ADDR": "no.such.name.invalid"},
}


@pytest.fixture(scope="module")
def meetings():
    """By meeting: where it should have been, and what the process said. They wait side by side."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1]), "WORLD_SIZE": "2", "RANK": "0"}
        places = {name: here | place for name, place in MEETINGS.items()}
        done = subprocess.run(
            [sys.executable, "-c", MEET, json.dumps(places)], env=ENV, capture_output=True, text=True, timeout=60
        )
    said = json.loads(done.stdout)
    return {name: (place["MASTER_ADDR"], said[name]) for name, place in places.items()}


@pytest.mark.parametrize("fault", MEETINGS)
def test_processes_that_cannot_connect_say_so(meetings, fault):
    address, said = meetings[fault]
    assert f"the processes must connect at {address}:" in said and "all of them were started" in said


def test_compiled_layers_can_not_be_sharded():
    pair = type("Pair", (SingleProcess,), {"world_size": 2})()
    with pytest.raises(BadSetting, match="compile and fsdp cannot be combined: .*; choose one"):
        trainer(1, dist=pair, compile=True, fsdp=True)
