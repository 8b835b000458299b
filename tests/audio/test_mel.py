"""Log-mel spectrograms: equal to the public implementations, whole or in windows, and to the published numbers."""

from __future__ import annotations

import pytest
import torch

from headwater.audio import mel
from headwater.audio.mel import LogMel, log_mel, mel_filters


def tone(seconds: float = 1.0, seed: int = 0) -> torch.Tensor:
    time = torch.arange(int(16_000 * seconds)) / 16_000
    noise = torch.randn(len(time), generator=torch.Generator().manual_seed(seed))
    return 0.3 * torch.sin(2 * torch.pi * 440 * time) * torch.sin(3 * time) + 0.01 * noise


@pytest.mark.parametrize(("bins", "total", "first"), [(80, 1.9990241, 0.024862595), (128, 3.1909855, 0.012373987)])
def test_the_filters_are_the_published_ones(bins, total, first):
    filters = mel_filters(bins)
    assert float(filters.double().sum()) == pytest.approx(total, abs=1e-6)
    assert filters[0].nonzero().flatten().tolist() == [1]
    assert float(filters[0, 1]) == pytest.approx(first, rel=1e-6)


@pytest.mark.parametrize("bins", [80, 128])
def test_equals_the_public_implementation(bins):
    import transformers as T

    samples = tone(7.3)
    theirs = T.WhisperFeatureExtractor(feature_size=bins)(samples.numpy(), sampling_rate=16_000).input_features[0]
    ours = log_mel(samples, bins, seconds=30)
    assert (ours - torch.as_tensor(theirs)).abs().max() < 1e-5


@pytest.mark.parametrize("after_the_last_frame", [0, 100, 159])
def test_a_click_at_the_end_counts_in_the_maximum(after_the_last_frame):
    import transformers as T

    samples = 1e-4 * tone(2.0 + after_the_last_frame / 16_000)
    samples[-3:] = 1.0
    theirs = T.WhisperFeatureExtractor()(samples.numpy(), sampling_rate=16_000).input_features[0]
    assert (log_mel(samples, seconds=30) - torch.as_tensor(theirs)).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("name", "value"), [("FFT_SIZE", 512), ("HOP", 161), ("DYNAMIC_RANGE", 7.0), ("SMALLEST_POWER", 1e-6)]
)
def test_a_wrong_constant_would_be_seen(monkeypatch, name, value):
    import transformers as T

    samples = tone(2.0)
    theirs = T.WhisperFeatureExtractor()(samples.numpy(), sampling_rate=16_000).input_features[0]
    monkeypatch.setattr(mel, name, value)
    mel_filters.cache_clear()
    try:
        assert (log_mel(samples, seconds=30) - torch.as_tensor(theirs)).abs().max() > 1e-3
    finally:
        monkeypatch.undo()
        mel_filters.cache_clear()


@pytest.mark.parametrize("step", [1, 7, 50, 131])
def test_windows_together_are_the_whole(step):
    spectrogram = LogMel(tone(1.31))
    parts = [spectrogram.window(first, min(step, 131 - first)) for first in range(0, 131, step)]
    assert torch.allclose(torch.cat(parts, 1), spectrogram.window(0, 131), atol=1e-6)


def test_the_floor_is_that_of_the_whole_recording(monkeypatch):
    quiet_then_loud = torch.cat((1e-4 * tone(1.0), tone(1.0)))
    spectrogram = LogMel(quiet_then_loud)
    assert float(spectrogram.window(0, 50).min()) == pytest.approx(float(spectrogram.window(0, 200).min()))
    monkeypatch.setattr(mel, "BLOCK_FRAMES", 30)  # the maximum, a block at a time
    assert LogMel(quiet_then_loud).maximum == pytest.approx(spectrogram.maximum, abs=1e-6)


@pytest.mark.parametrize("length", [1, 159, 160, 200, 201, 399, 400, 401])
def test_a_recording_shorter_than_a_frame(length):
    assert log_mel(tone(1.0)[:length], seconds=1).isfinite().all()
