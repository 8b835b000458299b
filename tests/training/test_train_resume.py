"""From files to a model and on: every task trains, is resumed, measured and used; faults are said in a line."""

from __future__ import annotations

import dataclasses
import json
import os

import pytest
import torch

from headwater.data.dates import dates_dataset
from headwater.data.examples import QAExample
from headwater.errors import BadFile, BadInput, BadSetting, NotFound, Unavailable
from headwater.training.api import resume, train
from headwater.training.evaluate import evaluate_files
from headwater.training.predict import load_run
from headwater.training.run_dir import RunDir, RunLock, unused_path
from headwater.training.state import NoteEvent, StepEvent, StopReason
from headwater.weights.native import is_native, load_native, save_native

TINY = {"size": "xs", "max_steps": 4, "batch_tokens": 600, "eval_examples": 20, "eval_every": 2, "log_every": 1}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """One small file for each task."""
    folder = tmp_path_factory.mktemp("data")
    pairs = dates_dataset("train", 300)
    (folder / "pairs.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in pairs))
    (folder / "labels.csv").write_text(
        "text,label\n"
        + "".join(f"{p.source},{'tagged' if p.source[0] == '>' else 'plain'}\n".replace(", ", " ") for p in pairs)
    )
    (folder / "words.conll").write_text(
        "\n\n".join("\n".join(f"{w} {'B-NUM' if w[0].isdigit() else 'O'}" for w in p.source.split()) for p in pairs)
        + "\n"
    )
    (folder / "running.txt").write_text("\n".join(f"{a} is {b}." for a, b in pairs))
    about = [{"context": f"The day was {p.target}. It rained.", "at": 12, "text": p.target} for p in pairs[:60]]
    asked = [{"context": a["context"], "qas": [{"id": str(n), "question": "What day was it?",
              "answers": [{"text": a["text"], "answer_start": a["at"]}]}]} for n, a in enumerate(about)]  # fmt: skip
    (folder / "questions.json").write_text(json.dumps({"data": [{"paragraphs": asked}]}))
    return folder


TASKS = {
    "pairs.tsv": ("seq2seq", "15 novembre 2026", str),
    "labels.csv": ("classification", "15 novembre 2026", dict),
    "words.conll": ("token-classification", "15 novembre 2026", list),
    "running.txt": ("language-model", "The day", str),
    "questions.json": ("question-answering", QAExample("What day?", "The day was 2026-11-15."), str),
}


@pytest.mark.usefixtures("plots")
@pytest.mark.parametrize("name", TASKS)
def test_every_task_trains_is_measured_and_used(files, tmp_path, name):
    task, given, kind = TASKS[name]
    trained = train(files / name, out=tmp_path / "run", context_length=32, **TINY)
    assert trained.task == task and trained.result.stop_reason is StopReason.FINISHED
    assert isinstance(trained(given, **({"max_tokens": 4} if kind is str and task == "language-model" else {})), kind)
    scores = evaluate_files(tmp_path / "run", [str(files / name)], max_examples=10).metrics
    assert scores["loss"] > 0
    run = RunDir.open(tmp_path / "run")
    lines = [line for line in run.read_log("metrics.jsonl") if line.get("split") == "train"]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["tokens_per_second"] >= line["targets_per_second"] > 0 for line in lines)
    assert trained.result.state.tokens_seen > trained.result.state.targets_seen > 0 or task == "language-model"
    assert {p.name for p in run.plots_dir.iterdir()} >= {"loss.png", "learning.png"}
    assert is_native(run.model_dir) and (run.model_dir / "tokenizer.json").exists()


@pytest.mark.parametrize("objective", ["mlm", "span-corruption", "denoising"])
def test_other_objectives_of_running_text(files, tmp_path, objective):
    trained = train(files / "running.txt", out=tmp_path / "run", objective=objective, context_length=32, **TINY)
    assert trained.metadata["objective"] == objective and trained.result.stop_reason is StopReason.FINISHED


