"""transformers: Marian, BART or GPT-2, with its own loss; Marian and BART support all dropout sites."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor
from train_workload import Batch, TrainOptions, maybe_compiled, parse_options, serve_model


def seq2seq(kind: str, options: TrainOptions) -> Any:
    work, dropout = options.workload, {site: options.p for site in options.dropout_sites}
    sides = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in
             (("layers", work.layers), ("attention_heads", work.heads), ("ffn_dim", work.d_ff))}  # fmt: skip
    shape = {
        "vocab_size": work.vocab, "d_model": work.d_model, "max_position_embeddings": max(64, work.length),
        "dropout": dropout.get("residual", 0.0), "attention_dropout": dropout.get("attention", 0.0),
        "activation_dropout": dropout.get("ffn", 0.0), "pad_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 1, "forced_eos_token_id": None, "activation_function": "relu",
        "scale_embedding": True, "use_cache": False, **sides}  # fmt: skip
    if kind == "marian":
        return transformers.MarianMTModel(transformers.MarianConfig(**shape))
    return transformers.BartForConditionalGeneration(transformers.BartConfig(bos_token_id=0, **shape))


def gpt2(options: TrainOptions) -> Any:
    work, dropout = options.workload, {site: options.p for site in options.dropout_sites}
    config = transformers.GPT2Config(
        vocab_size=work.vocab, n_positions=work.length, n_embd=work.d_model, n_layer=work.layers, n_head=work.heads,
        n_inner=work.d_ff, embd_pdrop=dropout.get("embedding", 0.0), resid_pdrop=dropout.get("residual", 0.0),
        attn_pdrop=dropout.get("attention", 0.0), use_cache=False, bos_token_id=0, eos_token_id=0)  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def main() -> None:
    options = parse_options()
    torch.manual_seed(0)
    model = seq2seq(options.kind, options) if options.workload.is_encoder_decoder else gpt2(options)
    forward = maybe_compiled(model, options)

    def seq2seq_loss(batch: Batch) -> Tensor:
        return forward(input_ids=batch.source, decoder_input_ids=batch.ids, labels=batch.targets).loss

    def lm_loss(batch: Batch) -> Tensor:  # shift_labels: the targets are already the next tokens
        return forward(input_ids=batch.ids, labels=batch.targets, shift_labels=batch.targets).loss

    supported = (
        options.dropout_sites
        if options.workload.is_encoder_decoder
        else [site for site in options.dropout_sites if site != "ffn"]
    )
    serve_model(model, seq2seq_loss if options.workload.is_encoder_decoder else lm_loss, options, supported)


if __name__ == "__main__":
    main()
