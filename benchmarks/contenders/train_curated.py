"""curated-transformers' GPT-NeoX: rotary positions, parallel attention and feed-forward, untied output embedding."""

from __future__ import annotations

import torch
from curated_transformers.layers import AttentionMask
from curated_transformers.models import GPTNeoXCausalLM, GPTNeoXConfig
from torch import Tensor
from torch.nn import functional as F
from train_workload import Batch, maybe_compiled, parse_options, serve_model


def main() -> None:
    options = parse_options()
    torch.manual_seed(0)
    work = options.workload
    model = GPTNeoXCausalLM(GPTNeoXConfig(
        hidden_width=work.d_model, intermediate_width=work.d_ff, n_attention_heads=work.heads, n_pieces=work.vocab,
        n_hidden_layers=work.layers, hidden_dropout_prob=options.p, dtype=torch.float32,
        attention_probs_dropout_prob=options.p if "attention" in options.dropout_sites else 0.0))  # fmt: skip
    forward = maybe_compiled(model, options)
    real = AttentionMask(torch.ones((work.rows, work.length), dtype=torch.bool))

    def loss(batch: Batch) -> Tensor:
        return F.cross_entropy(forward(batch.ids, real).logits.flatten(0, 1), batch.targets.flatten())

    serve_model(model, loss, options, [site for site in options.dropout_sites if site != "ffn"])


if __name__ == "__main__":
    main()
