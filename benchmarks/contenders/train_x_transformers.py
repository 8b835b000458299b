"""x-transformers, with its flash attention on; it drops wherever it is asked to."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from train_work import Asked, Batch, asked, maybe_compiled, serve_model
from x_transformers import Decoder, Encoder, TransformerWrapper


def wrapped(kind: type, asked: Asked, **more: object) -> TransformerWrapper:
    work, where = asked.work, {place: asked.p for place in asked.places}
    layers = kind(
        dim=work.d_model, depth=work.layers, heads=work.heads, attn_dim_head=work.d_model // work.heads,
        ff_mult=work.d_ff // work.d_model, attn_flash=True, attn_dropout=where.get("attention", 0.0),
        attn_sublayer_dropout=where.get("residual", 0.0), ff_sublayer_dropout=where.get("residual", 0.0),
        ff_dropout=where.get("ffn", 0.0), cross_attend=work.is_encoder_decoder and kind is Decoder)  # fmt: skip
    return TransformerWrapper(
        num_tokens=work.vocab,
        max_seq_len=work.length,
        emb_dropout=where.get("embedding", 0.0),
        attn_layers=layers,
        **more,
    )


class Translator(nn.Module):
    def __init__(self, asked: Asked) -> None:
        super().__init__()
        self.encoder = wrapped(Encoder, asked, return_only_embed=True)
        self.decoder = wrapped(Decoder, asked, tie_embedding=True)
        self.encoder.token_emb = self.decoder.token_emb

    def forward(self, source: Tensor, ids: Tensor) -> Tensor:
        return self.decoder(ids, context=self.encoder(source, return_embeddings=True))


def main() -> None:
    given = asked()
    torch.manual_seed(0)
    model = Translator(given) if given.work.is_encoder_decoder else wrapped(Decoder, given, tie_embedding=True)
    forward = maybe_compiled(model, given)

    def loss(batch: Batch) -> Tensor:
        logits = forward(batch.source, batch.ids) if given.work.is_encoder_decoder else forward(batch.ids)
        return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())

    serve_model(model, loss, given, given.places)


if __name__ == "__main__":
    main()
