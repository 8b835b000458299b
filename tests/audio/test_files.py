"""Audio files: every format, rate and number of channels gives the same sound; damaged ones are refused in one line."""

from __future__ import annotations

import os
import resource
import shutil
import time

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.audio import files
from headwater.audio.files import read_audio, samples_at_16khz
from headwater.audio.resample import Resampler, polyphase_filters, resample
from headwater.errors import BadFile, BadInput, Fault, NotFound, Unavailable


def sine(rate: int, seconds: float = 1.0, hertz: float = 700.0) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate)).astype(np.float32)


def middle(samples: torch.Tensor) -> torch.Tensor:
    return samples[2000:-2000].double()


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000, 15_999])
def test_a_tone_keeps_its_frequency_and_height(rate):
    ours = resample(torch.from_numpy(sine(rate)), rate, 16_000)
    assert len(ours) == 16_000
    assert (middle(ours) - middle(torch.from_numpy(sine(16_000)))).abs().max() < 2e-4


def test_a_shifted_filter_would_be_seen():
    x = torch.from_numpy(sine(44_100))
    ours = resample(x, 44_100, 16_000)
    late = torch.cat((torch.zeros(1), ours[:-1]))
    assert (middle(late) - middle(torch.from_numpy(sine(16_000)))).abs().max() > 0.05


def test_what_is_above_the_nyquist_frequency_is_removed():
    assert resample(torch.from_numpy(sine(48_000, hertz=12_000)), 48_000, 16_000)[500:-500].abs().max() < 1e-4
    assert polyphase_filters(48_000, 16_000).sum(1) == pytest.approx(1.0, abs=1e-6)


