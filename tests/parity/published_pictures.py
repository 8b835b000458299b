"""Tiny DALL-E mini, VQGAN and dVAE: their files with seeded weights, and what the public packages compute from them.

The packages (DALL_E 0.1, min-dalle 0.4.11, taming-transformers-rom1504 0.0.6) import much that these tests do not need,
so their answers are kept in published_pictures.json. To compute them again, with the packages in a folder of their own
(pip install --no-deps --target FOLDER DALL_E attrs min-dalle taming-transformers-rom1504):

    python tests/parity/published_pictures.py FOLDER
"""

from __future__ import annotations

import json
import math
import sys
import types
import zlib
from pathlib import Path

import torch
from torch import Tensor

ANSWERS = Path(__file__).with_suffix(".json")
DVAE = {"model_type": "dall_e_dvae", "n_hid": 64, "n_init": 16, "n_blk_per_group": 2, "vocab_size": 512,
        "image_size": 32}  # fmt: skip
VQGAN = {"model_type": "vqgan", "ch": 32, "ch_mult": [1, 1, 2], "num_res_blocks": 1, "attn_resolutions": [8],
         "resolution": 32, "z_channels": 16, "embed_dim": 12, "n_embed": 40, "double_z": False}  # fmt: skip
DALLEBART = {
    "model_type": "dallebart", "encoder_vocab_size": 106, "image_vocab_size": 50, "image_length": 256, "d_model": 32,
    "max_text_length": 64, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4, "use_glu": True,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "activation_function": "gelu",
    "ln_positions": "normformer", "bos_token_id": 50, "decoder_start_token_id": 50, "eos_token_id": 50,
}  # fmt: skip
MERGES = ["Ġ a", "r e", "re d", "Ġ red", "c a", "ca t", "Ġ cat"]
TEXTS = ["a red cat", "  A  Red   CAT! ", "Ünï cat, red-cat", ""]


def vocabulary() -> dict[str, int]:
    """Special tokens, printable ASCII and the merges."""
    pieces = ["<s>", "<pad>", "</s>", "<unk>", *map(chr, range(33, 127)), "Ġ"]
    return {piece: i for i, piece in enumerate([*pieces, *(merge.replace(" ", "") for merge in MERGES)])}


def seeded(name: str, shape: tuple[int, ...]) -> Tensor:
    """The weights of a tensor, from its name alone: the same in every version of every library."""
    size = math.prod(shape)
    wave = torch.sin(torch.arange(size, dtype=torch.float64) * 1.7 + zlib.crc32(name.encode()) % 1009)
    if len(shape) == 1:
        return (0.2 * wave + ("norm" in name and name.endswith("weight"))).float()
    return (1.7 * wave / math.sqrt(size / shape[0])).view(shape).float()


def pictures() -> Tensor:
    """[2, 3, 32, 32] in 0 … 1"""
    return (seeded("pictures", (2, 3, 32, 32)) * 16 + 0.5).clamp(0, 1)


def ids(name: str, shape: tuple[int, ...], vocab: int) -> Tensor:
    """Token ids from a name."""
    return (seeded(name, (math.prod(shape), 1)).abs() * 1e6).long().view(shape) % vocab


# ---------------------------------------------------------------------------------------------- the public packages