def test_resumed_through_the_files_is_never_stopped(files, tmp_path):
    whole = train(
        files / "pairs.tsv", out=tmp_path / "a", **{**TINY, "max_steps": 8}, checkpoint_steps=3, log_order=True
    )

    def cut(event):
        if isinstance(event, StepEvent) and event.step == 5:
            raise KeyboardInterrupt

    more = {**TINY, "max_steps": 8, "checkpoint_steps": 3, "log_order": True}
    with pytest.raises(KeyboardInterrupt):
        train(files / "pairs.tsv", out=tmp_path / "b", callbacks=[cut], **more)
    received = []
    again = resume(tmp_path / "b", callbacks=[received.append])
    assert "resumed at step 3" in [e.text for e in received if isinstance(e, NoteEvent)]
    for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert (tmp_path / "a/order.jsonl").read_text() == (tmp_path / "b/order.jsonl").read_text()
    keep = ("step", "split", "loss", "grad_norm", "lr", "bleu")
    lines = [
        [{k: x.get(k) for k in keep} for x in RunDir(tmp_path / r).read_log("metrics.jsonl") if "split" in x]
        for r in "ab"
    ]
    assert lines[0] == lines[1]


def test_what_makes_it_another_run_is_refused(files, tmp_path):
    copy = tmp_path / "pairs.tsv"
    copy.write_text((files / "pairs.tsv").read_text())
    train(copy, out=tmp_path / "run", **TINY)
    with pytest.raises(BadSetting, match="seed cannot change in a resumed run: it was 0, got 9"):
        resume(tmp_path / "run", seed=9)
    with pytest.raises(BadSetting, match="there is no setting 'max_step'; did you mean 'max_steps'"):
        resume(tmp_path / "run", max_step=9)
    received = []
    resume(tmp_path / "run", max_steps=6, callbacks=[received.append])
    assert "max_steps was 4 and is 6 now" in [e.text for e in received if isinstance(e, NoteEvent)]
    with copy.open("a") as file:
        file.write("one more\trow\n")
    with pytest.raises(BadSetting, match="data must be the same as when .* was saved, it has changed"):
        resume(tmp_path / "run")


def test_a_spoiled_checkpoint_is_said_and_the_one_before_is_used(files, tmp_path):
    train(files / "pairs.tsv", out=tmp_path / "run", checkpoint_steps=2, **TINY)
    newest = tmp_path / "run/checkpoints/step-00000004/model.safetensors"
    raw = bytearray(newest.read_bytes())
    raw[-1] ^= 1
    newest.write_bytes(bytes(raw))
    received = []
    resume(tmp_path / "run", callbacks=[received.append])
    notes = [e.text for e in received if isinstance(e, NoteEvent)]
    assert any("step-00000004: model.safetensors is not what was written (SHA-256)" in n for n in notes)
    assert "resumed at step 2" in notes


def test_folders_are_never_written_over_or_through(files, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    with pytest.raises(BadSetting, match="must be new or empty"):
        train(files / "pairs.tsv", out=tmp_path / "full", **TINY)
    (tmp_path / "link").symlink_to(tmp_path / "full")
    (tmp_path / "file").write_text("x")
    for odd, kind in (("link", "a link"), ("file", "a file")):
        with pytest.raises(BadFile, match=f"must be a folder, it is {kind}"):
            train(files / "pairs.tsv", out=tmp_path / odd, **TINY)
    assert (tmp_path / "full/notes.txt").read_text() == "mine"
    with pytest.raises(NotFound, match="must be the folder of a run, it has no config.yaml"):
        resume(tmp_path / "full")


def test_a_second_trainer_is_refused(files, tmp_path):
    train(files / "pairs.tsv", out=tmp_path / "run", **TINY)
    with RunLock(tmp_path / "run/lock"), pytest.raises(Unavailable, match=f"process {os.getpid()} on .* does"):
        resume(tmp_path / "run")


def test_names_of_runs_do_not_collide(tmp_path):
    first = unused_path("seq2seq", "my data!", tmp_path)
    assert first.name == "my-data"
    first.mkdir(parents=True)
    assert unused_path("seq2seq", "my data!", tmp_path).name == "my-data-2"


def test_a_run_can_start_from_another(files, tmp_path):
    first = train(files / "pairs.tsv", out=tmp_path / "a", **TINY)
    same = {"init_from": tmp_path / "a", "tokenizer": tmp_path / "a/model", "lr": 1e-12}
    second = train(files / "pairs.tsv", out=tmp_path / "b", **{**TINY, "max_steps": 1}, **same)
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)
    with pytest.raises(BadSetting, match="causal needs a decoder, the model has an encoder and a decoder"):
        train(files / "running.txt", out=tmp_path / "c", init_from=str(tmp_path / "a"), **TINY)
    with pytest.raises(BadSetting, match="the model has .* tokens, the tokenizer"):
        train(
            files / "pairs.tsv", out=tmp_path / "c", init_from=str(tmp_path / "a"), tokenizer="bpe", vocab=4000, **TINY
        )


