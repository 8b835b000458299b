"""Parity of MusicGen with transformers, through files on disk: logits, greedy codes, delay pattern, counts."""

from __future__ import annotations

import warnings

import pytest
import torch

from headwater.audiolm.delay import DelayPattern, write_codes
from headwater.codecs.folder import load_nested_codec
from headwater.core.cache import dynamic_cache
from headwater.core.embeddings import ModelInputs
from headwater.families import FAMILIES
from headwater.families.hf_folder import load_hf_folder, save_hf_folder
from headwater.weights.hf_config import HFConfig

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers as T

LIMIT = 2e-5
SHOWS = 4e-4
BOOKS = 4
DECODER = {"vocab_size": 16, "num_hidden_layers": 2, "ffn_dim": 48, "num_attention_heads": 4, "hidden_size": 32,
           "num_codebooks": BOOKS, "pad_token_id": 16, "bos_token_id": 16}  # fmt: skip
TEXT = {"vocab_size": 29, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
CODEC = {"num_filters": 2, "hidden_size": 4, "codebook_size": 16, "codebook_dim": 4, "upsampling_ratios": [2, 2],
         "sampling_rate": 16, "target_bandwidths": [0.064], "num_lstm_layers": 1}  # fmt: skip


def with_noise(model, seed=0):
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.02 if "audio_encoder" in name else 0.15))
    return model.eval()


def codes_of(length, batch=2, high=16):
    return torch.randint(high, (batch, length, BOOKS), generator=torch.Generator().manual_seed(length))


def public_ids(codes):
    """Codes [B, Q, K] as transformers takes them, [B · K, Q]."""
    return codes.transpose(1, 2).flatten(0, 1)


def public_logits(logits):
    """transformers' logits [B · K, Q, V] as [B, Q, K, V]."""
    return logits.unflatten(0, (-1, BOOKS)).transpose(1, 2)


@torch.inference_mode()
def test_the_decoder_equals_transformers_both_ways(tmp_path):
    torch.manual_seed(1)
    model = with_noise(T.MusicgenForCausalLM(T.MusicgenDecoderConfig(**DECODER)))
    model.save_pretrained(tmp_path / "public")
    loaded = load_hf_folder(tmp_path / "public")
    codes = codes_of(9, high=17)
    states = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(2))
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    expected = model(public_ids(codes), encoder_hidden_states=states, encoder_attention_mask=mask.long()).logits
    memory = ModelInputs(torch.zeros(2, 5, dtype=torch.long), mask, hidden_states=states)
    logits = loaded.model.decode(codes, memory=memory)
    assert float((logits - public_logits(expected)).abs().max()) < LIMIT
    shifted = loaded.model.decode(codes.roll(1, -1), memory=memory)  # planted: codes offset by one codebook
    assert float((shifted - public_logits(expected)).abs().max()) > SHOWS

    # without a text: cross-attention to zeros is no cross-attention
    silent = ModelInputs(torch.zeros(1, 1, dtype=torch.long), hidden_states=torch.zeros(1, 1, 32))
    expected = public_logits(model(public_ids(codes)).logits)
    assert float((loaded.model.decode(codes, memory=silent) - expected).abs().max()) < LIMIT

    save_hf_folder(loaded, tmp_path / "again")
    again, report = T.MusicgenForCausalLM.from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert torch.equal(again(public_ids(codes)).logits, model(public_ids(codes)).logits)


@pytest.fixture(scope="module", params=[1, 2], ids=["mono", "stereo"])
def whole(request, tmp_path_factory):
    torch.manual_seed(4)
    config = T.MusicgenConfig(
        text_encoder={"model_type": "t5", **TEXT},
        audio_encoder={"model_type": "encodec", **CODEC},
        decoder={**DECODER, "audio_channels": request.param},
    )
    model = with_noise(T.MusicgenForConditionalGeneration(config))
    for layer in model.audio_encoder.quantizer.layers:
        layer.codebook.embed.normal_()
    folder = tmp_path_factory.mktemp("musicgen")
    model.save_pretrained(folder)
    return model, folder, request.param


