"""Every method of --tune on one task: sentence polarity from MiniLM. Accuracy, learned weights, time of a step.

    python benchmarks/tune_methods.py                      each method 240 steps, then the steps in turns
    python benchmarks/tune_methods.py lora full --steps 60
    python benchmarks/tune_methods.py --only-steps         no training: the steps alone, with peft's LoRA

Needs sentence_polarity (in the folder HEADWATER_DATA, or --data FOLDER), the package of MiniLM, and peft. A step is
measured on the same batches for all, in turns, by the clock; on a busy machine set OMP_NUM_THREADS=1 and
--clock processor. peft's LoRA has the weights of ours: no ratio is printed unless its hidden states are equal to 1e-4.
Results: benchmarks/results/tune_methods.json and .md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from multi30k import DATA
from task_data import polarity
from torch import Tensor

import headwater
from headwater.core import Transformer
from headwater.families.load import find_model, load
from headwater.training.config import parse_config
from headwater.training.pretrained import clone_parameters
from headwater.training.tuned import METHODS
from headwater.tuning import Full, LoRA, tune
from headwater.tuning.base import trained_parameters

RESULTS = Path(__file__).resolve().parent / "results"
NAMES = ("full", "head", "prompt", "prefix", "ia3", "lora", "dora", "pfeiffer", "houlsby")
ROWS, LENGTH, ROUNDS = 32, 32, 5
TOLERANCE = 1e-4
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--steps", type=int, default=240, help="training steps of each method [240]")
    parser.add_argument("--rank", type=int, default=8, help="of lora and dora in training [8]")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="steps that are measured [5]")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the datasets [HEADWATER_DATA]")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="what the ratios are of [wall]")
    parser.add_argument("--only-steps", action="store_true", help="measure the steps alone")
    args = parser.parse_args()
    names = args.names or list(NAMES)
    if unknown := [name for name in names if name not in ("full", *METHODS)]:
        print(f"there is no method {unknown[0]!r}; they are {', '.join(NAMES)}")
        return 2
    report: dict = {"steps": args.steps, "threads": torch.get_num_threads(), "load": os.getloadavg()[0]}
    report["clock"] = args.clock
    report["seconds"], report["distance"] = measure_steps(names, args.rounds, CLOCKS[args.clock])
    report["accuracy"], report["learned"] = (
        ({}, {}) if args.only_steps else train_all(names, args.steps, args.rank, args.data)
    )
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "tune_methods.json").write_text(json.dumps(report, indent=1) + "\n")
    (RESULTS / "tune_methods.md").write_text(table(report) + "\n")
    print(table(report))
    return 0 if report["distance"] <= TOLERANCE else 1


# ------------------------------------------------------------------------------------------------------- accuracy


def train_all(names: list[str], steps: int, rank: int, data: Path) -> tuple[dict[str, float], dict[str, int]]:
    """Accuracy on the test set, and the number of weights that learned."""
    accuracy: dict[str, float] = {}
    learned: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as work:
        task = polarity(data, Path(work) / "data")
        lines = Path(task.test[0]).read_text(encoding="utf-8").splitlines()[1:]
        texts, labels = zip(*(line.split("\t") for line in lines), strict=True)
        for name in names:
            setups = []
            trained = headwater.train(
                task.train[0],
                out=Path(work) / name,
                init_from="minilm",
                tune=name,
                **({"tune_rank": rank} if name in ("lora", "dora") else {}),
                max_steps=steps,
                eval_examples=200,
                eval_every=max(1, steps // 3),
                quiet=True,
                on_setup=setups.append,
            )
            predicted = [max(scores, key=scores.get) for scores in trained(list(texts))]
            accuracy[name] = 100 * statistics.fmean(map(str.__eq__, predicted, labels))
            learned[name] = sum(p.numel() for p in trained_parameters(setups[0].model).values())
            print(f"{name:<10} {accuracy[name]:.1f} %  {learned[name]:,} weights", file=sys.stderr, flush=True)
    return accuracy, learned


# -------------------------------------------------------------------------------------------------- time of a step


def measure_steps(names: list[str], rounds: int, clock: Callable[[], float]) -> tuple[dict[str, float], float]:
    """Seconds of a step of each method and of peft's LoRA, and how far apart both LoRAs are."""
    ids = torch.randint(1000, 20_000, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    steps = {name: make_step(built(name), ids) for name in names}
    steps["peft lora"], distance = peft_step(ids)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _round in range(rounds + 1):
        for name, step in steps.items():
            start = clock()
            step()
            seconds[name].append(clock() - start)
    return {name: statistics.median(taken[1:]) for name, taken in seconds.items()}, distance


def built(name: str) -> Transformer:
    """MiniLM's encoder, changed by a method."""
    model = load("minilm").model
    if name == "full":
        return clone_parameters(model).train()
    if name == "head":  # it has none: the last layer stands for it
        return tune(model, Full("encoder.layers.5.ffn.down.*")).train()
    return tune(model, METHODS[name].build(parse_config({"tune": name, "init_from": "minilm"}))).train()


def make_step(model: torch.nn.Module, ids: Tensor, forward: Callable[..., Tensor] | None = None) -> Callable[[], None]:
    """One optimizer step on a batch."""
    learned = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learned, 1e-5, fused=True)
    run = forward or model

    def step() -> None:
        run(ids).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def peft_step(ids: Tensor) -> tuple[Callable[[], None], float]:
    """A step of peft's LoRA with our weights, read from a folder; and how far its hidden states are from ours."""
    import peft
    import transformers

    draw = torch.Generator().manual_seed(0)
    ours = tune(load("minilm", head="hidden_states"), LoRA(r=8))
    for parameter in trained_parameters(ours.model).values():
        parameter.data.normal_(0, 0.05, generator=draw)
    with tempfile.TemporaryDirectory() as folder:
        headwater.save_adapter(ours, Path(folder) / "adapter")
        base = transformers.AutoModel.from_pretrained(str(find_model("minilm")))
        theirs = peft.PeftModel.from_pretrained(base, Path(folder) / "adapter", is_trainable=True)
    with torch.no_grad():
        difference = ours.model.eval()(ids) - theirs.eval()(ids).last_hidden_state
    theirs.train()
    return make_step(theirs, ids, lambda batch: theirs(batch).last_hidden_state), float(difference.abs().max())


# ------------------------------------------------------------------------------------------------------- the table


def table(report: dict) -> str:
    """The results as Markdown. Ratios are above 1 where a method is faster than full tuning, or than peft's LoRA."""
    wrong = report["distance"] > TOLERANCE
    seconds = report["seconds"]
    heads = ("method", "accuracy %", "learned weights", "step, s", "full / it", "peft's LoRA / it")
    lines = [f"| {' | '.join(heads)} |", "|---|---|---|---|---|---|"]
    for name, taken in seconds.items():
        accuracy = f"{report['accuracy'][name]:.1f}" if name in report["accuracy"] else ""
        learned = f"{report['learned'][name]:,}" if name in report["learned"] else ""
        to_full = f"{seconds['full'] / taken:.2f}" if "full" in seconds else ""
        to_peft = "wrong outputs" if wrong else f"{seconds['peft lora'] / taken:.2f}"
        lines.append(f"| {name} | {accuracy} | {learned} | {taken:.3f} | {to_full} | {to_peft} |")
    machine = f"{report['clock']} time, {report['threads']} threads, load {report['load']:.1f}"
    return "\n".join([*lines, "", f"{machine}; ours and peft's LoRA differ by {report['distance']:.1e}"])


if __name__ == "__main__":
    sys.exit(main())
