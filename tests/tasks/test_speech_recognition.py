"""Speech recognition from files: learned and transcribed, resumed = uninterrupted, frozen = cached, bad input said."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import torch

from headwater.audio.mel import log_mel
from headwater.cli import main
from headwater.errors import BadInput, BadSetting
from headwater.families.load import load, save
from headwater.tasks import get_task
from headwater.tasks.batch import to_tensors
from headwater.training.api import resume, train
from headwater.training.config import parse_config
from headwater.training.evaluate import evaluate_files
from headwater.training.run_dir import RunDir
from headwater.training.state import StepEvent
from headwater.training.task_data import build_task_data, load_task_data, read_data
from headwater.transcription.api import transcribe
from headwater.transcription.speech_model import load_speech_model
from headwater.transcription.tokens import trained_tokens

from .spoken import record, sentences, speak

TINY = {"d_model": 32, "heads": 2, "layers": 1, "d_ff": 64, "dropout": 0.0, "tokenizer": "char", "quiet": True,
        "batch_tokens": 600, "eval_examples": 8, "final_eval_examples": 8, "log_every": 1}  # fmt: skip
LEARN = {**TINY, "max_steps": 250, "eval_every": 250, "lr": 5e-3, "warmup": 10}


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory):
    before = os.environ.get("HEADWATER_CACHE")
    os.environ["HEADWATER_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    os.environ.pop("HEADWATER_CACHE")
    if before is not None:
        os.environ["HEADWATER_CACHE"] = before


@pytest.fixture(scope="module")
def speech(tmp_path_factory):
    folder = tmp_path_factory.mktemp("speech")
    record(folder, sentences(80))
    return folder


@pytest.fixture(scope="module")
def run(speech, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(speech, out=folder, **LEARN)
    return folder


@pytest.fixture(scope="module")
def unheard(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unheard")
    return record(folder, sentences(12, seed=7), seed=7)


def task_data(path):
    """The datasets of a file, as train() makes them."""
    config = parse_config({**{k: v for k, v in TINY.items() if k != "quiet"}, "paths": [str(path)]})
    summary, splits = read_data(config)
    return load_task_data(config, summary, splits)


# ------------------------------------------------------------------------------------------------ learned and used


def test_a_run_writes_what_it_hears(run, unheard):
    report = evaluate_files(run, [str(unheard[0].parent)], beam=1)
    assert report.metrics["wer"] < 15
    assert not any("said in the training recordings" in note for note in report.notes)
    beam = evaluate_files(run, [str(unheard[0].parent)], beam=3)
    assert beam.metrics["wer"] < 15


def test_transcribe_takes_a_run(run, unheard, capsys):
    texts = [transcribe(path, run, beam_size=1).text.strip() for path in unheard]
    wanted = [path.with_suffix(".txt").read_text().strip() for path in unheard]
    assert sum(a == b for a, b in zip(texts, wanted, strict=True)) >= 10
    assert main(["transcribe", str(unheard[0]), "--model", str(run), "--beam-size", "1"]) == 0
    assert capsys.readouterr().out.strip() == texts[0]


def test_a_long_recording_is_cut_at_pauses(run):
    """Sentences with pauses between them, five times as long as the window."""
    rng = np.random.default_rng(3)
    texts = sentences(8, seed=3)
    pause = np.zeros(6_400)
    samples = np.concatenate([part for text in texts for part in (speak(text, rng), pause)])
    model = load_speech_model(run)
    assert len(samples) / 160 > 4 * model.frames
    heard = transcribe(samples, model, beam_size=1).text.split()
    wanted = " ".join(texts).split()
    assert abs(len(heard) - len(wanted)) <= 4


def test_the_prompt_and_the_targets(speech):
    config = parse_config({**{k: v for k, v in TINY.items() if k != "quiet"}, "paths": [str(speech)]})
    _summary, splits = read_data(config)
    rows = splits["train"]
    data = build_task_data(config, get_task("speech-recognition"), rows[:6], rows[6:8])
    batch = data.train.collate(np.arange(3), 0)
    start, no_stamps = batch.ids[0, :2]
    assert data.tokenizer.piece(int(start)) == "<|startoftranscript|>"
    assert data.tokenizer.piece(int(no_stamps)) == "<|notimestamps|>"
    end = data.tokenizer.token_to_id("<|endoftext|>")
    for row in range(3):
        targets = [int(n) for n in batch.targets[row] if n >= 0]
        assert data.tokenizer.decode(targets[:-1]).strip() == rows[row].text
        assert targets[-1] == end
    assert (batch.targets[:, 0] == -100).all()  # the prompt is given, not learned


def test_the_spectrogram_is_that_of_the_padded_recording(speech):
    config = parse_config({**{k: v for k, v in TINY.items() if k != "quiet"}, "paths": [str(speech)]})
    _summary, splits = read_data(config)
    rows = splits["train"]
    data = build_task_data(config, get_task("speech-recognition"), rows[:6], rows[6:8])
    windows = data.train.windows
    expected = log_mel(windows.clips.row(2), 80, windows.frames / 100)
    assert torch.allclose(torch.from_numpy(windows.take(np.array([2]), 0)[0]), expected, atol=2e-3)  # of 16 bits


def test_resumed_equals_uninterrupted(speech, tmp_path):
    settings = {**TINY, "max_steps": 8, "eval_every": 4, "lr": 1e-2, "checkpoint_steps": 2,
                "augment": "speed=0.1,noise=10,time_mask=5"}  # fmt: skip

    def stop_at_5(event: object) -> None:
        if isinstance(event, StepEvent) and event.step == 5:
            raise KeyboardInterrupt

    train(speech, out=tmp_path / "whole", **settings)
    with pytest.raises(KeyboardInterrupt):
        train(speech, out=tmp_path / "cut", callbacks=[stop_at_5], **settings)
    resume(tmp_path / "cut", quiet=True)
    whole, cut = (dict(load(tmp_path / name).model.named_parameters()) for name in ("whole", "cut"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


# ------------------------------------------------------------------------------------------------ tuning


def test_a_frozen_encoder_is_computed_once(run, speech, tmp_path, monkeypatch):
    """The decoder alone is tuned: its loss on cached states is that on computed ones, and no step runs the encoder."""
    runs = []

    def watch(setup):
        encoder = setup.model.encoder
        encoder.register_forward_hook(lambda *_unused: runs.append(1))
        data = setup.task_data
        batch = to_tensors(data.train.collate(np.arange(4), 0))
        cached = data.task.loss(setup.model, batch, 0.0)
        states, data.train.encoder_states = data.train.encoder_states, None
        fresh = data.task.loss(setup.model, to_tensors(data.train.collate(np.arange(4), 0)), 0.0)
        data.train.encoder_states = states
        assert states is not None
        assert torch.allclose(cached, fresh, rtol=1e-2)
        assert len(runs) == 1
        runs.clear()

    settings = {**TINY, "max_steps": 3, "eval_every": 3}
    del settings["tokenizer"], settings["d_model"], settings["heads"], settings["layers"], settings["d_ff"]
    tuned = train(speech, init_from=str(run), tune="decoder", out=tmp_path / "tuned", on_setup=watch, **settings)
    assert not runs
    base, model = dict(load(run).model.named_parameters()), dict(tuned.model.named_parameters())
    assert all(torch.equal(base[name], model[name]) for name in base if name.startswith("encoder."))
    assert any(not torch.equal(base[name], model[name]) for name in base if name.startswith("decoder."))


def test_lora_is_merged_and_exported(run, speech, tmp_path):
    settings = {
        name: value for name, value in TINY.items() if name not in ("tokenizer", "d_model", "heads", "layers", "d_ff")
    }
    train(speech, init_from=str(run), tune="lora", out=tmp_path / "lora", max_steps=3, eval_every=3, **settings)
    loaded = load(tmp_path / "lora")
    save(loaded, tmp_path / "whisper", layout="whisper")
    config = json.loads((tmp_path / "whisper" / "config.json").read_text())
    assert config["architectures"] == ["WhisperForConditionalGeneration"]
    mel = torch.randn(1, 80, 2 * config["max_source_positions"])
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        both = [model(ids, source=mel) for model in (loaded.model, load(tmp_path / "whisper").model)]
    assert torch.allclose(*both, atol=2e-5)


@pytest.mark.parametrize("method", ["full", "decoder", "lora"])
def test_a_shorter_window(run, speech, tmp_path, method):
    """A tuned model may hear less at once: its encoder has the first positions of the base, in all its files."""
    whole = load_speech_model(run).frames
    seconds = round(whole / 100 - 0.1, 1)
    settings = {
        name: value for name, value in TINY.items() if name not in ("tokenizer", "d_model", "heads", "layers", "d_ff")
    }
    tuned = train(speech, init_from=str(run), tune=method, out=tmp_path / "run", window_seconds=seconds, max_steps=1,
                  eval_every=1, lr=1e-9, **settings)  # fmt: skip
    assert f"longer than {seconds:g} s" in notes_of(tmp_path / "run")
    model = load_speech_model(tmp_path / "run")
    assert model.frames == whole - 10
    save(tuned.model, tmp_path / "whisper", layout="whisper")
    saved = load(tmp_path / "whisper").model
    assert saved.spec.encoder.embed.position.size == model.frames // 2

    base = load(run).model
    mel = torch.randn(1, 80, model.frames, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        states = [each.encode(mel).hidden_states for each in (base, model.transformer, saved)]
    assert torch.allclose(states[0], states[1], atol=1e-4)
    assert torch.allclose(states[0], states[2], atol=1e-4)


def test_a_longer_window_than_that_of_the_base_is_refused(run, speech, tmp_path):
    with pytest.raises(BadSetting, match="--window-seconds must be at most"):
        train(speech, init_from=str(run), out=tmp_path / "run", window_seconds=29, max_steps=1, quiet=True)


# ----------------------------------------------------------------------------------------------- layouts, notes, errors


def notes_of(run) -> str:
    return "\n".join(str(line["note"]) for line in RunDir.open(run).read_log("metrics.jsonl") if "note" in line)


def test_unreadable_and_strange_recordings_are_said(tmp_path):
    folder = tmp_path / "speech"
    paths = record(folder, sentences(12))
    paths[0].write_bytes(b"RIFF nothing")
    paths[1].with_suffix(".txt").write_text("low " * 200)
    predictor = train(folder, out=tmp_path / "run", **{**TINY, "max_steps": 2, "eval_every": 2})
    notes = (tmp_path / "run").rglob("*.jsonl")
    text = "\n".join(path.read_text() for path in notes)
    assert predictor.task == "speech-recognition"
    assert "cannot be read and are left out" in text
    assert "longer than anyone speaks" in text


def test_an_unknown_language_is_refused(run, speech, tmp_path):
    with pytest.raises(BadSetting, match="hears English only"):
        train(speech, init_from=str(run), language="de", out=tmp_path / "run", quiet=True, max_steps=1)


def test_each_row_has_its_language(speech, tmp_path):
    """The languages of a table become tokens of a model from scratch, and come back in its prompts."""
    names = sorted(path.stem for path in speech.glob("*.wav"))
    languages = ["fr", "German", "zh-CN", ""]
    rows = [(speech / f"{name}.wav", (speech / f"{name}.txt").read_text(), languages[n % 4])
            for n, name in enumerate(names)]  # fmt: skip
    (tmp_path / "all.tsv").write_text(
        "path\ttext\tlanguage\n" + "".join(f"{path}\t{text.strip()}\t{language}\n" for path, text, language in rows)
    )
    data = task_data(tmp_path / "all.tsv")
    tokens = trained_tokens(data.tokenizer, "")
    assert sorted(tokens.languages) == ["de", "en", "fr", "zh"]
    assert {row.language for row in data.valid_examples} <= set(tokens.languages)
    prompts = data.train.prompts
    assert set(prompts[:, 1].tolist()) == set(tokens.languages.values())
    assert (prompts[:, [0, 2, 3]] == [tokens.start, tokens.transcribe, tokens.no_timestamps]).all()


def test_the_recordings_of_one_speaker_are_split(speech, tmp_path):
    """Nobody is in two splits; of one speaker alone the recordings are."""
    names = sorted(path.stem for path in speech.glob("*.wav"))
    for name, speakers in (("one", ["ann"]), ("three", ["ann", "ben", "cat"])):
        rows = [f"{speech / each}.wav\tlow\t{speakers[n % len(speakers)]}" for n, each in enumerate(names)]
        (tmp_path / f"{name}.tsv").write_text("path\ttext\tspeaker\n" + "\n".join(rows))
    one = task_data(tmp_path / "one.tsv")
    assert 0 < len(one.valid.windows) < len(names) // 4
    three = task_data(tmp_path / "three.tsv")
    assert {row.speaker for row in three.valid_examples} < {"ann", "ben", "cat"}
    assert len(three.valid.windows) >= len(names) // 3 - 1


def test_rows_in_unknown_languages_are_left_out(speech, tmp_path):
    path = tmp_path / "strange.tsv"
    names = sorted(each.stem for each in speech.glob("*.wav"))
    lines = [f"{speech / name}.wav\tone\t{'elvish' if n < 3 else 'fr'}" for n, name in enumerate(names)]
    path.write_text("path\ttext\tlanguage\n" + "\n".join(lines))
    data = task_data(path)
    left_out = [note for note in data.notes if "languages that the model does not know" in note]
    assert left_out and "elvish" in left_out[0]
    assert len(data.train.windows) + len(data.valid.windows) == len(names) - 3


def test_augmentations_are_named(speech, tmp_path):
    with pytest.raises(BadSetting, match="sounds have no 'sped'; did you mean 'speed'"):
        train(speech, augment="sped=0.1", out=tmp_path / "run", quiet=True, max_steps=1)
    with pytest.raises(BadSetting, match="speed must be above 0 and at most 0.5"):
        train(speech, augment="speed=3", out=tmp_path / "run", quiet=True, max_steps=1)


def test_a_text_model_cannot_hear(tmp_path, speech):
    (tmp_path / "pairs.tsv").write_text("".join(f"source {n}\ttarget {n}\n" for n in range(40)))
    train(tmp_path / "pairs.tsv", out=tmp_path / "text", size="xs", max_steps=1, eval_every=1, quiet=True)
    with pytest.raises(BadSetting, match="must be a model that reads sound"):
        train(speech, init_from=str(tmp_path / "text"), out=tmp_path / "run", quiet=True, max_steps=1)


def test_all_recordings_too_long(tmp_path):
    record(tmp_path / "speech", sentences(4))
    with pytest.raises(BadInput, match="every recording is longer than 0.1 s"):
        train(tmp_path / "speech", window_seconds=0.1, out=tmp_path / "run", **{**TINY, "max_steps": 1})
