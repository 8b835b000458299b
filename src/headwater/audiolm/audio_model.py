"""AudioModel: the three stages of AudioLM, the codec of their codes, and what makes semantic tokens; clips in and out.

model = open_audio_model("runs/audio-language-model/sounds")
voice = model.encode("clip.wav")
samples = model.decode(model.continue_voice(voice, seconds=3))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwater.audio.files import read_audio
from headwater.audiolm.semantic import SemanticCodec
from headwater.audiolm.stages import GREEDY, SamplingRule, write_coarse, write_fine, write_semantic
from headwater.audiolm.voice import Voice, check_voice, read_voice
from headwater.codecs import Codec, load_codec
from headwater.codecs.encodec import EnCodecModel
from headwater.codecs.folder import CODEC_FOLDER, has_nested_codec, load_nested_codec
from headwater.errors import BadFile, BadInput, NotFound
from headwater.families.load import find_model, load
from headwater.i18n import _
from headwater.text.tokenizer import Tokenizer
from headwater.variants.audiolm import AudioLanguageModel, AudioTokens
from headwater.weights.hf_config import HFConfig

SEMANTIC_FOLDER = "semantic_codec"
MAX_SECONDS = 600
AUDIOLM_TEMPERATURES = (0.6, 0.8, 0.6)  # of the three stages, in the paper


@dataclass(frozen=True)
class AudioModel:
    """A loaded AudioLM. codec: of the sound, semantic_codec: of what is said; None where the folder has none."""

    model: AudioLanguageModel
    tokens: AudioTokens
    path: Path
    tokenizer: Tokenizer | None = None
    codec: EnCodecModel | None = None
    semantic_codec: SemanticCodec | None = None

    @property
    def sample_rate(self) -> int:
        """Samples a second of what decode() gives."""
        return round(self.tokens.frame_rate * self.require_codec().hop)

    def require_codec(self) -> EnCodecModel:
        """The codec of the sound."""
        if self.codec is None:
            raise NotFound(
                _(
                    "{path} has no sound codec, so tokens cannot become sound; put one into {name}/, or write tokens "
                    "with --out FILE.npz",
                    path=self.path,
                    name=CODEC_FOLDER,
                )
            )
        return self.codec

    # ----------------------------------------------------------------------------------------------- clips and tokens

    def encode(self, path: str | Path, max_seconds: float = MAX_SECONDS) -> Voice:
        """The tokens of a recording, or those that a .npz file holds."""
        if Path(path).suffix == ".npz":
            return check_voice(read_voice(path), self.tokens, path)
        codec = self.require_codec()
        if self.semantic_codec is None:
            raise NotFound(
                _(
                    "{path} has nothing that makes semantic tokens of a recording; give a .npz file of tokens",
                    path=self.path,
                )
            )
        recording = read_recording(path, codec, self.semantic_codec, max_seconds)
        return encode_recording(recording, codec, self.semantic_codec, self.tokens.books)

    @torch.inference_mode()
    def decode(self, fine: Tensor) -> Tensor:
        """Codes [M, K] to samples [N]."""
        codec = self.require_codec()
        return codec.decode(fine[None])[0].mean(0) if len(fine) else torch.zeros(0)

    # -------------------------------------------------------------------------------------------------------- writing

    def continue_voice(self, voice: Voice, seconds: float, rules: Sequence[SamplingRule] = (GREEDY,) * 3) -> Voice:
        """The tokens of the seconds that follow a recording."""
        if self.tokens.text_length:
            raise BadInput(_("{path} continues no recording, it speaks texts; use headwater speak", path=self.path))
        if not len(voice.semantic) or not len(voice.fine):
            raise BadInput(_("a recording must last a frame at least to be continued; give a longer one"))
        count = max(1, round(seconds * self.tokens.semantic_rate))
        semantic = write_semantic(self.model, self.tokens, voice, max_tokens=count, rule=rules[0])
        return Voice(semantic, self._codes(semantic, voice, rules))

    def speak(
        self, text: str | Sequence[int], voice: Voice | None = None, rules: Sequence[SamplingRule] = (GREEDY,) * 3
    ) -> Voice:
        """The tokens of a text, or of its token ids, in the voice of a recording."""
        if not self.tokens.text_length:
            raise BadInput(
                _(
                    "{path} was trained on sounds without texts, so it cannot speak; use headwater continue, or a Bark "
                    "folder",
                    path=self.path,
                )
            )
        if isinstance(text, str):
            if self.tokenizer is None:
                raise NotFound(
                    _("{path} has no tokenizer, which a text needs; put tokenizer.json into it", path=self.path)
                )
            text = self.tokenizer.encode(" ".join(text.split()), add_special_tokens=False)
        known = Voice.empty(self.tokens.books) if voice is None else check_voice(voice, self.tokens)
        semantic = write_semantic(self.model, self.tokens, known, text=text, rule=rules[0])
        return Voice(semantic, self._codes(semantic, known, rules))

    def _codes(self, semantic: Tensor, voice: Voice, rules: Sequence[SamplingRule]) -> Tensor:
        coarse = write_coarse(self.model, self.tokens, semantic, voice, rules[1])
        return write_fine(self.model, self.tokens, coarse, voice, rules[2])


class CodecInputs(NamedTuple):
    """The samples [N] of a recording, at the rate of each of the two codecs."""

    semantic: Tensor
    sound: Tensor


def read_recording(
    path: str | Path, codec: EnCodecModel, semantic_codec: SemanticCodec, max_seconds: float
) -> CodecInputs:
    """Read a recording for both codecs."""
    samples = read_audio(path, max_seconds=max_seconds, rate=semantic_codec.sample_rate)
    rate = codec.spec.sampling_rate
    same = rate == semantic_codec.sample_rate
    return CodecInputs(samples, samples if same else read_audio(path, max_seconds=max_seconds, rate=rate))


@torch.no_grad()
def encode_recording(recording: CodecInputs, codec: EnCodecModel, semantic_codec: SemanticCodec, books: int) -> Voice:
    """The tokens of a recording."""
    semantic = semantic_codec.encode(recording.semantic[None])[0].clone()  # no inference tensor
    return Voice(semantic, codec.encode(recording.sound[None, None], books)[0])


def open_audio_model(name: str | Path) -> AudioModel:
    """Load an AudioLM: the run of audio-language-model, or a Bark folder."""
    path = find_model(name)
    loaded = load(name)
    if not isinstance(loaded.model, AudioLanguageModel):
        raise BadInput(
            _("{name} is no AudioLM; give the run of --task audio-language-model or a Bark folder", name=name)
        )
    tokens = bark_tokens(loaded.model.tokens, loaded.generation_config, path)
    codec = find_sound_codec(path)
    semantic = load_codec(path / SEMANTIC_FOLDER) if (path / SEMANTIC_FOLDER / "config.json").is_file() else None
    if semantic is not None and not isinstance(semantic, SemanticCodec):
        raise BadFile(
            _("{path} must hold what makes semantic tokens, it holds another codec", path=path / SEMANTIC_FOLDER)
        )
    return AudioModel(loaded.model, tokens, path, loaded.tokenizer, codec, semantic)


def find_sound_codec(folder: Path) -> EnCodecModel | None:
    """The sound codec of a model folder: in its folder `codec`, or among its own tensors (Bark); None without one."""
    codec: Codec
    if (folder / CODEC_FOLDER / "config.json").is_file():
        codec = load_codec(folder / CODEC_FOLDER)
    elif has_nested_codec(folder):
        codec = load_nested_codec(folder)
    else:
        return None
    if not isinstance(codec, EnCodecModel):
        raise BadFile(_("{path} must be a codec of sounds, it is one of pictures", path=folder / CODEC_FOLDER))
    return codec


# generation_config.json of Bark: section, key -> field of AudioTokens
BARK_KEYS = {
    "semantic_config": {
        "semantic_vocab_size": "semantic_codes", "eos_token_id": "semantic_end", "text_pad_token": "text_pad",
        "semantic_infer_token": "semantic_infer", "semantic_rate_hz": "semantic_rate",
        "max_new_tokens": "semantic_length", "max_input_semantic_length": "text_length",
        "text_encoding_offset": "text_offset",
    },
    "coarse_acoustics_config": {
        "n_coarse_codebooks": "coarse_books", "coarse_rate_hz": "frame_rate", "coarse_infer_token": "coarse_infer",
        "coarse_semantic_pad_token": "coarse_pad", "max_coarse_input_length": "coarse_semantic",
        "max_coarse_history": "coarse_history", "sliding_window_len": "coarse_window",
    },
    "fine_acoustics_config": {
        "n_fine_codebooks": "books", "max_fine_history_length": "fine_history", "max_fine_input_length": "fine_length",
    },
}  # fmt: skip
RATES = ("semantic_rate", "frame_rate")


def bark_tokens(tokens: AudioTokens, generation_config: dict[str, Any], path: Path) -> AudioTokens:
    """The layout with what a Bark generation_config.json changes."""
    config = HFConfig(generation_config, path / "generation_config.json")
    changes: dict[str, Any] = {}
    for section, keys in BARK_KEYS.items():
        values = config.section(section)
        for key, name in keys.items():
            value = values.get_optional("get_float" if name in RATES else "get_int", key)
            changes |= {} if value is None else {name: value}
    if "codebook_size" in config:
        changes["codes"] = config.get_int("codebook_size")
    if "semantic_codes" in changes:
        changes["coarse_offset"] = changes["semantic_codes"]
    return replace(tokens, **changes) if changes else tokens
