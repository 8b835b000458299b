"""Audio classification: folders of classes, the command, a run in transformers' layout; bad input in one line."""

from __future__ import annotations

import json

import numpy as np
import pytest
import soundfile
import torch
import transformers

from headwater.cli import main
from headwater.errors import BadInput
from headwater.families.load import load, save
from headwater.training.api import train

from .spoken import RATE, TONES, record, speak

TINY = {"d_model": 32, "heads": 2, "layers": 1, "d_ff": 64, "quiet": True, "batch_tokens": 300, "eval_every": 60,
        "max_steps": 60, "lr": 1e-2, "dropout": 0.0, "eval_examples": 8}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADWATER_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def sounds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sounds")
    for number, name in enumerate(TONES):
        record(folder / name, [name] * 16, seed=number, with_text=False)
    return folder


@pytest.fixture(scope="module")
def run(sounds, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(sounds, out=folder, **TINY)
    return folder


def test_a_run_tells_the_classes_apart(run, tmp_path, capsys):
    for name in TONES:
        soundfile.write(tmp_path / f"{name}.wav", speak(name, np.random.default_rng(9)), RATE)
    (tmp_path / "broken.wav").write_bytes(b"nothing")
    assert main(["classify", str(run), str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    lines = [line.split("\t") for line in out.splitlines()]
    assert {path.rpartition("/")[2].removesuffix(".wav"): label for path, label, _p in lines} == {n: n for n in TONES}
    assert "broken.wav" in err
    assert main(["classify", str(run), str(tmp_path / "low.wav"), "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["output"]) == set(TONES)


def test_of_a_longer_recording_the_beginning_is_used(sounds, tmp_path, capsys):
    rng = np.random.default_rng(3)
    for name in TONES:
        (tmp_path / "sounds" / name).mkdir(parents=True)
        for number in range(4):
            words = f"{name} middle low high middle" if number == 0 else name
            soundfile.write(tmp_path / "sounds" / name / f"{number}.wav", speak(words, rng), RATE)
    settings = {**TINY, "max_steps": 2, "eval_every": 2, "quiet": False}
    train(tmp_path / "sounds", valid=[str(sounds)], out=tmp_path / "run", window_seconds=0.5, **settings)
    out = "".join(capsys.readouterr())
    assert "3 of 12 train recordings are longer than 0.5 s; their beginning is used" in out


def test_eval_prints_the_report(run, sounds, capsys):
    assert main(["eval", str(run), str(sounds)]) == 0
    assert "accuracy" in capsys.readouterr().out


def test_transformers_reads_a_saved_run(run, tmp_path):
    loaded = load(run)
    save(loaded, tmp_path / "saved", layout="whisper")
    theirs = transformers.WhisperForAudioClassification.from_pretrained(tmp_path / "saved").eval()
    assert theirs.config.id2label == dict(enumerate(sorted(TONES)))
    mel = torch.randn(2, 80, 2 * loaded.spec.encoder.max_positions)
    with torch.no_grad():
        assert torch.allclose(loaded.model(mel), theirs(mel).logits, atol=2e-5)


def test_one_class_is_refused(sounds, tmp_path):
    (tmp_path / "only" / "low").mkdir(parents=True)
    for path in (sounds / "low").iterdir():
        (tmp_path / "only" / "low" / path.name).write_bytes(path.read_bytes())
    with pytest.raises(BadInput, match="needs at least two labels, all recordings have 'low'"):
        train(tmp_path / "only", out=tmp_path / "run", **TINY)


def test_another_run_is_refused(tmp_path, capsys):
    rows = "".join(f"text {n}\t{'ab'[n % 2]}\n" for n in range(40))
    (tmp_path / "texts.tsv").write_text("text\tlabel\n" + rows)
    train(tmp_path / "texts.tsv", out=tmp_path / "run", size="xs", max_steps=1, eval_every=1, quiet=True)
    soundfile.write(tmp_path / "a.wav", np.zeros(1600), RATE)
    assert main(["classify", str(tmp_path / "run"), str(tmp_path / "a.wav")]) != 0
    assert "not for sounds" in capsys.readouterr().err