def test_another_task_keeps_the_body_and_has_a_new_head(files, tmp_path):
    first = train(files / "running.txt", out=tmp_path / "a", objective="mlm", **TINY)
    second = train(
        files / "labels.csv", out=tmp_path / "b", **{**TINY, "max_steps": 1}, init_from=tmp_path / "a", lr=1e-12
    )
    before, now = dict(first.model.named_parameters()), dict(second.model.named_parameters())
    for path in now:
        if not path.startswith("head.") and path in before:
            torch.testing.assert_close(before[path], now[path], atol=1e-6, rtol=0)
    assert (
        second.metadata["labels"]
        and "encoder.embed.token_types.weight" in now
        and "encoder.embed.token_types.weight" not in before
    )
    assert second.tokenizer.hash == first.tokenizer.hash and RunDir.open(tmp_path / "b").load_config().lr == 1e-12


def test_questions_a_user_may_ask(files, tmp_path):
    with pytest.raises(BadSetting, match="it needs files or examples to learn from"):
        train()
    with pytest.raises(BadSetting, match="no schedule is called 'cosin'; did you mean 'cosine'"):
        train(files / "pairs.tsv", schedule="cosin", out=tmp_path / "x", **TINY)
    with pytest.raises(BadSetting, match="no size is called 'xss'; did you mean 'xs'"):
        train(files / "pairs.tsv", out=tmp_path / "x", **{**TINY, "size": "xss"})
    with pytest.raises(NotFound, match="tokenizer must be a kind or a folder, 'bep' is neither"):
        train(files / "pairs.tsv", out=tmp_path / "x", tokenizer="bep", **TINY)
    with pytest.raises(BadInput, match="no row has at most 1 tokens"):
        train(files / "pairs.tsv", out=tmp_path / "x", max_length=1, **TINY)
    with pytest.raises(Unavailable, match="device 'cuda:7' cannot be used"):
        train(files / "pairs.tsv", out=tmp_path / "x", device="cuda:7", **TINY)
    assert not (tmp_path / "x").exists()


# ----------------------------------------------------------------------------------------------------- the model folder


def test_a_model_folder_reads_back_what_was_written(files, tmp_path):
    trained = train(files / "pairs.tsv", out=tmp_path / "run", **TINY)
    save_native(tmp_path / "m", trained.model, trained.metadata)
    again = load_native(tmp_path / "m")
    assert again.model.spec == trained.model.spec and again.metadata == trained.metadata
    for (name, a), (_, b) in zip(trained.model.named_parameters(), again.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert again.model.head.out.weight is again.model.decoder.embed.tokens.weight


def test_a_model_folder_of_another_shape_is_refused(files, tmp_path):
    trained = train(files / "pairs.tsv", out=tmp_path / "run", **TINY)
    config = json.loads((tmp_path / "run/model/config.json").read_text())
    wrong = dataclasses.replace(trained.model.spec, decoder=dataclasses.replace(trained.model.spec.decoder, layers=()))
    save_native(tmp_path / "m", wrong.build(seed=0), {})
    (tmp_path / "m/config.json").write_text(json.dumps(config))
    with pytest.raises(BadFile, match="must hold this model's tensors"):
        load_native(tmp_path / "m")
    (tmp_path / "m/config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    with pytest.raises(BadFile, match="model_type must be 'headwater', it is 'gpt2'"):
        load_native(tmp_path / "m")
    with pytest.raises(NotFound, match="is not the folder of a run or of a model"):
        load_run(tmp_path / "nothing")
