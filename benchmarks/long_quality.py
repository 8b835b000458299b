"""What attentions for long sequences learn in the same time: associative recall and ListOps, beside full attention.

    python benchmarks/long_quality.py [--tasks recall listops memory] [--length 2000] [--seconds 300] [--only full …]

recall   pairs of a key and a value stand among other tokens; the first token is a key, and the answer is its value.
listops  nested MIN, MAX, MED and SM (sum modulo 10) of digits; the answer is a digit (Nangia and Bowman 2018).
memory   a language model of the characters of wikitext-2 (in the folder HEADWATER_DATA) in segments of 64:
         Transformer-XL with and without memory of earlier segments, bits per character.
Every model trains for the same time; evaluation is not counted.
"""

from __future__ import annotations

import argparse
import gzip
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from side_by_side import LoadMonitor, verdict, write
from torch import Tensor
from torch.nn import functional as F

import headwater
from headwater.core import ClassificationHead, FirstToken, MeanPooling, Pooled
from headwater.core.base import PoolingSpec
from headwater.variants.transformer_xl import segment_memory

ATTENTIONS = {
    "full": "full",
    "window 256": "window:size=256",
    "longformer 256": "longformer:window=256",
    "bigbird 32": "bigbird:block=32,random=3",
    "linear": "linear",
    "performer 128": "performer:features=128",
    "linformer 128": "linformer:length={length},features=128",
}
SIZES = {"d_model": 64, "heads": 2, "layers": 2, "d_ff": 128, "dropout": 0.0, "norm_position": "pre"}
DATA = Path(os.environ.get("HEADWATER_DATA", ".")) / "data"

Examples = tuple[Tensor, Tensor]  # ids [B, N] and answers [B]


# ----------------------------------------------------------------------------------------------------------- the tasks

KEYS, VALUES, NOISE, PAIRS = 32, 16, 100, 32


def draw_recall(rows: int, length: int, generator: torch.Generator) -> Examples:
    """A key, and then noise with PAIRS tokens that each stand for a key and its value, in any places."""

    def numbers(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator)

    ids = numbers(NOISE, rows, length) + KEYS + KEYS * VALUES
    values = numbers(VALUES, rows, KEYS)
    for row in range(rows):
        places = torch.randperm(length - 1, generator=generator)[:PAIRS] + 1
        keys = torch.randperm(KEYS, generator=generator)[:PAIRS]
        ids[row, places] = KEYS + keys * VALUES + values[row, keys]
    asked = numbers(KEYS, rows)
    ids[:, 0] = asked
    return ids, values[torch.arange(rows), asked]


OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
WORDS = ["", *OPERATORS, "]", *map(str, range(10))]  # 0 is padding
MAX_DEPTH, MAX_ARGUMENTS, DIGIT_SHARE = 10, 10, 0.75


def expression(depth: int, draw: Callable[[int], int]) -> list[str]:
    """A random expression: a digit, or an operator with 2 to MAX_ARGUMENTS expressions."""
    if depth >= MAX_DEPTH or (depth and draw(100) < 100 * DIGIT_SHARE):
        return [str(draw(10))]
    words = [OPERATORS[draw(len(OPERATORS))]]
    for _argument in range(2 + draw(MAX_ARGUMENTS - 1)):
        words += expression(depth + 1, draw)
    return [*words, "]"]


def evaluate(words: list[str]) -> int:
    """The value of an expression, with a stack of operators and their arguments."""
    stack: list[list] = [[]]
    for word in words:
        if word in OPERATORS:
            stack.append([word])
        elif word == "]":
            operator, *numbers = stack.pop()
            results = {
                "[MIN": min,
                "[MAX": max,
                "[MED": lambda x: int(statistics.median(x)),
                "[SM": lambda x: sum(x) % 10,
            }
            stack[-1].append(results[operator](numbers))
        else:
            stack[-1].append(int(word))
    return stack[0][0]


def draw_listops(rows: int, length: int, generator: torch.Generator) -> Examples:
    """Expressions of a quarter of `length` to `length` words, padded on the right."""
    number = {word: i for i, word in enumerate(WORDS)}
    draw = random.Random(int(torch.randint(2**31, (), generator=generator))).randrange
    ids, answers = torch.zeros(rows, length, dtype=torch.long), []
    while len(answers) < rows:
        words = expression(0, draw)
        if length // 4 <= len(words) <= length:
            ids[len(answers), : len(words)] = torch.tensor([number[word] for word in words])
            answers.append(evaluate(words))
    return ids, torch.tensor(answers)


@dataclass(frozen=True)
class Task:
    """pooling: of what the answer is read. padded: rows end in padding, id 0."""

    draw: Callable[[int, int, torch.Generator], Examples]
    vocab: int
    answers: int
    pooling: PoolingSpec
    padded: bool = False


TASKS = {
    "recall": Task(draw_recall, KEYS + KEYS * VALUES + NOISE, VALUES, FirstToken()),
    "listops": Task(draw_listops, len(WORDS), 10, MeanPooling(), padded=True),
}


# -------------------------------------------------------------------------------------------------- training and scores


