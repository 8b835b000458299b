"""x-transformers with flash attention; it supports all dropout sites."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from train_workload import Batch, TrainOptions, maybe_compiled, parse_options, serve_model
from x_transformers import Decoder, Encoder, TransformerWrapper


def build_wrapper(kind: type, options: TrainOptions, **kwargs: object) -> TransformerWrapper:
    work, dropout = options.workload, {site: options.p for site in options.dropout_sites}
    layers = kind(
        dim=work.d_model, depth=work.layers, heads=work.heads, attn_dim_head=work.d_model // work.heads,
        ff_mult=work.d_ff // work.d_model, attn_flash=True, attn_dropout=dropout.get("attention", 0.0),
        attn_sublayer_dropout=dropout.get("residual", 0.0), ff_sublayer_dropout=dropout.get("residual", 0.0),
        ff_dropout=dropout.get("ffn", 0.0), cross_attend=work.is_encoder_decoder and kind is Decoder)  # fmt: skip
    return TransformerWrapper(
        num_tokens=work.vocab,
        max_seq_len=work.length,
        emb_dropout=dropout.get("embedding", 0.0),
        attn_layers=layers,
        **kwargs,
    )


class Translator(nn.Module):
    def __init__(self, options: TrainOptions) -> None:
        super().__init__()
        self.encoder = build_wrapper(Encoder, options, return_only_embed=True)
        self.decoder = build_wrapper(Decoder, options, tie_embedding=True)
        self.encoder.token_emb = self.decoder.token_emb

    def forward(self, source: Tensor, ids: Tensor) -> Tensor:
        return self.decoder(ids, context=self.encoder(source, return_embeddings=True))


def main() -> None:
    options = parse_options()
    torch.manual_seed(0)
    model = (
        Translator(options)
        if options.workload.is_encoder_decoder
        else build_wrapper(Decoder, options, tie_embedding=True)
    )
    forward = maybe_compiled(model, options)

    def loss(batch: Batch) -> Tensor:
        logits = forward(batch.source, batch.ids) if options.workload.is_encoder_decoder else forward(batch.ids)
        return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())

    serve_model(model, loss, options, options.dropout_sites)


if __name__ == "__main__":
    main()
