"""Python processes without the time of their imports: a process that has imported torch and headwater forks them.

Each `python -c` is a process of its own, with its own arguments, environment, folder and `__main__`; what it prints and
how it ends are its own too. Where imports are what is tested, a process must be started in the usual way.

As a script: it reads a line of JSON a process ({"code": …, "argv": …, "env": …, "cwd": …, "out": …, "err": …}), and
answers with its exit status.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
import types
from pathlib import Path


class Forks:
    """run() as subprocess.run, for [sys.executable, "-c", code, …] with capture_output; -I may stand before -c."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, __file__], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent / "src")},
        )  # fmt: skip
        assert self.process.stdout.readline() == "ready\n"

    def run(self, command, *, env=None, cwd=None, text=False, capture_output=True, check=False, timeout=None):
        python, *options, code = command[: command.index("-c") + 2]
        argv = command[command.index("-c") + 2 :]
        assert python == sys.executable and options in (["-c"], ["-I", "-c"]) and capture_output
        out, err = self.folder / "out", self.folder / "err"
        order = {"code": code, "argv": argv, "env": dict(os.environ if env is None else env), "cwd": str(cwd or ".")}
        self.process.stdin.write(json.dumps({**order, "out": str(out), "err": str(err)}) + "\n")
        self.process.stdin.flush()
        status = int(self.process.stdout.readline())
        said = [path.read_text(encoding="utf-8") if text else path.read_bytes() for path in (out, err)]
        done = subprocess.CompletedProcess(command, status, *said)
        if check:
            done.check_returncode()
        return done

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=60)


def become(order: dict) -> dict:
    """In the fork: be the process that was asked for; the namespace of its code."""
    for number, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, order["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        (2, order["err"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
    ):
        os.dup2(os.open(path, flags, 0o600), number)
    os.closerange(3, 64)
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    sys.argv = ["-c", *order["argv"]]
    sys.path[0] = ""
    sys.modules["__main__"] = types.ModuleType("__main__")
    return vars(sys.modules["__main__"])


def execute(order: dict) -> int:
    """The code of a process; its exit status, as the interpreter would give it."""
    status = 0
    try:
        exec(order["code"], become(order))
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if status and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def serve() -> dict | None:
    """Fork for every line; None at the end of the lines, and in a fork its order."""
    for line in iter(sys.stdin.readline, ""):
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            return order
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    return None


if __name__ == "__main__":
    import headwater.training.api
    import headwater.weights.pickles  # noqa: F401

    print("ready", flush=True)
    if order := serve():
        os._exit(execute(order))  # to take torch down again would take longer than most of these processes
