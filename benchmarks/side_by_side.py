"""Runs contenders alternately on the same work, each in a process of its own that stays, and reports ratios.

A contender is a script that prints one line when it is ready, and then, for every line it is given, does the work once
and prints a line of JSON with its figures. Timings on shared machines are noisy: figures are medians over interleaved
rounds, and a round in which other processes used the processors is marked.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
BENCH_PYTHON = HERE.parent / ".bench-venv" / "bin" / "python"


@dataclass
class Contender:
    name: str
    script: str
    arguments: tuple[str, ...] = ()
    python: Path = Path(sys.executable)
    rounds: list[dict[str, float]] = field(default_factory=list)
    process: subprocess.Popen[str] | None = None
    missing: str = ""

    def start(self, threads: int) -> None:
        if not self.python.exists():
            self.missing = f"{self.python} is not there; make bench installs it"
            return
        env = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        command = [str(self.python), str(HERE / "contenders" / self.script), *self.arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        assert self.process.stdout is not None
        if not self.process.stdout.readline():
            self.missing = f"{self.script} did not start"
            self.process = None

    def go(self) -> None:
        if self.process is None or self.process.stdin is None or self.process.stdout is None:
            return
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            self.missing, self.process = "it stopped in the middle", None
            return
        self.rounds.append(json.loads(line))

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def figures(self) -> dict[str, dict[str, float]]:
        kept = self.rounds[1:] or self.rounds  # the first round warms up
        found = {}
        for name in kept[0] if kept else ():
            values = sorted(r[name] for r in kept)
            quarter = max(0, len(values) // 4)
            found[name] = {"median": statistics.median(values), "low": values[quarter], "high": values[-1 - quarter]}
        return found


def busy() -> tuple[float, float]:
    """Seconds the processors have worked, and seconds we and our children have."""
    parts = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    tick = os.sysconf("SC_CLK_TCK")
    return (sum(map(int, parts)) - int(parts[3]) - int(parts[4])) / tick, sum(os.times()[:4])


def compare(contenders: list[Contender], rounds: int = 5, threads: int = 2) -> dict:
    """Every contender once a round, in turn."""
    for contender in contenders:
        contender.start(threads)
    load = os.getloadavg()[0]
    begun = time.time()
    for _ in range(rounds + 1):
        for contender in contenders:
            contender.go()
    for contender in contenders:
        contender.stop()
    report = {
        "rounds": rounds,
        "threads": threads,
        "seconds": round(time.time() - begun, 1),
        "load_before": round(load, 2),
        "trust": "quiet" if load < 0.5 else "busy: other work was running, do not trust these figures",
        "figures": {c.name: c.figures() for c in contenders if c.rounds},
        "missing": {c.name: c.missing for c in contenders if c.missing},
    }
    return report


def table(report: dict, first: str) -> str:
    """Markdown: medians with quartiles, and the ratio of the first contender to each."""
    figures = report["figures"]
    names = list(next(iter(figures.values())))
    lines = ["| | " + " | ".join(names) + " | " + " | ".join(f"{first} ÷ it: {n}" for n in names) + " |"]
    lines.append("|---" * (1 + 2 * len(names)) + "|")
    for who, found in figures.items():
        cells = [f"{found[n]['median']:.4g} [{found[n]['low']:.4g}..{found[n]['high']:.4g}]" for n in names]
        ratios = [f"{figures[first][n]['median'] / found[n]['median']:.2f}" for n in names]
        lines.append(f"| {who} | " + " | ".join(cells + ratios) + " |")
    lines += [f"\n{report['rounds']} interleaved rounds, {report['threads']} threads; machine {report['trust']}."]
    lines += [f"{name}: not measured, {why}" for name, why in report["missing"].items()]
    return "\n".join(lines)


def finish(report: dict, first: str, name: str) -> None:
    out = HERE / "results"
    out.mkdir(exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(report, indent=1))
    (out / f"{name}.md").write_text(table(report, first) + "\n")
    print(table(report, first))
