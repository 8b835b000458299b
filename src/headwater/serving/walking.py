"""One forward pass of one layer and one head, step by step: each step is formulas with every matrix they name.

The numbers are those of the model's own modules, recorded while it runs; only scores, mask and softmax, which fused
attention never stores, are computed beside it. A name stands for one matrix in the whole walk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headwater.core.attention import AttentionLayer, CrossAttentionLayer
from headwater.core.feedforward import FeedForwardLayer, GatedFeedForwardLayer
from headwater.core.positions import Turn, XLTerms
from headwater.core.stack import ParallelBlockLayer
from headwater.errors import BadInput
from headwater.inspection.results import plain
from headwater.inspection.scores import language, says_tokens
from headwater.inspection.subjects import Reading, still
from headwater.inspection.words import Both
from headwater.serving import formulas
from headwater.serving.asking import Step, reading_of
from headwater.serving.formulas import Table, linear, times
from headwater.serving.recording import recorded
from headwater.serving.shelf import Opened
from headwater.serving.tracing import labels

MOST_TOKENS, MOST_WORDS = 12, 8
SUFFIX = {"self_attn": "", "cross_attn": "_c", "ffn": "_f"}


def walk(opened: Opened, ask: Step) -> dict[str, Any]:
    reading = _short(reading_of(opened, ask))
    model: Any = reading.model
    side = "decoder" if model.decoder is not None else "encoder"
    stack = getattr(model, side)
    if not 0 <= ask.layer < len(stack.order):
        n = len(stack.order)
        raise BadInput(Both(f"the {side} has {n} layers, got {ask.layer}", f"它有 {n} 层，得到 {ask.layer}"))
    attention = stack.layers[stack.order[ask.layer]].self_attn
    if not 0 <= ask.head < attention.heads:
        n = attention.heads
        raise BadInput(Both(f"the layer has {n} heads, got {ask.head}", f"这一层有 {n} 个头，得到 {ask.head}"))
    with still(model), torch.inference_mode():
        tour = Tour(reading, stack, ask.layer, ask.head)
        tour.run()
    facts = {"side": side, "layers": len(stack.order), "heads": attention.heads, "head_dim": attention.head_dim}
    tokens = {"tokens": labels(reading.tokens), "source": labels(reading.source)}
    return {
        **tokens,
        "facts": {**facts, "d_model": stack.spec.d_model},
        "steps": tour.steps,
        "output": tour.output,
    }


def _short(reading: Reading) -> Reading:
    """The first tokens only: a walk is for reading numbers."""
    cut = {name: getattr(reading, name)[:MOST_TOKENS] for name in ("tokens", "source", "follows")}
    return replace(reading, **cut)


class Tour:
    """steps: in the order of the pass. Each method adds the steps of one part and returns the name of its result."""

    def __init__(self, reading: Reading, stack: Any, layer: int, head: int) -> None:
        self.reading, self.stack, self.layer, self.head = reading, stack, layer, head
        self.calls = recorded(reading, stack, layer)
        self.steps: list[dict[str, Any]] = []
        self.output: list[dict[str, Any]] = []
        self.sent: set[str] = set()
        self.norms = 0

    def run(self) -> None:
        if self.calls.before is None:
            self.embedding()
        else:
            before = f"y_{self.layer - 1}"
            stream = Table(before, self.calls.before.output[0]), Table("x", self.calls.block.inputs[0][0])
            self.add("stream", [f"x = {before}"], stream, layer=self.layer - 1)
        self.block()
        self.final()

    def add(
        self, step: str, texts: list[str], tables: Sequence[Table], weights: Sequence[Table] = (), **facts: Any
    ) -> None:
        """key names the step in an address. A matrix that came with an earlier step is not sent again."""
        count = sum(one["step"] == step for one in self.steps)
        key = f"{step}-{count + 1}" if count else step
        sent = {"tables": self.new(tables), "weights": self.new(weights)}
        self.steps.append({"step": step, "key": key, "formulas": texts, **sent, **facts})

    def new(self, tables: Sequence[Table]) -> list[dict[str, Any]]:
        fresh = [one for one in tables if one.name not in self.sent]
        self.sent |= {one.name for one in fresh}
        return [one.plain() for one in fresh]

    def norm(self, result: str, x: str, module: nn.Module, *tables: Table) -> None:
        self.norms += 1
        formula = formulas.norm(x, module, self.norms)
        self.add("norm", [f"{result} = {formula.text}"], tables, formula.weights)

    # ------------------------------------------------------------------------------------------------- embedding

    def embedding(self) -> None:
        """table[id] · scale, what the position adds, and a norm or a projection where the embedding has one."""
        embed, ids = self.stack.embed, self.reading.ids
        looked = embed.tokens(ids)[0]
        text, x, tables = times("table[id]", embed.scale), looked * embed.scale, [Table("table[id]", looked)]
        if embed.kinds is not None:
            kind = embed.kinds(torch.zeros_like(ids))[0]
            text, x = f"{text} + kind", x + kind
            tables.append(Table("kind", kind))
        self.add("embedding", [f"E = {text}"], [*tables, Table("E", x)])
        positions = torch.arange(len(self.reading.tokens))[None]
        added = embed.position.add(torch.zeros_like(x)[None], positions)[0]
        kind_name = type(self.stack.spec.embed.position).__name__
        normed, projected = not isinstance(embed.norm, nn.Identity), not isinstance(embed.project, nn.Identity)
        name, x = "e" if normed or projected else "x", x + added
        given = [] if kind_name == "NoPosition" else [Table("P", added)]
        self.add("position", [f"{name} = E + P" if given else f"{name} = E"], [*given, Table(name, x)], kind=kind_name)
        if normed:
            name, x = "e_n" if projected else "x", embed.norm(x)
            self.norm(name, "e", embed.norm, Table(name, x))
        if projected:
            formula = linear(name, embed.project, "p")
            self.add("project", [f"x = {formula.text}"], [Table("x", embed.project(x))], formula.weights)

    # ------------------------------------------------------------------------------------------------- the block

    def block(self) -> None:
        """Branch by branch in the block's own order: norm, layer, out_norm, the sum, post_norm."""
        block, out = self.calls.module, f"y_{self.layer}"
        parallel = isinstance(block, ParallelBlockLayer)
        x, terms = "x", ["x"]
        for number, (role, norm, out_norm, post_norm) in enumerate(block.names, 1):
            end = SUFFIX.get(role, f"_{number}")
            read = self.normed(f"n{end}", x, norm)
            made = self.normed(f"o{end}", self.branch(role, number, read), out_norm)
            terms.append(made)
            if not parallel:
                x = self.joined(out if number == len(block.names) else f"x_{number}", x, made, post_norm)
        if parallel:
            self.add("add", [f"{out} = {' + '.join(terms)}"], [Table(out, self.calls.block.output[0])])

    def normed(self, result: str, x: str, path: str) -> str:
        """x itself where there is no norm."""
        module = getattr(self.calls.module, path)
        if isinstance(module, nn.Identity):
            return x
        self.norm(result, x, module, Table(result, self.calls.output(path)))
        return result

    def joined(self, result: str, x: str, made: str, post_norm: str) -> str:
        """The residual sum, and the norm on it in a post-norm block."""
        call, module = self.calls.of[post_norm], getattr(self.calls.module, post_norm)
        if isinstance(module, nn.Identity):
            self.add("add", [f"{result} = {x} + {made}"], [Table(result, call.output[0])])
            return result
        total = f"a_{result.partition('_')[2]}" if result.startswith("x_") else "a"
        self.add("add", [f"{total} = {x} + {made}"], [Table(total, call.inputs[0][0] + call.inputs[1][0])])
        self.norm(result, total, module, Table(result, call.output[0]))
        return result

    def branch(self, role: str, number: int, read: str) -> str:
        layer = getattr(self.calls.module, role)
        if isinstance(layer, AttentionLayer):
            return Heads(self, role, layer, read).run()
        if isinstance(layer, (FeedForwardLayer, GatedFeedForwardLayer)):
            return self.feed_forward(role, layer, read)
        out = f"f_{number}"
        self.add("layer", [f"{out} = {type(layer).__name__}({read})"], [Table(out, self.calls.output(role))])
        return out

    def feed_forward(self, role: str, layer: Any, read: str) -> str:
        end = "" if role == "ffn" else f"_{role}"
        h, f = f"h{end}", f"f{end}"
        up, down = linear(read, layer.up, f"up{end}"), linear(h, layer.down, f"down{end}")
        act, weights = formulas.activation(layer.act), [*up.weights, *down.weights]
        text = f"{h} = {act}({up.text})"
        if isinstance(layer, GatedFeedForwardLayer):
            gate = linear(read, layer.gate, f"gate{end}")
            text, weights = f"{h} = {act}({gate.text}) · ({up.text})", [*gate.weights, *weights]
        tables = [Table(h, self.calls.of[f"{role}.down"].inputs[0][0]), Table(f, self.calls.output(role))]
        self.add("ffn", [text, f"{f} = {down.text}"], tables, weights)
        return f

    # ---------------------------------------------------------------------------------------------------- output

    def final(self) -> None:
        """From the last layer to the most probable tokens, where the model has a head that says tokens."""
        name, call = f"y_{len(self.stack.order) - 1}", self.calls.final_norm
        given, x = Table(name, call.inputs[0][0]), call.output[0]
        if not isinstance(self.stack.final_norm, nn.Identity):
            self.norm("s", name, self.stack.final_norm, given, Table("s", x))
            name = "s"
        if not says_tokens(self.reading.model):
            return
        head: Any = language(self.reading.model)
        if not isinstance(head.transform, nn.Identity):
            formula, x = linear(name, head.transform.dense, "t"), head.transform.act(head.transform.dense(x))
            text = f"d = {formulas.activation(head.transform.act)}({formula.text})"
            self.add("transform", [text], [given, Table("d", x)], formula.weights)
            name, x = "d_n", head.transform.norm(x)
            self.norm(name, "d", head.transform.norm, Table(name, x))
        self.words(head, times(name, head.scale), given, head.out(x * head.scale).float())

    def words(self, head: Any, x: str, given: Table, logits: Tensor) -> None:
        """The logits of the most probable tokens at the last position, and the softmax over the whole vocabulary."""
        top = logits[-1].softmax(-1).topk(min(MOST_WORDS, logits.shape[-1]))
        formula = linear(x, head.out, "out", top.indices)
        total = logits.logsumexp(-1, keepdim=True)
        some = logits[:, top.indices]
        tables = [given, Table("l", some, columns="words"), Table("c", total)]
        tables.append(Table("p", (some - total).exp(), columns="words"))
        words = [labels([self.reading.name(i)])[0] for i in top.indices.tolist()]
        texts = [f"l = {formula.text}", "p = exp(l − c)"]
        self.add("output", texts, tables, formula.weights, words=words, vocab=logits.shape[-1])
        self.output = [{**word, "share": plain(p)} for word, p in zip(words, top.values.tolist(), strict=True)]


