"""SmolLM2 in transformers, float32 from a folder with the same weights widened; its own generate with its own cache."""

import os
import sys
import time

import torch
import transformers
from decode_work import NEW, prompt, rates, serve

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
model.generation_config.eos_token_id = None  # as many tokens as are asked for
ids = torch.tensor([prompt()])


@torch.inference_mode()
def write(tokens: int) -> tuple[list[int], float]:
    begun = time.perf_counter()
    found = model.generate(ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return found[0, ids.shape[1] :].tolist(), time.perf_counter() - begun


def once() -> tuple[list[int], dict[str, float]]:
    (_, first), (tokens, whole) = write(1), write(NEW)
    return tokens, rates(first, whole - first)


with torch.inference_mode():
    scores = model(ids).logits[0, :-1].log_softmax(-1)
serve(once, {"reading": scores.gather(1, ids[0, 1:, None])[:, 0].tolist()})
