"""Recordings as the tokens that AudioLM learns from: the sound codec, k-means, and what the two make of files."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headwater.audio.files import MAX_SECONDS, read_audio
from headwater.audiolm.audio_model import CodecInputs, encode_recording, read_recording
from headwater.audiolm.semantic import SemanticCodec
from headwater.audiolm.voice import Voice, read_voice
from headwater.codecs import load_codec
from headwater.codecs.encodec import EnCodec, EnCodecModel
from headwater.data.dataset import evenly_spaced
from headwater.data.readers.sound_files import TOKEN_SUFFIX
from headwater.errors import BadInput, BadSetting, Fault
from headwater.families.load import find_model
from headwater.i18n import _

PIECE_SECONDS = 60  # of a recording are encoded at once
FITTED_VECTORS = 200_000  # that k-means draws from
MAX_BOOKS = 8  # of a codec: EnCodec has 32, of which each adds little to those before


def open_sound_codec(name: str) -> EnCodecModel | None:
    """The codec of a run or a folder; None where none is named."""
    if not name:
        return None
    codec = load_codec(find_model(name))
    if not isinstance(codec, EnCodecModel) or not isinstance(codec.spec, EnCodec):
        raise BadSetting(_("{codec} must be a codec of sounds, it is one of pictures", codec=name))
    if codec.in_chunks or codec.channels != 1:
        raise BadSetting(
            _("{codec} must be a codec of whole sounds in mono, such as EnCodec for 24 kHz; give another", codec=name)
        )
    return codec


def fit_semantic(paths: Sequence[str], num_codes: int, whisper: str, seed: int) -> SemanticCodec:
    """K-means over the features of recordings: states of a Whisper, or without one log-mel spectrograms."""
    codec = SemanticCodec.of(num_codes, whisper, seed)
    limit = max(1, FITTED_VECTORS // len(paths))  # of each recording, so that memory does not grow with them
    kept: list[Tensor] = []
    for path in paths:
        try:
            features = codec.features(read_audio(path))
        except Fault:
            continue  # read_voices() says so
        kept.append(features[evenly_spaced(len(features), limit)])
    if not kept:
        raise BadInput(_("no recording can be used: {first}", first=paths[0]))
    return codec.fit(torch.cat(kept), seed)


def read_voices(
    paths: Sequence[str], codec: EnCodecModel | None, semantic: SemanticCodec | None, notes: list[str]
) -> list[Voice]:
    """The tokens of recordings and token files; those that cannot be used are named in a note."""
    voices: list[Voice] = []
    bad: list[str] = []
    for path in paths:
        try:
            usable = [voice for voice in tokens_of_file(path, codec, semantic) if is_long_enough(voice)]
        except Fault as fault:
            bad.append(str(fault))
            continue
        voices += usable
        if not usable:
            bad.append(_("{path}: it is shorter than two tokens", path=path))
    if bad:
        notes.append(_("{count:,} recordings cannot be used and are left out: {first}", count=len(bad), first=bad[0]))
    if not voices:
        raise BadInput(_("no recording can be used: {first}", first=bad[0] if bad else "-"))
    return voices


def tokens_of_file(path: str, codec: EnCodecModel | None, semantic: SemanticCodec | None) -> list[Voice]:
    """The tokens of a token file, or of the pieces of a recording: how much memory it takes does not grow with it."""
    if path.endswith(TOKEN_SUFFIX):
        return [read_voice(path)]
    if codec is None or semantic is None:
        raise BadInput(_("{path}: there is no codec for recordings; give --codec", path=path))
    recording = read_recording(path, codec, semantic, MAX_SECONDS)
    pieces = map(
        CodecInputs,
        recording.semantic.split(PIECE_SECONDS * semantic.sample_rate),
        recording.sound.split(PIECE_SECONDS * codec.spec.sampling_rate),
    )
    return [encode_recording(piece, codec, semantic, min(codec.num_books, MAX_BOOKS)) for piece in pieces]


def is_long_enough(voice: Voice) -> bool:
    """Whether there is a token to predict from another."""
    return min(len(voice.semantic), len(voice.fine)) >= 2
