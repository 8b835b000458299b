"""Sound augmentation is a function of seed, epoch and example, and does what it says; the cache of sounds."""

from __future__ import annotations

import numpy as np
import pytest
import soundfile
import torch

from headwater.audio.augment import FFT_MULTIPLE, SoundAugmenter, warp_frequencies
from headwater.audio.mel import log_mel
from headwater.audio.sound_cache import Clip, decode_clips
from headwater.errors import BadSetting

TONE = torch.sin(2 * torch.pi * 440 * torch.arange(16_000) / 16_000)


def augmenter(**settings: str) -> SoundAugmenter:
    return SoundAugmenter.from_settings(settings, seed=1)


@pytest.mark.parametrize(
    "settings", [{"speed": "0.2"}, {"volume": "12"}, {"noise": "10"}, {"equalizer": "9"}, {"shift": "0.3"}]
)
def test_the_same_example_and_epoch_give_the_same_samples(settings):
    change = augmenter(**settings)
    assert torch.equal(change.change_samples(TONE, 3, 1), change.change_samples(TONE, 3, 1))
    others = [change.change_samples(TONE, n, epoch) for n, epoch in ((3, 2), (4, 1), (5, 1), (6, 1))]
    assert any(len(x) != len(others[0]) or not torch.equal(x, others[0]) for x in others[1:])


def test_speed_changes_length_and_pitch():
    lengths = {len(augmenter(speed="0.2").change_samples(TONE, n, 0)) for n in range(40)}
    assert lengths == {20_000, 17_778, 16_000, 14_546, 13_334}


def test_noise_is_as_loud_as_said():
    for n in range(10):
        noise = augmenter(noise="20").change_samples(TONE, n, 0) - TONE
        below = 10 * torch.log10(TONE.square().mean() / noise.square().mean())
        assert 19.5 < float(below) < 40.5


def test_the_equalizer_changes_each_band_by_no_more_than_said():
    noise = torch.randn(16 * FFT_MULTIPLE, generator=torch.Generator().manual_seed(0))
    for n in range(5):
        changed = augmenter(equalizer="9").change_samples(noise, n, 0)
        assert len(changed) == len(noise)
        decibels = 20 * torch.log10(torch.fft.rfft(changed).abs() / torch.fft.rfft(noise).abs())[10:-10]
        assert float(decibels.abs().max()) < 9.01
        assert float(decibels.max() - decibels.min()) > 2  # it is no mere change of volume
        assert float(decibels.diff().abs().max()) < 0.2  # neighbouring frequencies change alike


def test_masks_are_within_the_recording_and_no_wider_than_said():
    mel = torch.rand(80, 100)
    for n in range(20):
        masked = augmenter(time_mask="10", mel_mask="7").change_mel(mel, 60, n, 0)
        changed = masked != mel
        assert int(changed.all(0).sum()) <= 20
        assert int(changed.all(1).sum()) <= 14
        assert not changed[:, 60:].all(0).any()
    assert torch.equal(augmenter(noise="10").change_mel(mel, 60, 0, 0), mel)


def tone_mel(hertz: float) -> torch.Tensor:
    return log_mel(torch.sin(2 * torch.pi * hertz * torch.arange(16_000) / 16_000))[:, 40]  # [mels], of one frame


@pytest.mark.parametrize("factor", [0.8, 0.9, 1.15])
@pytest.mark.parametrize("hertz", [500.0, 1500.0, 3000.0])
def test_vtlp_gives_the_spectrogram_of_higher_or_lower_frequencies(hertz, factor):
    warped = warp_frequencies(tone_mel(hertz)[:, None], factor)[:, 0]
    assert abs(int(warped.argmax()) - int(tone_mel(hertz * factor).argmax())) <= 1
    assert abs(int(warped.argmax()) - int(tone_mel(hertz).argmax())) >= 2  # that of the tone itself would be seen


def test_vtlp_keeps_the_ends_of_the_spectrum():
    mel = torch.arange(80.0)[:, None].expand(80, 3)
    assert torch.allclose(warp_frequencies(mel, 1.0), mel, atol=1e-4)
    for factor in (0.7, 1.3):
        warped = warp_frequencies(mel, factor)
        assert bool((warped.diff(dim=0) >= 0).all())  # the order of frequencies
        assert float(warped[-1, 0]) == pytest.approx(79, abs=0.5)


def test_vtlp_differs_among_examples_and_epochs():
    mel = torch.rand(80, 100)
    change = augmenter(vtlp="0.2")
    assert change.changes and not change.changes_samples
    assert torch.equal(change.change_mel(mel, 100, 3, 1), change.change_mel(mel, 100, 3, 1))
    assert not torch.equal(change.change_mel(mel, 100, 3, 1), change.change_mel(mel, 100, 3, 2))
    assert not torch.equal(change.change_mel(mel, 100, 3, 1), change.change_mel(mel, 100, 4, 1))


def test_what_is_read_once_is_cached(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWATER_CACHE", str(tmp_path / "cache"))
    samples = (TONE * 0.5).numpy()
    soundfile.write(tmp_path / "a.wav", samples, 16_000)
    soundfile.write(tmp_path / "b.wav", np.stack((samples, samples), 1)[:8_000], 8_000)  # stereo, half the rate
    (tmp_path / "c.wav").write_bytes(b"nothing")
    clips = [Clip(str(tmp_path / "a.wav")), Clip(str(tmp_path / "c.wav")), Clip(str(tmp_path / "a.wav"), 0.25, 0.5),
             Clip(str(tmp_path / "b.wav")), Clip(str(tmp_path / "a.wav"), 7.0)]  # fmt: skip
    first = decode_clips(clips)
    assert first.readable.tolist() == [0, 2, 3]
    assert first.samples.lengths.tolist() == [16_000, 4_000, 16_000]
    assert len(first.problems) == 2
    assert "ends before 7 s" in first.problems[1]
    assert torch.allclose(first.row(1), torch.from_numpy(samples[4_000:8_000]), atol=1e-4)

    monkeypatch.setattr("headwater.audio.sound_cache.read_audio", None)  # nothing is read again
    again = decode_clips(clips)
    assert all(torch.equal(again.row(n), first.row(n)) for n in range(3))
    assert again.problems == first.problems


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"spede": "0.1"}, "did you mean 'speed'"), ({"speed": "2"}, "at most 0.5"), ({"noise": "loud"}, "above 0")],
)
def test_bad_settings(settings, words):
    with pytest.raises(BadSetting, match=words):
        augmenter(**settings)
