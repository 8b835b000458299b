"""The same in transformers, with the architecture of config.json; its tokenizer is loaded too, as in Headwater."""

import contextlib
import json
import sys
from pathlib import Path

import torch
import transformers

folder = Path(sys.argv[1])
kind = json.loads((folder / "config.json").read_text())["architectures"][0]
model = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32).eval()
if (folder / "tokenizer.json").exists():
    with contextlib.suppress(ValueError):
        transformers.AutoTokenizer.from_pretrained(folder)
with torch.inference_mode():
    print(float(next(iter(model(torch.arange(5, 21)[None]).values())).max()), flush=True)
