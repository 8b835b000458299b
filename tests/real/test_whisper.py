"""Whisper with its published weights: golden numbers, and real speech as other implementations hear it."""

from __future__ import annotations

import json

import pytest
import torch

import headwater
from headwater.audio.files import read_audio
from headwater.audio.mel import log_mel
from headwater.transcription.speech_model import load_speech_model

KENNEDY = "And so my fellow Americans ask not what your country can do for you ask what you can do for your country"


@pytest.fixture(scope="module")
def english(files):
    files("whisper-tiny.en")
    return headwater.load("whisper-tiny.en")


def test_the_published_number_of_parameters(english):
    assert sum(p.numel() for p in english.model.parameters()) == 37_760_256


def test_equals_the_public_implementation(english, tmp_path):
    import transformers as T

    headwater.save(english, tmp_path / "whisper")
    theirs = T.WhisperForConditionalGeneration.from_pretrained(tmp_path / "whisper").eval()
    time = torch.arange(16_000 * 3) / 16_000
    mel = log_mel(0.3 * torch.sin(900 * time) * torch.sin(9 * time), seconds=30)[None]
    ids = torch.tensor([[50257, 50362, 843, 523]])
    with torch.no_grad():
        out = theirs(input_features=mel, decoder_input_ids=ids)
        memory = english.model.encode(mel)
        assert (memory.hidden_states - out.encoder_last_hidden_state).abs().max() < 2e-4  # of states up to 90
        assert (english.model.decode(ids, memory=memory) - out.logits).abs().max() < 2e-4


@pytest.fixture(scope="module")
def speech(public_files):
    return public_files / "data" / "speech_samples"


@pytest.mark.slow
def test_golden_numbers(english, speech):
    mel = log_mel(read_audio(speech / "jfk.wav"), seconds=30)
    assert mel[40, 500:503].tolist() == pytest.approx([-0.04436195, 0.02810192, -0.2649355], abs=1e-5)
    assert float(mel.mean()) == pytest.approx(-0.29502899, abs=1e-6)
    with torch.no_grad():
        states = english.model.encode(mel[None]).hidden_states[0]
        logits = english.model(torch.tensor([[50257, 50362]]), source=mel[None])[0]
    assert states[0, :3].tolist() == pytest.approx([-0.941627, -0.012463, 0.512562], abs=1e-4)
    assert states[500, :3].tolist() == pytest.approx([-0.628302, -0.869773, -2.976148], abs=1e-4)
    best = logits[-1].topk(5)
    assert best.indices.tolist() == [843, 290, 1406, 366, 532]
    assert best.values.tolist() == pytest.approx([20.5251, 18.6948, 18.0149, 17.3074, 16.3405], abs=1e-3)
    assert float(logits[0].softmax(0)[50361]) == pytest.approx(0.0293032, abs=1e-4)


# What faster-whisper 1.2.1 hears in float32, greedily, with word times: segments, and the first and last words.
HEARD = {
    ("whisper-tiny.en", "jfk.wav"): (
        [(0.00, 8.06), (8.06, 10.50)],
        {"And": (0.00, 0.76), "fellow": (1.46, 1.76), "ask": (2.26, 3.88), "country": (6.02, 6.36)},
    ),
    ("whisper-base", "two_cities.wav"): (
        [(0.84, 4.42), (5.02, 8.02), (8.70, 12.66), (13.44, 16.34), (17.20, 20.24), (21.08, 23.96), (24.54, 28.16),
         (28.96, 32.20), (32.20, 36.54), (36.54, 41.46)],
        {"It": (0.84, 1.28), "foolishness.": (7.44, 8.02), "noisiest": (33.32, 33.90), "only.": (40.86, 41.46)},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("model", "name"), HEARD)
def test_times_are_those_of_another_implementation(files, speech, model, name):
    files(model)
    transcript = headwater.transcribe(speech / name, model, timestamps="word", beam_size=1, language="en")
    segments, words = HEARD[model, name]
    ours = [(segment.start, segment.end) for segment in transcript.segments]
    assert [time for pair in ours for time in pair] == pytest.approx([t for pair in segments for t in pair], abs=0.02)
    first = {}
    for word in transcript.words:
        first.setdefault(word.text.strip(), (word.start, word.end))
    for word, times in words.items():
        assert first[word] == pytest.approx(times, abs=0.04)


@pytest.mark.slow
def test_text_in_float32_and_8_bits(files, speech, command):
    files("whisper-tiny.en")
    for precision in ("float32", "int8"):
        transcript = headwater.transcribe(speech / "jfk.wav", "whisper-tiny.en", beam_size=1, precision=precision)
        assert transcript.text.replace(",", "").replace(".", "") == KENNEDY
    said = command("transcribe", speech / "jfk.wav", "--model", "whisper-tiny.en", "--to", "json", "--beam-size", 1)
    assert json.loads(said)["language"] == "en"


@pytest.mark.slow
def test_base_tells_the_language(files, speech):
    files("whisper-base")
    model = load_speech_model("whisper-base")
    mel = log_mel(read_audio(speech / "beckett.wav"), seconds=30)
    languages = model.detect_language(model.encode(mel))
    assert next(iter(languages)) == "en"
    assert languages["en"] > 0.9
    assert len(languages) == 99
