"""Runs the public Transformer-XL (transformers 4.37.2) in a process of its own: saves models and their answers.

python xl_oracle.py FOLDER: for each setting a folder in transformers' layout, and answers.safetensors with ids [2, 9],
log-probabilities of both segments (5 and 4 tokens, from an empty memory), and of the whole.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

SETTINGS = {
    "published": {},
    "pre_norm": {"pre_lnorm": True},
    "same_length": {"same_length": True, "mem_len": 4},
    "shared_terms": {"untie_r": False},
    "one_width": {"div_val": 1, "d_embed": 32, "clamp_len": -1},
    "no_clusters": {"div_val": 1, "d_embed": 32, "cutoffs": []},
}
SIZES = {
    "vocab_size": 60, "cutoffs": [20, 40], "d_model": 32, "d_embed": 16, "n_head": 4, "d_head": 6, "d_inner": 48,
    "div_val": 2, "n_layer": 2, "mem_len": 10, "clamp_len": 7, "same_length": False,
}  # fmt: skip


def main(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import TransfoXLConfig, TransfoXLLMHeadModel

    for name, setting in SETTINGS.items():
        torch.manual_seed(0)
        model = TransfoXLLMHeadModel(TransfoXLConfig(**{**SIZES, **setting})).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.3)
        model.tie_weights()
        ids = torch.randint(0, 60, (2, 9))
        empty = [torch.zeros(0, 2, 32)] * 2
        with torch.no_grad():
            whole = model(ids, mems=empty).prediction_scores
            first = model(ids[:, :5], mems=empty)
            second = model(ids[:, 5:], mems=first.mems).prediction_scores
            states = model.transformer(ids, mems=empty).last_hidden_state
        out = folder / name
        model.save_pretrained(out, safe_serialization=True)
        answers = {"ids": ids, "whole": whole, "first": first.prediction_scores, "second": second, "states": states}
        save_file({key: value.contiguous() for key, value in answers.items()}, str(out / "answers.safetensors"))
    print(json.dumps(sorted(SETTINGS)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
