"""Tuned runs in two processes: the losses, adapter and metrics of one, also after a resume with another number."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import headwater
from headwater.families.load import load
from headwater.quantization.layers import quantize
from headwater.training.distributed import SingleProcess, broadcast_model
from headwater.training.run_dir import RunDir
from headwater.training.state import StepEvent
from headwater.tuning import LoRA, PrefixTuning, adapter_tensors, copy_adapter, tune, tuning_of, use_adapter
from headwater.weights.native import save_native
from headwater.weights.safetensors import SafetensorsFile

ENV = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2] / "src"), "OMP_NUM_THREADS": "1"}
TEXT = "".join(f"the {a} {b} sees a {c}.\n" for a in ("old", "red", "big") for b in ("cat", "dog") for c in "abcdefg")
SETTINGS = {"batch_tokens": 200, "max_steps": 6, "eval_every": 3, "eval_examples": 4, "final_eval_examples": 8,
            "log_every": 1, "context_length": 16, "dropout": 0.0, "checkpoint_steps": 2, "lr": 1e-2}  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT * 6)
    return path


@pytest.fixture(scope="module")
def base(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "run"
    settings = {**SETTINGS, "size": "xs", "task": "language-model", "tokenizer": "char", "quiet": True}
    headwater.train(text, out=folder, **settings)
    return folder


def command(*words):
    done = subprocess.run(
        [sys.executable, "-m", "headwater", "train", *map(str, words), "--quiet"],
        env=ENV, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def flags(settings):
    return [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", value)]


def lines(folder, *splits):
    wanted = ("step", "split", "loss", "perplexity", "reward", "margin", "kl")
    log = [line for line in RunDir.open(folder).read_log("metrics.jsonl") if line.get("split") in splits]
    return [{name: line[name] for name in wanted if name in line} for line in log]


def assert_same_run(folder, whole):
    for splits in (("train",), ("valid", "final")):
        found, expected = lines(folder, *splits), lines(whole, *splits)
        assert [line.pop("split") for line in found] == [line.pop("split") for line in expected]
        assert found == [pytest.approx(line, abs=2e-6, rel=1e-5) for line in expected]
    names = [sorted(path.name for path in (run / "model").iterdir()) for run in (folder, whole)]
    assert names[0] == names[1] and "adapter.safetensors" in names[0]
    ours, theirs = (SafetensorsFile(run / "model" / "adapter.safetensors") for run in (folder, whole))
    assert sorted(ours) == sorted(theirs)
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-5) for name in ours)


TARGET = {"tune": "lora", "tune_target": ["*attn.q", "*.embed.tokens"]}  # the table is tied to the head


@pytest.fixture(scope="module")
def whole(text, base, tmp_path_factory):
    """The run of one process."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    headwater.train(text, out=folder, quiet=True, init_from=base, **SETTINGS, **TARGET)
    return folder


def test_a_run_of_one_process_is_resumed_by_two(text, base, whole, tmp_path):
    def stop(event):
        if isinstance(event, StepEvent) and event.step == 5:
            raise KeyboardInterrupt

    stopped = tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt):
        headwater.train(text, out=stopped, quiet=True, init_from=base, callbacks=[stop], **SETTINGS, **TARGET)
    command("--resume", stopped, "--nproc", 2)
    assert_same_run(stopped, whole)


@pytest.mark.slow
def test_two_processes_find_the_run_of_one(text, base, whole, tmp_path):
    words = flags({**SETTINGS, "tune": "lora", "init_from": base})
    command(text, *words, "--tune-target", *TARGET["tune_target"], "--out", tmp_path / "pair", "--nproc", 2)
    assert_same_run(tmp_path / "pair", whole)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["prefix", "pfeiffer", "quantized"])
