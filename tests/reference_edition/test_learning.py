"""Loss and optimizer against torch; training on the copy task; the command line."""

from __future__ import annotations

import math
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from headwater.reference import copy_task as task
from headwater.reference.__main__ import main, min_loss
from headwater.reference.figures import patterns
from headwater.reference.loss import cross_entropy
from headwater.reference.model import Transformer
from headwater.reference.optimizer import Adam, clip
from headwater.reference.weights import read

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_is_torchs(smoothing: float) -> None:
    logits, targets = RNG.normal(size=(2, 5, 7)), RNG.integers(0, 7, (2, 5))
    targets[0, 0] = 0
    x = torch.tensor(logits, requires_grad=True)
    expected = torch.nn.functional.cross_entropy(
        x.flatten(0, 1), torch.tensor(targets).flatten(), ignore_index=0, label_smoothing=smoothing
    )
    expected.backward()
    loss, backward = cross_entropy(logits, targets, padding=0, smoothing=smoothing)
    assert math.isclose(loss, expected.item(), rel_tol=1e-12)
    np.testing.assert_allclose(backward(), x.grad.numpy(), atol=1e-14)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adam_is_torchs(weight_decay: float) -> None:
    values = {"w": RNG.normal(size=(3, 4)), "b": RNG.normal(size=4)}
    theirs = {name: torch.tensor(v, requires_grad=True) for name, v in values.items()}
    ours = {name: v.copy() for name, v in values.items()}
    optimizer, adam = (
        torch.optim.AdamW(theirs.values(), 1e-2, (0.9, 0.98), 1e-9, weight_decay),
        Adam(weight_decay=weight_decay),
    )
    for _ in range(20):
        gradients = {name: RNG.normal(size=v.shape) for name, v in values.items()}
        for name, g in gradients.items():
            theirs[name].grad = torch.tensor(g)
        optimizer.step()
        adam.step(ours, gradients, 1e-2)
    for name in values:
        np.testing.assert_allclose(ours[name], theirs[name].detach().numpy(), atol=1e-13)


def test_clipping_scales_all_gradients_by_one_factor() -> None:
    gradients = {"a": np.array([3.0, 0.0]), "b": np.array([4.0])}
    assert clip(gradients, 10) == 5 and gradients["b"] == [4.0]
    assert clip(gradients, 1) == 5
    assert np.allclose(gradients["a"], [0.6, 0]) and np.allclose(gradients["b"], [0.8])


def test_a_batch_has_its_documented_layout() -> None:
    b = task.batch(np.random.default_rng(1), 50)
    for source, entry, target in zip(b.source, b.decoder_input, b.targets, strict=True):
        words = source[source != task.PADDING].tolist()
        assert task.SHORTEST <= len(words) <= task.LONGEST and min(words) > task.STOP
        assert entry[entry != task.PADDING].tolist() == [task.START, *words]
        assert target[target != task.PADDING].tolist() == [*words, task.STOP]


def test_the_copy_task_is_learned() -> None:
    report = task.train(task.SIZES["Small"], steps=300)
    assert report.exact >= 0.99
    assert report.losses[-1] < min_loss() + 0.05 < report.losses[0] - 2


def test_an_untrained_model_copies_nothing() -> None:
    assert task.exact_match(Transformer(task.SIZES["Mini"]), task.batch(np.random.default_rng(0), 50)) == 0


def test_the_minimum_loss_is_the_entropy_of_the_targets() -> None:
    perfect = np.log(np.full(task.VOCAB, 0.1 / task.VOCAB) + 0.9 * np.eye(task.VOCAB)[3])
    loss, backward = cross_entropy(perfect[None], np.array([3]), padding=0, smoothing=0.1)
    assert math.isclose(loss, min_loss()) and np.abs(backward()).max() < 1e-12


def test_patterns_are_the_diagonal_and_its_neighbours() -> None:
    to_self, to_neighbours = patterns(np.stack([np.eye(4), np.eye(4, k=1), np.full((4, 4), 0.25)])[None])
    assert np.allclose(to_self, [1, 0, 0.25]) and np.allclose(to_neighbours, [0, 0.5, 0.25])


def test_the_command_prints_a_table_and_writes_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--seed", "3", "--out", str(tmp_path / "new" / "out")]) == 0
    captured = capsys.readouterr().out
    assert all(word in captured for word in ("Mini", "Small", "21,920", "234,560", "exact", "source", "generated"))
    names = {"encoder-self-attention", "decoder-self-attention", "decoder-cross-attention", "attention-patterns"}
    figures = {p.stem: p for p in (tmp_path / "new" / "out").glob("*.png")}
    assert figures.keys() == names | {"learning-curves"}
    assert all(p.read_bytes().startswith(b"\x89PNG") and p.stat().st_size > 10_000 for p in figures.values())
    Transformer(task.SIZES["Small"], read(tmp_path / "new" / "out" / "small.safetensors"))


def test_an_output_folder_that_cannot_be_created_is_reported_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["--out", str(tmp_path / "file" / "below")]) == 5
    captured = capsys.readouterr()
    assert (
        not captured.out
        and captured.err.startswith("error: --out must be a folder that can be written")
        and captured.err.count("\n") == 1
    )


@pytest.mark.slow
def test_all_sizes_are_compared_within_a_minute(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start_time = time.process_time()  # processor time, because other programs may use the machine
    assert main(["--out", str(tmp_path)]) == 0
    assert time.process_time() - start_time < 60
    rows = [
        line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(("Mini", "Small", "Medium"))
    ]
    assert len(rows) == 3
    assert all(float(row[7].rstrip("%")) >= 97 for row in rows) and float(rows[1][7].rstrip("%")) >= 99
