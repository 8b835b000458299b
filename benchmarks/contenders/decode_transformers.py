"""SmolLM2 in transformers, float32 from a folder with the same weights dequantized; generate() with its own cache."""

import os
import sys
import time

import torch
import transformers
from decode_workload import NEW, prompt, rates, serve

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
model.generation_config.eos_token_id = None  # always max_new_tokens tokens
ids = torch.tensor([prompt()])


@torch.inference_mode()
def write(tokens: int) -> tuple[list[int], float]:
    start = time.perf_counter()
    output = model.generate(ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return output[0, ids.shape[1] :].tolist(), time.perf_counter() - start


def once() -> tuple[list[int], dict[str, float]]:
    (_, first), (tokens, total) = write(1), write(NEW)
    return tokens, rates(first, total - first)


with torch.inference_mode():
    logprobs = model(ids).logits[0, :-1].log_softmax(-1)
serve(once, {"prefill": logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()})
