"""AudioLM: a sound codec and three stages through the command, exact resumption, laws of the crops, continuation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import soundfile
import torch
from safetensors.torch import load_file

import headwater
from headwater.audio.files import read_audio
from headwater.audio.mel import log_mel
from headwater.audiolm.audio_model import CodecInputs, encode_recording, open_audio_model
from headwater.audiolm.baselines import baseline_bits
from headwater.audiolm.crops import CropDataset, trained_tokens
from headwater.audiolm.recordings import read_voices
from headwater.audiolm.semantic import SemanticCodec, SemanticTokens
from headwater.audiolm.stages import SamplingRule, flatten_codes, unflatten_codes
from headwater.audiolm.voice import Voice, read_voice, write_voice
from headwater.cli import main
from headwater.codecs import EnCodec, save_codec
from headwater.codecs.sound_codec import SoundCodec, snr
from headwater.data.collate import IGNORE_INDEX, SpecialTokens
from headwater.errors import BadInput, BadSetting
from headwater.families import FAMILIES
from headwater.tasks import get_task
from headwater.tasks.audio_language_model import audiolm_spec, stage_parts
from headwater.tasks.batch import to_tensors
from headwater.training.config import TrainConfig
from headwater.weights.hf_config import HFConfig
from headwater.weights.native import save_native

RATE = 16000
TINY = {"quiet": True, "max_time": 0, "warmup": 1, "eval_every": 3, "eval_examples": 2, "checkpoint_steps": 3,
        "d_model": 16, "heads": 2, "layers": 1, "d_ff": 16}  # fmt: skip


def tone(n, seconds=1.3):
    t = np.arange(int(RATE * seconds)) / RATE
    return 0.3 * np.sin(2 * math.pi * (200 + 40 * n) * t) + 0.1 * np.sin(2 * math.pi * 3 * t * n)


@pytest.fixture(scope="module")
def sounds(tmp_path_factory):
    """Eight tones, two of them for validation, and a file that is no sound."""
    folder = tmp_path_factory.mktemp("sounds")
    for n in range(8):
        side = folder / ("valid" if n % 4 == 3 else "train")
        side.mkdir(exist_ok=True)
        soundfile.write(side / f"{n}.wav", tone(n), RATE)
    (folder / "train" / "broken.flac").write_bytes(b"fLaC and no more")
    return folder


@pytest.fixture(scope="module")
def codec_run(sounds, tmp_path_factory):
    out = tmp_path_factory.mktemp("codec") / "run"
    headwater.train(sounds, task="sound-codec", out=out, vocab=16, max_steps=6, batch_tokens=800, **TINY)
    return out


@pytest.fixture(scope="module")
def run(sounds, codec_run, tmp_path_factory):
    out = tmp_path_factory.mktemp("audiolm") / "run"
    headwater.train(sounds, task="audio-language-model", codec=codec_run, out=out, vocab=16, max_steps=6,
                    batch_tokens=1500, context_length=64, **TINY)  # fmt: skip
    return out


# ------------------------------------------------------------------------------------------------------------ the codec


def test_the_codec_run_shows_what_it_makes_of_sounds(codec_run):
    names = {path.name for path in (codec_run / "plots").iterdir()}
    assert {"reconstructions.png", "codebooks.png", "sound-0.wav", "sound-0-decoded.wav"} <= names
    codec = headwater.codecs.load_codec(codec_run / "model")
    sound = torch.from_numpy(tone(2)).float()[None, None]
    with torch.inference_mode():
        ids = codec.encode(sound)
        assert ids.shape == (1, 65, 8) and codec.decode(ids).shape[-1] == 65 * 320


def test_a_codec_learns_a_tone():
    """The loss falls, codes come into use, and the decoded tone is nearer to the tone than silence is."""
    torch.manual_seed(0)
    codec = SoundCodec(filters=8, width=8, num_books=2, num_codes=16, ratios=(5, 4), kernel=3, last_kernel=3).build(0)
    sounds = torch.stack([torch.from_numpy(tone(n, 0.1)).float() for n in range(6)])[:, None]
    optimizer = torch.optim.AdamW(codec.parameters(), lr=2e-3)
    losses = []
    for _step in range(80):
        loss = codec.loss(sounds)
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    codec.eval()
    with torch.no_grad():
        ids = codec.encode(sounds)
        assert sum(losses[-5:]) < 0.6 * sum(losses[:5])
        assert len(ids[..., 0].unique()) > 2
        good = float(snr(sounds, codec.decode(ids)).mean())
        assert good > 1.0
        assert float(snr(sounds, codec.decode(ids.roll(1, -1))).mean()) < good - 0.5  # planted: codes of another book


def test_semantic_tokens_are_the_same_for_the_same_seed_and_tell_sounds_apart():
    codec = SemanticTokens(num_codes=8).build(0)
    features = torch.cat([codec.features(torch.from_numpy(tone(n)).float()) for n in range(6)])
    codec.fit(features, seed=3)
    again = SemanticTokens(num_codes=8).build(1).fit(features, seed=3)
    assert torch.equal(codec.centers, again.centers)
    sound = torch.from_numpy(tone(1)).float()[None]
    assert codec.encode(sound).shape == (1, 65)
    with pytest.raises(BadInput, match=r"\[batch, samples\]"):
        codec.encode(sound[0])


@torch.inference_mode()
def test_semantic_tokens_may_follow_the_states_of_a_whisper(tmp_path):
    config = {"d_model": 16, "vocab_size": 20, "num_mel_bins": 80, "encoder_layers": 2, "decoder_layers": 1,
              "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16,
              "activation_function": "gelu"}  # fmt: skip
    whisper = FAMILIES["whisper"].read_spec(HFConfig(config), "language").build(seed=2).eval()
    save_native(tmp_path, whisper, {})
    codec = SemanticCodec.of(4, str(tmp_path), seed=0)
    sound = torch.from_numpy(tone(2)).float()
    features = codec.features(sound)
    assert features.shape == (65, 16) and codec.fit(features).encode(sound[None]).shape == (1, 65)

    # the features are the states after the second layer
    states = whisper.encode(log_mel(sound, 80, seconds=30)[None]).hidden_states[0]
    norm = whisper.encoder.final_norm
    assert torch.allclose(norm(features), states[:65], atol=1e-5)
    with pytest.raises(BadInput, match="must be a Whisper with 5"):
        codec_of_five = SemanticTokens(4, str(tmp_path), layer=5, width=16).build(0)
        codec_of_five.features(sound)


# ------------------------------------------------------------------------------------------------------------ the crops


def voices_of(count=3, frames=90, books=4):
    generator = torch.Generator().manual_seed(count)
    return [
        Voice(
            torch.randint(20, (frames * 2 // 3,), generator=generator),
            torch.randint(16, (frames + n, books), generator=generator),
        )
        for n in range(count)
    ]


def crops(moving, voices=None):
    voices = voices or voices_of()
    tokens = trained_tokens(voices, 32, None, None)
    return CropDataset(voices, tokens, SpecialTokens(0, 0, 0), 4000, 0, moving), tokens, voices


def test_validation_crops_hold_every_token_once():
    dataset, tokens, voices = crops(moving=False)
    batch = dataset.collate(np.arange(dataset.size), 0)
    assert int((batch.targets != IGNORE_INDEX).sum()) == sum(len(voice.semantic) for voice in voices)
    fine = batch.signal[..., 0]
    assert int((fine != tokens.codes).sum()) == sum(len(voice.fine) for voice in voices)
    first = batch.targets[dataset.numbers == 0]
    for voice, row in zip(voices, first, strict=True):
        assert row.tolist() == voice.semantic[:32].tolist()


def test_coarse_rows_hold_codes_beside_their_semantic_tokens():
    dataset, tokens, voices = crops(moving=True)
    batch = dataset.collate(np.array([0, 1]), 2)
    for row in batch.source:
        semantic = row[: tokens.coarse_semantic]
        known = semantic[semantic != tokens.coarse_pad] - tokens.semantic_offset
        assert row[tokens.coarse_semantic] == tokens.coarse_infer
        codes = torch.from_numpy(row[tokens.coarse_semantic + 1 :])
        codes = unflatten_codes(tokens, codes[codes != tokens.coarse_pad])
        places = [(voice, start) for voice in voices for start in range(60)]
        owner, start = next(p for p in places if p[0].semantic[p[1] :][: len(known)].tolist() == known.tolist())
        frame = round(start * tokens.ratio / 2)
        assert torch.equal(codes, owner.fine[frame : frame + len(codes), :2])
        assert torch.equal(unflatten_codes(tokens, flatten_codes(tokens, codes.flatten())), codes)


def test_the_codebook_to_predict_is_not_given_away():
    dataset, tokens, _voices = crops(moving=True)
    for epoch in range(4):
        batch = dataset.collate(np.array([0, 1, 2]), epoch)
        wanted = batch.code_targets != IGNORE_INDEX
        assert wanted.any() and (batch.signal[..., -1][wanted] == tokens.codes).all()
        assert batch.signal.shape[-1] > tokens.coarse_books


def test_attentions_of_the_stages():
    """The encoder may have another attention; one that cannot continue is refused before anything is built."""
    sizes = {"d_model": 16, "heads": 2, "layers": 1, "d_ff": 16, "position": "rotary"}
    tokens = crops(moving=False)[1]
    spec = audiolm_spec(TrainConfig(**sizes, attention="linear", encoder_attention="window:size=8"), tokens)
    spec.build(seed=0)
    with pytest.raises(BadSetting, match="attention lsh has no KV cache, which continues sounds; use full, window or"):
        audiolm_spec(TrainConfig(**sizes, decoder_attention="lsh:chunk=4"), tokens)


def test_the_loss_is_the_mean_of_the_bits():
    """loss() and predict_rows() count the same: the loss in nats is that of the bits of all rows."""
    dataset, tokens, _voices = crops(moving=False)
    config = TrainConfig(d_model=16, heads=2, layers=1, d_ff=16, dropout=0.0, position="rotary")
    model = audiolm_spec(config, tokens).build(seed=1).eval()
    task = get_task("audio-language-model")
    batch = to_tensors(dataset.collate(np.arange(dataset.size), 0))
    outputs = task.predict_rows(model, None, [(np.arange(dataset.size), batch)])
    bits = task.metrics(list(outputs.values()), [], None)
    with torch.no_grad():
        loss = float(task.loss(model, batch, 0.0)) / task.num_targets(batch)
    assert loss == pytest.approx(math.log(2) * sum(bits.values()), rel=1e-4)
    shifted = {**batch, "signal": batch["signal"].roll(1, -1)}  # planted: codes offset by one codebook
    assert not torch.equal(stage_parts(model, shifted)[2].targets, stage_parts(model, batch)[2].targets)


def test_baselines_know_constant_and_repeated_tokens():
    semantic = torch.arange(12).repeat_interleave(5)
    fine = torch.zeros(90, 4, dtype=torch.long)
    voice = [Voice(semantic, fine)]
    tokens = trained_tokens(voice, 32, None, None)
    bits = baseline_bits(voice, voice, tokens)
    assert bits["unigram"]["semantic"] == pytest.approx(math.log2(12), abs=0.3)
    assert bits["repeat"]["semantic"] < 0.6 * bits["unigram"]["semantic"]
    assert bits["unigram"]["fine"] < 0.1


def test_long_recordings_are_encoded_in_pieces(tmp_path, monkeypatch):
    """No more memory for long ones; a last piece that is too short, and what needs a codec, are left out."""
    monkeypatch.setattr("headwater.audiolm.recordings.PIECE_SECONDS", 1)
    codec = SoundCodec(filters=4, num_books=3, num_codes=8).build(seed=0).eval()
    semantic = SemanticCodec.of(4, "", seed=0)
    soundfile.write(tmp_path / "long.wav", tone(1, seconds=2.51), RATE)
    write_voice(tmp_path / "tokens.npz", Voice(torch.tensor([1, 2, 3]), torch.tensor([[1, 2, 3]] * 4)), 2)
    paths = [str(tmp_path / name) for name in ("long.wav", "tokens.npz", "missing.wav")]
    notes = []
    voices = read_voices(paths, codec, semantic, notes)
    assert [len(voice.semantic) for voice in voices] == [50, 50, 25, 3]
    assert len(notes) == 1 and "missing.wav does not exist" in notes[0]

    recording = CodecInputs(*(read_audio(paths[0])[RATE : 2 * RATE],) * 2)  # the second piece, alone
    alone = encode_recording(recording, codec, semantic, books=3)
    assert torch.equal(alone.fine, voices[1].fine) and torch.equal(alone.semantic, voices[1].semantic)

    assert len(read_voices(paths[:2], None, None, notes)) == 1
    assert "long.wav: there is no codec for recordings" in notes[-1]


@pytest.mark.parametrize("change", [{"channels": 2}, {"normalize": True}])
def test_a_codec_of_chunks_or_stereo_is_refused(sounds, tmp_path, change):
    codec = EnCodec(RATE, filters=4, width=8, ratios=(8, 5, 4, 2), num_books=3, num_codes=16, **change).build(seed=0)
    save_codec(codec, tmp_path / "codec", "encodec")
    with pytest.raises(BadSetting, match="whole sounds in mono"):
        headwater.train(sounds, task="audio-language-model", codec=tmp_path / "codec", out=tmp_path / "run", **TINY)


def test_clips_of_different_codecs_are_refused():
    with pytest.raises(BadInput, match="same number of codebooks"):
        trained_tokens([*voices_of(books=4), *voices_of(books=5)], 32, None, None)
    with pytest.raises(BadSetting, match="coarse_books"):
        from headwater.variants.audiolm import AudioTokens

        AudioTokens(books=2, coarse_books=2)


# -------------------------------------------------------------------------------------------------------------- the run


@pytest.mark.parametrize("task", ["sound-codec", "audio-language-model"])
def test_a_resumed_run_is_the_same_to_the_last_bit(sounds, codec_run, tmp_path, task):
    settings = {
        **TINY,
        "vocab": 16,
        "batch_tokens": 1500,
        "context_length": 64,
        "eval_every": 6,
        "schedule": "constant",
    }
    settings |= {"codec": str(codec_run)} if task == "audio-language-model" else {}
    headwater.train(sounds, task=task, out=tmp_path / "whole", max_steps=4, **settings)
    headwater.train(sounds, task=task, out=tmp_path / "half", max_steps=2, **settings)
    headwater.resume(tmp_path / "half", max_steps=4, quiet=True)
    for file in ("model.safetensors", "optimizer.safetensors"):
        one, other = (load_file(tmp_path / name / "checkpoints" / "step-00000004" / file) for name in ("whole", "half"))
        assert one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def test_a_clip_is_continued_by_the_command(run, sounds, tmp_path, capsys):
    out = tmp_path / "continued.wav"
    clip = str(next((sounds / "valid").glob("*.wav")))
    arguments = ["continue", clip, "--model", str(run), "--out", str(out), "--seconds", "0.8", "--seed", "3"]
    assert main(arguments) == 0
    assert "its spectrogram" in capsys.readouterr().out
    assert out.with_suffix(".png").is_file()
    samples = read_audio(out)
    assert len(samples) / RATE == pytest.approx(1.3 + 0.8, abs=0.05)
    first = out.read_bytes()
    assert main(arguments) == 0 and out.read_bytes() == first  # the same seed, the same sound

    # tokens instead of sound, and from tokens
    assert main([*arguments[:5], str(tmp_path / "all.npz"), "--seconds", "0.5"]) == 0
    voice = read_voice(tmp_path / "all.npz")
    assert len(voice.semantic) == 65 + 25
    assert (
        main(["continue", str(tmp_path / "all.npz"), "--model", str(run), "--out", str(out), "--seconds", "0.2"]) == 0
    )

    # what it cannot do is said in a line
    assert main(["speak", "hello", "--model", str(run), "--out", str(out)]) != 0
    assert "cannot speak" in capsys.readouterr().err
    assert main(["continue", clip, "--model", str(run), "--out", "x.mp3"]) != 0
    assert ".wav or .npz" in capsys.readouterr().err


def test_the_beginning_decides_the_continuation(run, sounds):
    """Sampled continuations differ with the seed, not with what the clip has after its prompt."""
    model = open_audio_model(run)
    voice = model.encode(next((sounds / "valid").glob("*.wav")))
    rules = [SamplingRule(1.0, seed=1)] * 3
    one, again = (model.continue_voice(voice.first(model.tokens, 0.6), 0.5, rules) for _n in range(2))
    assert torch.equal(one.fine, again.fine) and len(one.fine) == 25
    other = model.continue_voice(voice.first(model.tokens, 0.6), 0.5, [SamplingRule(1.0, seed=2)] * 3)
    assert not torch.equal(one.fine, other.fine)


def test_token_files_alone_need_no_codec(tmp_path, capsys):
    for n, voice in enumerate(voices_of(6)):
        write_voice(tmp_path / f"{n}.npz", voice, 2)
    out = tmp_path / "run"
    headwater.train(tmp_path, task="audio-language-model", out=out, max_steps=2, batch_tokens=1500, context_length=32,
                    valid_fraction=0.2, **TINY)  # fmt: skip
    clip = str(tmp_path / "0.npz")
    assert main(["continue", clip, "--model", str(out), "--out", str(tmp_path / "c.npz"), "--seconds", "1"]) == 0
    assert main(["continue", clip, "--model", str(out), "--out", str(tmp_path / "c.wav")]) != 0
    assert "has no sound codec" in capsys.readouterr().err
