"""A process that has imported everything once and forks the ranks of a process group for each trial.

It reads a line of JSON a trial: {"world": 2, "folder": …, "steps": 50, "settings": {…}} and, where wanted,
    "stop": step after which all leave without a word       "poison": step whose loss is NaN on the last process
    "kill": [rank, step], "freeze": [rank, step]            that process kills, or stops, itself there
    "die": [rank, seconds]                                  that process is killed so long after all have met
    "timeout": seconds of a collective, in place of 120     and half as many for the roll call after it
    "unused": the model has a parameter that no loss depends on
    "slow": seconds the last process sleeps in each step    "linger": seconds the first needs after the last step
    "pause": [step, seconds]                                all stop themselves there, and wake up later
    "wired": the two processes have a network each          "cut": step after which the wire between them is silent
    "fix": seconds after which it is fixed
It answers with a line: {"codes": […], "said": [what each process found, or null], "seconds": …}.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import network  # beside this file; tests is no package
import torch
from small import Diary, mean_loss, model, trainer

from headwater.errors import Fault
from headwater.training import distributed
from headwater.training.checkpoint import CheckpointWriter, restore_checkpoint
from headwater.training.distributed import full_tensor, init_distributed, to_local
from headwater.training.storage import CheckpointManager


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def member(order: dict, book: Diary) -> dict:
    """What one process does. Everybody's diary, notes and weights are compared by the tests."""
    dist = init_distributed()
    if order.get("die", [None])[0] == dist.rank:
        threading.Timer(order["die"][1], os.kill, [os.getpid(), signal.SIGKILL]).start()
    settings = {"dropout": 0.0, "checkpoint_steps": 5, "eval_every": 10, **order.get("settings", {})}
    notes: list[str] = []
    net = model(settings["dropout"])
    if order.get("unused"):
        net.unused = torch.nn.Parameter(torch.ones(4))
    listeners = [book, *listening(order, dist, notes)]
    made = trainer(order["steps"], listeners, net=net, evaluate=mean_loss, dist=dist, **settings)
    checkpoints = CheckpointManager(Path(order["folder"]), "r")
    if saved := checkpoints.latest_valid():
        restore_checkpoint(made, saved, {})
    if dist.rank == 0:
        made.output = CheckpointWriter(checkpoints, {})
    if order.get("poison") and dist.rank == dist.world_size - 1:
        real = made.loss
        made.loss = lambda n, p: real(n, p) * (float("nan") if made.state.step == order["poison"] else 1.0)
    slow = order.get("slow", 0.0) if dist.rank == dist.world_size - 1 else 0.0
    back = made._backward
    made._backward = lambda *given: (time.sleep(slow), back(*given))[1]
    made.train()
    weights = {name: full_tensor(p).double().sum().item() for name, p in made.model.named_parameters()}
    held = sum(to_local(p).numel() for p in made.model.parameters())
    moments = sum(to_local(m).numel() for state in made.optimizer.state.values() for m in state.values())
    time.sleep(order.get("linger", 0.0) if dist.rank == 0 else 0.0)
    dist.shutdown()
    return {"lines": book.lines, "weights": weights, "notes": notes, "held": held, "moments": moments}


def listening(order, dist, notes):
    def listen(event):
        if type(event).__name__ == "NoteEvent":
            notes.append(event.text)
        if type(event).__name__ != "StepEvent":
            return
        if event.step == order.get("stop"):
            raise Left
        if event.step == order.get("cut"):
            network.cut(dist.rank)
            if order.get("fix"):
                threading.Timer(order["fix"], network.fix, [dist.rank]).start()
        if order.get("pause", [0])[0] == event.step:
            subprocess.Popen(["sh", "-c", f"sleep {order['pause'][1]}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        for what, number in (("kill", signal.SIGKILL), ("freeze", signal.SIGSTOP)):
            if order.get(what) == [dist.rank, event.step]:
                os.kill(os.getpid(), number)

    return [listen]


class Left(BaseException):
    """Without a word."""


def child(order: dict, rank: int, out: Path) -> int:
    where = network.ADDRESSES[0] if order.get("wired") else "127.0.0.1"
    place = {"RANK": rank, "WORLD_SIZE": order["world"], "MASTER_ADDR": where, "MASTER_PORT": order["port"]}
    os.environ.update({name: str(value) for name, value in place.items()})
    if order.get("timeout"):
        distributed.COLLECTIVE_TIMEOUT = timedelta(seconds=order["timeout"])
        distributed.ROLL_CALL_TIMEOUT = timedelta(seconds=order["timeout"] / 2)
    if order.get("wired"):
        network.plug_in(rank)
    code, book, said = 0, Diary(), {}
    try:
        said = member(order, book)
    except Left:
        said = {"lines": book.lines}
    except Fault as fault:
        said, code = {"fault": str(fault), "lines": book.lines}, fault.exit_code
    out.write_text(json.dumps(said))
    return code


def trial(order: dict) -> dict:
    began, order = time.monotonic(), {"port": free_port(), **order}
    Path(order["folder"]).mkdir(parents=True, exist_ok=True)
    outs = [Path(order["folder"]).parent / f"said-{rank}.json" for rank in range(order["world"])]
    children = {}
    for rank, out in reversed(list(enumerate(outs))):
        out.unlink(missing_ok=True)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                if rank and order.get("wired"):
                    network.move_out()
                code = child(order, rank, out)
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(code)
        children[pid] = rank
        if rank and order.get("wired"):
            network.lay(pid)
    codes = [None] * order["world"]
    frozen = order.get("freeze", [None])[0]
    while any(code is None for rank, code in enumerate(codes) if rank != frozen):
        pid, status = os.wait()
        codes[children[pid]] = os.waitstatus_to_exitcode(status)
    for pid, rank in children.items():
        if codes[rank] is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    said = [json.loads(out.read_text()) if out.exists() else None for out in outs]
    return {"codes": codes, "said": said, "seconds": time.monotonic() - began}


if __name__ == "__main__":
    torch.set_num_threads(1)
    trainer(1)  # so that all that is imported late is imported here, once
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(trial(json.loads(line))), flush=True)