class Heads:
    """The steps of one attention, self or cross, for one of its heads."""

    def __init__(self, tour: Tour, role: str, layer: AttentionLayer, read: str) -> None:
        self.tour, self.role, self.layer, self.read = tour, role, layer, read
        self.end = SUFFIX.get(role, f"_{role}")
        self.cross = isinstance(layer, CrossAttentionLayer)
        self.head = min(tour.head, layer.heads - 1)
        self.group = self.head * layer.kv_heads // layer.heads
        self.seen = "source" if self.cross else "tokens"
        self.kernel = tour.calls.of[f"{role}.kernel"]

    def run(self) -> str:
        self.projections()
        q, k = self.head_norms(f"q{self.end}", f"k{self.end}")
        q, k = self.turned(q, k)
        self.weights(q, k)
        return self.together()

    def projections(self) -> None:
        """q from the stream; k and v from it too, or from the memory m that the encoder wrote."""
        tour, layer, memory = self.tour, self.layer, "m" if self.cross else self.read
        parts = {"q": (self.read, self.head, layer.head_dim, "tokens")}
        parts["k"] = (memory, self.group, layer.head_dim, self.seen)
        parts["v"] = (memory, self.group, layer.v_head_dim, self.seen)
        texts: list[str] = []
        weights: list[Table] = []
        tables: list[Table] = []
        if self.cross:
            tables.append(Table("m", tour.calls.of[f"{self.role}.k"].inputs[0][0], self.seen))
        for name, (x, part, width, rows) in parts.items():
            own = slice(part * width, (part + 1) * width)
            formula = linear(x, getattr(layer, name), name + self.end, own)
            texts.append(f"{name}{self.end} = {formula.text}")
            tables.append(Table(name + self.end, tour.calls.output(f"{self.role}.{name}")[:, own], rows))
            weights += formula.weights
        tour.add("cross" if self.cross else "qkv", texts, tables, weights)

    def head_norms(self, q: str, k: str) -> tuple[str, str]:
        """Norms on each head's q and k, where the model has them."""
        if isinstance(self.layer.q_norm, nn.Identity):
            return q, k
        of = self.tour.calls.of
        made = of[f"{self.role}.q_norm"].output[0, self.head], of[f"{self.role}.k_norm"].output[0, self.group]
        self.tour.norm(f"{q}_n", q, self.layer.q_norm, Table(f"{q}_n", made[0]))
        self.tour.norm(f"{k}_n", k, self.layer.k_norm, Table(f"{k}_n", made[1], self.seen))
        return f"{q}_n", f"{k}_n"

    def turned(self, q: str, k: str) -> tuple[str, str]:
        """What a position makes of q and k before they meet: rotary turns both, Transformer-XL adds u to q."""
        q_now, k_now, _, sight, *_ = self.kernel.inputs
        mine, key = q_now[0, self.head], k_now[0, self.group]
        if isinstance(sight.position, XLTerms):
            u = Table("u", sight.position.u[self.head, 0], "dims")
            self.tour.add("query_bias", [f"{q}_u = {q} + u"], [Table(f"{q}_u", mine)], [u])
            return f"{q}_u", k
        if not isinstance(sight.position, Turn):
            return q, k
        cos, sin = (part[0, 0] for part in sight.position.angles(sight.q_places, q_now.dtype))
        still_ = mine.shape[-1] - 2 * cos.shape[-1]  # columns that do not turn
        cos = torch.cat((cos, cos, torch.ones(len(cos), still_)), -1)
        sin = torch.cat((sin, sin, torch.zeros(len(sin), still_)), -1)
        texts = [f"{name}_r = {name} · cos + rot({name}) · sin" for name in (q, k)]
        tables = [Table("cos", cos), Table("sin", sin), Table(f"{q}_r", mine), Table(f"{k}_r", key)]
        self.tour.add("rotary", texts, tables, turned=mine.shape[-1] - still_)
        return f"{q}_r", f"{k}_r"

    def weights(self, q: str, k: str) -> None:
        """Scores, mask and softmax: the attention matrix."""
        q_now, k_now, _, sight, *_ = self.kernel.inputs
        kernel: Any = self.layer.kernel
        scores = kernel.shaped(kernel.scale * (q_now[0, self.head] @ k_now[0, self.group].mT))
        bias, allowed = _split(kernel.dense(q_now, sight), self.head, scores)
        text, tables = f"{q} {k}ᵀ · {kernel.scale:.8g}", []
        if (cap := getattr(kernel, "cap", None)) is not None:
            text = f"{cap:g} · tanh({text} / {cap:g})"
        if bool(bias.any()):
            text, scores = f"{text} + B{self.end}", scores + bias
            tables.append(self.square("B", bias))
        usual = abs(kernel.scale * self.layer.head_dim**0.5 - 1) < 1e-6
        self.tour.add("scores", [f"S{self.end} = {text}"], [*tables, self.square("S", scores)], usual=usual)
        masked = scores.masked_fill(~allowed, -torch.inf)
        s, m, sees = f"S{self.end}", f"M{self.end}", type(self.layer.spec.sees).__name__
        made = [self.square("M", allowed.float()), Table(f"{s}_m", masked, "tokens", self.seen)]
        self.tour.add("mask", [f"{s}_m = {s} where {m} = 1, else −∞"], made, sees=sees)
        shares = torch.nan_to_num(masked.softmax(-1))
        self.tour.add("softmax", [f"A{self.end} = softmax({s}_m)"], [self.square("A", shares)])

    def square(self, name: str, values: Tensor) -> Table:
        return Table(name + self.end, values, "tokens", self.seen)

    def together(self) -> str:
        """The values mixed by this head, then all heads side by side and projected."""
        layer, end, mixed = self.layer, self.end, self.kernel.output[0]
        self.tour.add("values", [f"z{end} = A{end} v{end}"], [Table(f"z{end}", mixed[self.head])])
        formula = linear(f"Z{end}", layer.out, f"o{end}")
        tables = [Table(f"Z{end}", mixed.transpose(0, 1).flatten(1))]
        tables.append(Table(f"out{end}", self.tour.calls.output(f"{self.role}.out")))
        own = [self.head * layer.v_head_dim, (self.head + 1) * layer.v_head_dim]
        self.tour.add("heads", [f"out{end} = {formula.text}"], tables, formula.weights, own=own, heads=layer.heads)
        return f"out{end}"


def _split(mask: Tensor | None, head: int, scores: Tensor) -> tuple[Tensor, Tensor]:
    """What a mask adds to the scores of one head [Q, S], and where it lets them be seen."""
    if mask is None:
        return torch.zeros_like(scores), torch.ones_like(scores, dtype=torch.bool)
    while mask.dim() > 2:
        mask = mask[head if mask.dim() == 3 and mask.shape[0] > 1 else 0]
    mask = mask.expand_as(scores)
    if mask.dtype == torch.bool:
        return torch.zeros_like(scores), mask
    return mask.masked_fill(mask == -torch.inf, 0), mask > -torch.inf
