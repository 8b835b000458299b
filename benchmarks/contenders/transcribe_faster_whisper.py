"""Whisper in faster-whisper: a folder of weights, float32 or int8."""

import os
import sys

from faster_whisper import WhisperModel, decode_audio
from transcribe_workload import serve

precision, folder, file, *beam_sizes = sys.argv[1:]
model = WhisperModel(folder, device="cpu", compute_type=precision, cpu_threads=int(os.environ["OMP_NUM_THREADS"]))
samples = decode_audio(file)


def transcribe(beam_size: int) -> str:
    segments, _info = model.transcribe(samples, beam_size=beam_size, temperature=0.0, language="en")
    return "".join(segment.text for segment in segments)


serve(beam_sizes, len(samples) / 16_000, transcribe)
