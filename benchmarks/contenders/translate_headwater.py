"""Translation in Headwater: weights that have learnt nothing, in float32 or packed."""

import os
import sys

import torch
from translate_work import BEAM, D_FF, D_MODEL, HEADS, LAYERS, TOKENS, VOCAB, serve

import headwater
from headwater.fast.packed import pack
from headwater.generation.ask import Voice
from headwater.generation.beam import Beam

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
sizes = {"d_model": D_MODEL, "heads": HEADS, "layers": LAYERS, "d_ff": D_FF}
model = headwater.transformer(VOCAB, **sizes).build(seed=0).eval()
if sys.argv[1] != "float32":
    pack(model, sys.argv[1])
voice = Voice(model, start=1)


def translate(sentences: list[list[int]]) -> list[list[int]]:
    return [list(one.ids) for one in headwater.generate(voice, sentences, by=Beam(BEAM), max_tokens=TOKENS)]


serve(translate)
