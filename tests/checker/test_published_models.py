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


# ------------------------------------------------------------------------------------------------------------ Reformer


@pytest.fixture(scope="module")
def reformer_decoder() -> torch.nn.Module:
    config = T.ReformerConfig(
        vocab_size=50, hidden_size=32, num_attention_heads=2, attention_head_size=16, feed_forward_size=32,
        attn_layers=["lsh"], axial_pos_shape=[8, 8], axial_pos_embds_dim=[8, 24], num_buckets=4, num_hashes=2,
        hash_seed=3, lsh_attn_chunk_length=4, max_position_embeddings=64, is_decoder=True, hidden_dropout_prob=0.0,
        lsh_attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = T.ReformerModelWithLMHead(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model


def test_the_cached_reformer_of_transformers_gives_other_answers(reformer_decoder):
    """Chunks of a longer row are others; so Headwater reads the row again, and its generation is the whole form's."""

    def step(ids, state):
        out = reformer_decoder(ids, past_buckets_states=state, use_cache=True)
        return out.logits, out.past_buckets_states

    report = headwater.check(reformer_decoder, step=step, causal=True, length=24, laws=("cache",))
    assert [(verdict.law, verdict.status) for verdict in report.verdicts] == [("cache", "failed")]


def test_the_cached_reformer_of_transformers_reads_row_0_for_every_row(reformer_decoder):
    """In a batch, the cached step of row 1 depends on the text of row 0."""
    ids = torch.randint(50, (2, 20), generator=torch.Generator().manual_seed(0))
    other = ids.clone()
    other[0] = other[0].flip(0)

    def second_row(rows):
        with torch.no_grad():
            cached = reformer_decoder(rows[:, :-1], use_cache=True).past_buckets_states
            return reformer_decoder(rows[:, -1:], past_buckets_states=cached, use_cache=True).logits[1]

    assert (second_row(ids) - second_row(other)).abs().max() > 1e-3


def test_the_bias_of_reformers_head_is_not_added(reformer_decoder):
    ids = torch.randint(50, (1, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = reformer_decoder(ids).logits
        reformer_decoder.lm_head.bias.add_(1.0)
        assert torch.equal(before, reformer_decoder(ids).logits)
