"""A new task is one file: a class and register(). Here that file is this test; nothing else knows of the task."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import headwater
from headwater import cli
from headwater.core import ClassificationHead, MeanPooling, Pooled
from headwater.data.collate import SpecialTokens, TrainBatch, length_mask
from headwater.data.dataset import Dataset
from headwater.data.examples import EXAMPLE_FORMATS, ExampleFormat, text_cell
from headwater.data.ragged import encode_rows
from headwater.families.builders import encoder
from headwater.tasks import TASKS, Task, TaskData, register
from headwater.tasks.base import EvalBatch, stack_sizes
from headwater.tasks.batch import forward_hidden, forward_logits, to_tensors
from headwater.training.evaluate import evaluate_files
from headwater.training.predict import load_run

TINY = {"max_steps": 6, "eval_every": 3, "eval_examples": 20, "d_model": 16, "heads": 2, "layers": 1, "d_ff": 32,
        "vocab": 300, "batch_tokens": 600, "quiet": True}  # fmt: skip


class ScoredText(NamedTuple):
    """A text and a number."""

    text: str
    score: float

    @property
    def input_text(self):
        return self.text

    @property
    def texts(self):
        return (self.text,)

    @property
    def labels(self):
        return ()

    @classmethod
    def from_cells(cls, cells, roles, document):
        return cls(text_cell("text", cells.get(roles["text"])), float(cells[roles["score"]]))


class ScoreDataset(Dataset):
    def __init__(self, rows, tokenizer, config):
        self.texts = encode_rows(tokenizer, (row.text for row in rows))
        self.scores = np.array([[round(100 * row.score)] for row in rows])
        special_tokens = SpecialTokens.from_tokenizer(tokenizer)
        super().__init__(self.texts.lengths + 1, special_tokens, config.batch_tokens, config.seed)

    def collate(self, examples, epoch):
        rows = self.texts.take(examples).with_affixes([self.special_tokens.bos_id])
        ids = rows.to_padded(self.special_tokens.pad_id)
        return TrainBatch(ids, length_mask(rows), self.scores[examples])


class Regression(Task[ScoredText]):
    """A number for a text, by least squares."""

    name = "regression"
    example_format = ExampleFormat("regression", ScoredText, ("text", "score"))
    default_metric = "r2"
    output_columns = ("score",)

    def build_data(self, config, tokenizer, train, valid, labels=()):
        datasets = [ScoreDataset(rows, tokenizer, config) for rows in (train, valid)]
        num_tokens = int(datasets[0].lengths.sum())
        return TaskData(self, tokenizer, *datasets, valid, num_tokens=num_tokens)

    def model_spec(self, config, vocab_size, num_labels):
        head = ClassificationHead(1, Pooled(MeanPooling()))
        return encoder(vocab_size, head, activation="gelu", **stack_sizes(config))

    def loss(self, model, batch, label_smoothing):
        hidden_states, inputs = forward_hidden(model, batch)
        return F.mse_loss(model.head(hidden_states, inputs), batch["targets"] / 100, reduction="sum")

    @torch.no_grad()
    def predict(self, model, tokenizer, metadata, inputs: Sequence[str]):
        settings = type("Settings", (), {"batch_tokens": 1000, "seed": 0})
        rows = ScoreDataset([ScoredText(text, 0.0) for text in inputs], tokenizer, settings)
        batch = to_tensors(rows.collate(np.arange(len(inputs)), 0))
        return [round(score, 3) for score in forward_logits(model, batch)[:, 0].tolist()]

    def predict_rows(self, model, data, batches: Iterable[EvalBatch], beam=1):
        outputs = {}
        for rows, batch in batches:
            outputs |= dict(zip(rows.tolist(), forward_logits(model, batch)[:, 0].tolist(), strict=True))
        return outputs

    def reference(self, example):
        return example.score

    def metrics(self, outputs, references, data):
        errors = np.square(np.array(outputs) - references).mean()
        return {"r2": float(1 - errors / np.var(references))}


@pytest.fixture(scope="module", autouse=True)
def registered():
    register(Regression())
    yield
    for registry in (TASKS, EXAMPLE_FORMATS):
        del registry["regression"]


def rows(count=120):
    words = np.random.default_rng(0).choice(["good", "bad", "fine", "poor", "tea", "rain"], (count, 6))
    scores = np.isin(words, ["good", "fine"]).mean(1)
    return [ScoredText(" ".join([*row, str(n)]), float(scores[n])) for n, row in enumerate(words)]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "scores.tsv"
    path.write_text("text\tscore\n" + "".join(f"{row.text}\t{row.score}\n" for row in rows()))
    return path


def test_it_trains_evaluates_and_predicts_from_a_file(table, tmp_path, capsys):
    trained = headwater.train(table, task="regression", out=str(tmp_path / "run"), **TINY)
    assert trained.task == "regression" and trained.result.state.step == 6
    assert trained.columns == {"text": "text", "score": "score"}

    # predictions, of the run in memory and of the one on disk
    assert isinstance(trained("good tea"), float)
    texts = ["good fine", "poor bad rain"]
    assert load_run(tmp_path / "run")(texts) == trained(texts)

    # evaluation on a file, in Python and on the command line
    found = evaluate_files(tmp_path / "run", [str(table)])
    assert set(found.metrics) == {"loss", "r2"} and found.report == {"rows": 120}
    assert len(found.samples) == 5 and set(found.samples[0]) == {"input", "output", "expected"}
    assert cli.main(["eval", str(tmp_path / "run"), str(table)]) == 0
    assert "r2" in capsys.readouterr().out


def test_the_command_line_finds_the_task_by_its_columns(table, tmp_path, capsys):
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items() if name != "quiet"]
    assert cli.main(["train", str(table), "--out", str(tmp_path / "run"), "--quiet", *flags]) == 0
    said = capsys.readouterr().out
    assert "regression (text = text, score = score)" in said
    assert f'load_run("{tmp_path / "run"}")' in said, "a task without a verb is used from Python"


def test_it_trains_on_examples_and_is_resumed(tmp_path, table):
    some = rows()
    trained = headwater.train(examples={"train": some[:100], "valid": some[100:]}, task="regression",
                              out=str(tmp_path / "run"), **TINY)  # fmt: skip
    assert trained.result.state.best_score is not None
    headwater.train(table, task="regression", out=str(tmp_path / "more"), **{**TINY, "max_steps": 3})
    longer = headwater.resume(tmp_path / "more", max_steps=6, quiet=True)
    assert longer.result.state.step == 6


def test_a_task_that_nobody_registered_is_refused(table, tmp_path):
    with pytest.raises(headwater.BadSetting, match="did you mean 'regression'"):
        headwater.train(table, task="regresion", out=str(tmp_path / "run"), **TINY)
