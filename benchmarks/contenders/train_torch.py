"""torch.nn.Transformer, and TransformerEncoder with a causal mask as a GPT. Dropout is everywhere or nowhere."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from train_workload import DROPOUT_SITES, Batch, Workload, maybe_compiled, parse_options, serve_model


class Translator(nn.Module):
    """As in the PyTorch tutorials: sinusoidal positions, scaled embeddings, tied for source, target and output."""

    def __init__(self, work: Workload, p: float) -> None:
        super().__init__()
        self.scale, self.drop = math.sqrt(work.d_model), nn.Dropout(p)
        self.tokens = nn.Embedding(work.vocab, work.d_model)
        nn.init.normal_(self.tokens.weight, std=work.d_model**-0.5)
        self.register_buffer("positions", sines(work.length, work.d_model))
        self.body = nn.Transformer(work.d_model, work.heads, work.layers, work.layers, work.d_ff, p, batch_first=True)
        self.register_buffer("causal_mask", nn.Transformer.generate_square_subsequent_mask(work.length))

    def embed(self, ids: Tensor) -> Tensor:
        return self.drop(self.tokens(ids) * self.scale + self.positions[: ids.shape[1]])

    def forward(self, source: Tensor, ids: Tensor) -> Tensor:
        states = self.body(self.embed(source), self.embed(ids), tgt_mask=self.causal_mask, tgt_is_causal=True)
        return F.linear(states, self.tokens.weight)


class GPT(nn.Module):
    def __init__(self, work: Workload, p: float) -> None:
        super().__init__()
        self.tokens, self.drop = nn.Embedding(work.vocab, work.d_model), nn.Dropout(p)
        self.positions = nn.Embedding(work.length, work.d_model)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)
        layer = nn.TransformerEncoderLayer(
            work.d_model, work.heads, work.d_ff, p, "gelu", batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, work.layers, nn.LayerNorm(work.d_model), enable_nested_tensor=False)
        self.register_buffer("causal_mask", nn.Transformer.generate_square_subsequent_mask(work.length))

    def forward(self, source: Tensor, ids: Tensor) -> Tensor:
        x = self.drop(self.tokens(ids) + self.positions.weight[: ids.shape[1]])
        return F.linear(self.body(x, mask=self.causal_mask, is_causal=True), self.tokens.weight)


def sines(length: int, width: int) -> Tensor:
    angle = torch.arange(length)[:, None] / 10_000 ** (torch.arange(0, width, 2) / width)
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)


def main() -> None:
    options = parse_options()
    torch.manual_seed(0)
    model = (Translator if options.workload.is_encoder_decoder else GPT)(options.workload, options.p)
    forward = maybe_compiled(model, options)

    def loss(batch: Batch) -> Tensor:
        return F.cross_entropy(forward(batch.source, batch.ids).flatten(0, 1), batch.targets.flatten())

    serve_model(model, loss, options, DROPOUT_SITES["everywhere"])


if __name__ == "__main__":
    main()
