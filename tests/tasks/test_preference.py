"""Preferences: the losses against published numbers, the reference computed once, runs, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import headwater
from headwater.core.modules import eval_mode
from headwater.data.collate import IGNORE_INDEX
from headwater.errors import BadFile, BadSetting
from headwater.families.builders import decoder
from headwater.tasks import TASKS
from headwater.tasks.batch import to_tensors
from headwater.tasks.logprobs import head_logprobs, target_logprobs
from headwater.tasks.preference_losses import (
    PREFERENCE_LOSSES,
    LossSettings,
    PairLogprobs,
    bradley_terry_loss,
    hinge_loss,
    ipo_loss,
    odds_ratio_loss,
    orpo_loss,
    preference_losses,
    robust_loss,
    sigmoid_loss,
    simpo_loss,
)
from headwater.training.api import resume, train
from headwater.training.config import TrainConfig, parse_config
from headwater.training.distributed import without_targets
from headwater.training.plots import plot_run
from headwater.training.run_dir import RunDir
from headwater.training.state import StepEvent


def pairs_of_three() -> PairLogprobs:
    columns = ([-10, -12.5, -8], [-11, -12, -9.5], [-10.5, -12, -8.2], [-10.8, -12.1, -9.0], [5, 6, 4], [4, 8, 5])
    return PairLogprobs(*(torch.tensor(column, dtype=torch.float64) for column in columns))


# ------------------------------------------------------------------------------------------- the losses


@pytest.mark.parametrize(
    ("loss", "settings", "expected"),
    [
        (sigmoid_loss, LossSettings(0.1), [0.658760, 0.723597, 0.658760]),
        (sigmoid_loss, LossSettings(0.1, smoothing=0.1), [0.665760, 0.717597, 0.665760]),
        (robust_loss, LossSettings(0.1, smoothing=0.1), [0.650010, 0.731097, 0.650010]),
        (hinge_loss, LossSettings(0.1), [0.93, 1.06, 0.93]),
        (ipo_loss, LossSettings(0.1), [23.5225, 25.967506, 23.5225]),
        (simpo_loss, LossSettings(2.0, simpo_margin=0.5), [0.313262, 1.839674, 1.103186]),
        (lambda pairs, settings: odds_ratio_loss(pairs), LossSettings(), [0.362093, 1.105084, 0.753145]),
    ],
)
def test_each_loss_has_the_published_numbers(loss, settings, expected):
    tolerance = 2e-5 if loss is ipo_loss else 2e-6
    torch.testing.assert_close(
        loss(pairs_of_three(), settings), torch.tensor(expected, dtype=torch.float64), atol=tolerance, rtol=1e-6
    )


def test_without_a_reference_the_ratio_is_the_log_probability():
    pairs = pairs_of_three()
    free = PairLogprobs(pairs.chosen, pairs.rejected, pairs.chosen * 0, pairs.chosen * 0, *[pairs.chosen_length] * 2)
    expected = torch.tensor([0.644397, 0.718460, 0.620957], dtype=torch.float64)
    torch.testing.assert_close(sigmoid_loss(free, LossSettings(0.1)), expected, atol=2e-6, rtol=0)


def test_orpo_is_the_likelihood_and_the_odds():
    pairs = pairs_of_three()
    expected = -pairs.chosen / pairs.chosen_length + 0.1 * odds_ratio_loss(pairs)
    torch.testing.assert_close(orpo_loss(pairs, LossSettings(0.1)), expected)


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_rpo_adds_the_likelihood_of_the_chosen_answer(name):
    pairs = pairs_of_three()
    plain, rpo = (preference_losses(name, pairs, LossSettings(0.1, rpo_alpha=alpha)) for alpha in (0.0, 2.0))
    torch.testing.assert_close(rpo - plain, 2 * torch.tensor([10 / 5, 12.5 / 6, 8 / 4], dtype=torch.float64))


@pytest.mark.parametrize(
    ("margin", "center", "expected"),
    [(0.0, 0.0, [0.403186, 0.913015, 0.744397]), ([1.0, 0.0, 0.5], 0.0, [0.854355, 0.913015, 1.037488])],
)
def test_bradley_terry_with_and_without_margins(margin, center, expected):
    chosen, rejected = torch.tensor([1.2, -0.3, 0.8]), torch.tensor([0.5, 0.1, 0.9])
    losses = bradley_terry_loss(chosen, rejected, torch.tensor(margin), center)
    torch.testing.assert_close(losses, torch.tensor(expected), atol=2e-6, rtol=0)
    assert abs(float(bradley_terry_loss(chosen, rejected, 0.0, 0.01).mean()) - 0.706266) < 2e-6


def test_robust_dpo_is_unbiased_under_swapped_pairs():
    """E over a swap with probability ε of the robust loss is the loss without noise; conservative DPO is biased."""
    pairs, epsilon = pairs_of_three(), 0.2
    swapped = PairLogprobs(pairs.rejected, pairs.chosen, pairs.reference_rejected, pairs.reference_chosen,
                           pairs.rejected_length, pairs.chosen_length)  # fmt: skip

    def expectation(loss, settings):
        return (1 - epsilon) * loss(pairs, settings) + epsilon * loss(swapped, settings)

    clean = sigmoid_loss(pairs, LossSettings(0.1))
    noisy = LossSettings(0.1, smoothing=epsilon)
    torch.testing.assert_close(expectation(robust_loss, noisy), clean)
    assert not torch.allclose(expectation(sigmoid_loss, noisy), clean)  # the planted fault


# ------------------------------------------------------------------------------------ log-probabilities


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_and_their_gradients_are_those_of_the_formula(monkeypatch, temperature):
    monkeypatch.setattr("headwater.tasks.logprobs.CHUNK_ROWS", 5)  # several chunks
    model = decoder(40, d_model=16, heads=2, layers=1, d_ff=32, dropout=0.0).build(seed=0)
    ids = torch.randint(0, 40, (3, 7), generator=torch.Generator().manual_seed(1))
    targets = ids.roll(-1, 1).masked_fill(torch.rand(3, 7, generator=torch.Generator().manual_seed(2)) < 0.4, -100)
    weights = torch.randn(3, 7, generator=torch.Generator().manual_seed(3))

    def gradients(logprobs):
        model.zero_grad()
        (logprobs * weights).sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    chunked = target_logprobs(model, {"ids": ids, "targets": targets}, temperature)
    found = gradients(chunked)
    full = torch.log_softmax(model(ids) / temperature, -1).gather(2, targets.clamp(min=0)[..., None])[..., 0]
    expected = full.masked_fill(targets == IGNORE_INDEX, 0)
    torch.testing.assert_close(chunked, expected)
    torch.testing.assert_close(found, gradients(expected))


def test_a_head_that_is_more_than_a_matrix_gives_the_same(monkeypatch):
    model = decoder(40, d_model=16, heads=2, layers=1, d_ff=32, dropout=0.0).build(seed=0)
    ids = torch.randint(0, 40, (2, 5), generator=torch.Generator().manual_seed(1))
    inputs = model.inputs(ids)
    hidden = model.hidden_states(inputs)
    plain = head_logprobs(model.head, hidden, inputs, ids)
    model.head.out = torch.nn.Sequential(model.head.out)
    torch.testing.assert_close(head_logprobs(model.head, hidden, inputs, ids), plain)


@pytest.mark.parametrize("loss", PREFERENCE_LOSSES)
def test_the_gradient_of_a_filler_is_zero(loss):
    task = TASKS["preference"].configured(TrainConfig().replace(preference_loss=loss))
    model = decoder(40, d_model=16, heads=2, layers=1, d_ff=32, dropout=0.0).build(seed=0)
    ids = torch.randint(0, 40, (4, 7), generator=torch.Generator().manual_seed(1))
    batch = {"ids": ids, "targets": ids, "reference_logprobs": torch.full((4,), -20.0)}

    def gradient(pairs):
        model.zero_grad()
        task.loss(model, pairs, 0.0).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    assert not gradient(without_targets(batch)).any(), "dividing by a length of 0 would make it NaN"
    assert gradient(batch).isfinite().all() and gradient(batch).any()


# --------------------------------------------------------------------------------------------------------------- runs


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def pair_file(tmp_path_factory):
    rows = [{"prompt": f"What is word {n}?", "chosen": "No idea.", "rejected": "It is a word."} for n in range(40)]
    return write_rows(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", rows)


SHORT = {"max_steps": 12, "eval_every": 6, "batch_tokens": 600, "lr": 1e-3, "log_every": 1, "checkpoint_steps": 4}


def valid_lines(folder):
    return [line for line in RunDir.open(folder).read_log("metrics.jsonl") if line.get("split") == "valid"]


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "hinge", "robust", "simpo", "orpo"])
def test_every_loss_learns_the_preference(base, pair_file, tmp_path, loss):
    trained = train(pair_file, init_from=base, preference_loss=loss, out=tmp_path / "run", quiet=True, **SHORT)
    assert trained.task == "preference" and TASKS["preference"].recorded.take() == {}
    last = valid_lines(tmp_path / "run")[-1]
    assert last["accuracy"] == 100 and last["margin"] > 0 and last["reward_chosen"] > last["reward_rejected"]
    steps = [line for line in RunDir.open(tmp_path / "run").read_log("metrics.jsonl") if line.get("split") == "train"]
    assert steps[-1]["margin"] > steps[0]["margin"] and {"accuracy", "logprob_chosen"} <= steps[0].keys()


def test_the_first_loss_is_that_of_a_model_that_equals_its_reference(base, pair_file, tmp_path):
    train(pair_file, init_from=base, out=tmp_path / "run", quiet=True, **SHORT)
    first = next(line for line in RunDir.open(tmp_path / "run").read_log("metrics.jsonl") if line["step"] == 1)
    assert abs(first["loss"] - np.log(2)) < 1e-6 and abs(first["margin"]) < 1e-5


def cut(step):
    def listener(event):
        if isinstance(event, StepEvent) and event.step == step:
            raise KeyboardInterrupt

    return listener


@pytest.mark.parametrize("task", ["preference", "reward"])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_resumed_run_is_the_run_that_never_stopped(base, pair_file, tmp_path, task, method):
    settings = {"init_from": str(base), "task": task, "tune": method, "quiet": True, **SHORT}
    whole = train(pair_file, out=tmp_path / "whole", **settings)
    with pytest.raises(KeyboardInterrupt):
        train(pair_file, out=tmp_path / "cut", callbacks=[cut(7)], **settings)
    resumed = resume(tmp_path / "cut", quiet=True)
    for (name, a), (_, b) in zip(whole.model.named_parameters(), resumed.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    kept = [[line.get("loss") for line in RunDir.open(tmp_path / name).read_log("metrics.jsonl") if "loss" in line]
            for name in ("whole", "cut")]  # fmt: skip
    assert kept[0] == kept[1]


def test_a_reference_that_moves_along_teaches_nothing_new(base, pair_file, tmp_path):
    """The planted fault: with the reference recomputed from the model of today the margin is always zero."""
    task = TASKS["preference"].configured(parse_config({"init_from": str(base)}))
    loaded = headwater.load(base)
    examples = [headwater.data.conversations.PreferencePair.from_cells(json.loads(line), {}, 0)
                for line in pair_file.read_text().splitlines()]  # fmt: skip
    config = parse_config({"batch_tokens": 600})
    data = task.build_data(config, loaded.tokenizer, examples, examples[:4])
    task.prepare(loaded.model, data, config, resumed=False)
    frozen = data.train.reference_logprobs.copy()
    with torch.no_grad():
        loaded.model.head.out.weight.mul_(1.2)
    batch = to_tensors(data.train.collate(np.arange(8), 0))
    with eval_mode(loaded.model):
        honest = task.pair_logprobs(loaded.model, batch)
        task.prepare(loaded.model, data, config, resumed=False)
        moved = task.pair_logprobs(loaded.model, to_tensors(data.train.collate(np.arange(8), 0)))
    assert float((honest.chosen_ratio - honest.rejected_ratio).abs().max()) > 1e-2
    assert float((moved.chosen_ratio - moved.rejected_ratio).abs().max()) < 1e-4
    assert not np.array_equal(frozen, data.train.reference_logprobs)


def test_a_reward_model_scores_answers_and_margins_change_its_loss(base, pair_file, tmp_path):
    scorer = train(pair_file, init_from=base, task="reward", out=tmp_path / "run", quiet=True, **{**SHORT, "lr": 1e-2})
    good, bad = scorer([("What is word 3?", "No idea."), ("What is word 3?", "It is a word.")])
    assert good > bad + 0.5
    assert headwater.load(tmp_path / "run").model.head.out.weight.shape == (1, 32)


# ---------------------------------------------------------------------------------------------------------- refusals


def test_pairs_that_are_equal_are_counted_and_left_out(tmp_path, base):
    rows = [{"prompt": "Hi", "chosen": "A", "rejected": "A"}] * 3
    with pytest.raises(BadFile, match="no row that can be used; 3 × chosen and rejected are equal"):
        train(write_rows(tmp_path / "p.jsonl", rows), init_from=base, quiet=True, out=tmp_path / "run")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"preference_loss": "dop"}, "preference_loss must be one of sigmoid.*got 'dop'"),
        ({"beta": 0}, "beta must be above 0: nothing would be learned"),
        ({"label_smoothing": 0.5}, "label_smoothing of preference pairs must be below 0.5, got 0.5"),
        ({"init_from": ""}, "preference tunes a model that can answer already; give one: --init-from smollm2"),
    ],
)
def test_settings_that_teach_nothing_are_refused(base, pair_file, tmp_path, settings, words):
    with pytest.raises(BadSetting, match=words):
        train(pair_file, **{"init_from": str(base), "out": str(tmp_path / "run"), "quiet": True, **SHORT, **settings})
    assert not (tmp_path / "run").exists()


def test_the_rewards_are_drawn(base, pair_file, tmp_path):
    train(pair_file, init_from=base, out=tmp_path / "run", quiet=True, **SHORT)
    drawn = plot_run(RunDir.open(tmp_path / "run"))
    assert [path.name for path in drawn] == ["loss.png", "learning.png", "feedback.png", "scores.png"]
