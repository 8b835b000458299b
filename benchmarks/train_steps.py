"""One training step, ours beside the peers: forward, backward, clip, AdamW, on the same tokens, in turn.

    python benchmarks/train_steps.py                        all of it: work a, b and c, without dropout and with
    python benchmarks/train_steps.py --work a --places none residual --rounds 3 --threads 1
    python benchmarks/train_steps.py --compile              every model through torch.compile (its warm-up is reported)

Peers drop in different places, so a comparison names the places, and only contenders that drop there, and nowhere
else, are ranked: `residual` is what Marian and BART do by default, `attention` what GPT-2 does, `everywhere` what
torch.nn.Transformer does. The peak of matrix multiplication is measured in the same rounds.

Who does not learn what is asked gets no ratio: the losses of our first two steps must be those of the same steps
without the C kernels, and every contender's first loss must be near that of a model that knows nothing yet.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path

from correctness import end_if_wrong
from side_by_side import Contender, compare, ending, environment, peers_python, ratio, write

sys.path.insert(0, str(Path(__file__).parent / "contenders"))
from train_work import PLACES, WORKS, Work

OURS, PEAK = "headwater", "matmul peak"
USUAL = {"a": ("none", "residual", "everywhere"), "b": ("none", "residual"), "c": ("none", "attention"),
         "tiny": ("none", "everywhere"), "tiny-gpt": ("none", "attention")}  # fmt: skip


def contenders(work: str, places: str, compiled: bool) -> list[Contender]:
    words = (work, "--places", places, *(["--compile"] if compiled else []))
    peers, two = peers_python(), WORKS[work].is_encoder_decoder
    found = [
        Contender(OURS, "train_headwater.py", words),
        Contender("torch.nn.Transformer", "train_torch.py", words),
        Contender("written by hand", "train_plain.py", words),
        *(
            Contender(f"transformers {name}", "train_transformers.py", (*words, "--kind", name.lower()), peers)
            for name in (("Marian", "BART") if two else ("GPT-2",))
        ),
        Contender("x-transformers", "train_x_transformers.py", words, peers),
        *([Contender("JoeyNMT", "train_joeynmt.py", words, peers)] if two else []),
        *([] if two else [Contender("curated-transformers", "train_curated.py", words, peers)]),
        Contender(PEAK, "limits_matmul.py", ("1024",)),
    ]
    return found


def plain_losses(work: str, places: str, threads: int) -> list[float]:
    """The losses of our first two steps with the C kernels turned off."""
    script = Path(__file__).parent / "contenders" / "train_headwater.py"
    run = subprocess.run(
        [sys.executable, str(script), work, "--places", places], env={**environment(threads), "HEADWATER_FAST": "0"},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(run.stdout.splitlines()[0])["losses"]


def wrong(report: dict, work: Work, plain: list[float]) -> dict[str, str]:
    """Name to reason, of those whose losses are not what they must be."""
    losses = {name: facts["losses"] for name, facts in report["facts"].items() if "losses" in facts}
    guess = math.log(work.vocab)
    found = {
        name: f"its first loss is {first:.2f}, that of a model that knows nothing {guess:.2f}"
        for name, (first, *_) in losses.items() if not 0.8 * guess < first < 2 * guess
    }  # fmt: skip
    if OURS in losses and any(abs(a - b) > 1e-3 * abs(b) for a, b in zip(losses[OURS], plain, strict=True)):
        found[OURS] = f"its losses are {losses[OURS]}, without the C kernels {plain}"
    return found


def ranked(report: dict, places: str) -> list[str]:
    """The peers that drop exactly where they were asked to."""
    drops = {name: set(facts["drops"]) for name, facts in report["facts"].items() if "drops" in facts}
    return [name for name, found in drops.items() if found == set(PLACES[places]) and name != OURS]


def summary(report: dict, work: Work, places: str) -> dict[str, float]:
    """How ours stands: against the fastest ranked peer, and against the peak."""
    time = {name: found["ms a step"]["median"] for name, found in report["figures"].items() if "ms a step" in found}
    peak = report["figures"].get(PEAK, {}).get("GFLOP/s", {}).get("median", float("nan"))
    report["peak GFLOP/s"] = peak
    report["share of peak"] = {name: work.flops_per_step / 1e6 / ms / peak for name, ms in time.items()}
    own = report["figures"].get(OURS, {}).get("ms a step")
    report["times as fast"] = {name: ratio(report["figures"][name]["ms a step"], own) for name in time} if own else {}
    equal = ranked(report, places)
    report["fastest equal peer"] = min(equal, key=lambda name: time.get(name, float("inf")), default="")
    return report["times as fast"]


COLUMNS = ("", "ms a step", "processor ms", "tokens/s", "of matmul peak", "headwater × as fast", "weights", "drops at")


def times(report: dict, name: str, worked: dict, own: dict | None) -> str:
    """Headwater beside a contender, by the clock and by processor time; nothing where one of them is wrong."""
    if own is None or {OURS, name} & set(report["wrong"]):
        return "none"
    return f"{report['times as fast'][name]:.2f} ({ratio(worked, own):.2f})"


def text(report: dict, title: str, places: str) -> str:
    """Markdown. In brackets beside the ratio: the same by processor time, which other work disturbs less."""
    lines = [f"### {title}\n", "| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    equal = {OURS, *ranked(report, places)}
    own = report["figures"].get(OURS, {}).get("processor ms")
    for name, found in report["figures"].items():
        if name == PEAK:
            continue
        ms, worked, facts = found["ms a step"], found["processor ms"], report["facts"][name]
        cells = [
            name,
            f"{ms['median']:.1f} [{ms['low']:.1f}..{ms['high']:.1f}]",
            f"{worked['median']:.1f}",
            f"{found['tokens/s']['median']:,.0f}",
            f"{report['share of peak'][name]:.0%}",
            times(report, name, worked, own),
            f"{facts['parameters']:,}",
            (", ".join(facts["drops"]) or "nowhere") + ("" if name in equal else " (not the same)"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines.append(f"\nThe fastest peer that drops in the same places: {report['fastest equal peer'] or 'none'}.")
    lines.append(f"Peak of matrix multiplication in the same rounds: {report['peak GFLOP/s']:.0f} GFLOP/s.")
    warm = [f"{name} {facts['warm-up seconds']:.1f} s" for name, facts in report["facts"].items()]
    lines.append(f"Warm-up, two steps: {', '.join(warm)}.")
    return "\n".join(lines + ending(report))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", nargs="+", default=["a", "c", "b"], choices=WORKS)
    parser.add_argument("--places", nargs="+", choices=PLACES, help="where values are dropped; else the usual places")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="+", help="contenders whose name has one of these words")
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    reports, texts = {}, []
    for work in args.work:
        for places in args.places or USUAL[work]:
            some = contenders(work, places, args.compile)
            some = [c for c in some if not args.only or any(word in c.name for word in [*args.only, OURS, PEAK])]
            dropped = f"0.1: {places}" if PLACES[places] else "0"
            name = f"({work}) dropout {dropped}" + (", compiled" if args.compile else "")
            print(name, file=sys.stderr)
            report = compare(some, args.rounds, args.threads)
            report["wrong"] = wrong(report, WORKS[work], plain_losses(work, places, args.threads))
            summary(report, WORKS[work], places)
            reports[name] = report
            texts.append(text(report, name, places))
            print(texts[-1] + "\n", flush=True)
    write(reports, "\n\n".join(texts), "train_steps_compiled" if args.compile else "train_steps")
    for report in reports.values():
        end_if_wrong(report, OURS)


if __name__ == "__main__":
    main()
