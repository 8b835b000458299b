"""Codecs: pictures and sounds to token ids and back, small models beside a Transformer.

Importing this package registers all of them.
"""

from __future__ import annotations

from headwater.codecs.base import Codec, CodecSpec, PictureCodec
from headwater.codecs.dvae import DVAE
from headwater.codecs.folder import find_codec, load_codec, save_codec
from headwater.codecs.vqgan import VQGAN

__all__ = ["DVAE", "VQGAN", "Codec", "CodecSpec", "PictureCodec", "find_codec", "load_codec", "save_codec"]
