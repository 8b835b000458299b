"""curated-transformers' GPT-NeoX: rotary places, attention beside the feed-forward, an output table of its own."""

from __future__ import annotations

import torch
from curated_transformers.layers import AttentionMask
from curated_transformers.models import GPTNeoXCausalLM, GPTNeoXConfig
from torch import Tensor
from torch.nn import functional as F
from train_work import Batch, asked, maybe_compiled, serve_model


def main() -> None:
    given = asked()
    torch.manual_seed(0)
    work = given.work
    model = GPTNeoXCausalLM(GPTNeoXConfig(
        hidden_width=work.d_model, intermediate_width=work.d_ff, n_attention_heads=work.heads, n_pieces=work.vocab,
        n_hidden_layers=work.layers, hidden_dropout_prob=given.p, dtype=torch.float32,
        attention_probs_dropout_prob=given.p if "attention" in given.places else 0.0))  # fmt: skip
    forward = maybe_compiled(model, given)
    real = AttentionMask(torch.ones((work.rows, work.length), dtype=torch.bool))

    def loss(batch: Batch) -> Tensor:
        return F.cross_entropy(forward(batch.ids, real).logits.flatten(0, 1), batch.targets.flatten())

    serve_model(model, loss, given, [place for place in given.places if place != "ffn"])


if __name__ == "__main__":
    main()
