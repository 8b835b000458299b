"""Many processes follow the curve of one, see the same examples, and may change in number when a run is resumed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]

WORK = """
import json, sys
from pathlib import Path
from headwater.training.checkpoints import Checkpoints
from headwater.training.snapshot import keeper, restore
from headwater.training.team import team
from small import Diary, trainer, mean_loss
folder, steps, stop, poison = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
together = team()
book = Diary()
made = trainer(steps, [book], dropout=0.0, save_steps=5, eval_every=10, evaluate=mean_loss)
made.team = together
checkpoints = Checkpoints(folder, "r")
saved = checkpoints.newest()
if saved:
    restore(made, saved, {})
if together.rank == 0:
    made.keep = keeper(checkpoints, {})
if poison and together.rank == 1:
    hook = lambda m, i, o: o * float("nan") if made.progress.step == poison else o
    made.model.encoder.layers[0].ffn.register_forward_hook(hook)
def cut(event):
    if type(event).__name__ == "Stepped" and event.step == stop:
        sys.stdout.write(json.dumps([book.lines, []]))
        sys.stdout.flush()
        import os; os._exit(0)
made.listeners.append(cut)
made.run()
print(json.dumps([book.lines, {n: float(p.detach().double().sum()) for n, p in made.model.named_parameters()}]))
together.leave()
"""


def port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def together(world, folder, steps=50, stop=0, poison=0):
    """Every process's diary: (lines, sums of the weights)."""
    folder.mkdir(exist_ok=True)
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests" / "training")])
    at = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port()), "WORLD_SIZE": str(world)}
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **at}
    words = [sys.executable, "-c", WORK, str(folder), str(steps), str(stop), str(poison)]
    children = [
        subprocess.Popen(words, env={**env, "RANK": str(r)}, stdout=subprocess.PIPE, text=True) for r in range(world)
    ]
    outs = [child.communicate(timeout=300)[0] for child in children]
    assert [child.returncode for child in children] == [0] * world
    return [json.loads(out) for out in outs]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return together(1, tmp_path_factory.mktemp("alone") / "c")[0]


def close(lines, wanted):
    """Losses and norms to 1e-6, examples exactly, in their order."""
    assert len(lines) == len(wanted)
    for got, want in zip(map(json.loads, lines), map(json.loads, wanted), strict=True):
        assert got[0] == want[0] and got[3] == want[3]
        assert got[1] == pytest.approx(want[1], abs=1e-6, rel=1e-6)
        assert got[2] == pytest.approx(want[2], rel=1e-3)


def test_two_processes_follow_the_curve_of_one(alone, tmp_path):
    first, second = together(2, tmp_path / "c")
    assert first == second, "both processes have seen the same numbers and have the same weights"
    close(first[0], alone[0])
    for name, total in first[1].items():
        if not name.endswith(".k.bias"):  # softmax does not see it: its gradient is rounding, which Adam makes large
            assert total == pytest.approx(alone[1][name], abs=1e-4, rel=1e-4), name


def test_a_run_may_change_its_number_of_processes(alone, tmp_path):
    """1 process up to step 17, 3 up to step 33, then 2: the curve and the order of one."""
    lines = together(1, tmp_path / "c", stop=17)[0][0][:15]
    lines += together(3, tmp_path / "c", stop=33)[0][0][:15]
    lines += together(2, tmp_path / "c")[0][0]
    close(lines, alone[0])


def test_a_nan_on_one_process_is_skipped_by_all_in_the_same_step(tmp_path):
    first, second = together(2, tmp_path / "c", steps=12, poison=6)
    assert first[1] == second[1] and torch.tensor(list(first[1].values())).isfinite().all()
    bad = [json.loads(line)[0] for line in first[0] if json.loads(line)[1] != json.loads(line)[1]]
    assert bad == [7]
