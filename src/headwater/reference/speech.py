"""Speech: the log-mel spectrogram of a recording, and the two convolutions with which Whisper reads it.

N samples, T frames, M mel bins, D width. A convolution of three taps is three matrix products, one for each tap.
"""

from __future__ import annotations

import numpy as np

from headwater.reference.gradients import Array, Backward, Parameters

SAMPLE_RATE = 16_000
FFT_SIZE = 400  # samples of a frame
HOP = 160  # samples between frames


def mel_filters(bins: int) -> Array:
    """Triangular filters [M, 201], even in mel: 3 mels for 200 Hz up to 1 kHz, then 27 for each factor of 6.4."""

    def to_hz(mel: Array) -> Array:
        return np.where(mel < 15, 200 * mel / 3, 1000 * 6.4 ** ((mel - 15) / 27))

    highest = 15 + 27 * np.log(SAMPLE_RATE / 2 / 1000) / np.log(6.4)
    corners = to_hz(np.linspace(0, highest, bins + 2))
    left = corners[:-2, None]
    middle = corners[1:-1, None]
    right = corners[2:, None]
    hz = np.linspace(0, SAMPLE_RATE / 2, FFT_SIZE // 2 + 1)
    triangles = np.maximum(0, np.minimum((hz - left) / (middle - left), (right - hz) / (right - middle)))
    return triangles * 2 / (right - left)  # each of the same area


def log_mel(samples: Array, bins: int = 80) -> Array:
    """The spectrogram [M, T] of samples [N], T = N // 160: log10 of the power, at most 8 below its maximum, scaled.

    The recording is mirrored at its start, and followed by silence.
    """
    padded = np.pad(np.pad(samples, (FFT_SIZE // 2, 0), "reflect"), (0, FFT_SIZE))
    starts = HOP * np.arange(len(samples) // HOP)
    frames = padded[starts[:, None] + np.arange(FFT_SIZE)]  # [T, 400]
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(FFT_SIZE) / FFT_SIZE)
    power = np.abs(np.fft.rfft(frames * hann)) ** 2  # [T, 201]
    log_power = np.log10(np.maximum(mel_filters(bins) @ power.T, 1e-10))
    return (np.maximum(log_power, log_power.max() - 8) + 4) / 4


def convolution(x: Array, w: Parameters, stride: int = 1) -> tuple[Array, Backward]:
    """Convolution of three taps, zeros beyond both ends: y_t = Σ_j W_j x_(s·t + j - 1) + b. x [..., C, T]."""
    weight = w["weight"]  # [D, C, 3]
    length = x.shape[-1]
    padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(1, 1)])
    taps = [padded[..., j : j + length : stride] for j in range(3)]  # each [..., C, T']
    y = sum(weight[:, :, j] @ tap for j, tap in enumerate(taps)) + w["bias"][:, None]

    def backward(dy: Array) -> Array:
        # dW_j = Σ_t dy_t x_(s·t + j - 1)ᵀ, db = Σ_t dy_t, and each x receives W_jᵀ dy from the outputs that read it
        batch = tuple(range(dy.ndim - 2))
        gradient = [(dy @ np.swapaxes(tap, -1, -2)).sum(axis=batch) for tap in taps]
        w.add("weight", np.stack(gradient, axis=-1))
        w.add("bias", dy.sum(axis=(*batch, -1)))
        dpadded = np.zeros_like(padded)
        for j in range(3):
            dpadded[..., j : j + length : stride] += weight[:, :, j].T @ dy
        return dpadded[..., 1:-1]

    return y, backward
