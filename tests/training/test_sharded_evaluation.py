"""Evaluation sharded over ranks gives the metrics, samples and score of one process, to the last bit."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from functools import partial

import pytest
import torch

from headwater.data.dates import dates_dataset
from headwater.data.examples import LabeledText, QAExample, TaggedTokens
from headwater.training.config import parse_config
from headwater.training.distributed import SingleProcess
from headwater.training.setup import build_train_setup

PAIRS = dates_dataset("train", 60)
WORDS = [source.split() for source, _ in PAIRS]
CONTEXTS = [" ".join(["the year is not known ."] * 60 + words) for words in WORDS]
EXAMPLES = {
    "seq2seq": PAIRS,
    "classification": [LabeledText(source, target[:3]) for source, target in PAIRS],
    "token-classification": [TaggedTokens(tuple(w), tuple("B-N" if x[0].isdigit() else "O" for x in w)) for w in WORDS],
    "question-answering": [
        QAExample("which ?", text, (words[-1],), (len(text) - len(words[-1]),))
        for text, words in zip(CONTEXTS, WORDS, strict=True)
    ],
}


class Rank(SingleProcess):
    """A rank that is a thread: all-gather through a list that all ranks share."""

    def __init__(self, rank, shared, barrier):
        self.rank, self.shared, self.barrier = rank, shared, barrier
        self.world_size = barrier.parties

    def all_gather_object(self, value):
        self.shared[self.rank] = value
        self.barrier.wait(60)
        values = list(self.shared)
        self.barrier.wait(60)
        return values


def on_ranks(evaluator, model, world_size):
    """The result of each rank."""
    shared, results = [None] * world_size, [None] * world_size
    barrier = threading.Barrier(world_size)

    def work(rank):
        with torch.no_grad():
            results[rank] = replace(evaluator, dist=Rank(rank, shared, barrier))(model)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return results


@pytest.mark.parametrize("task", EXAMPLES)
def test_ranks_that_share_the_batches_find_what_one_process_finds(task):
    examples = {"train": EXAMPLES[task], "valid": EXAMPLES[task]}
    settings = {
        "size": "xs",
        "device": "cpu",
        "max_steps": 1,
        "task": task,
        "batch_tokens": 2000,
        "eval_every": 1,
        "eval_examples": 60,
    }
    setup = build_train_setup(
        parse_config(settings), examples=examples, dist=SingleProcess(), start_time=time.monotonic()
    )
    valid = setup.task_data.valid
    valid.eval_batches = partial(valid.eval_batches, max_tokens=150)
    assert len(list(valid.eval_batches(60))) > 3
    model, evaluator = setup.model.eval(), setup.trainer.evaluate_fn
    (wanted,) = on_ranks(evaluator, model, 1)
    for world_size in (2, 3):
        assert on_ranks(evaluator, model, world_size) == [wanted] * world_size