@torch.inference_mode()
def test_the_whole_model_gives_the_same_logits_and_greedy_codes(whole):
    model, folder, channels = whole
    loaded = load_hf_folder(folder)
    text = torch.tensor([[3, 14, 15, 9, 2]])
    codes = codes_of(7, batch=1)
    expected = public_logits(model(input_ids=text, decoder_input_ids=public_ids(codes)).logits)
    assert float((loaded.model(codes, source=text) - expected).abs().max()) < LIMIT

    settings = {"do_sample": False, "decoder_start_token_id": 16, "pad_token_id": 16, "bos_token_id": 16}
    frames = 9
    memory = loaded.model.encode(text)
    for scale in (1.0, 3.0):
        codes_of_channels = []
        decode = model.audio_encoder.decode

        def keep(codes, **kwargs):
            codes_of_channels.append(codes[0, 0])  # noqa: B023
            return decode(codes, **kwargs)  # noqa: B023

        model.audio_encoder.decode = keep
        length = frames + BOOKS // channels
        mask = torch.ones_like(text)
        model.generate(input_ids=text, attention_mask=mask, guidance_scale=scale, max_length=length, **settings)
        model.audio_encoder.decode = decode
        written = write_codes(loaded.model, frames, memory=memory, channels=channels, scale=scale)
        for channel in range(channels):
            assert torch.equal(written[:, channel::channels].T, codes_of_channels[channel])
    if channels == 1:
        codec = load_nested_codec(folder)
        sound = model.audio_encoder.decode(written.T[None, None], [None]).audio_values
        assert float((codec.decode(written[None]) - sound).abs().max()) < LIMIT


@torch.inference_mode()
@pytest.mark.parametrize("channels", [1, 2])
def test_the_delay_pattern_is_that_of_transformers(channels):
    model = T.MusicgenForCausalLM(T.MusicgenDecoderConfig(**DECODER, audio_channels=channels))
    pattern = DelayPattern(BOOKS, 16, channels)
    prompt = codes_of(3, batch=1)[0]
    frames = 8
    start = torch.full((BOOKS, 1), 16)
    ids = torch.cat((start, prompt.T), 1)
    _ids, mask = model.build_delay_pattern_mask(ids, pad_token_id=16, max_length=frames + pattern.extra)
    steps = pattern.apply(prompt, frames)
    assert torch.equal(steps.T, mask)
    codes = codes_of(frames, batch=1)[0]
    assert torch.equal(pattern.undo(pattern.apply(codes, frames)), codes)


def test_of_a_longer_recording_the_pattern_holds_the_first_frames():
    pattern = DelayPattern(BOOKS, 16)
    codes = codes_of(9, batch=1)[0]
    assert torch.equal(pattern.undo(pattern.apply(codes, 5)), codes[:5])


@torch.inference_mode()
def test_cached_equals_uncached_with_the_delay_pattern():
    config = HFConfig({**DECODER, "model_type": "musicgen_decoder"})
    config.ignore("model_type")
    model = FAMILIES["musicgen_decoder"].read_spec(config, "language").build(seed=5).eval()
    steps = DelayPattern(BOOKS, 16).apply(codes_of(8, batch=1)[0], 8)[None]
    memory = ModelInputs(torch.zeros(1, 3, dtype=torch.long), hidden_states=torch.randn(1, 3, 32))
    whole = model.decode(steps, memory=memory)
    cache = dynamic_cache(model)
    parts = [model.decode(part, memory=memory, cache=cache) for part in steps.split([3, 1, 1, 7], 1)]
    assert float((torch.cat(parts, 1) - whole).abs().max()) < LIMIT

    # no code depends on later steps, and the later codebooks do depend on the earlier ones of the same frame
    changed = steps.clone()
    changed[0, 5:] = 0
    assert torch.equal(model.decode(changed, memory=memory)[:, :5], whole[:, :5])


@pytest.mark.parametrize(
    ("sizes", "count"),
    [((24, 16, 1024), 419_584_000), ((48, 24, 1536), 1_837_556_736), ((48, 32, 2048), 3_255_382_016)],
)
def test_the_published_number_of_parameters(sizes, count):
    layers, heads, width = sizes
    config = HFConfig(
        {"num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": width, "ffn_dim": 4 * width}
    )
    spec = FAMILIES["musicgen_decoder"].read_spec(config, "language")
    assert sum(p.numel() for p in spec.on_meta().parameters()) == count
