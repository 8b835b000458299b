"""A model in the style of nanoGPT: one matrix for q, k, v, torch's fused attention, plain modules."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from train_torch import sines
from train_workload import Batch, TrainOptions, Workload, maybe_compiled, parse_options, serve_model


class SelfAttention(nn.Module):
    def __init__(self, work: Workload, p: float, attention_p: float, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal, self.attention_p = work.heads, causal, attention_p
        self.qkv = nn.Linear(work.d_model, 3 * work.d_model)
        self.out, self.drop = nn.Linear(work.d_model, work.d_model), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, 2))
        p = self.attention_p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=self.causal)
        return self.drop(self.out(mixed.transpose(1, 2).flatten(2)))


class CrossAttention(nn.Module):
    def __init__(self, work: Workload, p: float, attention_p: float) -> None:
        super().__init__()
        self.heads, self.attention_p = work.heads, attention_p
        self.q, self.kv = nn.Linear(work.d_model, work.d_model), nn.Linear(work.d_model, 2 * work.d_model)
        self.out, self.drop = nn.Linear(work.d_model, work.d_model), nn.Dropout(p)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        parts = (self.q(x), *self.kv(memory).chunk(2, 2))
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.attention_p if self.training else 0.0)
        return self.drop(self.out(mixed.transpose(1, 2).flatten(2)))


class FeedForward(nn.Module):
    def __init__(self, work: Workload, p: float, inner_p: float, activation: nn.Module) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(work.d_model, work.d_ff), nn.Linear(work.d_ff, work.d_model)
        self.activation, self.inner, self.drop = activation, nn.Dropout(inner_p), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.down(self.inner(self.activation(self.up(x)))))


class Layer(nn.Module):
    """A pre-norm block: x + f(norm(x)) for each of its two or three branches."""

    def __init__(self, options: TrainOptions, causal: bool, has_cross_attention: bool, activation: nn.Module) -> None:
        super().__init__()
        work, p = options.workload, options.p
        attention_p = p if "attention" in options.dropout_sites else 0.0
        self.attention = SelfAttention(work, p, attention_p, causal)
        self.cross = CrossAttention(work, p, attention_p) if has_cross_attention else None
        self.ffn = FeedForward(work, p, p if "ffn" in options.dropout_sites else 0.0, activation)
        self.norms = nn.ModuleList(nn.LayerNorm(work.d_model) for _ in range(3 if has_cross_attention else 2))

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        if self.cross is not None:
            x = x + self.cross(self.norms[1](x), memory)
        return x + self.ffn(self.norms[-1](x))


class GPT(nn.Module):
    def __init__(self, options: TrainOptions) -> None:
        super().__init__()
        work = options.workload
        self.tokens, self.positions = nn.Embedding(work.vocab, work.d_model), nn.Embedding(work.length, work.d_model)
        self.drop, self.norm = nn.Dropout(options.p), nn.LayerNorm(work.d_model)
        self.layers = nn.ModuleList(Layer(options, True, False, nn.GELU()) for _ in range(work.layers))
        initialize(self, work.layers)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.tokens(ids) + self.positions.weight[: ids.shape[1]])
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.tokens.weight)


class Translator(nn.Module):
    def __init__(self, options: TrainOptions) -> None:
        super().__init__()
        work = options.workload
        self.tokens, self.drop = nn.Embedding(work.vocab, work.d_model), nn.Dropout(options.p)
        self.scale = math.sqrt(work.d_model)
        self.register_buffer("positions", sines(work.length, work.d_model))
        self.encoder = nn.ModuleList(Layer(options, False, False, nn.ReLU()) for _ in range(work.layers))
        self.decoder = nn.ModuleList(Layer(options, True, True, nn.ReLU()) for _ in range(work.layers))
        self.norms = nn.ModuleList(nn.LayerNorm(work.d_model) for _ in range(2))
        initialize(self, 2 * work.layers)

    def embed(self, ids: Tensor) -> Tensor:
        return self.drop(self.tokens(ids) * self.scale + self.positions[: ids.shape[1]])

    def forward(self, source: Tensor, ids: Tensor) -> Tensor:
        memory, x = self.embed(source), self.embed(ids)
        for layer in self.encoder:
            memory = layer(memory)
        memory = self.norms[0](memory)
        for layer in self.decoder:
            x = layer(x, memory)
        return F.linear(self.norms[1](x), self.tokens.weight)


def initialize(model: nn.Module, layers: int) -> None:
    """GPT-2's initialization: normal(0.02), smaller for projections into the residual stream."""
    for name, p in model.named_parameters():
        if p.dim() > 1:
            is_output = name.endswith(("out.weight", "down.weight"))
            nn.init.normal_(p, std=0.02 / math.sqrt(2 * layers) if is_output else 0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(p)


def main() -> None:
    options = parse_options()
    torch.manual_seed(0)
    model = Translator(options) if options.workload.is_encoder_decoder else GPT(options)
    forward = maybe_compiled(model, options)

    def loss(batch: Batch) -> Tensor:
        logits = forward(batch.source, batch.ids) if options.workload.is_encoder_decoder else forward(batch.ids)
        return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())

    serve_model(model, loss, options, options.dropout_sites)


if __name__ == "__main__":
    main()
