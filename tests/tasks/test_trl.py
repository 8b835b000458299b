"""Losses of preferences and rewards equal TRL's, to 1e-6, through files on disk.

HEADWATER_TRL names a Python with torch, transformers and trl 1.12; HEADWATER_TRL_CLASSIC one with trl 0.11.4, the last
whose PPO takes a reward function, and what it needs (transformers 4.45, accelerate 1.2, datasets 3, tyro).
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from headwater import load
from headwater.data.collate import IGNORE_INDEX
from headwater.tasks import TASKS
from headwater.tasks.policy_losses import KLController, group_advantages
from headwater.tasks.preference_losses import bradley_terry_loss, odds_ratio_loss
from headwater.training.config import parse_config

pytestmark = pytest.mark.slow

ORACLE = Path(__file__).with_name("trl_oracle.py")
PYTHONS = {"ppo": ("HEADWATER_TRL_CLASSIC", "0.11.4")}
PAIRS, ANSWERS, LENGTH, VOCAB = 4, 8, 12, 19


def trl(part, folder, *words, **arrays):
    """What TRL computes of these tensors."""
    variable, version = PYTHONS.get(part, ("HEADWATER_TRL", "1.12"))
    if not (python := os.environ.get(variable)):
        pytest.skip(f"{variable} names no Python with trl {version}")
    np.savez(folder / "given.npz", **{name: tensor.numpy() for name, tensor in arrays.items()})
    command = [python, str(ORACLE), part, str(folder / "given.npz"), str(folder / "found.npz"), *map(str, words)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return {name: torch.from_numpy(array) for name, array in np.load(folder / "found.npz").items()}


def close(found, expected, tolerance=1e-6):
    torch.testing.assert_close(found.double(), expected.double(), atol=tolerance, rtol=tolerance)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def answer_mask(rows, seed=7):
    """[rows, LENGTH] answers of 2 to LENGTH - 4 tokens after a prompt of 3, with padding on the right."""
    lengths = torch.randint(2, LENGTH - 3, (rows,), generator=torch.Generator().manual_seed(seed))
    places = torch.arange(LENGTH)
    return ((places >= 3) & (places < 3 + lengths[:, None])).long()


def shifted(ids, mask):
    """Targets at the position before each token of an answer, as in our batches."""
    targets = torch.full_like(ids, IGNORE_INDEX)
    targets[:, :-1] = ids[:, 1:].masked_fill(mask[:, 1:] == 0, IGNORE_INDEX)
    return targets


def token_logprobs(logits, targets, temperature=1.0):
    chosen = F.log_softmax(logits / temperature, -1).gather(2, targets.clamp(min=0)[..., None])[..., 0]
    return chosen.masked_fill(targets == IGNORE_INDEX, 0)


@pytest.fixture
def pairs():
    """Chosen answers and then rejected ones, with the log-probabilities of a reference."""
    mask = answer_mask(2 * PAIRS)
    ids = torch.randint(VOCAB, mask.shape, generator=torch.Generator().manual_seed(3))
    reference = token_logprobs(draw(2 * PAIRS, LENGTH, VOCAB, seed=5), shifted(ids, mask)).sum(1)
    return {
        "input_ids": ids, "completion_mask": mask, "attention_mask": torch.ones_like(mask),
        "ref_chosen_logps": reference[:PAIRS], "ref_rejected_logps": reference[PAIRS:],
    }  # fmt: skip


def our_batch(pairs):
    targets = shifted(pairs["input_ids"], pairs["completion_mask"])
    reference = torch.cat([pairs["ref_chosen_logps"], pairs["ref_rejected_logps"]])
    return {"ids": pairs["input_ids"], "targets": targets, "reference_logprobs": reference}


def test_preference_losses(pairs, tmp_path, monkeypatch):
    logits = draw(2 * PAIRS, LENGTH, VOCAB, seed=1)
    expected = trl("preference", tmp_path, logits=logits, **pairs)
    batch = our_batch(pairs)
    logprobs = token_logprobs(logits, batch["targets"])
    monkeypatch.setattr("headwater.tasks.preference.target_logprobs", lambda model, inputs: logprobs)
    of = {"cdpo": ("sigmoid", 0.3, 0.1), "sigmoid": ("sigmoid", 0.3, 0.0), "simpo": ("simpo", 2.0, 0.0)}
    for name, value in expected.items():
        loss, beta, smoothing = of.get(name, (name, 0.3, 0.1))
        settings = {"preference_loss": loss.removesuffix("_odds"), "beta": beta, "label_smoothing": smoothing}
        task = TASKS["preference"].configured(parse_config(settings))
        if name == "orpo_odds":
            close(0.3 * odds_ratio_loss(task.pair_logprobs(None, batch)).mean(), value)
        else:
            close(task.loss(None, batch, 0.0) / PAIRS, value)
    assert len({round(float(value), 6) for value in expected.values()}) == len(expected) == 7


def test_swapped_pairs_would_be_seen(pairs, tmp_path, monkeypatch):
    """The planted fault: the rejected answers first."""
    logits = draw(2 * PAIRS, LENGTH, VOCAB, seed=1)
    expected = trl("preference", tmp_path, logits=logits, **pairs)
    batch = our_batch(pairs)
    swapped = token_logprobs(logits, batch["targets"]).roll(PAIRS, 0)
    monkeypatch.setattr("headwater.tasks.preference.target_logprobs", lambda model, inputs: swapped)
    task = TASKS["preference"].configured(parse_config({"beta": 0.3}))
    assert abs(float(task.loss(None, batch, 0.0)) / PAIRS - float(expected["sigmoid"])) > 0.01


def test_the_loss_of_a_reward_model(tmp_path):
    rewards, margin = draw(2 * PAIRS, 1), draw(PAIRS, seed=2).abs()
    expected = trl("reward", tmp_path, rewards=rewards, margin=margin)
    chosen, rejected = rewards[:, 0].chunk(2)
    close(bradley_terry_loss(chosen, rejected).mean(), expected["plain"])
    close(bradley_terry_loss(chosen, rejected, margin, 0.01).mean(), expected["margin"])


def test_the_losses_of_grpo(tmp_path, monkeypatch):
    mask = answer_mask(ANSWERS)
    ids = torch.randint(VOCAB, mask.shape, generator=torch.Generator().manual_seed(3))
    logits = draw(ANSWERS, LENGTH, VOCAB, seed=1)
    targets = shifted(ids, mask)
    logprobs = token_logprobs(logits, targets, 0.7)
    moved = {name: (logprobs + 0.3 * draw(*mask.shape, seed=seed)) for name, seed in (("old", 8), ("ref", 9))}
    scores = torch.tensor([1.0, 0.0, float("nan"), 1.0, 2.0, 2.0, 2.0, 2.0])
    advantages = draw(ANSWERS, seed=4)
    expected = trl(
        "grpo", tmp_path, logits=logits, scores=scores, advantages=advantages,
        prompt_ids=ids[:, :3], prompt_mask=torch.ones(ANSWERS, 3, dtype=torch.long),
        completion_ids=ids[:, 3:], completion_mask=mask[:, 3:],
        old_per_token_logps=moved["old"][:, 2:-1], ref_per_token_logps=moved["ref"][:, 2:-1],
    )  # fmt: skip
    close(group_advantages(scores, 4), expected.pop("advantages"))

    from headwater.tasks.grpo import token_weights

    monkeypatch.setattr("headwater.tasks.grpo.target_logprobs", lambda model, inputs, temperature: logprobs)
    is_answer = targets != IGNORE_INDEX
    for name, value in expected.items():
        mean, _, importance = name.rpartition("_")
        settings = {"grpo_loss": mean, "importance": importance, "beta": 0.04, "clip_range_high": 0.28,
                    "temperature": 0.7}  # fmt: skip
        task = TASKS["grpo"].configured(parse_config(settings))
        batch = {
            "ids": ids, "targets": targets, "advantages": advantages[:, None] * is_answer,
            "old_logprobs": moved["old"] * is_answer, "reference_logprobs": moved["ref"] * is_answer,
            "weights": token_weights(is_answer, mean, 12).double(),
        }  # fmt: skip
        close(task.loss(None, batch, 0.0) / task.num_targets(batch), value)
    assert len(expected) == 8


@pytest.mark.parametrize("whiten", [False, True])
def test_the_sums_of_ppo(tmp_path, monkeypatch, whiten):
    """Whitened rewards of answers of one length: TRL's are not zero in padding, which reaches the tokens before it."""
    mask = answer_mask(ANSWERS)
    if whiten:
        mask[:, 3:] = 1
    is_answer = torch.zeros_like(mask, dtype=torch.bool)
    is_answer[:, :-1] = mask[:, 1:].bool()
    draws = {name: draw(*mask.shape, seed=seed) * is_answer for seed, name in enumerate(["values", "step", "noise"])}
    old = (-draw(*mask.shape, seed=5).abs() - 0.1) * is_answer
    given = {
        "old": old, "new": old + 0.2 * draws["step"], "reference": old + 0.3 * draws["noise"],
        "values": draws["values"], "new_values": draws["values"] + 0.3 * draws["step"],
    }  # fmt: skip
    scores = draw(ANSWERS, seed=6)
    answers = {name: tensor[:, 2:-1] for name, tensor in given.items()}
    expected = trl("ppo", tmp_path, scores=scores, mask=is_answer[:, 2:-1].double(), **answers)

    settings = {"beta": 0.2, "discount": 0.99, "whiten_rewards": whiten, "missing_end_penalty": 0.0}
    task = TASKS["ppo"].configured(parse_config(settings))
    batch = {
        "ids": torch.zeros_like(mask), "targets": torch.where(is_answer, 1, IGNORE_INDEX),
        "old_logprobs": given["old"], "reference_logprobs": given["reference"], "old_values": given["values"],
        "ended": torch.ones(ANSWERS, dtype=torch.bool),
    }  # fmt: skip
    metrics = task.learn(batch, scores)
    name = "white_" if whiten else ""
    close(batch["advantages"][:, 2:-1], expected[f"{name}advantages"])
    close(batch["returns"][:, 2:-1], expected[f"{name}returns"])
    assert abs(metrics["kl"] - float(expected["kl"])) < 1e-6

    monkeypatch.setattr("headwater.tasks.ppo.forward_hidden", lambda model, inputs: (None, None))
    monkeypatch.setattr("headwater.tasks.ppo.language_head", lambda model: None)
    monkeypatch.setattr("headwater.tasks.ppo.head_logprobs", lambda *inputs: given["new"])
    model = SimpleNamespace(head={"value": lambda hidden, inputs: given["new_values"][..., None]})
    loss = task.loss(model, batch, 0.0) / is_answer.sum()
    close(loss, expected[f"{name}policy"] + expected[f"{name}value"])


def test_the_adaptive_coefficient(tmp_path):
    one = torch.ones(2, 2, dtype=torch.float64)
    same = dict.fromkeys(("old", "new", "reference", "values", "new_values"), one)
    expected = trl("ppo", tmp_path, scores=one[0], mask=one, **same)["betas"]
    controller = KLController(0.2, target=6.0, horizon=10_000)
    for kl, beta in zip((3.0, 6.6, 40.0), expected.tolist(), strict=True):
        controller.update(kl, 512)
        assert abs(controller.beta - beta) < 1e-9


def test_dpo_of_a_whole_model_and_its_gradient(pairs, tmp_path):
    """Both read one folder; float32, so to a few times 1e-6."""
    from tests.families.tiny_models import make

    folder = make(tmp_path / "model", "llama", vocab_size=VOCAB)
    pairs = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in pairs.items()}
    expected = trl("model", tmp_path, folder, **pairs)
    model = load(folder).model
    loss = TASKS["preference"].configured(parse_config({})).loss(model, our_batch(pairs), 0.0) / PAIRS
    loss.backward()
    close(loss.detach(), expected["loss"], 5e-6)
    close(model.head.out.weight.grad, expected["gradient"], 5e-6)
