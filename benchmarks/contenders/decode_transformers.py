"""SmolLM2 in transformers, float32 from a folder with the same weights widened; its own generate with its own cache."""

import json
import sys
import time

import torch
import transformers

PROMPT, NEW = 128, 128
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
ids = (torch.arange(1000, 1000 + PROMPT))[None]


@torch.inference_mode()
def once() -> dict[str, float]:
    begun = time.perf_counter()
    model.generate(ids, max_new_tokens=1, do_sample=False, pad_token_id=0)
    middle = time.perf_counter()
    model.generate(ids, min_new_tokens=NEW, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    end = time.perf_counter()
    prefill = middle - begun
    return {"prefill tokens/s": PROMPT / prefill, "decode tokens/s": (NEW - 1) / (end - middle - prefill)}


torch.set_num_threads(2)
print("ready", flush=True)
for _ in sys.stdin:
    print(json.dumps(once()), flush=True)
