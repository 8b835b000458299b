"""Run contenders alternately on the same workload, each in its own persistent process, and report ratios.

A contender is a script that prints one line when it is ready (plain text, or JSON with facts about it), and then, for
every line of stdin, runs the workload once and prints one line of JSON with its figures. Only one of them runs at a
time. Timings on shared machines are noisy: figures are medians over interleaved rounds, and the report states the load
of other processes.
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
MAX_OTHER_LOAD = 0.03  # fraction of the CPUs that other processes may use in a valid measurement


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
            self.missing = f"{self.python} does not exist; make bench installs it"
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
            self.mark_missing("it did not start")
        elif line.startswith("{"):
            self.facts = json.loads(line)

    def run_round(self, line: str = "go") -> bool:
        """Run one round; returns whether the contender completed it."""
        if self.process is None or self.process.stdin is None or self.process.stdout is None:
            return False
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            self.mark_missing("it stopped in the middle")
            return False
        self.rounds.append(json.loads(answer))
        return True

    def mark_missing(self, reason: str) -> None:
        self.stop()
        self.process = None
        assert self.stderr_file is not None
        self.stderr_file.seek(0)
        errors = self.stderr_file.read().decode(errors="replace").strip().splitlines()
        self.missing = f"{reason}: {errors[-1][:200]}" if errors else reason

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def figures(self) -> dict[str, dict[str, float]]:
        measured = self.rounds[1:] or self.rounds  # the first round warms up
        return {name: spread([r[name] for r in measured]) for name in (measured[0] if measured else ())}


def environment(threads: int) -> dict[str, str]:
    """The environment of a contender: the number of threads is fixed, the wait policy is the default of each library.

    The threads of a waiting contender sleep after a few milliseconds. OMP_WAIT_POLICY=passive would make every step of
    a decoder, with its hundred barriers, three times slower.
    """
    defaults = {"TOKENIZERS_PARALLELISM": "false"}
    thread_counts = {f"{name}_NUM_THREADS": str(threads) for name in ("OMP", "MKL", "OPENBLAS", "NUMBA", "RAYON")}
    return {**defaults, **os.environ, **thread_counts}


def spread(values: list[float]) -> dict[str, Any]:
    """The median, the quartiles, and all values in order."""
    ordered, quarter = sorted(values), len(values) // 4
    return {
        "median": statistics.median(ordered), "low": ordered[quarter], "high": ordered[-1 - quarter], "rounds": values
    }  # fmt: skip


def ratio(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The median of the ratios of each round: a slow round affects both contenders and cancels out."""
    return statistics.median(a / b for a, b in zip(one["rounds"], other["rounds"], strict=False))


# ---------------------------------------------------------------------------------------------------------- CPU load


def cpu_seconds(pids: list[int]) -> float:
    """CPU seconds of these processes, with their threads and reaped children."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return total / os.sysconf("SC_CLK_TCK")


def total_cpu_seconds() -> float:
    """CPU seconds of all processes."""
    parts = [int(part) for part in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(parts) - parts[3] - parts[4]) / os.sysconf("SC_CLK_TCK")


class LoadMonitor:
    """The CPU load of other processes since its creation: 1 is all CPUs."""

    def __init__(self, pids: list[int]) -> None:
        self.pids = [os.getpid(), *pids]
        self.start_time = time.monotonic()
        self.total = total_cpu_seconds()
        self.own = cpu_seconds(self.pids)

    def other_load(self) -> float:
        available = (time.monotonic() - self.start_time) * (os.cpu_count() or 1)
        other_seconds = (total_cpu_seconds() - self.total) - (cpu_seconds(self.pids) - self.own)
        return max(0.0, other_seconds) / max(available, 1e-9)


def verdict(other_load: float) -> str:
    """Whether the machine was quiet, as text."""
    usage = f"other processes used {other_load:.0%} of the CPUs"
    return f"quiet ({usage})" if other_load <= MAX_OTHER_LOAD else f"busy: {usage}, do not trust these figures"


# ------------------------------------------------------------------------------------------------------- comparing


@contextlib.contextmanager
def started(contenders: list[Contender], threads: int) -> Iterator[LoadMonitor]:
    """Start all contenders; they are stopped at the end of the with-block."""
    try:
        for contender in contenders:
            contender.start(threads)
            print(f"  {contender.name}: {contender.missing or 'ready'}", file=sys.stderr, flush=True)
        yield LoadMonitor([c.process.pid for c in contenders if c.process])
    finally:
        for contender in contenders:
            contender.stop()


def compare(contenders: list[Contender], rounds: int = 5, threads: int = 2) -> dict:
    """Run every contender once per round, in turn, after one warm-up round."""
    with started(contenders, threads) as monitor:
        start = time.time()
        for _ in range(rounds + 1):
            for contender in contenders:
                contender.run_round()
        other_load = monitor.other_load()
    return report(contenders, rounds, threads, time.time() - start, other_load)


def report(contenders: list[Contender], rounds: int, threads: int, seconds: float, other_load: float) -> dict:
    return {
        "rounds": rounds,
        "threads": threads,
        "seconds": round(seconds, 1),
        "other_load": round(other_load, 3),
        "load_verdict": verdict(other_load),
        "figures": {c.name: c.figures() for c in contenders if c.rounds},
        "facts": {c.name: c.facts for c in contenders if c.facts},
        "missing": {c.name: c.missing for c in contenders if c.missing},
    }


def table(report: dict, first: str) -> str:
    """A Markdown table: medians with quartiles, and the ratio of the first contender to each with correct outputs."""
    figures, wrong = report["figures"], report.get("wrong", {})
    names = list(next(iter(figures.values())))
    lines = ["| | " + " | ".join(names) + " | " + " | ".join(f"{first} ÷ it: {n}" for n in names) + " |"]
    lines.append("|---" * (1 + 2 * len(names)) + "|")
    for name, stats in figures.items():
        cells = [f"{stats[n]['median']:.4g} [{stats[n]['low']:.4g}..{stats[n]['high']:.4g}]" for n in names]
        if first in wrong or name in wrong:
            ratios = ["none"] * len(names)
        else:
            ratios = [f"{ratio(figures[first][n], stats[n]):.2f}" for n in names]
        lines.append(f"| {name} | " + " | ".join(cells + ratios) + " |")
    return "\n".join(lines + ending(report))


def ending(report: dict) -> list[str]:
    """The lines below every table."""
    summary = f"\n{report['rounds']} interleaved rounds, {report['threads']} threads; machine {report['load_verdict']}."
    missing = [f"{name}: not measured, {why}" for name, why in report["missing"].items()]
    return [summary, *missing, *(f"{name}: no ratio, {why}" for name, why in report.get("wrong", {}).items())]


def finish(report: dict, first: str, name: str) -> None:
    write(report, table(report, first), name)


def write(report: object, text: str, name: str) -> None:
    RESULTS.mkdir(exist_ok=True)
    for kind, content in (("json", json.dumps(report, indent=1)), ("md", text + "\n")):
        (RESULTS / f"{name}.{kind}").write_text(content.replace(f"{HERE.parent}/", ""))  # without local paths
    print(text)


def peers_python() -> Path:
    """The Python of the peers' environment; if it is not installed, this one, which may have some of them."""
    return BENCH_PYTHON if (HERE.parent / ".bench-venv" / ".installed").exists() else Path(sys.executable)
