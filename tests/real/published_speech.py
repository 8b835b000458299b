"""What faster-whisper and openai-whisper hear in the speech samples with the same weights: text, segments, words.

Their answers are kept in published_speech.json, with times of words: of faster-whisper 1.2.1 in float32, greedy and
with 5 beams, and of openai-whisper 20250625, greedy. To compute some again, where the peer is installed (openai-whisper
beside Headwater); the folders are those of whisper-tiny.en and whisper-base, as `headwater models` installs them:

    python tests/real/published_speech.py faster-whisper 5 FOLDER_OF_SAMPLES TINY.EN BASE
    python tests/real/published_speech.py openai-whisper 1 FOLDER_OF_SAMPLES TINY.EN BASE
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ANSWERS = Path(__file__).with_suffix(".json")
MODELS = ("whisper-tiny.en", "whisper-base")
SAMPLES = ("jfk.wav", "beckett.wav", "two_cities.wav")
PEERS = (("faster-whisper", 1), ("faster-whisper", 5), ("openai-whisper", 1))  # with the number of beams


def faster_whisper(model: str, sample: Path, beam_size: int) -> list[dict]:
    from faster_whisper import WhisperModel, decode_audio

    peer = WhisperModel(model, device="cpu", compute_type="float32")
    settings = {"beam_size": beam_size, "language": "en", "word_timestamps": True}
    segments, _info = peer.transcribe(decode_audio(str(sample)), **settings)
    return [rounded(s.start, s.end, s.text, [(w.start, w.end, w.word) for w in s.words]) for s in segments]


def openai_whisper(model: str, sample: Path, beam_size: int) -> list[dict]:
    import torch
    import whisper

    import headwater
    from headwater.audio.files import read_audio
    from headwater.families import FAMILIES
    from headwater.families.whisper_formats import hf_to_openai

    # the same weights under openai's names
    loaded = headwater.load(model)
    config = loaded.config
    heads = config["encoder_attention_heads"]
    tensors = FAMILIES["whisper"].body_names.export(dict(loaded.model.named_parameters()), heads=heads, kv_heads=heads)
    layers, width = config["encoder_layers"], config["d_model"]
    vocab = len(loaded.model.decoder.embed.tokens.weight)
    peer = whisper.model.Whisper(
        whisper.model.ModelDimensions(80, 1500, width, heads, layers, vocab, 448, width, heads, layers)
    )
    state = {hf_to_openai(name): tensors[name].detach().clone() for name in tensors}
    missing = set(peer.state_dict()) - set(state)
    assert not missing, missing
    peer.load_state_dict({name: tensor.view(peer.state_dict()[name].shape) for name, tensor in state.items()})
    chosen = torch.zeros(layers, heads, dtype=torch.bool)
    for layer, head in loaded.generation_setting("alignment_heads"):
        chosen[layer, head] = True
    peer.register_buffer("alignment_heads", chosen.to_sparse(), persistent=False)

    sound = read_audio(sample).numpy()
    settings = {"beam_size": beam_size if beam_size > 1 else None, "language": "en", "word_timestamps": True}
    answer = whisper.transcribe(peer.eval(), sound, fp16=False, **settings)
    return [
        rounded(s["start"], s["end"], s["text"], [(w["start"], w["end"], w["word"]) for w in s["words"]])
        for s in answer["segments"]
    ]


def rounded(start: float, end: float, text: str, words: list[tuple[float, float, str]]) -> dict:
    times = [[round(float(first), 2), round(float(last), 2), word] for first, last, word in words]
    return {"start": round(float(start), 2), "end": round(float(end), 2), "text": text, "words": times}


def answers_of(peer: str, beam_size: int) -> str:
    """The key of a peer's answers."""
    return peer if beam_size == 1 else f"{peer}, {beam_size} beams"


def main() -> None:
    peer, beams, folder, *models = sys.argv[1:]
    hear = {"faster-whisper": faster_whisper, "openai-whisper": openai_whisper}[peer]
    answers = json.loads(ANSWERS.read_text()) if ANSWERS.is_file() else {}
    answers[answers_of(peer, int(beams))] = {
        name: {sample: hear(model, Path(folder) / sample, int(beams)) for sample in SAMPLES}
        for name, model in zip(MODELS, models, strict=True)
    }
    lines = json.dumps(answers, ensure_ascii=False, indent=None, separators=(",", ":"))
    ANSWERS.write_text(lines.replace('{"start"', '\n{"start"') + "\n")


if __name__ == "__main__":
    main()