def test_adapters_that_stay_beside_their_base(text, base, tmp_path, method):
    """The model in use has other parameters than its spec says: nothing but the adapter may be sent around."""
    source = base
    if method == "quantized":
        loaded = load(base)
        quantize(loaded.model, "int8", ["decoder.*"])
        source = tmp_path / "packed"
        save_native(source, loaded.model, loaded.config["metadata"])
        loaded.tokenizer.save(source)
    words = flags({**SETTINGS, "tune": "lora" if method == "quantized" else method, "init_from": source})
    for count in (1, 2):
        command(text, *words, "--out", tmp_path / str(count), "--nproc", count)
    assert_same_run(tmp_path / "2", tmp_path / "1")


class Counting(SingleProcess):
    """A rank without the files of the run, which counts the numbers that are sent to it."""

    received = 0

    def broadcast(self, value):
        return True

    def broadcast_tensors(self, tensors):
        for tensor in tensors:
            self.received += tensor.numel()
            tensor.fill_(0.5)


@pytest.mark.parametrize("method", [LoRA(r=2, target=("*attn.q", "*.embed.tokens")), PrefixTuning(3)])
def test_the_adapter_alone_is_broadcast(base, method):
    model = tune(load(base).model, method)
    rank = Counting()
    received = broadcast_model(None, model, rank)
    assert rank.received == sum(tensor.numel() for tensor in adapter_tensors(model).values())
    assert all(bool((tensor == 0.5).all()) for tensor in adapter_tensors(received).values())
    assert not any(bool((tensor == 0.5).all()) for tensor in adapter_tensors(model).values())


def test_a_copy_shares_the_base_and_has_its_own_adapter(base):
    model = tune(load(base).model, LoRA(r=2), PrefixTuning(3))
    copied = copy_adapter(model)
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        before = model(ids)
        assert torch.equal(copied(ids), before)
        for tensor in adapter_tensors(copied).values():
            tensor.add_(0.5)
        assert torch.equal(model(ids), before) and not torch.allclose(copied(ids), before, atol=1e-3)
        use_adapter(copied, None)  # a record of its own
        assert torch.equal(model(ids), before) and tuning_of(model).selection.active == "default"
    weight = "decoder.layers.0.ffn.up.weight"
    assert copied.get_parameter(weight) is model.get_parameter(weight)


# ---------------------------------------------------------------------------------------------- preferences and rewards

REWARDS = "def words(completions):\n    return [float(len(set(text.split()))) for text in completions]\n"


@pytest.mark.slow
@pytest.mark.parametrize("task", ["preference", "grpo", "ppo"])
def test_preferences_and_rewards_in_two_processes(tmp_path, task):
    """Both processes sample the same answers, and share the steps that learn from them."""
    answers = ["It is a word.", "No idea."]
    rows = [{"prompt": f"What is word {n}?", "completion": answers[n % 2]} for n in range(40)]
    if task == "preference":
        rows = [{"prompt": row["prompt"], "chosen": answers[1], "rejected": answers[0]} for row in rows]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    chat = tmp_path / "chat.jsonl"
    chat.write_text("".join(json.dumps({"prompt": r["prompt"], "completion": answers[0]}) + "\n" for r in rows))
    (tmp_path / "rewards.py").write_text(REWARDS)
    sizes = {"d_model": 32, "layers": 1, "heads": 2, "d_ff": 64, "vocab": 300, "dropout": 0.0, "quiet": True}
    headwater.train(chat, task="chat", max_steps=10, eval_every=10, out=tmp_path / "base", **sizes)

    settings = {"init_from": tmp_path / "base", "task": task, "tune": "lora", "max_steps": 6, "eval_every": 3,
                "eval_examples": 4, "log_every": 1, "lr": 1e-3, "batch_tokens": 400, "checkpoint_steps": 2}  # fmt: skip
    if task != "preference":
        reward = f"{tmp_path}/rewards.py:words"
        settings |= {"reward": reward, "rollouts": 8, "minibatch": 4, "group_size": 4, "answer_tokens": 6}
    for count in (1, 2):
        command(data, *flags(settings), "--out", tmp_path / str(count), "--nproc", count)
    assert_same_run(tmp_path / "2", tmp_path / "1")
