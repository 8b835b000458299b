"""Handler for the checker: the laws of headwater.check, and the measured dependencies of positions on tokens."""

from __future__ import annotations

from typing import Any

import torch

from headwater.checker.api import check, laws_of
from headwater.core.modules import eval_mode
from headwater.core.stack import TransformerStack
from headwater.serving.model_store import OpenModel
from headwater.serving.schemas import CheckRequest
from headwater.variants.towers import TwoTowers

PROBE_LENGTH = 13  # tokens
MIN_CHANGE = 1e-6  # relative to the largest hidden state: above rounding error


def check_model(open_model: OpenModel, request: CheckRequest) -> dict[str, Any]:
    """The report of the checker; with the dependency matrix if all laws, or the law "future", are requested."""
    model = open_model.inspected.model
    tower = model.image if isinstance(model, TwoTowers) else model
    report = check(tower, num_probes=2, laws=request.laws or None)
    with_dependencies = "future" in laws_of(tower) and (not request.laws or "future" in request.laws)
    dependencies = dependency_matrix(open_model) if with_dependencies else None
    return {**report.to_dict(), "dependencies": dependencies}


def dependency_matrix(open_model: OpenModel) -> dict[str, Any]:
    """change [Q, S]: relative change of the hidden state at position i when the token at position j is replaced.

    In a causal stack position i may depend on j ≤ i only, so a leak shows above the diagonal.
    """
    model = open_model.inspected.model
    length = min(PROBE_LENGTH, open_model.inspected.max_positions or PROBE_LENGTH)
    vocab = _vocab_size(model.output_stack)
    generator = torch.Generator().manual_seed(0)

    # Row 0 is the original, row j + 1 has another token at position j: [length + 1, length]
    ids = torch.randint(vocab, (1, length), generator=generator).repeat(length + 1, 1)
    for position in range(length):
        ids[position + 1, position] = (ids[position + 1, position] + 1 + vocab // 3) % vocab

    with eval_mode(model), torch.inference_mode():
        memory = None
        if model.encoder is not None and model.decoder is not None:
            source = torch.randint(_vocab_size(model.encoder), (1, length), generator=generator)
            memory = model.encode(source.repeat(length + 1, 1))
        states = model.hidden_states(model.inputs(ids, None, None, None, None), memory=memory)

    change = (states[1:] - states[:1]).abs().amax(-1).T / states[0].abs().max()  # [Q, S]
    change = torch.where(change > MIN_CHANGE, change, 0.0)
    causal = model.decoder is not None
    leaks = [[i, j] for i in range(length) for j in range(i + 1, length) if causal and change[i, j] > 0]
    return {
        "length": length,
        "causal": causal,
        "change": [[round(x, 7) for x in row] for row in change.tolist()],
        "leaks": leaks,
    }


def _vocab_size(stack: TransformerStack) -> int:
    embed: Any = stack.spec.embed  # each embedding part has a vocab, their base class has none
    return int(embed.vocab)
