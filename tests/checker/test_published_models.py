"""What the checker says of published implementations that break a law."""

from __future__ import annotations

import warnings

import pytest
import torch

import headwater

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers as T


def bigbird_decoder(attention_type: str) -> torch.nn.Module:
    config = T.BigBirdConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, block_size=4,
        num_random_blocks=1, max_position_embeddings=128, is_decoder=True, attention_type=attention_type,
        hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = T.BigBirdForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model


@pytest.mark.parametrize(("attention_type", "leaks"), [("block_sparse", True), ("original_full", False)])
def test_the_causal_bigbird_of_transformers_sees_the_future(attention_type, leaks):
    """Its blocks have no causal mask. Rows must be long enough: a short row switches it to full attention for good."""
    report = headwater.check(bigbird_decoder(attention_type), length=64, laws=("future",))
    (verdict,) = report.verdicts
    assert verdict.law == "future" and (verdict.status == "failed") is leaks
    if leaks:
        assert verdict.module == "bert.encoder.layer.0.attention.self"
