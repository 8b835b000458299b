"""Translation in Headwater: the weights of a folder, in float32 or packed."""

import os
import sys

import torch
from translate_work import BEAM, TOKENS, serve

import headwater
from headwater.fast.packed import pack
from headwater.generation.ask import Voice
from headwater.generation.beam import Beam

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
model = headwater.load(sys.argv[1]).model
if sys.argv[2] != "float32":
    pack(model, sys.argv[2])
voice = Voice(model, start=1)


def translate(sentences: list[list[int]]) -> list[list[int]]:
    return [list(one.ids) for one in headwater.generate(voice, sentences, by=Beam(BEAM), max_tokens=TOKENS)]


serve(translate)
