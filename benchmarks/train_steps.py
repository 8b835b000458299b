"""One training step compared with peers: forward, backward, clipping, AdamW, on the same tokens, interleaved.

    python benchmarks/train_steps.py                        workloads a, b and c, without dropout and with
    python benchmarks/train_steps.py --workload a --dropout-sites none residual --rounds 3 --threads 1
    python benchmarks/train_steps.py --compile              every model through torch.compile (its warmup is reported)

Peers have different dropout sites, so a comparison names the sites, and only contenders with exactly these sites are
ranked: `residual` is the default of Marian and BART, `attention` that of GPT-2, `everywhere` that of
torch.nn.Transformer. The peak of matrix multiplication is measured in the same rounds.

A contender with wrong losses gets no ratio: the losses of Headwater's first two steps must equal those without
the C kernels, and the first loss of every contender must be near that of an untrained model.
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
from train_workload import DROPOUT_SITES, WORKLOADS, Workload

OURS, PEAK = "headwater", "matmul peak"
DEFAULT_SITES = {
    "a": ("none", "residual", "everywhere"),
    "b": ("none", "residual"),
    "c": ("none", "attention"),
    "tiny": ("none", "everywhere"),
    "tiny-gpt": ("none", "attention"),
}


def contenders(work: str, sites: str, compiled: bool) -> list[Contender]:
    flags = (work, "--dropout-sites", sites, *(["--compile"] if compiled else []))
    peers, is_encoder_decoder = peers_python(), WORKLOADS[work].is_encoder_decoder
    return [
        Contender(OURS, "train_headwater.py", flags),
        Contender("torch.nn.Transformer", "train_torch.py", flags),
        Contender("written by hand", "train_plain.py", flags),
        *(
            Contender(f"transformers {name}", "train_transformers.py", (*flags, "--kind", name.lower()), peers)
            for name in (("Marian", "BART") if is_encoder_decoder else ("GPT-2",))
        ),
        Contender("x-transformers", "train_x_transformers.py", flags, peers),
        *([Contender("JoeyNMT", "train_joeynmt.py", flags, peers)] if is_encoder_decoder else []),
        *([] if is_encoder_decoder else [Contender("curated-transformers", "train_curated.py", flags, peers)]),
        Contender(PEAK, "limits_matmul.py", ("1024",)),
    ]


def plain_losses(work: str, sites: str, threads: int) -> list[float]:
    """The losses of the first two steps without the C kernels."""
    script = Path(__file__).parent / "contenders" / "train_headwater.py"
    run = subprocess.run(
        [sys.executable, str(script), work, "--dropout-sites", sites],
        env={**environment(threads), "HEADWATER_FAST": "0"},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(run.stdout.splitlines()[0])["losses"]


def wrong(report: dict, work: Workload, plain: list[float]) -> dict[str, str]:
    """name -> reason, for contenders with wrong losses."""
    losses = {name: facts["losses"] for name, facts in report["facts"].items() if "losses" in facts}
    untrained_loss = math.log(work.vocab)
    reasons = {
        name: f"its first loss is {first:.2f}, that of an untrained model {untrained_loss:.2f}"
        for name, (first, *_) in losses.items() if not 0.8 * untrained_loss < first < 2 * untrained_loss
    }  # fmt: skip
    if OURS in losses and any(abs(a - b) > 1e-3 * abs(b) for a, b in zip(losses[OURS], plain, strict=True)):
        reasons[OURS] = f"its losses are {losses[OURS]}, without the C kernels {plain}"
    return reasons


def ranked(report: dict, sites: str) -> list[str]:
    """The peers with exactly the requested dropout sites."""
    sites_by_name = {
        name: set(facts["dropout_sites"]) for name, facts in report["facts"].items() if "dropout_sites" in facts
    }
    return [
        name for name, own_sites in sites_by_name.items() if own_sites == set(DROPOUT_SITES[sites]) and name != OURS
    ]


def summary(report: dict, work: Workload, sites: str) -> dict[str, float]:
    """Add the speedups, the fastest comparable peer and the fractions of the matmul peak to the report."""
    time = {name: stats["ms per step"]["median"] for name, stats in report["figures"].items() if "ms per step" in stats}
    peak = report["figures"].get(PEAK, {}).get("GFLOP/s", {}).get("median", float("nan"))
    report["peak GFLOP/s"] = peak
    report["fraction of peak"] = {name: work.flops_per_step / 1e6 / ms / peak for name, ms in time.items()}
    ours = report["figures"].get(OURS, {}).get("ms per step")
    report["speedup"] = {name: ratio(report["figures"][name]["ms per step"], ours) for name in time} if ours else {}
    comparable = ranked(report, sites)
    report["fastest comparable peer"] = min(comparable, key=lambda name: time.get(name, float("inf")), default="")
    return report["speedup"]


COLUMNS = ("", "ms per step", "CPU ms", "tokens/s", "of matmul peak", "headwater × as fast", "parameters", "dropout at")


def speedup_text(report: dict, name: str, cpu_ms: dict, ours: dict | None) -> str:
    """The speedup over a contender, by wall time and by CPU time; none if one of them is wrong."""
    if ours is None or {OURS, name} & set(report["wrong"]):
        return "none"
    return f"{report['speedup'][name]:.2f} ({ratio(cpu_ms, ours):.2f})"


def text(report: dict, title: str, sites: str) -> str:
    """The report as Markdown. In parentheses: the ratio of CPU times, which other load disturbs less."""
    lines = [f"### {title}\n", "| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    comparable = {OURS, *ranked(report, sites)}
    ours = report["figures"].get(OURS, {}).get("CPU ms")
    for name, stats in report["figures"].items():
        if name == PEAK:
            continue
        ms, cpu_ms, facts = stats["ms per step"], stats["CPU ms"], report["facts"][name]
        cells = [
            name,
            f"{ms['median']:.1f} [{ms['low']:.1f}..{ms['high']:.1f}]",
            f"{cpu_ms['median']:.1f}",
            f"{stats['tokens/s']['median']:,.0f}",
            f"{report['fraction of peak'][name]:.0%}",
            speedup_text(report, name, cpu_ms, ours),
            f"{facts['parameters']:,}",
            (", ".join(facts["dropout_sites"]) or "nowhere") + ("" if name in comparable else " (not the same)"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines.append(f"\nThe fastest peer with the same dropout sites: {report['fastest comparable peer'] or 'none'}.")
    lines.append(f"Peak of matrix multiplication in the same rounds: {report['peak GFLOP/s']:.0f} GFLOP/s.")
    warm = [f"{name} {facts['warmup seconds']:.1f} s" for name, facts in report["facts"].items()]
    lines.append(f"Warmup, two steps: {', '.join(warm)}.")
    return "\n".join(lines + ending(report))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", nargs="+", default=["a", "c", "b"], choices=WORKLOADS)
    parser.add_argument(
        "--dropout-sites", nargs="+", choices=DROPOUT_SITES, help="dropout sites (default: several, by workload)"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="+", help="contenders whose name has one of these words")
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    reports, texts = {}, []
    for work in args.workload:
        for sites in args.dropout_sites or DEFAULT_SITES[work]:
            selected = contenders(work, sites, args.compile)
            selected = [
                c for c in selected if not args.only or any(word in c.name for word in [*args.only, OURS, PEAK])
            ]
            dropped = f"0.1: {sites}" if DROPOUT_SITES[sites] else "0"
            name = f"({work}) dropout {dropped}" + (", compiled" if args.compile else "")
            print(name, file=sys.stderr)
            report = compare(selected, args.rounds, args.threads)
            report["wrong"] = wrong(report, WORKLOADS[work], plain_losses(work, sites, args.threads))
            summary(report, WORKLOADS[work], sites)
            reports[name] = report
            texts.append(text(report, name, sites))
            print(texts[-1] + "\n", flush=True)
    write(reports, "\n\n".join(texts), "train_steps_compiled" if args.compile else "train_steps")
    for report in reports.values():
        end_if_wrong(report, OURS)


if __name__ == "__main__":
    main()
