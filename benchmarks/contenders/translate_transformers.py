"""Translation in transformers: the weights of a folder, as Marian, float32."""

import os
import sys

import torch
import transformers
from translate_work import BEAM, TOKENS, serve

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
model = transformers.MarianMTModel.from_pretrained(sys.argv[1], dtype=torch.float32).eval()


@torch.inference_mode()
def translate(sentences: list[list[int]]) -> list[list[int]]:
    given = torch.tensor(sentences)
    pinned = {"min_new_tokens": TOKENS, "max_new_tokens": TOKENS}
    found = model.generate(given, attention_mask=torch.ones_like(given), num_beams=BEAM, **pinned)
    return found[:, 1:].tolist()


@torch.inference_mode()
def score(sources: list[list[int]], targets: list[list[int]]) -> list[list[float]]:
    wanted = torch.tensor(targets)
    shifted = torch.cat([torch.ones_like(wanted[:, :1]), wanted[:, :-1]], 1)  # 1 starts a translation
    scores = model(input_ids=torch.tensor(sources), decoder_input_ids=shifted).logits.log_softmax(-1)
    return scores.gather(-1, wanted[:, :, None])[:, :, 0].tolist()


serve(translate, score)
