"""Whisper with its published weights: golden numbers, and real speech as other implementations hear it."""

from __future__ import annotations

import json

import pytest
import torch

import headwater
from headwater.audio.files import read_audio
from headwater.audio.mel import log_mel
from headwater.transcription.speech_model import load_speech_model

from .published_speech import ANSWERS, MODELS, PEERS, SAMPLES, answers_of

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


PUBLISHED = json.loads(ANSWERS.read_text())


@pytest.fixture(scope="module")
def heard(files, speech):
    """What Headwater hears in a sample, with times of words."""
    transcripts = {}

    def hear(model, name, beam_size):
        files(model)
        key = model, name, beam_size
        if key not in transcripts:
            settings = {"timestamps": "word", "beam_size": beam_size, "language": "en"}
            transcripts[key] = headwater.transcribe(speech / name, model, **settings)
        return transcripts[key]

    return hear


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("peer", "beam_size"), PEERS)
def test_text_and_times_are_those_of_other_implementations(heard, peer, beam_size, model, name):
    transcript = heard(model, name, beam_size)
    segments = PUBLISHED[answers_of(peer, beam_size)][model][name]
    words = [word for segment in segments for word in segment["words"]]
    assert transcript.text.strip() == "".join(segment["text"] for segment in segments).strip()

    ours = [time for segment in transcript.segments for time in (segment.start, segment.end)]
    assert ours == pytest.approx([segment[end] for segment in segments for end in ("start", "end")], abs=0.02001)
    assert [word.text for word in transcript.words] == [text for _start, _end, text in words]
    ours = [time for word in transcript.words for time in (word.start, word.end)]
    assert ours == pytest.approx([time for start, end, _text in words for time in (start, end)], abs=0.04001)


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
