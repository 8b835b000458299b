"""JoeyNMT's Transformer with its own loss. Dropout is everywhere or nowhere."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from joeynmt.model import build_model
from joeynmt.vocabulary import Vocabulary
from torch import Tensor
from train_workload import DROPOUT_SITES, Batch, Workload, maybe_compiled, parse_options, serve_model

SPECIAL_IDS = {"unk": 0, "pad": 1, "bos": 2, "eos": 3}


def vocabulary(size: int) -> Vocabulary:
    special_tokens = {f"{name}_token": f"<{name}>" for name in SPECIAL_IDS} | {
        f"{name}_id": n for name, n in SPECIAL_IDS.items()
    }
    return Vocabulary(
        [str(n) for n in range(size - len(SPECIAL_IDS))],
        SimpleNamespace(**special_tokens, sep_token=None, sep_id=None, lang_tags=[]),
    )


def side(work: Workload, p: float) -> dict:
    return {
        "type": "transformer", "num_layers": work.layers, "num_heads": work.heads, "hidden_size": work.d_model,
        "ff_size": work.d_ff, "dropout": p, "freeze": False, "layer_norm": "post",
        "embeddings": {"embedding_dim": work.d_model, "scale": True, "dropout": p, "freeze": False}}  # fmt: skip


def main() -> None:
    options = parse_options()
    torch.manual_seed(0)
    vocab = vocabulary(options.workload.vocab)
    config = {"encoder": side(options.workload, options.p), "decoder": side(options.workload, options.p),
              "tied_embeddings": True, "tied_softmax": True,
              "initializer": "xavier_uniform", "embed_initializer": "xavier_uniform",
              "init_gain": 1.0, "embed_init_gain": 1.0, "bias_initializer": "zeros"}  # fmt: skip
    model = build_model(config, vocab, vocab)
    model.loss_function = ("crossentropy", 0.0)
    forward = maybe_compiled(model, options)
    shape = (options.workload.rows, 1, options.workload.length)
    real = torch.ones(shape, dtype=torch.bool)

    def loss(batch: Batch) -> Tensor:
        output = forward(
            return_type="loss", src=batch.source, trg_input=batch.ids, trg=batch.targets, src_mask=real, trg_mask=real,
            src_length=torch.full((shape[0],), shape[2]))  # fmt: skip
        return output[0] / batch.targets.numel()

    serve_model(model, loss, options, DROPOUT_SITES["everywhere"])


if __name__ == "__main__":
    main()
