"""Translation in transformers: the weights of a folder, as Marian, float32."""

import os
import sys

import torch
import transformers
from translate_workload import BEAM, TOKENS, serve

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
model = transformers.MarianMTModel.from_pretrained(sys.argv[1], dtype=torch.float32).eval()


@torch.inference_mode()
def translate(sentences: list[list[int]]) -> list[list[int]]:
    source = torch.tensor(sentences)
    fixed_length = {"min_new_tokens": TOKENS, "max_new_tokens": TOKENS}
    output = model.generate(source, attention_mask=torch.ones_like(source), num_beams=BEAM, **fixed_length)
    return output[:, 1:].tolist()


@torch.inference_mode()
def score(sources: list[list[int]], targets: list[list[int]]) -> list[list[float]]:
    labels = torch.tensor(targets)
    shifted = torch.cat([torch.ones_like(labels[:, :1]), labels[:, :-1]], 1)  # 1 starts a translation
    scores = model(input_ids=torch.tensor(sources), decoder_input_ids=shifted).logits.log_softmax(-1)
    return scores.gather(-1, labels[:, :, None])[:, :, 0].tolist()


serve(translate, score)
