"""PPO and GRPO: runs that learn from rewards, resumed runs, the reference, reward functions that fail, best of n."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch

import headwater
from headwater import cli
from headwater.core import LMHead
from headwater.core.modules import eval_mode
from headwater.errors import BadInput, BadSetting, NotFound
from headwater.families.adapters import load_with_base
from headwater.tasks.best_of_n import best_of_n
from headwater.tasks.ppo import with_value_head
from headwater.tasks.rewards import Answer, PythonReward, RewardError, load_reward
from headwater.tasks.rollouts import language_model
from headwater.training.api import resume, train
from headwater.training.config import parse_config
from headwater.training.distributed import SingleProcess
from headwater.training.run_dir import RunDir
from headwater.training.setup import build_train_setup
from headwater.training.state import StepEvent
from headwater.tuning import use_adapter
from headwater.weights.safetensors import SafetensorsFile

REWARDS = '''
"""Rewards for a test."""
def no_idea(prompts, completions, **columns):
    return [float("idea" in text) for text in completions]

def of_column(completions, wanted):
    return [float(want in text) for text, want in zip(completions, wanted)]

def raises(completions):
    if any("idea" in text for text in completions):
        raise KeyError("no such answer")
    return [1.0] * len(completions)

def exits(completions):
    if any("idea" in text for text in completions):
        raise SystemExit(3)
    return [1.0] * len(completions)

def number(completions):
    return 0.5

def nothing(completions):
    pass

def nan(completions):
    return [float("nan") if "idea" in text else 1.0 for text in completions]

def short(completions):
    return [1.0]

def none(completions):
    return [None for _ in completions]
'''
SHORT = {"rollouts": 16, "minibatch": 8, "answer_tokens": 10, "ppo_epochs": 2, "group_size": 4, "lr": 3e-3,
         "log_every": 1, "eval_every": 8, "eval_examples": 2, "quiet": True}  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "rewards.py").write_text(REWARDS)
    rows = [{"prompt": f"What is word {n}?", "wanted": "idea"} for n in range(20)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run(files, base, out, task="grpo", reward="no_idea", **settings):
    given = {"task": task, "init_from": str(base), "reward": f"{files}/rewards.py:{reward}", "max_steps": 24}
    return train(files / "prompts.jsonl", out=out, **{**SHORT, **given, **settings})


def steps_of(folder):
    return [line for line in RunDir.open(folder).read_log("metrics.jsonl") if line.get("split") == "train"]


def rewards_of(folder):
    return [line["reward"] for line in steps_of(folder) if "reward" in line]


# --------------------------------------------------------------------------------------------------------------- runs


@pytest.mark.parametrize("task", ["ppo", "grpo"])
def test_the_reward_rises_and_the_model_is_a_plain_one(files, base, tmp_path, task):
    trained = run(files, base, tmp_path / "run", task, max_steps=48)
    rewards = rewards_of(tmp_path / "run")
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.2
    assert isinstance(headwater.load(tmp_path / "run").spec.head, LMHead)  # without the value head of training
    assert "idea" in trained("What is word 3?", max_tokens=10)
    last = steps_of(tmp_path / "run")[-1]
    assert {"clipped", "step_kl"} <= last.keys()
    valid = [line for line in RunDir.open(tmp_path / "run").read_log("metrics.jsonl") if line.get("split") == "valid"]
    assert {"reward", "ended"} <= valid[-1].keys() and "loss" not in valid[-1]


@pytest.mark.parametrize(
    "settings",
    [
        {"grpo_loss": "grpo", "importance": "sequence"},
        {"grpo_loss": "dr_grpo", "group_scale": "none", "clip_range_high": 0.28},
        {"grpo_loss": "bnpo", "group_scale": "batch", "beta": 0.1},
        {"task": "ppo", "whiten_rewards": True, "normalize_rewards": True, "kl_target": 2.0, "kl_horizon": 100},
        {"tune": "lora", "beta": 0.05},
        {"task": "ppo", "tune": "prefix", "tune_tokens": 2},
    ],
)
def test_every_variant_runs_on_finite_numbers(files, base, tmp_path, settings):
    run(files, base, tmp_path / "run", **{"max_steps": 8, **settings})
    steps = steps_of(tmp_path / "run")
    assert all(np.isfinite(line["loss"]) and line["applied"] for line in steps) and len(steps) == 8


def cut(step):
    def listener(event):
        if isinstance(event, StepEvent) and event.step == step:
            raise KeyboardInterrupt

    return listener


@pytest.mark.parametrize(
    "settings",
    [
        {"task": "ppo", "kl_target": 2.0, "kl_horizon": 100, "normalize_rewards": True},
        {"task": "grpo", "beta": 0.05},
        {"task": "grpo", "beta": 0.05, "tune": "lora"},
        {"task": "ppo", "tune": "lora", "kl_target": 2.0, "kl_horizon": 100},
    ],
)
def test_a_resumed_run_is_the_run_that_never_stopped(files, base, tmp_path, settings):
    """Stopped in the middle of an iteration: its answers, the reference and β come from the checkpoint."""
    settings = {**settings, "max_steps": 10, "checkpoint_steps": 1, "eval_every": 5}
    whole = run(files, base, tmp_path / "whole", **settings)
    with pytest.raises(KeyboardInterrupt):
        run(files, base, tmp_path / "cut", callbacks=[cut(6)], **settings)
    resumed = resume(tmp_path / "cut", quiet=True)
    for (name, a), (_, b) in zip(whole.model.named_parameters(), resumed.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    kept = [[(line["loss"], line.get("reward"), line.get("kl"), line.get("beta")) for line in steps_of(tmp_path / n)]
            for n in ("whole", "cut")]  # fmt: skip
    assert kept[0] == kept[1]


def setup_of(files, base, task="ppo", **settings):
    config = parse_config({**{k: v for k, v in SHORT.items() if k != "quiet"}, "task": task, "max_steps": 8,
                           "init_from": str(base), "reward": f"{files}/rewards.py:no_idea", "device": "cpu",
                           "paths": [str(files / "prompts.jsonl")], "batch_tokens": 1024,
                           "out": str(files / "unused"), **settings})  # fmt: skip
    return build_train_setup(config, dist=SingleProcess(), start_time=0.0)


def test_answers_are_sampled_from_the_weights_of_today_and_the_ratio_begins_at_one(files, base):
    setup = setup_of(files, base)
    data = setup.task_data.train
    with torch.no_grad():
        setup.model.head["lm"].out.weight.mul_(0.7)
    data.roll_out(1)
    ids, targets = torch.from_numpy(data.arrays["ids"]), torch.from_numpy(data.arrays["targets"])
    policy = language_model(setup.model)
    expected = torch.log_softmax(policy(ids), -1).gather(2, targets.clamp(min=0)[..., None])[..., 0]
    old = torch.from_numpy(data.arrays["old_logprobs"])
    torch.testing.assert_close(old, expected.masked_fill(targets == -100, 0), atol=1e-5, rtol=1e-5)
    row = 0
    first = int((targets[row] != -100).nonzero()[0])
    seed_text = data.answer([tuple(ids[row, : first + 1].tolist())], [3])
    again = data.answer([tuple(ids[row, : first + 1].tolist())], [3])
    assert seed_text == again


def test_the_reference_is_frozen(files, base):
    """The planted fault: a reference that shares the weights of the policy sees no divergence at all."""
    setup = setup_of(files, base)
    data = setup.task_data.train
    with torch.no_grad():
        setup.model.head["lm"].out.weight.mul_(0.7)
    data.roll_out(1)
    assert data.iteration_metrics["kl"] > 0.01
    data.reference.model = language_model(setup.model)
    data.roll_out(1)
    assert abs(data.iteration_metrics["kl"]) < 1e-4


def test_without_a_penalty_the_model_leaves_its_reference_behind(files, base, tmp_path):
    """β = 0: the reward is all that counts, and the divergence is several times that of a run with a penalty."""
    out = {}
    for beta in (0.0, 0.5):
        run(files, base, tmp_path / str(beta), "ppo", beta=beta, max_steps=40)
        out[beta] = [line["kl"] for line in steps_of(tmp_path / str(beta)) if "kl" in line][-1]
    assert out[0.0] > 2 * abs(out[0.5])


def test_a_value_head_changes_no_logit_and_begins_at_zero(base):
    model = headwater.load(base).model
    ids = torch.arange(3, 10)[None]
    with eval_mode(model):
        expected = model(ids)
        built = with_value_head(model)
        assert torch.equal(built(ids)["lm"], expected) and not built(ids)["value"].any()
        assert torch.equal(language_model(built)(ids), expected)
    assert language_model(built).decoder is built.decoder


def test_ppo_with_an_adapter_keeps_the_base_as_its_reference(files, base, tmp_path):
    """The folder has the adapter and neither base nor value head; the model without its adapter is the base."""
    run(files, base, tmp_path / "run", "ppo", tune="lora", tune_target="all-linear", max_steps=48, lr=1e-2)
    rewards = rewards_of(tmp_path / "run")
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.1
    kl = [line["kl"] for line in steps_of(tmp_path / "run") if "kl" in line]
    assert kl[0] == pytest.approx(0, abs=1e-5) and kl[-1] > 0.01

    names = set(SafetensorsFile(tmp_path / "run" / "model" / "adapter.safetensors"))
    assert names and all("lora_" in name and "value" not in name for name in names)
    tuned = load_with_base(tmp_path / "run")
    plain = headwater.load(base).model.eval()
    ids = torch.arange(3, 10)[None]
    with torch.no_grad():
        changed = tuned.model(ids)
        use_adapter(tuned.model, None)
        torch.testing.assert_close(tuned.model(ids), plain(ids), atol=1e-6, rtol=1e-6)
    assert (changed - plain(ids)).abs().max() > 1e-3


# --------------------------------------------------------------------------------------------------- reward functions


def test_a_function_gets_the_columns_that_it_names(files, base, tmp_path):
    run(files, base, tmp_path / "run", reward="of_column", max_steps=4)
    assert len(rewards_of(tmp_path / "run")) == 2


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("raises", "it gave KeyError: .*no such answer"),
        ("exits", "it gave SystemExit: '3'"),
        ("nan", "it gave 'nan'"),
        ("short", "returned 1"),
        ("number", "it returned '0.5'"),
        ("nothing", "it returned 'None'"),
    ],
)
def test_a_function_that_fails_stops_the_run_in_one_line(files, base, tmp_path, name, words):
    with pytest.raises(BadInput, match=words) as caught:
        run(files, base, tmp_path / "run", reward=name)
    assert "\n" not in str(caught.value) and f"rewards.py:{name} must return" in str(caught.value)
    if name in ("raises", "exits", "nan"):
        assert "for the prompt 'What is word" in str(caught.value)


@pytest.mark.parametrize("name", ["raises", "exits", "nan"])
def test_or_it_goes_on_without_those_answers(files, base, tmp_path, name):
    run(files, base, tmp_path / "run", reward=name, reward_errors="skip", max_steps=8)
    first = next(line for line in steps_of(tmp_path / "run") if "reward" in line)
    assert first["reward"] == 1 and first["unscored"] > 0
    lines = RunDir.open(tmp_path / "run").read_log("metrics.jsonl")
    notes = [line["note"] for line in lines if "such answers are left out" in line.get("note", "")]
    assert len(notes) == 1 and f"rewards.py:{name} gave " in notes[0] and "for the prompt 'What is word" in notes[0]


def test_a_function_that_fails_late_loses_nothing(files, base, tmp_path):
    """The steps before it are saved; once it is mended the run goes on, and is the run that never failed."""
    path = tmp_path / "late.py"
    path.write_text(
        "calls = [0]\ndef late(completions):\n    calls[0] += 1\n"
        "    return [float('idea' in c) if calls[0] < 3 else float('nan') for c in completions]\n"
    )
    settings = {"eval_every": 100, "checkpoint_every": 3600, "max_steps": 12}
    given = {**SHORT, **settings, "task": "grpo", "init_from": str(base), "reward": f"{path}:late"}
    with pytest.raises(RewardError):
        train(files / "prompts.jsonl", **given, out=tmp_path / "run")
    path.write_text("def late(completions):\n    return [float('idea' in c) for c in completions]\n")
    resumed = resume(tmp_path / "run", quiet=True)
    whole = train(files / "prompts.jsonl", **given, out=tmp_path / "whole")
    losses = [[line["loss"] for line in steps_of(tmp_path / name)] for name in ("run", "whole")]
    assert losses[0] == losses[1]
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_reward_model_and_a_classifier_are_rewards_too(base, tmp_path):
    pairs = [{"prompt": f"What is word {n}?", "chosen": "No idea.", "rejected": "It is a word."} for n in range(40)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in pairs))
    train(path, init_from=base, task="reward", out=tmp_path / "rm", quiet=True, max_steps=12, lr=1e-2, eval_every=12)
    table = tmp_path / "labels.tsv"
    table.write_text("text\tlabel\n" + "".join(f"What is word {n}?{'No idea.' if n % 2 else 'It is a word.'}\t"
                                               f"{'dull' if n % 2 else 'good'}\n" for n in range(60)))  # fmt: skip
    train(table, out=tmp_path / "classes", quiet=True, max_steps=30, lr=1e-2, eval_every=30, d_model=16, heads=2,
          layers=1, d_ff=16, vocab=300, batch_tokens=600)  # fmt: skip
    example = headwater.data.conversations.PromptExample.from_cells({"prompt": "What is word 3?"}, {}, 0)
    answers = [Answer(example, "No idea."), Answer(example, "It is a word.")]
    scores = load_reward(str(tmp_path / "rm"))(answers)
    assert scores[0] > scores[1]
    odds = load_reward(f"{tmp_path / 'classes'}:dull")(answers)
    assert odds[0] > 0 > odds[1]
    with pytest.raises(BadSetting, match="no label is called 'dul'; did you mean 'dull'"):
        load_reward(f"{tmp_path / 'classes'}:dul")
    with pytest.raises(BadSetting, match="must be a reward model or a classifier, its task is 'chat'"):
        load_reward(str(base))


def test_the_best_of_several_answers_is_better_than_one(base):
    reward = PythonReward(lambda completions: [float("idea" in text) for text in completions], "idea")
    loaded = headwater.load(base)
    prompts = [f"What is word {n}?" for n in range(12)]
    one = best_of_n(loaded, prompts, reward, n=1, max_tokens=10)
    eight = best_of_n(loaded, prompts, reward, n=8, max_tokens=10)
    assert all(best.reward == max(best.rewards) for best in eight)
    assert sum(best.reward for best in eight) > sum(best.reward for best in one)


def test_the_command_prints_the_best_answer_and_its_reward(files, base, capsys):
    given = ["generate", str(base), "What is word 3?", "--max-tokens", "10", "--seed", "1"]
    best = ["--best-of", "8", "--reward", f"{files}/rewards.py:no_idea"]
    assert cli.main([*given, *best]) == 0
    out, err = capsys.readouterr()
    assert "idea" in out and re.search(r"reward 1, mean of 8 answers 0\.\d+, KL at most 1\.20 nats", err)

    # as JSON: all rewards, and the answer is one of those with the highest
    assert cli.main([*given, *best, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert len(answer["rewards"]) == 8 and answer["reward"] == max(answer["rewards"])
    assert answer["text"].strip() == out.strip()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--best-of", "4"], "--best-of and --reward belong together"),
        (["--reward", "rewards.py:no_idea"], "--best-of and --reward belong together"),
        (["--best-of", "4", "--reward", "{files}/rewards.py:no_idea", "--beam", "2"], "got --beam too; leave it out"),
        (["--best-of", "0", "--reward", "{files}/rewards.py:no_idea"], "n must be at least 1, got 0"),
        (["--best-of", "2", "--reward", "{files}/rewards.py:none"], "it scored none"),
        (["--best-of", "8", "--reward", "{files}/rewards.py:nan"], "must return a finite number, it gave 'nan'"),
    ],
)
def test_best_of_n_is_refused_in_one_line(files, base, capsys, flags, words):
    given = ["generate", str(base), "What is word 3?", "--max-tokens", "10"]
    assert cli.main([*given, *(flag.format(files=files) for flag in flags)]) in (2, 3)
    out, err = capsys.readouterr()
    assert words in err and err.count("\n") == 1 and not out


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("settings", "fault", "words"),
    [
        ({"reward": ""}, BadSetting, "this task needs a reward"),
        ({"reward": "nowhere.py:f"}, NotFound, "there is no file nowhere.py"),
        ({"reward": "{files}/rewards.py:no_ide"}, BadSetting, "no function is called 'no_ide'; did you mean 'no_idea'"),
        ({"reward_errors": "ignore"}, BadSetting, "reward_errors must be stop or skip"),
        ({"rollouts": 18}, BadSetting, r"rollouts \(18\) must be a multiple of group_size \(4\)"),
        ({"grpo_loss": "grop"}, BadSetting, "grpo_loss must be one of grpo"),
        ({"init_from": ""}, BadSetting, "grpo tunes a model that can answer already"),
        ({"clip_range": 1}, BadSetting, "clip_range must be a number from 0 to 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(files, base, tmp_path, settings, fault, words):
    given = {"task": "grpo", "init_from": str(base), "reward": f"{files}/rewards.py:no_idea", "max_steps": 2}
    given |= {k: v.format(files=files) if isinstance(v, str) else v for k, v in settings.items()}
    with pytest.raises(fault, match=words) as caught:
        train(files / "prompts.jsonl", out=tmp_path / "run", **{**SHORT, **given})
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()
