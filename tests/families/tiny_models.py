"""Tiny models of every family, saved as Hugging Face folders; and helpers that change such a folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from headwater.audio.frames import FramesLayer
from headwater.families import FAMILIES, detect_head_type
from headwater.families.hf_folder import LoadedModel, save_hf_folder
from headwater.variants.patches import PatchesLayer
from headwater.variants.towers import TwoTowers
from headwater.weights.hf_config import HFConfig
from headwater.weights.safetensors import SafetensorsFile, write_safetensors

VOCAB = 47
ENCODER = {
    "vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 64,
}  # fmt: skip
DECODER = ENCODER | {"num_key_value_heads": 1}
T5 = {"vocab_size": VOCAB, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
PAIR = {
    "vocab_size": VOCAB, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
}  # fmt: skip
FAIRSEQ = {
    "vocab_size": VOCAB, "encoder_embed_dim": 16, "decoder_embed_dim": 16, "encoder_ffn_embed_dim": 24,
    "decoder_ffn_embed_dim": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
}  # fmt: skip
IMAGE = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "image_size": 16,
    "patch_size": 8, "encoder_stride": 8,
}  # fmt: skip
TOWER = ENCODER | {"projection_dim": 12, "eos_token_id": 46}
IMAGE_TOWER = {key: value for key, value in IMAGE.items() if key != "encoder_stride"} | {"projection_dim": 12}
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": ENCODER,
    "roberta": ENCODER,
    "xlm-roberta": ENCODER,
    "camembert": ENCODER,
    "albert": ENCODER | {"embedding_size": 8},
    "distilbert": {
        "vocab_size": VOCAB, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "max_position_embeddings": 64,
    },
    "gpt2": {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "llama": DECODER,
    "mistral": DECODER | {"sliding_window": 6},
    "qwen2": DECODER,
    "qwen3": DECODER | {"head_dim": 8},
    "gemma": DECODER | {"head_dim": 8},
    "gpt_neox": ENCODER,
    "mixtral": DECODER | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "t5": T5,
    "mt5": T5,
    "bart": PAIR,
    "mbart": PAIR,
    "marian": PAIR,
    "pegasus": PAIR,
    "blenderbot": PAIR,
    "megatron-bert": ENCODER,
    "fairseq": FAIRSEQ,
    "fairseq_prenorm": FAIRSEQ,
    "clip": {"text_config": TOWER, "vision_config": IMAGE_TOWER, "projection_dim": 12},
    "siglip": {"text_config": TOWER | {"projection_size": 20}, "vision_config": IMAGE_TOWER | {"hidden_size": 20}},
    "clip_text_model": TOWER,
    "clip_vision_model": IMAGE_TOWER,
    "siglip_text_model": TOWER,
    "siglip_vision_model": IMAGE_TOWER,
    "transfo-xl": {
        "vocab_size": VOCAB, "d_model": 16, "n_layer": 2, "n_head": 2, "d_head": 6, "d_inner": 24, "d_embed": 8,
        "cutoffs": [20, 40], "div_val": 2, "mem_len": 64, "same_length": False,
    },
    "longformer": ENCODER | {"attention_window": 4},
    "led": {key: value for key, value in PAIR.items() if key != "max_position_embeddings"} | {"attention_window": 4},
    "big_bird": ENCODER | {"block_size": 4, "num_random_blocks": 1},
    "bigbird_pegasus": PAIR | {"block_size": 4, "num_random_blocks": 1},
    "longt5": T5 | {"encoder_attention_type": "transient-global", "local_radius": 2, "global_block_size": 3},
    "reformer": {
        "vocab_size": VOCAB, "hidden_size": 16, "num_attention_heads": 2, "attention_head_size": 6, "hash_seed": 0,
        "feed_forward_size": 24, "attn_layers": ["local", "lsh"], "axial_pos_shape": [4, 16],
        "axial_pos_embds_dim": [4, 12], "max_position_embeddings": 64, "is_decoder": True,
    },
    "vit": IMAGE,
    "deit": IMAGE,
}  # fmt: skip
SPEECH_CONFIGS: dict[str, dict[str, Any]] = {  # they read a spectrogram
    "whisper": {key: value for key, value in PAIR.items() if key != "max_position_embeddings"}
    | {"num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 64}
}
ALL_CONFIGS = CONFIGS | SPEECH_CONFIGS


def tiny(model_type: str, head: str | None = None, seed: int = 0, **changes: Any) -> LoadedModel:
    """A small random model of a family, with weights large enough that a wrong term shows."""
    config = {"model_type": model_type, **ALL_CONFIGS[model_type], **changes}
    family = FAMILIES[model_type]
    c = HFConfig(dict(config))
    kind = head or detect_head_type(family, c.get_list("architectures", str, []))
    model = family.read_spec(c, kind).build(seed=seed).eval()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.1)
    return LoadedModel(model, None, config, Path(), kind)


def make(folder: Path, model_type: str, **changes: Any) -> Path:
    return save_hf_folder(tiny(model_type, **changes), folder)


def ids(length: int = 9, seed: int = 0) -> torch.Tensor:
    return torch.randint(5, VOCAB - 4, (2, length), generator=torch.Generator().manual_seed(seed))


def forward(model: Any, rows: torch.Tensor | None = None) -> torch.Tensor:
    """Logits of a model on fixed ids, or on fixed images; an encoder-decoder also gets a source: ids or sound."""
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    if isinstance(model, TwoTowers):
        with torch.no_grad():
            return model(ids(), source=pixels)
    if rows is None:
        rows = pixels if isinstance(getattr(model.encoder, "embed", None), PatchesLayer) else ids()
    with torch.no_grad():
        pair = model.encoder is not None and model.decoder is not None
        if pair and isinstance(model.encoder.embed, FramesLayer):
            mel = torch.randn(2, model.encoder.embed.mels, 14, generator=torch.Generator().manual_seed(1))
            return model(rows, source=mel)
        return model(rows, source=ids(7, 1)) if pair else model(rows)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    file = SafetensorsFile(folder / "model.safetensors")
    return {name: file[name].clone() for name in file}


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    weights = tensors(folder)
    changed = change(weights)
    write_safetensors(folder / "model.safetensors", weights if changed is None else changed)


def reconfigure(folder: Path, **changes: Any) -> None:
    """Change config.json; a value of ... removes the key."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
