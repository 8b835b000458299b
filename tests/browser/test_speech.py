"""A recording on the page: words at their times, spectrogram and cross-attention, playback; in a real browser."""

from __future__ import annotations

import base64

import numpy as np
import pytest
import torch

from headwater.audio.write import write_wav
from headwater.errors import BadInput, Unavailable
from headwater.families import FAMILIES
from headwater.families.hf_folder import LoadedModel
from headwater.families.hub import HUB, find_installed
from headwater.families.load import save
from headwater.serving.handlers.speech import decode_samples
from headwater.serving.model_store import StoredModel
from headwater.text.load import load_tokenizer
from headwater.weights.hf_config import HFConfig

SECONDS = 3


CONFIG = {
    "d_model": 32, "vocab_size": 51864, "num_mel_bins": 80, "encoder_layers": 1, "encoder_ffn_dim": 32,
    "decoder_layers": 2, "decoder_ffn_dim": 32, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "max_source_positions": 150, "max_target_positions": 448, "activation_function": "gelu", "model_type": "whisper",
}  # fmt: skip


@pytest.fixture(scope="module")
def small_speech_model(tmp_path_factory):
    """A folder with a small Whisper of random weights and the tokenizer of tiny.en: its text means nothing."""
    try:
        english = find_installed("whisper-tiny.en")
    except Unavailable:
        pytest.skip(f"needs the package {HUB['whisper-tiny.en'].package}; make models installs it")
    model = FAMILIES["whisper"].read_spec(HFConfig({**CONFIG, "model_type": "whisper"}), "language").build(seed=0)
    for parameter in model.decoder.parameters():
        parameter.data *= 3
    loaded = LoadedModel(model, load_tokenizer(english), dict(CONFIG), english, "language")
    return save(loaded, tmp_path_factory.mktemp("small") / "small")


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    """Syllables of a voice that says nothing, at another rate."""
    time = torch.arange(22_050 * SECONDS) / 22_050
    sound = 0.3 * torch.sin(2 * torch.pi * 220 * time) * torch.sin(2 * torch.pi * 3 * time).clamp(min=0)
    path = tmp_path_factory.mktemp("sound") / "voice.wav"
    write_wav(path, sound, 22_050)
    return path


@pytest.fixture(scope="module")
def speech_page(small_speech_model, start_server, browser):
    """The page with a small random Whisper."""
    with start_server([StoredModel("small", "model", small_speech_model)]) as url:

        def open_page(locale: str = "en-US"):
            page = browser.new_context(locale=locale).new_page()
            page.errors = []
            page.on("pageerror", lambda error: page.errors.append(str(error)))
            page.goto(f"{url}#/speech?model=small")
            page.wait_for_selector("#recording")
            return page

        yield open_page


@pytest.mark.parametrize(("locale", "title"), [("en-US", "Speech, word by word"), ("zh-CN", "语音，逐词对照")])
def test_words_pictures_and_playback(speech_page, recording, locale, title):
    page = speech_page(locale)
    assert page.inner_text("h1") == title
    page.set_input_files("#recording", recording)
    page.wait_for_selector("#words .chip")
    words = page.locator("#words .chip").count()
    assert words == page.locator(".words i").count()

    # a row of attention for each token, below the spectrogram, on the same axis
    tokens = page.locator(".labels .mono").count()
    sizes = page.evaluate("[...document.querySelectorAll('.picture canvas')].map((c) => [c.width, c.height])")
    assert sizes == [[50 * SECONDS, 80], [50 * SECONDS, tokens]]
    widths = page.evaluate("[...document.querySelectorAll('.picture canvas')].map((c) => c.clientWidth)")
    assert widths[0] == widths[1] == 96 * SECONDS

    # play, pause, and play from a word
    page.click("#play")
    wait_until(page, lambda: seconds(page) > 0.2)
    page.click("#play")
    paused = seconds(page)
    page.wait_for_timeout(150)
    assert seconds(page) == paused
    page.locator("#words .chip").first.click()
    wait_until(page, lambda: seconds(page) != paused)
    assert not page.errors


def seconds(page) -> float:
    """Where the playback is."""
    return float(page.inner_text("output").split()[0])


def wait_until(page, condition) -> None:
    """Wait at most ten seconds; the page's own policy forbids playwright's wait_for_function."""
    for _turn in range(100):
        if condition():
            return
        page.wait_for_timeout(100)
    raise AssertionError("it did not happen in ten seconds")


def test_a_file_that_is_no_recording(speech_page, tmp_path):
    (tmp_path / "notes.mp3").write_text("no sound")
    page = speech_page()
    page.set_input_files("#recording", tmp_path / "notes.mp3")
    page.wait_for_selector(".notice")
    assert page.inner_text(".notice") == "This browser cannot decode notes.mp3; convert it to wav or mp3."


def test_other_views_say_what_the_model_reads(speech_page):
    page = speech_page()
    page.goto(page.url.replace("speech", "attention"))
    page.wait_for_selector(".notice")
    assert page.inner_text(".notice") == "This model reads sound, this view does not. Speech"


def test_samples_come_back_as_they_were_sent():
    samples = np.array([0, 1, -1, 32767, -32768], "<i2")
    decoded = decode_samples(base64.b64encode(samples.tobytes()).decode())
    assert decoded.mul(32768).tolist() == samples.tolist()
    for text in ("%%%%", "AAA=AAA", "AAAA"):
        with pytest.raises(BadInput, match="16-bit integers in base64"):
            decode_samples(text)