def _sample(tensor: Tensor) -> dict[str, object]:
    """The shape of a tensor, and 64 values spread over it."""
    flat = tensor.detach().flatten()
    return {"shape": list(tensor.shape), "values": flat[:: max(1, len(flat) // 64)].tolist()}


def _fill(module: torch.nn.Module, prefix: str) -> dict[str, list[int]]:
    """Seed the weights of a module; returns its shapes by published name."""
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(seeded(prefix + name, tuple(p.shape)))
    return {prefix + name: list(p.shape) for name, p in module.named_parameters()}


def _dvae() -> dict[str, object]:
    import dall_e
    from dall_e.decoder import Decoder
    from dall_e.encoder import Encoder

    encoder = Encoder(n_hid=64, n_blk_per_group=2, vocab_size=512)
    decoder = Decoder(n_hid=64, n_init=16, n_blk_per_group=2, vocab_size=512)
    shapes = _fill(encoder, "encoder.") | _fill(decoder, "decoder.")
    one_hot = torch.nn.functional.one_hot(ids("dvae", (2, 4, 4), 512), 512).permute(0, 3, 1, 2).float()
    return {
        "shapes": shapes,
        "logits": _sample(encoder(dall_e.map_pixels(pictures()))),
        "ids": encoder(dall_e.map_pixels(pictures())).argmax(1).flatten(1).tolist(),
        "decoded": _sample(dall_e.unmap_pixels(torch.sigmoid(decoder(one_hot)[:, :3]))),
    }


def _vqgan() -> dict[str, object]:
    import taming.modules.diffusionmodules.model as taming

    sizes = {"ch": 32, "out_ch": 3, "ch_mult": (1, 1, 2), "num_res_blocks": 1, "attn_resolutions": [8],
             "in_channels": 3, "resolution": 32, "z_channels": 16, "double_z": False}  # fmt: skip
    modules = {
        "encoder.": taming.Encoder(**sizes),
        "decoder.": taming.Decoder(**sizes),
        "quantize.embedding.": torch.nn.Embedding(40, 12),
        "quant_conv.": torch.nn.Conv2d(16, 12, 1),
        "post_quant_conv.": torch.nn.Conv2d(12, 16, 1),
    }
    shapes: dict[str, list[int]] = {}
    for prefix, module in modules.items():
        shapes |= _fill(module.eval(), prefix)
    encoder, decoder, table, to_codes, from_codes = modules.values()
    latents = table(ids("vqgan", (2, 8, 8), 40)).permute(0, 3, 1, 2)
    return {
        "shapes": shapes,
        "latents": _sample(to_codes(encoder(pictures()))),
        "decoded": _sample(decoder(from_codes(latents)).clamp(0, 1)),
    }


def _dallebart() -> dict[str, object]:
    from min_dalle.models import DalleBartDecoder, DalleBartEncoder
    from min_dalle.text_tokenizer import TextTokenizer

    common = {"embed_count": 32, "attention_head_count": 4, "glu_embed_count": 40, "device": "cpu"}
    encoder = DalleBartEncoder(layer_count=2, text_vocab_count=106, text_token_count=64, **common).eval()
    decoder = DalleBartDecoder(layer_count=3, image_vocab_count=50, **common).eval()
    shapes = _fill(encoder, "encoder.") | _fill(decoder, "decoder.")

    # the empty prompt and a text, padded with 1
    tokenizer = TextTokenizer(vocabulary(), MERGES)
    tokens = tokenizer.tokenize(TEXTS[0])
    text = torch.ones(2, 64, dtype=torch.long)
    text[0, :2] = torch.tensor([0, 2])
    text[1, : len(tokens)] = torch.tensor(tokens)
    logits, _ = decoder(
        attention_mask=text.ne(1)[:, None, None],
        encoder_state=encoder(text),
        attention_state=torch.zeros(3, 4, 256, 32),
        prev_tokens=ids("picture", (1, 17), 50),
        token_index=torch.arange(17),
    )
    return {"shapes": shapes, "tokens": [tokenizer.tokenize(t) for t in TEXTS], "logits": _sample(logits)}


def main(folder: str) -> None:
    sys.path.append(folder)
    for name in ("requests", "emoji"):
        sys.modules.setdefault(name, types.ModuleType(name))
    sys.modules["emoji"].demojize = lambda text, **_: text
    with torch.no_grad():
        answers = {"dvae": _dvae(), "vqgan": _vqgan(), "dallebart": _dallebart()}
    ANSWERS.write_text(json.dumps(answers, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
