"""Whisper in Headwater: a folder of weights, float32 or int8."""

import os
import sys

import torch
from transcribe_workload import serve

import headwater
from headwater.audio.files import read_audio
from headwater.transcription.speech_model import load_speech_model

precision, folder, file, *beam_sizes = sys.argv[1:]
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
model = load_speech_model(folder, precision)
samples = read_audio(file)


def transcribe(beam_size: int) -> str:
    settings = {"beam_size": beam_size, "temperature": 0.0, "language": "en", "vad": False}
    return headwater.transcribe(samples, model, **settings).text


serve(beam_sizes, len(samples) / 16_000, transcribe)
