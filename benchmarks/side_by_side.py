"""Runs contenders alternately on the same work, each in a process of its own that stays, and reports ratios.

A contender is a script that prints one line when it is ready (plain, or JSON with facts about it), and then, for every
line it is given, does the work once and prints a line of JSON with its figures. Only one of them works at a time.
Timings on shared machines are noisy: figures are medians over interleaved rounds, and a comparison during which other
processes used the processors says so.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
BENCH_PYTHON = HERE.parent / ".bench-venv" / "bin" / "python"
QUIET = 0.03  # the share of the processors that others may take before figures are not to be trusted


@dataclass
class Contender:
    name: str
    script: str
    arguments: tuple[str, ...] = ()
    python: Path = Path(sys.executable)
    rounds: list[dict[str, float]] = field(default_factory=list)
    facts: dict = field(default_factory=dict)
    process: subprocess.Popen[str] | None = None
    missing: str = ""
    stderr_file: IO[bytes] | None = None

    def start(self, threads: int) -> None:
        if not self.python.exists():
            self.missing = f"{self.python} is not there; make bench installs it"
            return
        env = environment(threads)
        command = [str(self.python), str(HERE / "contenders" / self.script), *self.arguments]
        self.stderr_file = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.stderr_file, text=True, env=env
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.give_up("it did not start")
        elif line.startswith("{"):
            self.facts = json.loads(line)

    def go(self, word: str = "go") -> bool:
        """One round; whether there was one."""
        if self.process is None or self.process.stdin is None or self.process.stdout is None:
            return False
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(word + "\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            self.give_up("it stopped in the middle")
            return False
        self.rounds.append(json.loads(line))
        return True

    def give_up(self, what: str) -> None:
        self.stop()
        self.process = None
        assert self.stderr_file is not None
        self.stderr_file.seek(0)
        said = self.stderr_file.read().decode(errors="replace").strip().splitlines()
        self.missing = f"{what}: {said[-1][:200]}" if said else what

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def figures(self) -> dict[str, dict[str, float]]:
        kept = self.rounds[1:] or self.rounds  # the first round warms up
        return {name: spread([r[name] for r in kept]) for name in (kept[0] if kept else ())}


def environment(threads: int) -> dict[str, str]:
    """Threads are counted out; how they wait for each other is left as each library has it.

    Those of a contender that waits for its turn fall asleep by themselves after a few milliseconds. To make them sleep
    at once (OMP_WAIT_POLICY=passive) makes every step of a decoder, with its hundred meetings of threads, thrice as
    long.
    """
    calm = {"TOKENIZERS_PARALLELISM": "false"}
    pinned = {f"{name}_NUM_THREADS": str(threads) for name in ("OMP", "MKL", "OPENBLAS", "NUMBA", "RAYON")}
    return {**calm, **os.environ, **pinned}


def spread(values: list[float]) -> dict[str, Any]:
    """The median and the quartiles; and all of them, in their order."""
    rising, quarter = sorted(values), len(values) // 4
    return {
        "median": statistics.median(rising), "low": rising[quarter], "high": rising[-1 - quarter], "rounds": values
    }  # fmt: skip


def ratio(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The median of the rounds' own ratios: what slows a whole round down slows both, and is in neither."""
    return statistics.median(a / b for a, b in zip(one["rounds"], other["rounds"], strict=False))


# --------------------------------------------------------------------------------------------------- a quiet machine


