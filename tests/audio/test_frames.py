"""The embedding of spectrogram frames, and the voice activity of a recording."""

from __future__ import annotations

import pytest
import torch

from headwater.audio.frames import Frames, SinusoidTable, slots
from headwater.audio.mel import LogMel
from headwater.audio.voice_activity import VoiceActivity
from headwater.core import Attention, Block, FeedForward, LayerNorm, Learned, Model, Stack, pre
from headwater.errors import BadInput, TooLong
from headwater.parts import from_dict, to_dict


def encoder(positions: int = 10) -> Model:
    block = Block((pre(LayerNorm(), self_attn=Attention(2)), pre(LayerNorm(), ffn=FeedForward(8))))
    return Model(encoder=Stack(8, Frames(5, Learned(positions)), (block,)))


@pytest.mark.parametrize("frames", [1, 2, 3, 19, 20])
def test_two_frames_give_one_vector(frames):
    states = encoder().build(seed=0)(torch.randn(2, 5, frames))
    assert states.shape == (2, slots(frames), 8)


def test_a_vector_depends_on_its_frames_alone():
    embed = encoder().build(seed=0).encoder.embed
    signal = torch.randn(1, 5, 20)
    changed = signal.clone()
    changed[:, :, 10] += 1
    inputs = [embed.read(x, "ids") for x in (signal, changed)]
    a, b = (embed(one, torch.arange(10)[None]) for one in inputs)
    differs = (a != b).any(-1)[0].nonzero().flatten().tolist()
    assert differs == [4, 5, 6][: len(differs)] or differs == [5, 6] or differs == [4, 5]
    assert 5 in differs


def test_other_inputs_are_refused():
    model = encoder().build(seed=0)
    for bad in (torch.zeros(1, 4, 20), torch.zeros(5, 20), torch.zeros(1, 5, 0), torch.zeros(1, 5, 20).long()):
        with pytest.raises(BadInput, match="log-mel spectrogram"):
            model(bad)
    with pytest.raises(TooLong, match="10 positions"):
        model(torch.zeros(1, 5, 21))


def test_the_spec_survives_json():
    assert from_dict(to_dict(encoder())) == encoder()


def test_the_table_starts_as_whispers():
    from transformers.models.whisper.modeling_whisper import sinusoids

    table = torch.empty(30, 8)
    SinusoidTable().fill(table, torch.Generator())
    assert torch.allclose(table, sinusoids(30, 8), atol=1e-5)


def speech(level: float = 0.1) -> torch.Tensor:
    """Noise that rises and falls as syllables do."""
    time = torch.arange(32_000) / 16_000
    noise = torch.randn(32_000, generator=torch.Generator().manual_seed(1))
    return level * noise * torch.sin(8 * time).clamp(min=0) ** 4


@pytest.mark.parametrize("background", [0.0, 1e-4, 1e-3])
def test_speech_is_heard_and_silence_is_not(background):
    silence = torch.zeros(32_000)
    samples = torch.cat((silence, speech(), silence))
    samples += background * torch.randn(len(samples), generator=torch.Generator().manual_seed(2))
    activity = VoiceActivity(LogMel(samples))
    assert activity.is_active_between(2.0, 4.0)
    assert not activity.is_active_between(0.0, 1.9)
    assert not activity.is_active_between(4.2, 6.0)


def test_a_short_recording_without_a_pause_is_heard():
    """A word that fills half a second varies as little as hum does."""
    word = 0.1 * torch.sin(2 * torch.pi * 900 * torch.arange(8_000) / 16_000)
    assert VoiceActivity(LogMel(word)).is_active(0, 50)
    assert not VoiceActivity(LogMel(torch.zeros(8_000))).is_active(0, 50)


def test_nothing_is_heard_in_hiss_and_hum():
    noise = 0.1 * torch.randn(160_000, generator=torch.Generator().manual_seed(3))
    hum = 0.2 * torch.sin(2 * torch.pi * 50 * torch.arange(160_000) / 16_000)
    for samples in (noise, hum, noise + hum, torch.zeros(160_000), torch.full((160_000,), 0.3)):
        assert not VoiceActivity(LogMel(samples)).is_active(0, 1000)