@settings(max_examples=20)
@given(st.lists(st.integers(0, 3000), max_size=8), st.sampled_from([8_000, 44_100, 12_345]))
def test_blocks_together_are_the_whole(sizes, rate):
    x = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(0))
    resampler = Resampler(rate, 16_000)
    parts = [resampler.push(block) for block in x.split(sizes)] if sizes else []
    ours = torch.cat([*parts, resampler.finish()])
    assert len(ours) == -(-len(x) * 16_000 // rate)
    if len(x):
        assert torch.allclose(ours, resample(x, rate, 16_000), atol=1e-5)


FORMATS = {"wav": {"subtype": "FLOAT"}, "flac": {}, "ogg": {}, "mp3": {}, "aiff": {"subtype": "PCM_16"}}


@pytest.mark.parametrize("name", FORMATS)
def test_formats(tmp_path, name):
    stereo = np.stack([sine(44_100), 0 * sine(44_100)], 1)  # the mean of both is half as loud
    soundfile.write(tmp_path / f"a.{name}", stereo, 44_100, **FORMATS[name])
    samples = read_audio(tmp_path / f"a.{name}")
    assert abs(len(samples) - 16_000) < 10
    assert float(middle(samples).abs().max()) == pytest.approx(0.25, abs=0.02)


def test_a_wrong_ending_is_read_by_content(tmp_path):
    soundfile.write(tmp_path / "a.wav", sine(16_000), 16_000)
    (tmp_path / "a.wav").rename(tmp_path / "a.mp3")
    assert len(read_audio(tmp_path / "a.mp3")) == 16_000


def test_integers_and_floats_in_memory():
    floats = samples_at_16khz(sine(16_000), 16_000)
    integers = samples_at_16khz((sine(16_000) * 32768).astype(np.int16), 16_000)
    assert (floats - integers).abs().max() < 1e-4
    assert len(samples_at_16khz(np.zeros((8_000, 2), np.float32), 8_000)) == 16_000


def test_long_recordings_are_mapped_from_a_file(tmp_path, monkeypatch):
    soundfile.write(tmp_path / "a.wav", sine(16_000, 3.0), 16_000)
    whole = read_audio(tmp_path / "a.wav")
    monkeypatch.setattr(files, "IN_MEMORY_SECONDS", 1)
    monkeypatch.setattr(files, "BLOCK_SECONDS", 1)
    assert torch.equal(read_audio(tmp_path / "a.wav"), whole)


def refusal(path, **limits) -> Fault:
    with pytest.raises(Fault) as caught:
        read_audio(path, **limits)
    assert "\n" not in str(caught.value)
    return caught.value


def test_damaged_and_hostile_files(tmp_path, monkeypatch):
    broken = sine(16_000)
    broken[1600] = np.nan
    soundfile.write(tmp_path / "nan.wav", broken, 16_000, subtype="FLOAT")
    soundfile.write(tmp_path / "empty.wav", broken[:0], 16_000)
    soundfile.write(tmp_path / "long.wav", sine(16_000, 3.0), 16_000)
    (tmp_path / "text.wav").write_text("no sound")
    assert "0.10 s is not a finite number" in str(refusal(tmp_path / "nan.wav"))
    assert "no samples" in str(refusal(tmp_path / "empty.wav"))
    assert "may last 2 s, this one lasts 3 s" in str(refusal(tmp_path / "long.wav", max_seconds=2))
    assert isinstance(refusal(tmp_path / "none.wav"), NotFound)
    assert isinstance(refusal(tmp_path), BadFile)
    monkeypatch.setattr(files.shutil, "which", lambda name: None)
    assert isinstance(refusal(tmp_path / "text.wav"), Unavailable)
    with pytest.raises(BadInput, match="correct them"):
        samples_at_16khz(np.zeros((2, 3, 4), np.float32), 16_000)


def test_the_mp3_decoder_is_quiet(tmp_path, monkeypatch, capfd):
    """What it writes about damaged frames is no message of ours; the descriptor of stderr comes back."""
    monkeypatch.setattr(files.shutil, "which", lambda name: None)
    (tmp_path / "text.mp3").write_text("no sound")
    assert "Format not recognised" in str(refusal(tmp_path / "text.mp3"))
    soundfile.write(tmp_path / "a.mp3", sine(16_000), 16_000)
    raw = bytearray((tmp_path / "a.mp3").read_bytes())
    raw[300:400] = bytes(100)
    (tmp_path / "damaged.mp3").write_bytes(raw)
    assert len(read_audio(tmp_path / "damaged.mp3")) > 8_000
    os.write(2, b"after")
    assert capfd.readouterr().err == "after"


@pytest.mark.skipif(shutil.which("ffmpeg") is None, reason="needs ffmpeg")
def test_other_formats_go_through_ffmpeg(tmp_path):
    import subprocess

    soundfile.write(tmp_path / "a.wav", sine(44_100), 44_100)
    subprocess.run(["ffmpeg", "-v", "error", "-i", tmp_path / "a.wav", tmp_path / "a.m4a"], check=True)
    heard = middle(read_audio(tmp_path / "a.m4a"))
    assert float(heard.square().mean().sqrt()) == pytest.approx(0.5 / 2**0.5, abs=0.03)
    (tmp_path / "text.m4a").write_text("no sound")
    assert "neither soundfile nor ffmpeg" in str(refusal(tmp_path / "text.m4a"))


def test_mutated_files_are_read_or_refused(tmp_path):
    fuzz(tmp_path, 40)


@pytest.mark.slow
def test_five_thousand_mutated_files_are_read_or_refused(tmp_path):
    fuzz(tmp_path, 5000)


def fuzz(folder, count: int) -> None:
    """Mutate files of every format: each is read, or refused with a Fault, within seconds and in bounded memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    random = np.random.default_rng(0)
    refused = 0
    slowest = 0.0
    originals = []
    for name, options in FORMATS.items():
        soundfile.write(folder / f"original.{name}", sine(16_000, 0.2), 16_000, **options)
        originals.append((name, (folder / f"original.{name}").read_bytes()))
    for number in range(count):
        name, raw = originals[number % len(originals)]
        mutated = bytearray(raw)
        for _unused in range(int(random.integers(1, 12))):
            where = int(random.integers(0, len(mutated) if random.random() < 0.5 else min(64, len(mutated))))
            mutated[where] = int(random.integers(0, 256))
        if random.random() < 0.3:
            mutated = mutated[: int(random.integers(0, len(mutated)))]
        path = folder / f"mutated.{name}"
        path.write_bytes(mutated)
        begin = time.process_time()
        try:
            assert read_audio(path, max_seconds=60).isfinite().all()
        except Fault as fault:
            assert "\n" not in str(fault)
            refused += 1
        slowest = max(slowest, time.process_time() - begin)
        assert slowest < 5.0, (name, number)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"{count:,} files: {refused:,} refused, the slowest {slowest:.2f} s, {grown:.0f} MB more than before")
    assert grown < 256
