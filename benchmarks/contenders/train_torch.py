"""torch.nn.Transformer, and TransformerEncoder with a causal mask for a GPT. It drops everywhere or nowhere."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from train_work import PLACES, Batch, Work, asked, maybe_compiled, serve_model


class Translator(nn.Module):
    """As the documentation's examples do: scaled tokens, sines, one table for source, target and output."""

    def __init__(self, work: Work, p: float) -> None:
        super().__init__()
        self.scale, self.drop = math.sqrt(work.d_model), nn.Dropout(p)
        self.tokens = nn.Embedding(work.vocab, work.d_model)
        nn.init.normal_(self.tokens.weight, std=work.d_model**-0.5)
        self.register_buffer("places", sines(work.length, work.d_model))
        self.body = nn.Transformer(work.d_model, work.heads, work.layers, work.layers, work.d_ff, p, batch_first=True)
        self.register_buffer("causal_mask", nn.Transformer.generate_square_subsequent_mask(work.length))

    def embed(self, ids: Tensor) -> Tensor:
        return self.drop(self.tokens(ids) * self.scale + self.places[: ids.shape[1]])

    def forward(self, source: Tensor, ids: Tensor) -> Tensor:
        states = self.body(self.embed(source), self.embed(ids), tgt_mask=self.causal_mask, tgt_is_causal=True)
        return F.linear(states, self.tokens.weight)


class Writer(nn.Module):
    def __init__(self, work: Work, p: float) -> None:
        super().__init__()
        self.tokens, self.drop = nn.Embedding(work.vocab, work.d_model), nn.Dropout(p)
        self.places = nn.Embedding(work.length, work.d_model)
        for table in (self.tokens, self.places):
            nn.init.normal_(table.weight, std=0.02)
        layer = nn.TransformerEncoderLayer(
            work.d_model, work.heads, work.d_ff, p, "gelu", batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, work.layers, nn.LayerNorm(work.d_model), enable_nested_tensor=False)
        self.register_buffer("causal_mask", nn.Transformer.generate_square_subsequent_mask(work.length))

    def forward(self, source: Tensor, ids: Tensor) -> Tensor:
        x = self.drop(self.tokens(ids) + self.places.weight[: ids.shape[1]])
        return F.linear(self.body(x, mask=self.causal_mask, is_causal=True), self.tokens.weight)


def sines(length: int, width: int) -> Tensor:
    angle = torch.arange(length)[:, None] / 10_000 ** (torch.arange(0, width, 2) / width)
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)


def main() -> None:
    given = asked()
    torch.manual_seed(0)
    model = (Translator if given.work.is_encoder_decoder else Writer)(given.work, given.p)
    forward = maybe_compiled(model, given)

    def loss(batch: Batch) -> Tensor:
        return F.cross_entropy(forward(batch.source, batch.ids).flatten(0, 1), batch.targets.flatten())

    serve_model(model, loss, given, PLACES["everywhere"])


if __name__ == "__main__":
    main()
