"""transformers: Marian, BART or GPT-2, with its own loss; Marian and BART drop wherever they are asked to."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor
from train_work import Asked, Batch, asked, maybe_compiled, serve_model


def seq2seq(kind: str, asked: Asked) -> Any:
    work, where = asked.work, {place: asked.p for place in asked.places}
    sides = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in
             (("layers", work.layers), ("attention_heads", work.heads), ("ffn_dim", work.d_ff))}  # fmt: skip
    shape = {
        "vocab_size": work.vocab, "d_model": work.d_model, "max_position_embeddings": max(64, work.length),
        "dropout": where.get("residual", 0.0), "attention_dropout": where.get("attention", 0.0),
        "activation_dropout": where.get("ffn", 0.0), "pad_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 1, "forced_eos_token_id": None, "activation_function": "relu",
        "scale_embedding": True, "use_cache": False, **sides}  # fmt: skip
    if kind == "marian":
        return transformers.MarianMTModel(transformers.MarianConfig(**shape))
    return transformers.BartForConditionalGeneration(transformers.BartConfig(bos_token_id=0, **shape))


def gpt2(asked: Asked) -> Any:
    work, where = asked.work, {place: asked.p for place in asked.places}
    config = transformers.GPT2Config(
        vocab_size=work.vocab, n_positions=work.length, n_embd=work.d_model, n_layer=work.layers, n_head=work.heads,
        n_inner=work.d_ff, embd_pdrop=where.get("embedding", 0.0), resid_pdrop=where.get("residual", 0.0),
        attn_pdrop=where.get("attention", 0.0), use_cache=False, bos_token_id=0, eos_token_id=0)  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def main() -> None:
    given = asked()
    torch.manual_seed(0)
    model = seq2seq(given.kind, given) if given.work.is_encoder_decoder else gpt2(given)
    forward = maybe_compiled(model, given)

    def translated(batch: Batch) -> Tensor:
        return forward(input_ids=batch.source, decoder_input_ids=batch.ids, labels=batch.targets).loss

    def written(batch: Batch) -> Tensor:  # shift_labels: the targets are already the next tokens
        return forward(input_ids=batch.ids, labels=batch.targets, shift_labels=batch.targets).loss

    able = given.places if given.work.is_encoder_decoder else [place for place in given.places if place != "ffn"]
    serve_model(model, translated if given.work.is_encoder_decoder else written, given, able)


if __name__ == "__main__":
    main()