def worked(pids: list[int]) -> float:
    """Seconds of processor time these processes have used, with their threads and the children they waited for."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return total / os.sysconf("SC_CLK_TCK")


def busy() -> float:
    """Seconds all processors have worked, for anyone."""
    parts = [int(part) for part in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(parts) - parts[3] - parts[4]) / os.sysconf("SC_CLK_TCK")


class Watch:
    """How much of the machine others use between two moments: 1 is all of it."""

    def __init__(self, pids: list[int]) -> None:
        self.pids = [os.getpid(), *pids]
        self.began, self.busy, self.worked = time.monotonic(), busy(), worked(self.pids)

    def other_load(self) -> float:
        room = (time.monotonic() - self.began) * (os.cpu_count() or 1)
        return max(0.0, (busy() - self.busy) - (worked(self.pids) - self.worked)) / max(room, 1e-9)


def verdict(others: float) -> str:
    taken = f"others took {others:.0%} of the processors"
    return f"quiet ({taken})" if others <= QUIET else f"busy: {taken}, do not trust these figures"


# ------------------------------------------------------------------------------------------------------- comparing


@contextlib.contextmanager
def started(contenders: list[Contender], threads: int) -> Iterator[Watch]:
    """All of them ready and waiting; stopped in the end, whatever happens."""
    try:
        for contender in contenders:
            contender.start(threads)
            print(f"  {contender.name}: {contender.missing or 'ready'}", file=sys.stderr, flush=True)
        yield Watch([c.process.pid for c in contenders if c.process])
    finally:
        for contender in contenders:
            contender.stop()


def compare(contenders: list[Contender], rounds: int = 5, threads: int = 2) -> dict:
    """Every contender once a round, in turn. One more round before the first warms up."""
    with started(contenders, threads) as watch:
        begun = time.time()
        for _ in range(rounds + 1):
            for contender in contenders:
                contender.go()
        others = watch.other_load()
    return report(contenders, rounds, threads, time.time() - begun, others)


def report(contenders: list[Contender], rounds: int, threads: int, seconds: float, others: float) -> dict:
    return {
        "rounds": rounds,
        "threads": threads,
        "seconds": round(seconds, 1),
        "others": round(others, 3),
        "trust": verdict(others),
        "figures": {c.name: c.figures() for c in contenders if c.rounds},
        "facts": {c.name: c.facts for c in contenders if c.facts},
        "missing": {c.name: c.missing for c in contenders if c.missing},
    }


def table(report: dict, first: str) -> str:
    """Markdown: medians with quartiles, and the ratio of the first contender to each whose answers are right."""
    figures, wrong = report["figures"], report.get("wrong", {})
    names = list(next(iter(figures.values())))
    lines = ["| | " + " | ".join(names) + " | " + " | ".join(f"{first} ÷ it: {n}" for n in names) + " |"]
    lines.append("|---" * (1 + 2 * len(names)) + "|")
    for who, found in figures.items():
        cells = [f"{found[n]['median']:.4g} [{found[n]['low']:.4g}..{found[n]['high']:.4g}]" for n in names]
        if first in wrong or who in wrong:
            ratios = ["none"] * len(names)
        else:
            ratios = [f"{ratio(figures[first][n], found[n]):.2f}" for n in names]
        lines.append(f"| {who} | " + " | ".join(cells + ratios) + " |")
    return "\n".join(lines + ending(report))


def ending(report: dict) -> list[str]:
    """What stands below every table."""
    said = f"\n{report['rounds']} interleaved rounds, {report['threads']} threads; machine {report['trust']}."
    missing = [f"{name}: not measured, {why}" for name, why in report["missing"].items()]
    return [said, *missing, *(f"{name}: no ratio, {why}" for name, why in report.get("wrong", {}).items())]


def finish(report: dict, first: str, name: str) -> None:
    write(report, table(report, first), name)


def write(report: object, text: str, name: str) -> None:
    RESULTS.mkdir(exist_ok=True)
    for kind, said in (("json", json.dumps(report, indent=1)), ("md", text + "\n")):
        (RESULTS / f"{name}.{kind}").write_text(said.replace(f"{HERE.parent}/", ""))  # no path of this machine
    print(text)


def peers_python() -> Path:
    """The peers' environment; where it is not installed, this one, which may hold some of them."""
    return BENCH_PYTHON if (HERE.parent / ".bench-venv" / ".installed").exists() else Path(sys.executable)
