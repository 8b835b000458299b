"""What attentions for long sequences learn in the same time: associative recall and ListOps, beside full attention.

    python benchmarks/long_quality.py [--tasks recall listops memory] [--seconds 24] [--only full …] [--redo]

recall   a row begins with questions, which are keys; among other tokens behind them stand the keys with their values.
         The answers are the values (associative recall).
listops  nested MIN, MAX, MED and SM (sum modulo 10) of digits (Nangia and Bowman 2018). At each operator stands the
         value of its expression; the root is the value of the whole text.
memory   a language model of the characters of wikitext-2 (in the folder HEADWATER_DATA) in segments: Transformer-XL
         with and without memory of earlier segments, bits per character.

Every model trains for the same seconds of processor time, so that other work on the machine changes nothing, and by
one recipe: short rows first, then longer ones (STAGES). Drawing rows and evaluation are not counted. Every finished
model is added to results/long_quality.json; a run goes on after the models that are there.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from multi30k import DATA
from side_by_side import RESULTS, write
from torch import Tensor
from torch.nn import functional as F

import headwater
from headwater.core import Model, TokenClassificationHead
from headwater.core.model import Transformer
from headwater.families.builders import with_token_types
from headwater.variants.hierarchy import hierarchical
from headwater.variants.transformer_xl import segment_memory

ATTENTIONS = {
    "full": "full",
    "window 256": "window:size=256",
    "longformer 256": "longformer:window=256",
    "bigbird 32": "bigbird:block=32,random=3",
    "longt5 local 127": "window:size=254",  # with the relative positions of T5
    "longt5 transient-global 127": "longt5:radius=127,block=16",
    "lsh 64": "lsh:chunk=64,rounds=2",
    "linear": "linear",
    "performer 128": "performer:features=128",
    "linformer 128": "linformer:length=2048,features=128",
    "hierarchical 128": "full",  # of chunks, and one layer over their summaries
}
SIZES = {"d_model": 64, "heads": 2, "layers": 2, "d_ff": 128, "dropout": 0.0, "norm_position": "pre"}
LENGTH, TOKENS = 2048, 4096  # of the longest rows, and of a batch
LR, WARMUP = 2e-3, 30  # steps


class Examples(NamedTuple):
    """ids [B, N], and labels [B, N]: -100 where there is nothing to answer. token_types [B, N], of recall."""

    ids: Tensor
    labels: Tensor
    token_types: Tensor | None = None

    def rows(self, chosen: Tensor | slice) -> Examples:
        return Examples(*(None if t is None else t[chosen] for t in self))


# ----------------------------------------------------------------------------------------------------------- the tasks

QUESTIONS, KEYS, VALUES, NOISE = 16, 32, 16, 32


def draw_recall(rows: int, length: int, generator: torch.Generator) -> Examples:
    """QUESTIONS keys, then noise with pairs in any places: the id of a pair is its key, its token type the value."""

    def numbers(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator)

    pairs = min(KEYS, length // 8)
    ids = KEYS + numbers(NOISE, rows, length)
    types = 1 + numbers(VALUES, rows, length)
    places = QUESTIONS + torch.rand(rows, length - QUESTIONS, generator=generator).argsort(1)[:, :pairs]  # [B, pairs]
    keys = torch.rand(rows, KEYS, generator=generator).argsort(1)[:, :pairs]
    ids.scatter_(1, places, keys)

    asked = numbers(pairs, rows, QUESTIONS)
    ids[:, :QUESTIONS] = keys.gather(1, asked)
    types[:, :QUESTIONS] = 0
    labels = torch.full_like(ids, -100)
    labels[:, :QUESTIONS] = types.gather(1, places).gather(1, asked) - 1
    return Examples(ids, labels, types)


OPERATORS: dict[str, Callable[[list[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda numbers: int(statistics.median(numbers)),
    "[SM": lambda numbers: sum(numbers) % 10,
}
WORDS = ["", *OPERATORS, "]", *map(str, range(10))]  # 0 is padding
MAX_DEPTH, MAX_ARGUMENTS, DIGIT_SHARE = 10, 10, 0.75


class Expression:
    """A random expression: words, and labels, the value of the expression that begins at each operator."""

    def __init__(self, draw: Callable[[int], int], max_depth: int = MAX_DEPTH) -> None:
        self.draw = draw
        self.max_depth = max_depth
        self.words: list[str] = []
        self.labels: list[int] = []
        self.add(0)

    def add(self, depth: int) -> int:
        """Add a digit, or an operator with 2 to MAX_ARGUMENTS expressions; returns the value."""
        if depth >= self.max_depth or (depth and self.draw(100) < 100 * DIGIT_SHARE):
            digit = self.draw(10)
            self._add_word(str(digit))
            return digit
        operator = list(OPERATORS)[self.draw(len(OPERATORS))]
        place = len(self.words)
        self._add_word(operator)
        arguments = [self.add(depth + 1) for _ in range(2 + self.draw(MAX_ARGUMENTS - 1))]
        self.labels[place] = OPERATORS[operator](arguments)
        self._add_word("]")
        return self.labels[place]

    def _add_word(self, word: str) -> None:
        self.words.append(word)
        self.labels.append(-100)


def draw_listops(rows: int, length: int, generator: torch.Generator) -> Examples:
    """Expressions of a quarter of `length` to `length` words, padded on the right."""
    number = {word: i for i, word in enumerate(WORDS)}
    draw = random.Random(int(torch.randint(2**31, (), generator=generator))).randrange
    ids = torch.zeros(rows, length, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    row = 0
    while row < rows:
        expression = Expression(draw, MAX_DEPTH if length > 64 else 4)
        size = len(expression.words)
        if length // 4 <= size <= length:
            ids[row, :size] = torch.tensor([number[word] for word in expression.words])
            labels[row, :size] = torch.tensor(expression.labels)
            row += 1
    return Examples(ids, labels)


@dataclass(frozen=True)
class Task:
    """position: recall needs none. stages: the length of rows, and its share of the time."""

    draw: Callable[[int, int, torch.Generator], Examples]
    vocab: int
    answers: int
    position: str
    stages: tuple[tuple[int, float], ...]


TASKS = {
    "recall": Task(draw_recall, KEYS + NOISE, VALUES, "none", ((64, 0.4), (256, 0.2), (LENGTH, 0.4))),
    "listops": Task(draw_listops, len(WORDS), 10, "rotary", ((64, 0.3), (256, 0.2), (LENGTH, 0.5))),
}


# -------------------------------------------------------------------------------------------------- training and scores


def build_spec(task: Task, name: str) -> Model:
    position = "relative" if name.startswith("longt5 local") else task.position
    head = TokenClassificationHead(task.answers)
    spec = headwater.encoder(task.vocab, head, **SIZES, position=position, attention=ATTENTIONS[name])
    if name.startswith("hierarchical"):
        spec = hierarchical(spec, chunk=128, layers=1)
    return with_token_types(spec, VALUES + 1) if task.draw is draw_recall else spec


def logits(model: Transformer, task: Task, examples: Examples) -> Tensor:
    """[B, N, answers]. The questions are global tokens where there are some, as in question answering."""
    more: dict[str, Tensor] = {}
    if examples.token_types is not None:
        more["token_types"] = examples.token_types
        if model.output_stack.uses_global_tokens:
            more["global_tokens"] = examples.labels >= 0
    else:
        more["attention_mask"] = examples.ids != 0
    return model(examples.ids, **more)


@functools.cache
def pool(task: Task, length: int, seed: int, rows: int) -> Examples:
    """Rows that all models share."""
    return task.draw(rows, length, torch.Generator().manual_seed(seed))


def learning_rate(step: int, share: float) -> float:
    """Warmup, and a linear decay in the last 30 % of the time."""
    return LR * min(1.0, (step + 1) / WARMUP) * min(1.0, (1 - share) / 0.3 + 0.02)


class Stopwatch:
    """Processor seconds of the with-blocks so far."""

    spent = 0.0

    def __enter__(self) -> None:
        self.begun = time.process_time()

    def __exit__(self, *_error: object) -> None:
        self.spent += time.process_time() - self.begun


def batches(task: Task, seconds: float, watch: Stopwatch, seed: int) -> Iterator[Examples]:
    """Batches of TOKENS tokens of the stages, each for its share of the time."""
    generator = torch.Generator().manual_seed(seed)
    end = 0.0
    for length, share in task.stages:
        end += share
        rows = pool(task, length, seed, max(400, 2**19 // length))
        while watch.spent < end * seconds:
            yield rows.rows(torch.randint(len(rows.ids), (TOKENS // length,), generator=generator))


def learn(task: Task, name: str, seconds: float, seed: int, tests: int) -> dict[str, float]:
    """Accuracy on fresh long rows after `seconds` of processor time: of all answers, and of the first one of a row."""
    model = build_spec(task, name).build(seed=seed).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, betas=(0.9, 0.98))
    watch, steps = Stopwatch(), 0
    for batch in batches(task, seconds, watch, seed):
        optimizer.param_groups[0]["lr"] = learning_rate(steps, watch.spent / seconds)
        with watch:
            loss = F.cross_entropy(logits(model, task, batch).flatten(0, 1), batch.labels.flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        steps += 1

    model.eval()
    examples = pool(task, LENGTH, 1_000_000, tests)
    asked = examples.labels >= 0
    with torch.no_grad():
        answers = [logits(model, task, examples.rows(slice(i, i + 4))).argmax(-1) for i in range(0, tests, 4)]
    right = torch.cat(answers) == examples.labels
    roots = float(right[:, 0].float().mean())
    return {
        "accuracy": float(right[asked].float().mean()),
        "root": roots,
        "steps": steps,
        "seconds": round(watch.spent, 1),
    }


# ------------------------------------------------------------------------------------------------- memory of segments

SEGMENT, ROWS = 32, 32
MEMORY_SIZES = {**SIZES, "layers": 3, "d_model": 128, "d_ff": 512, "heads": 4}
MEMORIES = (0, 64)  # tokens that Transformer-XL remembers


def characters(name: str, vocabulary: dict[str, int]) -> Tensor:
    text = gzip.decompress((DATA / "wikitext2_valid_test" / name).read_bytes()).decode("utf-8")
    for character in sorted(set(text)):
        vocabulary.setdefault(character, len(vocabulary))
    return torch.tensor([vocabulary[character] for character in text])


def segments(ids: Tensor, rows: int) -> list[tuple[Tensor, Tensor]]:
    """Rows of text that continue from segment to segment: inputs and labels [rows, SEGMENT]."""
    columns = (len(ids) - 1) // rows // SEGMENT * SEGMENT
    inputs = ids[: rows * columns].view(rows, columns)
    labels = ids[1 : rows * columns + 1].view(rows, columns)
    return list(zip(inputs.split(SEGMENT, 1), labels.split(SEGMENT, 1), strict=True))


def learn_characters(remembered: int, seconds: float, seed: int, test_characters: int) -> dict[str, float]:
    """Bits per character of the test split after `seconds` of processor time on the validation split."""
    vocabulary: dict[str, int] = {}
    train, test = characters("valid.txt.gz", vocabulary), characters("test.txt.gz", vocabulary)[:test_characters]
    attention = f"xl:memory={remembered or 1}"
    model = headwater.decoder(len(vocabulary), **MEMORY_SIZES, position="none", attention=attention).build(seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)

    def loss(memory, inputs: Tensor, labels: Tensor) -> Tensor:
        logits = model.decode(inputs, cache=memory) if remembered else model(inputs)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    watch, steps = Stopwatch(), 0
    while watch.spent < seconds:
        memory = segment_memory(model) if remembered else None
        for inputs, labels in segments(train, ROWS):
            optimizer.param_groups[0]["lr"] = learning_rate(steps, watch.spent / seconds)
            with watch:
                value = loss(memory, inputs, labels)
                optimizer.zero_grad()
                value.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
                optimizer.step()
            steps += 1
            if watch.spent >= seconds:
                break

    model.eval()
    memory = segment_memory(model) if remembered else None
    with torch.no_grad():
        losses = [loss(memory, inputs, labels).item() for inputs, labels in segments(test, 8)]
    return {"bits": statistics.mean(losses) / math.log(2), "steps": steps, "seconds": round(watch.spent, 1)}


# ----------------------------------------------------------------------------------------------------------- the report

Report = dict[str, dict[str, float]]  # by "task, name, seconds, seed"


def table(report: Report, task: str, seconds: float, seeds: list[int]) -> list[str]:
    """The rows of a task that are there, for all of the seeds."""
    names = [str(memory) for memory in MEMORIES] if task == "memory" else list(ATTENTIONS)
    if task == "memory":
        title = f"Bits per character of wikitext-2, segments of {SEGMENT}"
        lines = ["| tokens of memory | mean | each seed | steps |", "|---|---|---|---|"]
    else:
        title = f"{task}: accuracy at a length of {LENGTH:,}, chance {1 / TASKS[task].answers:.0%}"
        root = " root |" if task == "listops" else ""
        lines = [f"| attention | accuracy |{root} steps |", "|---|---|" + "---|" * (1 + bool(root))]
    for name in names:
        runs = [report[key] for seed in seeds if (key := f"{task}, {name}, {seconds:g}, {seed}") in report]
        if len(runs) < len(seeds):
            continue
        steps = f"{statistics.mean(run['steps'] for run in runs):,.0f}"
        if task == "memory":
            each = ", ".join(f"{run['bits']:.3f}" for run in runs)
            lines.append(f"| {name} | {statistics.mean(run['bits'] for run in runs):.3f} | {each} | {steps} |")
            continue
        cells = [f"{statistics.mean(run['accuracy'] for run in runs):.1%}"]
        if task == "listops":
            cells.append(f"{statistics.mean(run['root'] for run in runs):.1%}")
        lines.append(f"| {name} | {' | '.join(cells)} | {steps} |")
    return [f"\n#### {title}, {seconds:g} s of processor time a model, seeds {seeds}\n", *lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=[*TASKS, "memory"], choices=[*TASKS, "memory"])
    parser.add_argument("--only", nargs="+", default=list(ATTENTIONS), choices=list(ATTENTIONS), metavar="NAME")
    parser.add_argument("--seconds", type=float, default=24.0, help="of processor time for each model (default: 24)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--tests", type=int, default=200, help="long rows of the test (default: 200)")
    parser.add_argument("--test-characters", type=int, default=200_000)
    parser.add_argument("--redo", action="store_true", help="train again what the results have already")
    args = parser.parse_args()
    torch.set_num_threads(1)
    path = RESULTS / "long_quality.json"
    report: Report = json.loads(path.read_text()) if path.exists() else {}

    jobs = [(task, name) for task in args.tasks for name in (map(str, MEMORIES) if task == "memory" else args.only)]
    for seed in args.seeds:
        for task, name in jobs:
            key = f"{task}, {name}, {args.seconds:g}, {seed}"
            if key in report and not args.redo:
                continue
            if task == "memory":
                report[key] = learn_characters(int(name), args.seconds, seed, args.test_characters)
            else:
                report[key] = learn(TASKS[task], name, args.seconds, seed, args.tests)
            print(key, report[key], file=sys.stderr, flush=True)
            RESULTS.mkdir(exist_ok=True)
            path.write_text(json.dumps(report, indent=1))

    lines = [line for task in args.tasks for line in table(report, task, args.seconds, args.seeds)]
    write(report, "\n".join(["### What is learned in the same processor time", *lines]), "long_quality")


if __name__ == "__main__":
    main()
