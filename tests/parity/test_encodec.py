"""Parity of EnCodec with transformers, through files on disk: latents, codes and sounds."""

from __future__ import annotations

import json
import math
import warnings

import pytest
import torch

from headwater.codecs import EnCodec, load_codec, save_codec
from headwater.errors import BadFile, BadInput

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import EncodecConfig, EncodecModel

LIMIT = 2e-5
SHOWS = 4e-4
TINY = {"num_filters": 4, "hidden_size": 8, "codebook_size": 16, "codebook_dim": 8, "upsampling_ratios": [4, 3, 2],
        "sampling_rate": 2400, "target_bandwidths": [0.4, 1.6], "kernel_size": 5}  # fmt: skip
CASES = [
    {},
    {"use_causal_conv": False, "use_conv_shortcut": False, "num_lstm_layers": 1},
    {"norm_type": "time_group_norm", "use_causal_conv": False, "audio_channels": 2},
    {"num_residual_layers": 2, "compress": 4, "pad_mode": "constant", "last_kernel_size": 3},
]


def public(change):
    """transformers' model; its codebooks, which start at zero, are filled."""
    torch.manual_seed(0)
    model = EncodecModel(EncodecConfig(**{**TINY, **change})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
        for layer in model.quantizer.layers:
            layer.codebook.embed.normal_()
            layer.codebook.embed_avg.normal_()
            layer.codebook.cluster_size.uniform_(1, 9)
    return model


@pytest.mark.parametrize("change", CASES, ids=["24 kHz", "32 kHz", "group norm", "blocks"])
@torch.inference_mode()
def test_it_equals_transformers_both_ways(change, tmp_path):
    model = public(change)
    model.save_pretrained(tmp_path / "public")
    codec = load_codec(tmp_path / "public")
    for length in (480, 1001, 7):  # full frames, a part of one, shorter than the padding
        sound = torch.randn(2, codec.channels, length, generator=torch.Generator().manual_seed(length))
        latents = model.encoder(sound)
        assert float((codec.encoder(sound) - latents).abs().max()) < LIMIT
        expected = model.encode(sound, bandwidth=1.6).audio_codes[0]  # [B, K, frames]
        ids = codec.encode(sound)
        assert torch.equal(ids, expected.transpose(1, 2)) and ids.shape[1] == math.ceil(length / codec.hop)
        assert torch.equal(codec.encode(sound, codec.books_for(0.4)), ids[..., :1])
        decoded = model.decode(expected[None], [None]).audio_values
        assert float((codec.decode(ids) - decoded).abs().max()) < LIMIT

    save_codec(codec, tmp_path / "again", "encodec")
    again, report = EncodecModel.from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert all(torch.equal(again.state_dict()[name], value) for name, value in model.state_dict().items())


CHUNKED = {"norm_type": "time_group_norm", "use_causal_conv": False, "audio_channels": 2, "normalize": True,
           "chunk_length_s": 0.1, "overlap": 0.05}  # fmt: skip


@torch.inference_mode()
def test_chunks_equal_those_of_transformers(tmp_path):
    """As at 48 kHz: chunks of 240 samples, every 228 of them, each divided by its level, and cross-faded."""
    model = public(CHUNKED)
    model.save_pretrained(tmp_path / "public")
    codec = load_codec(tmp_path / "public")
    for length in (228, 240, 1001, 7):  # the last chunk is 12, 12, 89 and 7 samples long
        sound = torch.randn(2, 2, length, generator=torch.Generator().manual_seed(length)) * 0.1
        expected = model.encode(sound, bandwidth=1.6)
        chunks = codec.encode_chunks(sound)
        assert len(chunks) == len(expected.audio_codes) == -(-length // 228)
        for chunk, codes, scale in zip(chunks, expected.audio_codes, expected.audio_scales, strict=True):
            assert torch.equal(chunk.ids, codes.transpose(1, 2)[:, : chunk.ids.shape[1]])
            assert torch.allclose(chunk.level[..., 0], scale, rtol=1e-6)
        decoded = model.decode(
            expected.audio_codes, expected.audio_scales, last_frame_pad_length=expected.last_frame_pad_length
        ).audio_values
        assert float((codec.decode_chunks(chunks) - decoded).abs().max()) < LIMIT
        assert codec.decode_chunks(codec.encode_chunks(sound * 0)).isfinite().all()  # silence has a level too

    # levels that were left out would show
    flat = [chunk._replace(level=torch.ones_like(chunk.level)) for chunk in chunks]
    assert float((codec.decode_chunks(flat) - decoded).abs().max()) > SHOWS

    save_codec(codec, tmp_path / "again", "encodec")
    config = EncodecModel.from_pretrained(tmp_path / "again").config
    assert (config.normalize, config.chunk_length, config.chunk_stride) == (True, 240, 228)


@torch.inference_mode()
def test_codes_given_to_the_next_book_would_show(tmp_path):
    public({}).save_pretrained(tmp_path)
    codec = load_codec(tmp_path)
    ids = codec.encode(torch.randn(1, 1, 480))
    assert float((codec.decode(ids) - codec.decode(ids.roll(1, -1))).abs().max()) > SHOWS


@torch.inference_mode()
def test_no_frame_of_a_causal_codec_depends_on_later_samples():
    codec = EnCodec(2400, filters=4, width=8, ratios=(4, 2), num_books=2, num_codes=16).build(seed=0).eval()
    sound = torch.randn(1, 1, 160)
    changed = sound.clone()
    changed[..., 88:] += 1
    same = (codec.encoder(sound) == codec.encoder(changed)).all(1)[0]
    assert bool(same[:11].all()) and not bool(same[11:].any())


def test_what_it_refuses(tmp_path):
    codec = EnCodec(2400, filters=4, width=8, ratios=(4, 2), num_books=2, num_codes=16).build(seed=0).eval()
    with pytest.raises(BadInput, match=r"\[batch, 1, samples\], got float32 \(1, 2, 80\)"):
        codec.encode(torch.zeros(1, 2, 80))
    with pytest.raises(BadInput, match=r"\[batch, frames, 1 to 2\]"):
        codec.decode(torch.zeros(1, 4, 3, dtype=torch.long))
    with pytest.raises(BadInput, match="from 0 to 15"):
        codec.decode(torch.full((1, 4, 2), 16))
    save_codec(codec, tmp_path, "encodec")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "trim_right_ratio": 0.5}))
    with pytest.raises(BadFile, match="must be 1"):
        load_codec(tmp_path)
    chunked = EnCodec(2400, filters=4, width=8, ratios=(4, 2), num_books=2, num_codes=16, normalize=True).build(seed=0)
    with pytest.raises(BadInput, match="use encode_chunks"):
        chunked.encode(torch.zeros(1, 1, 80))
    with pytest.raises(BadInput, match="use decode_chunks"):
        chunked.decode(torch.zeros(1, 4, 2, dtype=torch.long))
    with pytest.raises(BadInput, match="a chunk at least"):
        chunked.decode_chunks([])


MUSIC = EnCodec(32000, filters=64, ratios=(8, 5, 4, 4), num_books=4, num_codes=2048, causal=False, shortcut=False)


STEREO = EnCodec(48000, channels=2, num_books=16, causal=False, group_norm=True, chunk_seconds=1.0, overlap=0.01,
                 normalize=True)  # fmt: skip


@pytest.mark.parametrize(("spec", "count"), [(EnCodec(), 14_851_810), (MUSIC, 56_884_674), (STEREO, 14_856_294)])
def test_the_published_number_of_parameters(spec, count):
    model = spec.on_meta()
    assert sum(p.numel() for name, p in model.named_parameters() if not name.startswith("quantizer")) == count
