"""Every family equals its public implementation: same file on disk, same numbers, to 2e-5."""

from __future__ import annotations

import warnings

import pytest
import torch

from headwater.families.folder import load_folder, save_folder

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers as T
    from cases import CASES, Case  # the parity folder is on the path, see conftest

LIMIT = 2e-5
T.logging.set_verbosity_error()


def public(case: Case):
    """The public model with weights drawn wide enough that a wrong term shows."""
    torch.manual_seed(hash(case.id) % 2**31)
    model = case.build().eval()
    with torch.no_grad():
        for parameter in filter(lambda p: p.requires_grad, model.parameters()):  # Marian's sines are not learned
            parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, buffer in model.named_buffers():
            if name == "final_logits_bias":
                buffer.normal_()
    return model


def answers(model, case: Case, ids, keep=None, source=None, source_keep=None):
    """What the public model says, as our heads say it."""
    mask = {} if keep is None else {"attention_mask": keep.long()}
    if source is not None:
        mask = {} if source_keep is None else {"attention_mask": source_keep.long()}
        if keep is not None:
            mask["decoder_attention_mask"] = keep.long()
        out = model(input_ids=source, decoder_input_ids=ids, **mask)
    else:
        out = model(input_ids=ids, **mask)
    if "prediction_logits" in out:
        second = out.get("seq_relationship_logits")
        return {"language": out.prediction_logits, "next": second if second is not None else out.sop_logits}
    if "start_logits" in out:
        return torch.stack((out.start_logits, out.end_logits), -1)
    return out.logits if "logits" in out else out.last_hidden_state


def distance(ours, theirs) -> float:
    if isinstance(ours, dict):
        return max(distance(ours[name], theirs[name]) for name in ours)
    return (ours - theirs).abs().max().item()


def draw(case: Case, length: int = 11):
    low = 5 if case.family in ("bart", "mbart", "marian", "roberta") else 2
    ids = torch.randint(low, 37, (2, length))
    return ids


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_equals_the_public_model(case: Case, tmp_path):
    model = public(case)
    model.save_pretrained(tmp_path / "theirs")
    loaded = load_folder(tmp_path / "theirs")
    ids = draw(case)
    pair = loaded.model.encoder is not None and loaded.model.decoder is not None
    with torch.no_grad():
        if pair and case.model.endswith(("SequenceClassification", "QuestionAnswering")):
            source = ids.clone()
            source[:, -1] = 2
            theirs = answers(model, case, None, source=source) if False else model(input_ids=source)
            theirs = theirs.logits if "logits" in theirs else torch.stack((theirs.start_logits, theirs.end_logits), -1)
            shifted = torch.cat((torch.full((2, 1), 2), source[:, :-1]), 1)
            ours = loaded.model(shifted, source=source)
        elif pair:
            source = draw(case, 9)
            keep = torch.ones(2, 9, dtype=torch.bool)
            keep[1, 6:] = False
            theirs = answers(model, case, ids, source=source, source_keep=keep)
            ours = loaded.model(ids, source=source, source_keep=keep)
        else:
            theirs, ours = answers(model, case, ids), loaded.model(ids)
    assert distance(ours, theirs) < LIMIT
    save_folder(loaded, tmp_path / "ours")
    with torch.no_grad():
        again = getattr(T, case.model).from_pretrained(tmp_path / "ours").eval()
        if pair:
            return
        assert distance(answers(again, case, ids), theirs) < LIMIT
