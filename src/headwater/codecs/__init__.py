"""Codecs: pictures and sounds to token ids and back, small models beside a Transformer.

Importing this package registers all of them.
"""

from __future__ import annotations

import headwater.codecs.encodec_files  # noqa: F401  (registers the published layout)
from headwater.codecs.base import Codec, CodecSpec, PictureCodec
from headwater.codecs.dvae import DVAE
from headwater.codecs.encodec import EnCodec
from headwater.codecs.folder import find_codec, is_codec, load_codec, read_codec_metadata, read_codec_spec, save_codec
from headwater.codecs.sound_codec import SoundCodec
from headwater.codecs.vqgan import VQGAN
from headwater.codecs.vqvae import VQVAE

__all__ = [
    "DVAE",
    "VQGAN",
    "VQVAE",
    "Codec",
    "CodecSpec",
    "EnCodec",
    "PictureCodec",
    "SoundCodec",
    "find_codec",
    "is_codec",
    "load_codec",
    "read_codec_metadata",
    "read_codec_spec",
    "save_codec",
]
