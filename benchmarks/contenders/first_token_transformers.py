"""The same weights widened to float32 in transformers, from a folder: one token."""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
given = tokenizer(sys.argv[2], return_tensors="pt")
with torch.inference_mode():
    found = model.generate(**given, max_new_tokens=1, do_sample=False, pad_token_id=0)
print(int(found[0, -1]), tokenizer.decode(found[0, -1:]), flush=True)
