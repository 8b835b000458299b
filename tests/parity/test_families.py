"""Parity: every family equals transformers within 2e-5, from the same file on disk; a wrong setting would show."""

from __future__ import annotations

import functools
import warnings
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headwater.core import (
    Attention,
    Causal,
    Embeddings,
    FeedForward,
    GatedFeedForward,
    LayerNorm,
    Learned,
    LMHead,
    OffsetRMSNorm,
    RelativeBias,
    RMSNorm,
    Rotary,
    SinusoidalHalves,
    SlidingWindow,
    dynamic_cache,
    sliding_cache,
    static_cache,
)
from headwater.families import FAMILIES
from headwater.families.hf_folder import LoadedModel, build_with_weights, load_hf_folder, save_hf_folder
from headwater.parts import swap
from headwater.weights.hf_config import HFConfig
from headwater.weights.shards import open_weights

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers as T
    from cases import CASES, Case  # beside this file, see conftest

LIMIT, SHOWS = 2e-5, 4e-4
T.logging.set_verbosity_error()
LANGUAGE = ("LMHeadModel", "ForCausalLM", "ForMaskedLM", "ForConditionalGeneration", "MTModel")
BASE = [case for case in CASES if case.number == 0 and case.model.endswith(LANGUAGE)]
DECODERS = [
    case
    for case in BASE
    if case.family in {"gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma", "gpt_neox", "mixtral"}
]
PAIRS = [case for case in BASE if case.family in {"t5", "mt5", "bart", "mbart", "marian", "pegasus", "blenderbot"}]
ENCODERS = [case for case in BASE if case.family in {"bert", "roberta", "albert", "distilbert", "megatron-bert"}]
by_id = pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)


def public(case: Case) -> T.PreTrainedModel:
    """The public model with weights drawn wide enough that a wrong term shows."""
    torch.manual_seed(zlib.crc32(case.id.encode()))
    model = case.build().eval()
    with torch.no_grad():
        for parameter in filter(lambda p: p.requires_grad, model.parameters()):  # Marian's sines are not learned
            parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, buffer in model.named_buffers():
            if name == "final_logits_bias":
                buffer.normal_()
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Callable[[Case], tuple[T.PreTrainedModel, Path]]:
    """The public model of a case and the folder it was saved to, made once for all tests that only read them."""

    @functools.cache
    def save(case: Case) -> tuple[T.PreTrainedModel, Path]:
        model, folder = public(case), tmp_path_factory.mktemp("saved")
        model.save_pretrained(folder)
        return model, folder

    return save


def read(out) -> torch.Tensor | dict[str, torch.Tensor]:
    """The output of a public model, in the form of our heads."""
    if "prediction_logits" in out:
        second = out.get("seq_relationship_logits")
        return {"language": out.prediction_logits, "next_sentence": second if second is not None else out.sop_logits}
    if "start_logits" in out:
        return torch.stack((out.start_logits, out.end_logits), -1)
    return out.logits if "logits" in out else out.last_hidden_state


def distance(ours, theirs) -> float:
    """The maximum difference, relative to the largest output where that is above 1: processors round differently."""
    if isinstance(ours, dict):
        return max(distance(ours[name], theirs[name]) for name in ours)
    return (ours - theirs).abs().max().item() / max(1.0, theirs.abs().max().item())


