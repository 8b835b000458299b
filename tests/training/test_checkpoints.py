"""A checkpoint is whole or not there: every operation of a save is the last once, or fails once; every bit may turn."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import time

import pytest
from tests.training.shim import BROKEN, FULL, FaultyDisk, PowerCut

from headwater.errors import BadFile, Unavailable
from headwater.training.run_dir import RunLock
from headwater.training.storage import CheckpointManager, Disk


def contents(step):
    return {
        "model.safetensors": lambda: [b"weights of ", str(step).encode() * 50],
        "optimizer.safetensors": lambda: [b"moments of " + str(step).encode() * 30],
        "state.json": lambda: [json.dumps({"step": step}).encode()],
    }


def filled(folder, steps=(1, 2, 3), keep=2, disk=None):
    folder.mkdir(exist_ok=True)
    made = CheckpointManager(folder, "run-a", disk, keep)
    for step in steps:
        made.save(step, contents(step))
    return made


def survivors(folder):
    """The valid checkpoints a fresh process finds, each with what was saved in it."""
    fresh = CheckpointManager(folder, "run-a")
    valid = [p for p in fresh.paths() if not fresh.validation_error(p)]
    for path in valid:
        step = int(path.name[5:])
        assert (path / "model.safetensors").read_bytes() == b"".join(contents(step)["model.safetensors"]())
    return [int(p.name[5:]) for p in valid]


@pytest.fixture
def operations(tmp_path):
    """The disk operations of one save, which lets an old checkpoint go too."""
    graves = tmp_path / "count" / "graves"
    graves.mkdir(parents=True)
    made = filled(tmp_path / "count" / "c")
    made.disk = disk = FaultyDisk(graves)
    made.save(4, contents(4))
    return disk.log


def test_a_save_writes_the_manifest_last_and_syncs_before_it_commits(operations):
    log = operations
    names = [line.split()[0] for line in log]
    commit = next(i for i, line in enumerate(log) if line == "rename step-00000004")
    assert names[commit - 1] == "sync" and log[commit - 2] == "fsync manifest.json"
    assert names[commit + 1] == "sync"
    assert [line.split()[1] for line in log if line.startswith("create")][-1] == "manifest.json"
    trash = next(i for i, line in enumerate(log) if ".trash" in line)
    assert trash > commit + 1 and min(i for i, n in enumerate(names) if n == "remove") > trash + 1


WAYS = {
    "killed": {"keep_names": True, "torn": 1.0},
    "power cut, names kept, bytes gone": {"keep_names": True, "torn": 0.0},
    "power cut, names kept, bytes torn": {"keep_names": True, "torn": 0.5},
    "power cut, names undone": {"keep_names": False, "torn": 0.0},
}


@pytest.mark.parametrize("way", WAYS)
def test_after_a_crash_at_any_operation_two_checkpoints_are_valid(tmp_path, operations, way):
    assert len(operations) > 20
    for at in range(len(operations)):
        here = tmp_path / f"{at}"
        graves = here / "graves"
        graves.mkdir(parents=True)
        made = filled(here / "c")
        made.disk = disk = FaultyDisk(graves, at)
        with pytest.raises(PowerCut):
            made.save(4, contents(4))
        disk.lose(**WAYS[way])
        left = survivors(here / "c")
        assert left in ([2, 3], [2, 3, 4], [3, 4]), (disk.log[-1], left)
        again = CheckpointManager(here / "c", "run-a", max_to_keep=2)
        assert again.latest_valid().step == left[-1]
        again.save(5, contents(5))
        assert survivors(here / "c") == [left[-1], 5]
        assert sorted(p.name for p in (here / "c").iterdir()) == sorted(f"step-{s:08d}" for s in (left[-1], 5))


@pytest.mark.parametrize("code", [FULL, BROKEN])
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
def test_a_failing_disk_at_any_operation_loses_nothing(tmp_path, operations, code, lasting):
    for at in range(len(operations)):
        here = tmp_path / f"{at}"
        (here / "graves").mkdir(parents=True)
        made = filled(here / "c")
        made.disk = disk = FaultyDisk(here / "graves", at, code, lasting)
        try:
            made.save(4, contents(4))
            failed = False
        except OSError:
            failed = True
        left = survivors(here / "c")
        assert left in ([2, 3], [2, 3, 4], [3, 4]), (disk.log[-1], left)
        assert failed or 4 in left
        made.disk = Disk()
        made.save(5, contents(5))
        assert survivors(here / "c")[-1] == 5 and len(survivors(here / "c")) == 2
        assert not [p for p in (here / "c").iterdir() if p.name.startswith(".")]


def test_the_shim_would_catch_a_save_without_fsync(tmp_path):
    class Hasty(FaultyDisk):
        def fsync(self, file):
            pass

    (tmp_path / "graves").mkdir()
    made = filled(tmp_path / "c")
    made.disk = disk = Hasty(tmp_path / "graves")
    made.save(4, contents(4))
    disk.lose(keep_names=True, torn=0.0)
    assert survivors(tmp_path / "c") == [3]


def test_the_shim_would_catch_deleting_before_renaming(tmp_path, monkeypatch):
    from headwater.training.storage import remove_tree

    monkeypatch.setattr(CheckpointManager, "_retire", lambda self, path: remove_tree(self.disk, path))
    (tmp_path / "graves").mkdir()
    made = filled(tmp_path / "c", (1, 2))
    made.disk, made.max_to_keep = FaultyDisk(tmp_path / "graves", at=3), 1
    with pytest.raises(PowerCut):
        made.prune()
    assert [p for p in made.paths() if made.validation_error(p)], (
        "a half-deleted folder still carries a checkpoint's name"
    )


def damaged(folder, draw):
    """Flip one bit, or cut a file short, somewhere in the newest checkpoint."""
    newest = CheckpointManager(folder, "run-a").paths()[-1]
    file = draw.choice(sorted(newest.iterdir()))
    raw = bytearray(file.read_bytes())
    if draw.random() < 0.7:
        raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
    else:
        del raw[draw.randrange(len(raw)) :]
    file.write_bytes(bytes(raw))
    return file.name


def test_500_flipped_bits_and_cut_files_are_all_noticed(tmp_path):
    filled(tmp_path / "c")
    draw, hit = random.Random(0), set()
    for _ in range(500):
        copy = tmp_path / "copy"
        shutil.copytree(tmp_path / "c", copy)
        hit.add(damaged(copy, draw))
        found = CheckpointManager(copy, "run-a").latest_valid()
        assert found.step == 2 and "step-00000003" in found.skipped[0]
        shutil.rmtree(copy)
    assert hit == {"manifest.json", "state.json", "model.safetensors", "optimizer.safetensors"}


def _swap_from_another_step(folder):
    shutil.copy(folder / "step-00000002/model.safetensors", folder / "step-00000003/model.safetensors")


def _whole_folder_of_another_step(folder):
    shutil.rmtree(folder / "step-00000003")
    shutil.copytree(folder / "step-00000002", folder / "step-00000003")


def _link(folder):
    file = folder / "step-00000003/model.safetensors"
    shutil.copy(file, folder.parent / "elsewhere")
    file.unlink()
    file.symlink_to(folder.parent / "elsewhere")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda f: (f / "step-00000003/optimizer.safetensors").unlink(), "optimizer.safetensors is missing"),
        (lambda f: (f / "step-00000003/more.safetensors").write_text("x"), "more.safetensors is not in its manifest"),
        (_swap_from_another_step, "not what was written"),
        (_whole_folder_of_another_step, "it is of step 2"),
        (lambda f: (f / "step-00000003/manifest.json").unlink(), "manifest cannot be read"),
        (_link, "not a plain file"),
    ],
)
def test_what_does_not_belong_is_named_and_the_previous_one_used(tmp_path, spoil, said):
    filled(tmp_path / "c")
    spoil(tmp_path / "c")
    found = CheckpointManager(tmp_path / "c", "run-a").latest_valid()
    assert found.step == 2 and said in found.skipped[0]


def test_another_runs_checkpoint_is_not_ours(tmp_path):
    filled(tmp_path / "c")
    with pytest.raises(BadFile, match="all 2 are corrupted .*another run"):
        CheckpointManager(tmp_path / "c", "run-b").latest_valid()


def test_if_all_are_spoiled_it_is_said_and_never_begun_anew(tmp_path):
    filled(tmp_path / "c")
    for path in (tmp_path / "c").iterdir():
        (path / "state.json").write_text("{}")
    with pytest.raises(BadFile, match="must have a valid checkpoint, all 2 are corrupted"):
        CheckpointManager(tmp_path / "c", "run-a").latest_valid()
    (tmp_path / "d").mkdir()
    assert CheckpointManager(tmp_path / "d", "run-a").latest_valid() is None


def test_the_number_decides_and_not_the_clock(tmp_path):
    import os

    filled(tmp_path / "c")
    os.utime(tmp_path / "c" / "step-00000003", (0, 0))
    assert CheckpointManager(tmp_path / "c", "run-a").latest_valid().step == 3


def test_a_hundred_checkpoints_of_which_one_is_good_are_searched_quickly(tmp_path):
    made = filled(tmp_path / "c", range(1, 101), keep=100)
    for path in made.paths()[1:]:
        (path / "model.safetensors").write_bytes(b"")
    began = time.monotonic()
    assert CheckpointManager(tmp_path / "c", "run-a").latest_valid().step == 1
    assert time.monotonic() - began < 10


def test_a_link_in_place_of_a_checkpoint_is_not_followed(tmp_path):
    filled(tmp_path / "c")
    shutil.copytree(tmp_path / "c/step-00000003", tmp_path / "away")
    (tmp_path / "c/step-00000009").symlink_to(tmp_path / "away")
    made = CheckpointManager(tmp_path / "c", "run-a")
    assert made.latest_valid().step == 3
    made.save(10, contents(10))
    made.save(11, contents(11))
    assert (tmp_path / "away/manifest.json").exists()


# ------------------------------------------------------------------------------------------------------------ the lock

HOLD = """
import sys, time
from pathlib import Path
from headwater.training.run_dir import RunLock
RunLock(Path(sys.argv[1])).acquire()
print("held", flush=True)
time.sleep(60)
"""


def test_a_second_trainer_is_refused_and_a_killed_one_leaves_no_lock(tmp_path):
    path = tmp_path / "lock"
    other = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "held\n"
    with pytest.raises(Unavailable, match=f"process {other.pid} on .* does"):
        RunLock(path).acquire()
    other.kill()
    other.wait()
    with RunLock(path):
        assert json.loads(path.read_text())["pid"] != other.pid
    assert path.read_text() == ""


def test_a_lock_of_another_machine_is_believed(tmp_path):
    path = tmp_path / "lock"
    path.write_text(json.dumps({"pid": 1, "host": "elsewhere", "boot": "x"}))
    with pytest.raises(Unavailable, match="process 1 on elsewhere .*remove"):
        RunLock(path).acquire()


def test_a_lock_of_an_earlier_boot_or_a_torn_one_is_cleared(tmp_path):
    import socket

    path = tmp_path / "lock"
    for left in (json.dumps({"pid": 1, "host": socket.gethostname(), "boot": "earlier"}), '{"pid": 1, "ho', "[]"):
        path.write_text(left)
        with RunLock(path):
            pass