def learn(task: Task, attention: str, args: argparse.Namespace, seed: int) -> dict[str, float]:
    """Accuracy on fresh examples after args.seconds of training."""
    head = ClassificationHead(task.answers, Pooled(task.pooling))
    name = attention.format(length=args.length)
    model = headwater.encoder(task.vocab, head, **SIZES, position="sinusoidal", attention=name).build(seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    generator = torch.Generator().manual_seed(seed)
    pool_ids, pool_answers = task.draw(args.examples, args.length, generator)

    def logits(ids: Tensor) -> Tensor:
        return model(ids, attention_mask=ids != 0) if task.padded else model(ids)

    spent, steps = 0.0, 0
    model.train()
    while spent < args.seconds:
        chosen = torch.randint(args.examples, (args.batch,), generator=generator)
        begun = time.perf_counter()
        loss = F.cross_entropy(logits(pool_ids[chosen]), pool_answers[chosen])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        spent += time.perf_counter() - begun
        steps += 1

    model.eval()
    ids, answers = task.draw(args.tests, args.length, torch.Generator().manual_seed(1_000_000))
    with torch.no_grad():
        right = sum(int((logits(i).argmax(-1) == a).sum()) for i, a in zip(ids.split(8), answers.split(8), strict=True))
    return {"accuracy": right / args.tests, "steps": steps}


def recall_and_listops(args: argparse.Namespace) -> tuple[dict, list[str]]:
    report: dict = {}
    chosen = [name for name in args.tasks if name in TASKS]
    for task in chosen:
        for name in args.only:
            report[task, name] = [learn(TASKS[task], ATTENTIONS[name], args, seed) for seed in args.seeds]
            print(task, name, report[task, name], file=sys.stderr, flush=True)
    lines = [f"#### Accuracy after {args.seconds:g} s of training, length {args.length:,} (steps)\n"]
    lines += ["| attention | " + " | ".join(chosen) + " |", "|---" * (len(chosen) + 1) + "|"]
    for name in args.only:
        cells = [
            f"{statistics.mean(r['accuracy'] for r in report[task, name]):.1%} ({report[task, name][0]['steps']:,})"
            for task in chosen
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    chance = [f"{1 / TASKS[task].answers:.1%}" for task in chosen]
    lines.append(f"| a guess | {' | '.join(chance)} |")
    return {f"{task}, {name}": runs for (task, name), runs in report.items()}, lines if chosen else []


# ------------------------------------------------------------------------------------------------- memory of segments

SEGMENT, ROWS = 64, 16


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


def bits_per_character(remembered: int, args: argparse.Namespace, seed: int) -> float:
    """Of the test split, after args.seconds of training on the validation split with `remembered` tokens of memory."""
    vocabulary: dict[str, int] = {}
    train, test = characters("valid.txt.gz", vocabulary), characters("test.txt.gz", vocabulary)[: args.test_characters]
    sizes = {**SIZES, "layers": 4, "d_model": 128, "d_ff": 512, "heads": 4}
    attention = f"xl:memory={remembered}" if remembered else "xl:memory=1"
    model = headwater.decoder(len(vocabulary), **sizes, position="none", attention=attention).build(seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss(memory, inputs: Tensor, labels: Tensor) -> Tensor:
        logits = model.decode(inputs, cache=memory) if remembered else model(inputs)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    spent = 0.0
    while spent < args.seconds:
        memory = segment_memory(model) if remembered else None
        for inputs, labels in segments(train, ROWS):
            begun = time.perf_counter()
            value = loss(memory, inputs, labels)
            optimizer.zero_grad()
            value.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            spent += time.perf_counter() - begun
            if spent >= args.seconds:
                break

    model.eval()
    memory = segment_memory(model) if remembered else None
    with torch.no_grad():
        losses = [loss(memory, inputs, labels).item() for inputs, labels in segments(test, 1)]
    return statistics.mean(losses) / math.log(2)


def memory_table(args: argparse.Namespace) -> tuple[dict, list[str]]:
    report = {}
    for remembered in (0, *args.memory):
        report[remembered] = [bits_per_character(remembered, args, seed) for seed in args.seeds]
        print("memory", remembered, report[remembered], file=sys.stderr, flush=True)
    lines = [f"\n#### Bits per character of wikitext-2 after {args.seconds:g} s of training, segments of {SEGMENT}\n"]
    lines += ["| tokens of memory | mean | each seed |", "|---|---|---|"]
    for remembered, values in report.items():
        each = ", ".join(f"{value:.3f}" for value in values)
        lines.append(f"| {remembered} | {statistics.mean(values):.3f} | {each} |")
    return {f"memory {remembered}": values for remembered, values in report.items()}, lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=[*TASKS, "memory"], choices=[*TASKS, "memory"])
    parser.add_argument("--only", nargs="+", default=list(ATTENTIONS), choices=list(ATTENTIONS), metavar="NAME")
    parser.add_argument("--length", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=300.0, help="of training, for each model (default: 300)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--examples", type=int, default=4000)
    parser.add_argument("--tests", type=int, default=400)
    parser.add_argument("--memory", type=int, nargs="+", default=[64, 256], help="tokens that Transformer-XL remembers")
    parser.add_argument("--test-characters", type=int, default=100_000)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    monitor = LoadMonitor([])
    report, lines = recall_and_listops(args)
    if "memory" in args.tasks:
        more, table = memory_table(args)
        report |= more
        lines += table
    other_load = monitor.other_load()
    lines.append(f"\n{args.threads} threads, seeds {args.seeds}; machine {verdict(other_load)}.")
    write(
        {**report, "other_load": other_load},
        "\n".join(["### What is learned in the same time\n", *lines]),
        "long_quality",
    )


if __name__ == "__main__":
    main()
