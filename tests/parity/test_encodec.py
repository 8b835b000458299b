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
    for change, words in (({"normalize": True}, "48 kHz"), ({"trim_right_ratio": 0.5}, "must be 1")):
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(BadFile, match=words):
            load_codec(tmp_path)


MUSIC = EnCodec(32000, filters=64, ratios=(8, 5, 4, 4), num_books=4, num_codes=2048, causal=False, shortcut=False)


@pytest.mark.parametrize(("spec", "count"), [(EnCodec(), 14_851_810), (MUSIC, 56_884_674)])
def test_the_published_number_of_parameters(spec, count):
    model = spec.on_meta()
    assert sum(p.numel() for name, p in model.named_parameters() if not name.startswith("quantizer")) == count
