"""Instruction tuning: a run on conversations, what it shows before it begins, and what it refuses."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
import torch
from rich.console import Console

import headwater
from headwater import cli
from headwater.errors import BadInput
from headwater.families.load import load
from headwater.tasks import get_task
from headwater.tasks.batch import to_tensors
from headwater.tasks.chat import ChatDataset, ChatOutput, one_to_a_row
from headwater.training.config import parse_config
from headwater.training.distributed import SingleProcess
from headwater.training.evaluate import eval_task_data
from headwater.training.predict import load_run
from headwater.training.preview import print_preview
from headwater.training.setup import build_train_setup

TINY = {"d_model": 32, "layers": 1, "heads": 2, "d_ff": 64, "vocab": 300, "dropout": 0.0, "quiet": True}


@pytest.fixture(scope="module")
def chat_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("chat") / "chat.jsonl"
    answer = {"role": "assistant", "content": "It is a word."}
    rows = [{"messages": [{"role": "user", "content": f"What is word {n}?"}, answer]} for n in range(40)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture(scope="module")
def trained(chat_file, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "chat"
    settings = {"max_steps": 40, "eval_every": 20, "batch_tokens": 300, "lr": 1e-2, "out": str(out)}
    return headwater.train(chat_file, **settings, **TINY)


def test_a_run_answers_and_stops_by_itself(trained):
    assert trained("What is word 91?") == "It is a word."
    lines = [json.loads(line) for line in (trained.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["ended"] for line in lines if line.get("split") == "valid"][-1] == 100
    loaded = load(trained.folder)
    assert loaded.tokenizer.chat_template and loaded.eos_ids == (loaded.tokenizer.eos_id,)


def test_a_chat_goes_on_with_the_trained_model(trained, monkeypatch, capsys):
    lines = iter(["What is word 92?"])

    def read_line(prompt=""):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read_line)
    assert cli.main(["chat", str(trained.folder), "--temperature", "0"]) == 0
    assert "It is a word." in capsys.readouterr().out


@pytest.mark.parametrize("method", ["prefix", "prompt", "p-tuning"])
def test_virtual_tokens_are_tuned_on_conversations_one_to_a_row(chat_file, trained, method):
    setup = setup_of(chat_file, init_from=str(trained.folder), tune=method, tune_tokens=3)
    data = setup.task_data.train
    assert [len(group) for group in data.groups] == [1] * len(data.groups) and len(data.groups) > 30
    batch = to_tensors(data.collate(np.array([0, 1]), 0))
    loss = setup.task_data.task.loss(setup.model, batch, 0.0)
    loss.backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in setup.model.parameters())
    assert all(p.grad is None for p in setup.model.parameters() if not p.requires_grad)


def test_a_conversation_alone_in_its_row_has_the_loss_of_a_packed_one(chat_file):
    setup = setup_of(chat_file)
    task, packed = setup.task_data.task, setup.task_data.train
    alone = ChatDataset(packed.rows, one_to_a_row(packed.rows), packed.special_tokens, 300, 0)
    model = setup.model.double().eval()
    sums = [task.loss(model, to_tensors(each.collate(np.arange(len(each.groups)), 0)), 0.0).item()
            for each in (packed, alone)]  # fmt: skip
    assert sums[0] == pytest.approx(sums[1], rel=1e-12)


def test_a_run_is_evaluated_as_it_was_trained(chat_file, trained, tmp_path):
    """Also without a template, where a message is the plain text of the prompt."""
    rows = [{"prompt": f"What is word {n}?", "completion": " It is a word."} for n in range(40)]
    path = tmp_path / "plain.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    out = tmp_path / "run"
    headwater.train(path, init_from=trained.folder, chat_template="none", out=out, max_steps=2, eval_every=2,
                    batch_tokens=300, quiet=True)  # fmt: skip
    for run, has_template in ((out, False), (trained.folder, True)):
        data = eval_task_data(load_run(run), [str(path)])
        assert ("Assistant" in "".join(text for text, _learned in data.preview)) == has_template
        assert not data.notes
        assert get_task("chat").usage(data.tokenizer).split()[1] == ("chat" if has_template else "generate")


def setup_of(path, **settings):
    config = parse_config({"paths": [str(path)], "max_steps": 2, "eval_every": 2, "eval_examples": 1,
                           "batch_tokens": 300, "device": "cpu", "out": str(path.parent / "unused"),
                           **{k: v for k, v in TINY.items() if k != "quiet"}, **settings})  # fmt: skip
    return build_train_setup(config, dist=SingleProcess(), start_time=0.0)


def test_the_loss_is_on_answers_alone(chat_file):
    """What stands in the prompt changes no gradient but through attention: its logits are never asked for."""
    setup = setup_of(chat_file)
    task, data = setup.task_data.task, setup.task_data.train
    batch = to_tensors(data.collate(data.sample_rows(4), 0))
    learned = batch["targets"] != -100
    assert 0 < int(learned.sum()) < int((batch["document_ids"] > 0).sum()) / 2
    logits = setup.model(batch["ids"], document_ids=batch["document_ids"])
    by_hand = -torch.log_softmax(logits, -1)[learned].gather(1, batch["targets"][learned][:, None]).sum()
    loss = task.loss(setup.model.eval(), batch, 0.0)
    torch.testing.assert_close(loss, by_hand)
    everywhere = {**batch, "targets": torch.where(batch["document_ids"] > 0, batch["ids"], -100)}
    assert not torch.allclose(task.loss(setup.model, everywhere, 0.0), by_hand)  # the planted fault


def test_the_preview_marks_what_is_learned(chat_file):
    setup = setup_of(chat_file)
    shown = [text for text, learned in setup.task_data.preview if learned]
    assert len(shown) == 1 and shown[0].startswith("It is") and shown[0].endswith("<eos>")
    console = Console(width=80, record=True, file=io.StringIO())
    print_preview(setup.task_data, console)
    assert f"«{shown[0]}»" in console.export_text()
    coloured = Console(width=80, record=True, force_terminal=True, color_system="standard", file=io.StringIO())
    print_preview(setup.task_data, coloured)
    assert f"\x1b[1;32m{shown[0]}" in coloured.export_text(styles=True)


def test_the_plan_counts_the_answer_tokens(chat_file, capsys):
    flags = [f"--{k.replace('_', '-')}={v}" for k, v in TINY.items() if k != "quiet"]
    assert cli.main(["train", str(chat_file), *flags, "--max-steps", "2", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "tokens are learned" in out and "«It is" in out


def test_a_run_that_would_learn_nothing_is_refused(chat_file):
    with pytest.raises(BadInput, match="no answer token to learn from: every answer is beyond the limit of tokens"):
        setup_of(chat_file, max_length=3, truncate=True)


def test_metrics_of_answers():
    outputs = [ChatOutput("a b c", True), ChatOutput("a b d", False)]
    scores = headwater.tasks.TASKS["chat"].metrics(outputs, ["a b c", "a b c"], None)
    assert scores["exact"] == 50 and scores["ended"] == 50
