"""Time to quality: training time of a plain loop and of Headwater until the same quality, trained in turns.

    python benchmarks/quality.py characters                   three seeds
    python benchmarks/quality.py characters --recipe characters characters,lr=2e-3 --seeds 0
    python benchmarks/quality.py translation --minutes 20 10  half an hour per seed

characters: tinyshakespeare to a validation loss of 1.88 per character. The first 90 % of the file are the training set;
the loss is over the rest, in windows of 64 characters, computed by the same function for all.
translation: Multi30k English to German, a plain loop for 20 minutes and Headwater for 10; BLEU (sacrebleu) of greedy
translations: of 400 rows of valid during training, and of test_2016 once at the end.
Only training is timed: no data loading, no evaluation.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
import time
from pathlib import Path

from multi30k import DATA, prepare_files
from side_by_side import Contender, started, verdict, write

PLAIN = "plain loop"


def split_text(file: Path, folder: Path) -> Path:
    """Write train.txt and valid.txt: the first nine tenths of a text, and the rest."""
    text = (gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()).decode("utf-8")
    cut = int(0.9 * len(text))
    (folder / "train.txt").write_text(text[:cut], encoding="utf-8")
    (folder / "valid.txt").write_text(text[cut:], encoding="utf-8")
    return folder


def race(contenders: list[Contender], chunk: float, threads: int, target: float = -1.0) -> float:
    """Run all in turn, each until the target or its last step; returns the CPU load of other processes."""
    with started(contenders, threads) as monitor:
        running = [c for c in contenders if c.process]
        while running:
            running = [c for c in running if c.run_round(str(chunk)) and unfinished(c, target)]
        return monitor.other_load()


def unfinished(contender: Contender, target: float) -> bool:
    last = contender.rounds[-1]
    print(f"  {contender.name}: {json.dumps(last)}", file=sys.stderr, flush=True)
    return not last["done"] and last.get("loss", 0.0) > target


def reached(rounds: list[dict], target: float) -> float | None:
    """Seconds of training when the loss first reached the target, interpolated linearly between two evaluations."""
    before = None
    for now in rounds:
        if now["loss"] <= target:
            if before is None:
                return now["seconds"]
            fraction = (before["loss"] - target) / (before["loss"] - now["loss"])
            return before["seconds"] + fraction * (now["seconds"] - before["seconds"])
        before = now
    return None


def characters(args: argparse.Namespace) -> dict:
    results: dict = {"target": args.target, "threads": args.threads, "runs": [], "missing": {}}
    with tempfile.TemporaryDirectory() as scratch:
        folder = str(split_text(Path(args.text), Path(scratch)))
        for seed in args.seeds:
            flags = (folder, "--seed", str(seed), "--window", str(args.window))
            contenders = [Contender(PLAIN, "quality_characters_plain.py", flags), *ours(args, flags)]
            other_load = race(contenders, args.chunk or 4.0, args.threads, args.target)
            results["runs"].append(
                {"seed": seed, "other_load": other_load, **{c.name: curve(c, args.target) for c in contenders}}
            )
            results["missing"] |= {c.name: c.missing for c in contenders if c.missing}
    results["names"] = [c.name for c in contenders]
    return results


def ours(args: argparse.Namespace, flags: tuple[str, ...]) -> list[Contender]:
    recipes = args.recipe or [{"characters": "characters", "translation": "multi30k"}[args.part]]
    flags = (args.part, *flags)
    return [Contender(f"headwater {r}", "quality_headwater.py", (*flags, "--recipe", r)) for r in recipes]


def curve(contender: Contender, target: float) -> dict:
    rounds = contender.rounds
    lowest = min((r["loss"] for r in rounds), default=None)
    return {"reached": reached(rounds, target), "lowest": lowest, "curve": rounds, **contender.facts}


def table(results: dict) -> str:
    """One line per contender: seconds to the target for each seed, and the ratio to the plain loop."""
    lines = [f"### tinyshakespeare to a validation loss of {results['target']}\n"]
    seeds = [run["seed"] for run in results["runs"]]
    lines.append("| | " + " | ".join(f"seed {seed}" for seed in seeds) + " | plain loop ÷ contender |")
    lines.append("|---" * (len(seeds) + 2) + "|")
    for name in results["names"]:
        cells, ratios = [], []
        for run in results["runs"]:
            cells.append(cell(run[name]))
            reached_at, plain = run[name]["reached"], run[PLAIN]["reached"] or last_second(run[PLAIN])
            ratios.append(f"{plain / reached_at:.2f}" if reached_at and plain else "–")
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {', '.join(ratios)} |")
    other_load = max(run["other_load"] for run in results["runs"])
    lines.append(f"\nSeconds of training, {results['threads']} threads, in turns; machine {verdict(other_load)}.")
    lines.append("A run that ended above the target is listed with its lowest loss; the ratio uses its total time.")
    return "\n".join(lines + [f"{name}: not measured, {why}" for name, why in results["missing"].items()])


def cell(run: dict) -> str:
    if run["reached"] is not None:
        return f"{run['reached']:.1f} s"
    return f"not in {last_second(run):.1f} s (lowest {run['lowest']:.3f})" if run["curve"] else "–"


def last_second(run: dict) -> float:
    return run["curve"][-1]["seconds"] if run["curve"] else 0.0


# ----------------------------------------------------------------------------------------------------- translation


def translation(args: argparse.Namespace) -> dict:
    results: dict = {"threads": args.threads, "minutes": args.minutes, "runs": [], "missing": {}}
    with tempfile.TemporaryDirectory() as scratch:
        folder = prepare_files(Path(args.files), Path(scratch), args.rows)
        for seed in args.seeds:
            plain_flags, flags = (
                (str(folder), "--seed", str(seed), "--minutes", str(minutes)) for minutes in args.minutes
            )
            contenders = [Contender(PLAIN, "quality_translation_plain.py", plain_flags), *ours(args, flags)]
            other_load = race(contenders, args.chunk or 60.0, args.threads)
            curves = {c.name: {"curve": c.rounds, **c.facts} for c in contenders}
            results["runs"].append({"seed": seed, "other_load": other_load, **curves})
            results["missing"] |= {c.name: c.missing for c in contenders if c.missing}
    results["names"] = [c.name for c in contenders]
    return results


def translation_table(results: dict) -> str:
    lines = ["### Multi30k, English to German\n"]
    lines.append("| | seed | minutes | test BLEU | valid BLEU | minutes to the plain loop's last valid BLEU |")
    lines.append("|---" * 6 + "|")
    for run in results["runs"]:
        target_bleu = run[PLAIN]["curve"][-1]["valid bleu"] if run[PLAIN]["curve"] else float("inf")
        for name in results["names"]:
            if not (curve := run[name]["curve"]):
                continue
            last, crossed = curve[-1], [r["seconds"] / 60 for r in curve if r["valid bleu"] >= target_bleu]
            when = f"{crossed[0]:.1f}" if crossed else "not reached"
            lines.append(f"| {name} | {run['seed']} | {last['seconds'] / 60:.1f} | {last.get('test bleu', 0.0):.1f} "
                         f"| {last['valid bleu']:.1f} | {when} |")  # fmt: skip
    other_load = max(run["other_load"] for run in results["runs"])
    lines.append(f"\n{results['threads']} threads, in turns; machine {verdict(other_load)}.")
    return "\n".join(lines + [f"{name}: not measured, {why}" for name, why in results["missing"].items()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["characters", "translation"])
    parser.add_argument("--text", default=str(DATA / "tinyshakespeare" / "input.txt.gz"), help="one text file")
    parser.add_argument("--files", default=str(DATA / "multi30k"), help="the folder of Multi30k's task 1")
    parser.add_argument("--recipe", nargs="+", help="recipes, such as characters or characters,lr=2e-3")
    parser.add_argument("--target", type=float, default=1.88, help="the loss to reach, in characters")
    parser.add_argument("--window", type=int, default=64, help="characters per validation window")
    parser.add_argument("--minutes", type=float, nargs=2, default=[20, 10], help="of the plain loop and of Headwater")
    parser.add_argument("--rows", type=int, default=0, help="number of training rows, to try the benchmark (0: all)")
    parser.add_argument("--chunk", type=float, help="seconds of training between two evaluations")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    start = time.time()
    if args.part == "characters" and not Path(args.text).is_file():
        sys.exit(f"{args.text} does not exist; give tinyshakespeare's input.txt with --text")
    results = characters(args) if args.part == "characters" else translation(args)
    results["seconds"] = round(time.time() - start, 1)
    write(results, table(results) if args.part == "characters" else translation_table(results), f"quality_{args.part}")


if __name__ == "__main__":
    main()
