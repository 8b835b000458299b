"""The same weights dequantized to float32 in transformers, from a folder: one token."""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
inputs = tokenizer(sys.argv[2], return_tensors="pt")
with torch.inference_mode():
    output = model.generate(**inputs, max_new_tokens=1, do_sample=False, pad_token_id=0)
print(int(output[0, -1]), tokenizer.decode(output[0, -1:]), flush=True)
