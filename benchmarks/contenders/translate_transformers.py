"""Translation in transformers: Marian of the same shape, with weights that have learnt nothing, float32."""

import os

import torch
import transformers
from translate_work import BEAM, D_FF, D_MODEL, HEADS, LAYERS, TOKENS, VOCAB, serve

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
sides = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in
         (("layers", LAYERS), ("attention_heads", HEADS), ("ffn_dim", D_FF))}  # fmt: skip
ids = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": None}
config = transformers.MarianConfig(vocab_size=VOCAB, d_model=D_MODEL, activation_function="relu", **sides, **ids)
model = transformers.MarianMTModel(config).eval()


@torch.inference_mode()
def translate(sentences: list[list[int]]) -> list[list[int]]:
    given = torch.tensor(sentences)
    pinned = {"min_new_tokens": TOKENS, "max_new_tokens": TOKENS}
    found = model.generate(given, attention_mask=torch.ones_like(given), num_beams=BEAM, **pinned)
    return found[:, 1:].tolist()


serve(translate)
