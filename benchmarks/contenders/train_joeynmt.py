"""JoeyNMT's Transformer with its own loss. It drops everywhere or nowhere."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from joeynmt.model import build_model
from joeynmt.vocabulary import Vocabulary
from torch import Tensor
from train_work import PLACES, Batch, Work, asked, maybe_compiled, serve_model

MARKS = {"unk": 0, "pad": 1, "bos": 2, "eos": 3}


def vocabulary(size: int) -> Vocabulary:
    marks = {f"{name}_token": f"<{name}>" for name in MARKS} | {f"{name}_id": n for name, n in MARKS.items()}
    return Vocabulary(
        [str(n) for n in range(size - len(MARKS))], SimpleNamespace(**marks, sep_token=None, sep_id=None, lang_tags=[])
    )


def side(work: Work, p: float) -> dict:
    return {
        "type": "transformer", "num_layers": work.layers, "num_heads": work.heads, "hidden_size": work.d_model,
        "ff_size": work.d_ff, "dropout": p, "freeze": False, "layer_norm": "post",
        "embeddings": {"embedding_dim": work.d_model, "scale": True, "dropout": p, "freeze": False}}  # fmt: skip


def main() -> None:
    given = asked()
    torch.manual_seed(0)
    words = vocabulary(given.work.vocab)
    config = {"encoder": side(given.work, given.p), "decoder": side(given.work, given.p), "tied_embeddings": True,
              "tied_softmax": True, "initializer": "xavier_uniform", "embed_initializer": "xavier_uniform",
              "init_gain": 1.0, "embed_init_gain": 1.0, "bias_initializer": "zeros"}  # fmt: skip
    model = build_model(config, words, words)
    model.loss_function = ("crossentropy", 0.0)
    forward = maybe_compiled(model, given)
    shape = (given.work.rows, 1, given.work.length)
    real = torch.ones(shape, dtype=torch.bool)

    def loss(batch: Batch) -> Tensor:
        found = forward(
            return_type="loss", src=batch.source, trg_input=batch.ids, trg=batch.targets, src_mask=real, trg_mask=real,
            src_length=torch.full((shape[0],), shape[2]))  # fmt: skip
        return found[0] / batch.targets.numel()

    serve_model(model, loss, given, PLACES["everywhere"])


if __name__ == "__main__":
    main()
