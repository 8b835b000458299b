"""Whisper in whisper.cpp: a ggml file that Headwater wrote, in float16."""

import os
import sys
import wave

import numpy as np
from pywhispercpp.model import Model
from transcribe_workload import serve

ggml, file, *beam_sizes = sys.argv[1:]
with wave.open(file) as sound:  # 16 bits, mono, 16 kHz
    samples = np.frombuffer(sound.readframes(sound.getnframes()), np.int16).astype(np.float32) / 32768


def model_with(beam_size: int) -> Model:
    strategy = {"params_sampling_strategy": 1} if beam_size > 1 else {}
    quiet = {"print_progress": False, "print_realtime": False, "redirect_whispercpp_logs_to": None}
    return Model(ggml, n_threads=int(os.environ["OMP_NUM_THREADS"]), language="en", **quiet, **strategy)


models = {int(beam): model_with(int(beam)) for beam in beam_sizes}


def transcribe(beam_size: int) -> str:
    extra = {"beam_search": {"beam_size": beam_size, "patience": -1.0}} if beam_size > 1 else {}
    segments = models[beam_size].transcribe(samples, temperature_inc=0.0, **extra)
    return " ".join(segment.text for segment in segments)


serve(beam_sizes, len(samples) / 16_000, transcribe)
