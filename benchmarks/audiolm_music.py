"""Music that continues: a sound codec and then AudioLM, both trained here on recordings; a continuation as a picture.

Recordings are cut into pieces of 15 seconds; every tenth piece is held out. Printed are how well the codec reconstructs
held-out pieces (signal-to-noise ratio, difference of the spectra), and the real-time factor of a continuation; the
runs print bits a token of the three stages beside baselines. The picture has the held-out piece above what the model
made of its beginning.

    apt-get download asterisk-moh-opsound-wav && dpkg-deb -x asterisk-moh-opsound-wav_*.deb moh
    python benchmarks/audiolm_music.py moh/usr/share/asterisk/moh --codec-time 8m --max-time 7m --picture music.png
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch

import headwater
from headwater.audio.files import read_audio
from headwater.audio.mel import SAMPLE_RATE
from headwater.audio.write import spectrogram_image, write_wav
from headwater.audiolm.audio_model import AUDIOLM_TEMPERATURES, open_audio_model
from headwater.audiolm.stages import SamplingRule
from headwater.codecs.sound_codec import snr, spectrum_decibels
from headwater.vision.sheets import write_png

PIECE = 15  # seconds
HELD_OUT = 10  # every such piece
PROMPT = 4.0
CONTINUED = 6.0


def cut(recordings: Path, folder: Path) -> None:
    """The recordings in pieces, in a folder for training and one for validation."""
    count = 0
    for path in sorted(recordings.glob("*.wav")):
        for piece in read_audio(path).split(PIECE * SAMPLE_RATE):
            if len(piece) == PIECE * SAMPLE_RATE:
                side = "valid" if count % HELD_OUT == HELD_OUT - 1 else "train"
                write_wav(folder / side / f"{count:03d}.wav", piece, SAMPLE_RATE)
                count += 1


def train(data: Path, out: Path, args: argparse.Namespace) -> None:
    """The codec, then the three stages."""
    codec = Path(f"{out}-codec")
    codec_limit, limit = {"max_time": args.codec_time}, {"max_time": args.max_time}
    if args.steps:
        codec_limit, limit = ({"max_steps": steps} for steps in args.steps)
    shared = {"valid": [str(data / "valid")], "dtype": args.dtype}
    if not (codec / "model").is_dir():
        headwater.train(
            str(data / "train"), task="sound-codec", out=str(codec), d_model=64, heads=1,
            layers=1, d_ff=64, batch_tokens=args.codec_batch, **codec_limit, **{**shared, "dtype": "fp32"},
        )  # fmt: skip
    if not (out / "model").is_dir():
        headwater.train(
            str(data / "train"), task="audio-language-model", codec=str(codec), out=str(out),
            d_model=128, heads=4, layers=3, d_ff=512, dropout=0.1, batch_tokens=8000, **limit, **shared,
        )  # fmt: skip


def measure(data: Path, out: Path, picture: Path | None) -> None:
    """Reconstructions and a continuation of held-out pieces."""
    model = open_audio_model(out)
    assert model.codec is not None
    pieces = [read_audio(path) for path in sorted((data / "valid").glob("*.wav"))]
    sounds = torch.stack(pieces)[:, None]
    with torch.inference_mode():
        decoded = model.codec.decode(model.codec.encode(sounds))[..., : sounds.shape[-1]]
    kilobits = model.tokens.frame_rate * model.tokens.books * 8 / 1000
    print(f"codec: {len(pieces)} held-out pieces of {PIECE} s at {kilobits:.1f} kbit/s")
    ratio = snr(sounds, decoded).mean()
    spectra = spectrum_decibels(sounds, decoded).mean()
    print(f"signal-to-noise ratio {ratio:.1f} dB, spectra differ by {spectra:.1f} dB")

    path = sorted((data / "valid").glob("*.wav"))[0]
    prompt = model.encode(path).first(model.tokens, PROMPT)
    start = time.perf_counter()
    rules = [SamplingRule(temperature, seed=1) for temperature in AUDIOLM_TEMPERATURES]
    written = model.continue_voice(prompt, CONTINUED, rules)
    sound = model.decode(written.after(prompt).fine)
    seconds = time.perf_counter() - start
    assert abs(len(sound) / model.sample_rate - PROMPT - CONTINUED) < 0.1
    print(f"continuation: {CONTINUED:g} s after {PROMPT:g} s in {seconds:.1f} s, {CONTINUED / seconds:.2f} x real time")
    if picture is not None:
        whole = pieces[0][: round((PROMPT + CONTINUED) * SAMPLE_RATE)]
        write_png(spectrogram_image([whole, sound], model.sample_rate, PROMPT, height=1), picture)
        write_wav(picture.with_suffix(".wav"), sound, model.sample_rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", type=Path)
    parser.add_argument("--out", type=Path, help="folder of the run; one that is there is measured again")
    parser.add_argument("--codec-time", default="8m")
    parser.add_argument("--codec-batch", type=int, default=1600, help="codes of a batch; 200 are half a second")
    parser.add_argument("--max-time", default="7m")
    parser.add_argument("--steps", type=int, nargs=2, default=(), help="of the codec and of AudioLM, in place of times")
    parser.add_argument("--dtype", default="bf16", help="of the Transformers")
    parser.add_argument("--picture", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temp:
        data = Path(temp)
        cut(args.recordings, data)
        out = args.out or data / "run"
        begin = time.process_time()
        train(data, out, args)
        print(f"training: {(time.process_time() - begin) / 60:.1f} minutes of processor time")
        measure(data, out, args.picture)


if __name__ == "__main__":
    main()
