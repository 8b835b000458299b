"""Time to quality: how long a plain loop and ours train until they are equally good, learning in turns.

    python benchmarks/quality.py                              both parts, three seeds
    python benchmarks/quality.py characters --recipe characters characters,lr=2e-3 --seeds 0

characters: tinyshakespeare to a validation loss of 1.88 a character. The first 90 % of the file are learned from; the
loss is over the whole rest, in windows of 64 characters, worked out by the same function for all. Only training is on
the clock: not reading, not evaluating.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
import time
from pathlib import Path

from side_by_side import HERE, Contender, started, verdict, write

DATA = HERE.parent.parent / "shared" / "data"


def prepared(file: Path, folder: Path) -> Path:
    """train.txt and valid.txt: the first nine tenths of a text, and the rest."""
    text = (gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()).decode("utf-8")
    cut = int(0.9 * len(text))
    (folder / "train.txt").write_text(text[:cut], encoding="utf-8")
    (folder / "valid.txt").write_text(text[cut:], encoding="utf-8")
    return folder


def race(contenders: list[Contender], target: float, chunk: float, threads: int) -> float:
    """All of them in turn, each until the target or its last step. Gives what others took of the machine."""
    with started(contenders, threads) as watch:
        running = [c for c in contenders if c.process]
        while running:
            running = [c for c in running if c.go(str(chunk)) and unfinished(c, target)]
        return watch.others()


def unfinished(contender: Contender, target: float) -> bool:
    last = contender.rounds[-1]
    print(f"  {contender.name}: {json.dumps(last)}", file=sys.stderr, flush=True)
    return last["loss"] > target and not last["done"]


def reached(rounds: list[dict], target: float) -> float | None:
    """Seconds of training when the loss first was at the target, on the straight line between two examinations."""
    before = None
    for now in rounds:
        if now["loss"] <= target:
            if before is None:
                return now["seconds"]
            share = (before["loss"] - target) / (before["loss"] - now["loss"])
            return before["seconds"] + share * (now["seconds"] - before["seconds"])
        before = now
    return None


def characters(args: argparse.Namespace) -> dict:
    found: dict = {"target": args.target, "threads": args.threads, "runs": [], "missing": {}}
    with tempfile.TemporaryDirectory() as scratch:
        folder = str(prepared(Path(args.text), Path(scratch)))
        for seed in args.seeds:
            words = (folder, "--seed", str(seed), "--window", str(args.window))
            contenders = [
                Contender("plain loop", "quality_characters_plain.py", words),
                *(Contender(f"headwater {r}", "quality_headwater.py", (*words, "--recipe", r)) for r in args.recipe),
            ]
            others = race(contenders, args.target, args.chunk, args.threads)
            found["runs"].append(
                {"seed": seed, "others": others, **{c.name: curve(c, args.target) for c in contenders}}
            )
            found["missing"] |= {c.name: c.missing for c in contenders if c.missing}
    found["names"] = [c.name for c in contenders]
    return found


def curve(contender: Contender, target: float) -> dict:
    rounds = contender.rounds
    lowest = min((r["loss"] for r in rounds), default=None)
    return {"reached": reached(rounds, target), "lowest": lowest, "curve": rounds, **contender.facts}


def table(found: dict) -> str:
    """A line a contender: seconds to the target for each seed, and the ratio of the plain loop's to its own."""
    lines = [f"### tinyshakespeare to a validation loss of {found['target']}\n"]
    seeds = [run["seed"] for run in found["runs"]]
    lines.append("| | " + " | ".join(f"seed {seed}" for seed in seeds) + " | plain loop's time ÷ its own |")
    lines.append("|---" * (len(seeds) + 2) + "|")
    for name in found["names"]:
        cells, ratios = [], []
        for run in found["runs"]:
            cells.append(cell(run[name]))
            own, plain = run[name]["reached"], run["plain loop"]["reached"] or last_second(run["plain loop"])
            ratios.append(f"{plain / own:.2f}" if own and plain else "–")
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {', '.join(ratios)} |")
    others = max(run["others"] for run in found["runs"])
    lines.append(f"\nSeconds of training, {found['threads']} threads, in turns; machine {verdict(others)}.")
    lines.append("Where a run ended above the target its lowest loss is given, and its whole time stands in the ratio.")
    return "\n".join(lines + [f"{name}: not measured, {why}" for name, why in found["missing"].items()])


def cell(run: dict) -> str:
    if run["reached"] is not None:
        return f"{run['reached']:.1f} s"
    return f"not in {last_second(run):.1f} s (lowest {run['lowest']:.3f})" if run["curve"] else "–"


def last_second(run: dict) -> float:
    return run["curve"][-1]["seconds"] if run["curve"] else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", nargs="?", default="characters", choices=["characters"])
    parser.add_argument("--text", default=str(DATA / "tinyshakespeare" / "input.txt.gz"), help="one text file")
    parser.add_argument("--recipe", nargs="+", default=["characters"], help="recipes, such as characters,lr=2e-3")
    parser.add_argument("--target", type=float, default=1.88)
    parser.add_argument("--window", type=int, default=64, help="characters a validation window")
    parser.add_argument("--chunk", type=float, default=4.0, help="seconds of training between two examinations")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if not Path(args.text).is_file():
        sys.exit(f"{args.text} is not there; give tinyshakespeare's input.txt by --text")
    began = time.time()
    found = characters(args)
    found["seconds"] = round(time.time() - began, 1)
    write(found, table(found), "quality_characters")


if __name__ == "__main__":
    main()
