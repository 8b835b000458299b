"""Small models with wide weights (so that a wrong term shows), and the plainest decoding there is to compare with."""

from __future__ import annotations

import pytest
import torch

from headwater.families.builders import decoder, transformer
from headwater.generation.engine import Engine
from headwater.generation.request import Request
from headwater.generation.sampling import Greedy

GREEDY = (Greedy(),)
SHAPES = {
    "rotary": {"position": "rotary", "kv_heads": 2, "norm_position": "pre", "norm": "rms"},
    "learned": {"position": "learned", "max_positions": 64},
    "alibi": {"position": "alibi", "norm_position": "pre"},
    "relative": {"position": "relative", "norm_position": "pre"},
    "xl": {"position": "xl", "norm_position": "pre"},
    "linear": {"position": "rotary", "norm_position": "pre", "attention": "linear"},
}


def widened(spec, seed=0, by=2.0):
    """In double precision, so that an answer does not hang on rounding."""
    model = spec.build(seed=seed).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(by)
    return model


@pytest.fixture(scope="session")
def build():
    def make(shape="rotary", vocab=40, seed=0, **sizes):
        sizes = {"d_model": 32, "heads": 4, "layers": 2, **SHAPES[shape], **sizes}
        return widened(decoder(vocab, **sizes), seed)

    return make


@pytest.fixture(scope="session")
def model(build):
    return build()


@pytest.fixture(scope="session")
def translator():
    return widened(transformer(30, 40, d_model=32, heads=4, layers=2))


@pytest.fixture(scope="session")
def slowly():
    """Greedy decoding without a cache, a batch or an engine: the law all others are held to."""

    def answer(model, prompt, count, source=None):
        ids, more = list(prompt), {} if source is None else {"source": torch.tensor([source])}
        for _ in range(count):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids]), **more)[0, -1].argmax()))
        return ids[len(prompt) :]

    return answer


@pytest.fixture(scope="session")
def answer():
    """One request, alone on a fresh engine."""

    def ask(model, prompt, processors=GREEDY, max_tokens=10, **more):
        engine = Engine(model)
        row = engine.submit(Request(tuple(prompt), processors=processors, max_tokens=max_tokens, **more))
        engine.run()
        return row

    return ask


class Letters:
    """A tokenizer whose tokens are bytes: every character beyond ASCII is cut."""

    def __init__(self, bos=None):
        self.bos_id = bos

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(ids).decode("utf-8", "replace")

    def piece(self, token):
        return chr(token)


@pytest.fixture(scope="session")
def letters():
    return Letters


class Loaded:
    """What headwater.load gives, as far as generation asks."""

    def __init__(self, model, tokenizer, eos_ids=(), decoder_start_id=None, max_positions=None, **generation_config):
        self.model = model
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.decoder_start_id = decoder_start_id
        self.max_positions = max_positions
        self.generation_setting = generation_config.get


@pytest.fixture(scope="session")
def loaded(build, letters):
    """A model of bytes that has learnt nothing."""
    return Loaded(build(vocab=256), letters(bos=2), eos_ids=(3,), max_positions=200)


@pytest.fixture(scope="session")
def make_loaded():
    return Loaded