def ids(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(5, 37, (2, length), generator=torch.Generator().manual_seed(seed))


def both(case: Case, theirs, ours: LoadedModel, length: int = 11) -> tuple:
    """Outputs of our model and of the public one on the same inputs."""
    rows, source = ids(length), ids(9, 1)
    with torch.no_grad():
        if ours.model.encoder is None or ours.model.decoder is None:
            return ours.model(rows), read(theirs(input_ids=rows))
        if case.model.endswith(("SequenceClassification", "QuestionAnswering")):  # they shift the source themselves
            source[:, -1] = 2
            shifted = torch.cat((torch.full((2, 1), 2), source[:, :-1]), 1)
            return ours.model(shifted, source=source), read(theirs(input_ids=source))
        keep = torch.ones(2, 9, dtype=torch.bool)
        keep[1, 6:] = False
        their_output = theirs(input_ids=source, attention_mask=keep.long(), decoder_input_ids=rows)
        return ours.model(rows, source=source, source_attention_mask=keep), read(their_output)


@by_id
def test_equals_the_public_model_and_back(case: Case, tmp_path):
    model = public(case)
    model.save_pretrained(tmp_path / "theirs")
    loaded = load_hf_folder(tmp_path / "theirs")
    assert distance(*both(case, model, loaded)) < LIMIT
    save_hf_folder(loaded, tmp_path / "ours")
    again = getattr(T, case.model).from_pretrained(tmp_path / "ours").eval()
    assert distance(*both(case, again, loaded)) < LIMIT


@pytest.mark.parametrize("case", DECODERS, ids=lambda c: c.id)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_as_in_the_public_model(case: Case, side: str, saved):
    model, folder = saved(case)
    loaded, rows = load_hf_folder(folder), ids(11)
    keep = torch.ones(2, 11, dtype=torch.bool)
    keep[1, slice(0, 4) if side == "left" else slice(7, 11)] = False
    positions = (keep.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        theirs = read(model(input_ids=rows, attention_mask=keep.long(), position_ids=positions))
        assert distance(loaded.model(rows, attention_mask=keep)[keep], theirs[keep]) < LIMIT


@pytest.mark.parametrize("case", ENCODERS, ids=lambda c: c.id)
def test_right_padding_of_encoders(case: Case, saved):
    model, folder = saved(case)
    loaded, rows = load_hf_folder(folder), ids(11)
    keep = torch.ones(2, 11, dtype=torch.bool)
    keep[1, 7:] = False
    rows[~keep] = loaded.config["pad_token_id"]
    with torch.no_grad():
        theirs = read(model(input_ids=rows, attention_mask=keep.long()))
        assert distance(loaded.model(rows, attention_mask=keep)[keep], theirs[keep]) < LIMIT


@pytest.mark.parametrize("case", DECODERS + PAIRS, ids=lambda c: c.id)
@pytest.mark.parametrize(
    "make",
    [dynamic_cache, sliding_cache, lambda model: static_cache(model, 2, 40)],
    ids=["dynamic", "sliding", "static"],
)
def test_token_by_token_equals_the_public_forward_pass(case: Case, make, saved):
    model, folder = saved(case)
    loaded, rows, source = load_hf_folder(folder).model, ids(14), ids(9, 1)
    cache = make(loaded)
    with torch.no_grad():
        memory = loaded.encode(source) if loaded.encoder is not None else None
        more = {} if memory is None else {"memory": memory}
        first = loaded.decode(rows[:, :6], cache=cache, **more)
        steps = [loaded.decode(rows[:, i : i + 1], cache=cache, **more) for i in range(6, 14)]
        their_output = model(input_ids=rows) if memory is None else model(input_ids=source, decoder_input_ids=rows)
    assert distance(torch.cat([first, *steps], 1), read(their_output)) < LIMIT


@pytest.mark.parametrize("case", DECODERS + ENCODERS, ids=lambda c: c.id)
def test_up_to_the_last_position(case: Case, saved):
    model, folder = saved(case)
    longest = (64 if case in DECODERS else 40) - (2 if case.family == "roberta" else 0)
    assert distance(*both(case, model, load_hf_folder(folder), longest)) < LIMIT


FAULTS = {
    "one row off in the table": (Learned, lambda p: replace(p, offset=p.offset - 1 if p.offset else 1)),
    "sines with another base": (SinusoidalHalves, lambda p: replace(p, base=5000.0)),
    "another rotation": (Rotary, lambda p: replace(p, theta=p.theta / 2)),
    "buckets that reach less far": (RelativeBias, lambda p: replace(p, max_distance=20)),
    "sees one token ahead of the window": (SlidingWindow, lambda p: replace(p, size=p.size + 1)),
    "sees only a window": (Causal, lambda p: SlidingWindow(3)),
    "another activation": (FeedForward, lambda p: replace(p, activation="silu")),
    "another gate": (GatedFeedForward, lambda p: replace(p, activation="relu")),
    "a larger eps": (LayerNorm, lambda p: replace(p, eps=1e-1)),
    "a larger rms eps": (RMSNorm, lambda p: replace(p, eps=1e-1)),
    "a larger offset rms eps": (OffsetRMSNorm, lambda p: replace(p, eps=1e-1)),
    "scores scaled otherwise": (Attention, lambda p: replace(p, scale=0.5 if p.scale != 0.5 else 1.0)),
    "embedding scaled otherwise": (Embeddings, lambda p: replace(p, scale=p.scale * 1.5)),
    "states scaled before the head": (LMHead, lambda p: replace(p, scale=p.scale * 1.1)),
}
EXPECTED = {
    "bert": 6, "roberta": 6, "albert": 6, "distilbert": 6, "gpt2": 7, "llama": 7, "mistral": 6, "qwen2": 7, "qwen3": 7,
    "gemma": 7, "gpt_neox": 7, "mixtral": 7, "t5": 7, "mt5": 7, "bart": 7, "mbart": 7, "marian": 7, "pegasus": 7,
    "blenderbot": 7, "megatron-bert": 6,
}  # fmt: skip


@pytest.mark.parametrize("case", [*DECODERS, *PAIRS, *ENCODERS], ids=lambda c: c.id)
def test_a_wrong_part_shows(case: Case, saved):
    """The check above can fail: each planted fault that a family has a part for moves its answers."""
    model, folder = saved(case)
    family, loaded = FAMILIES[case.family], load_hf_folder(folder)
    seen = []
    for name, (kind, fault) in FAULTS.items():
        spec = family.read_spec(HFConfig.from_json_file(folder / "config.json"), loaded.head)
        wrong = swap(spec, kind, fault)
        if wrong == spec:
            continue
        bad = replace(loaded, model=build_with_weights(wrong, family, loaded.head, open_weights(folder)))
        longer = 30 if "reach" in name else 11
        assert distance(*both(case, model, bad, longer)) > SHOWS, f"the check does not see: {name}"
        seen.append(name)
    assert len(seen) >= EXPECTED[case.family] - 1, seen
