"""The laws a Transformer must keep (causality, padding, batch, cache, ...), each a generator of claims.

B rows, L positions. Inputs are random tokens; a fault that shows only for certain tokens may be missed. Laws share
their queries, so that no forward pass runs twice; each of the two rows probes a different position.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from headwater.checker.adapters import ModelAdapter
from headwater.checker.claims import Claim, Query
from headwater.core.masks import WindowSize
from headwater.core.modules import Tap
from headwater.i18n import Message, _
from headwater.inspection.hooks import PositionIndex


@dataclass(frozen=True)
class Probes:
    """Random queries, and the positions to change. excluded_id: an id with a special meaning, such as padding.

    padding_sides: where rows are padded. per_token: one output for each position, or one for each row.
    """

    adapter: ModelAdapter
    length: int
    count: int
    generator: torch.Generator
    device: torch.device
    padding_sides: tuple[str, ...] = ("left", "right")
    excluded_id: int = -1
    per_token: bool = True
    queries: dict[Any, Query] = field(default_factory=dict, repr=False, compare=False)

    def random_ids(self, rows: int, length: int | None = None, vocab: int | None = None) -> Tensor:
        vocab = vocab or self.adapter.vocab
        ids = torch.randint(vocab, (rows, length or self.length), generator=self.generator)
        return torch.where(ids == self.excluded_id, (ids + 1) % vocab, ids).to(self.device)

    def replace_tokens(self, ids: Tensor, mask: Tensor, vocab: int | None = None) -> Tensor:
        """Another token at each position where the mask is True."""
        vocab = vocab or self.adapter.vocab
        shift = 1 + torch.randint(max(vocab - 1, 1), ids.shape, generator=self.generator).to(ids.device)
        new_ids = (ids + shift) % vocab
        new_ids = torch.where(new_ids == self.excluded_id, (new_ids + 1) % vocab, new_ids)
        new_ids = torch.where(new_ids == ids, (new_ids + 1) % vocab, new_ids)
        return torch.where(mask, new_ids, ids)

    def get_or_create(self, key: Any, factory: Callable[[], Query]) -> Query:
        """The query of a key, created on first use."""
        if key not in self.queries:
            self.queries[key] = factory()
        return self.queries[key]

    def query(self, rows: int = 2, training: bool = False) -> Query:
        """Random rows, with a random source for an encoder-decoder."""
        if training:
            return self.get_or_create((rows, True), lambda: replace(self.query(rows), training=True))
        return self.get_or_create((rows, False), lambda: Query(self.random_ids(rows), self._random_source(rows)))

    def _random_source(self, rows: int) -> dict[str, Tensor]:
        has_source = "source" in self.adapter.accepts
        return {"source": self.random_ids(rows, self.length + 4, self.adapter.source_vocab)} if has_source else {}

    def positions_to_change(self) -> list[int]:
        """The last position, the second, and some between them."""
        steps = max(self.count - 1, 1)
        return sorted({1 + round((self.length - 2) * i / steps) for i in range(self.count)}, reverse=True)

    def column_mask(self, ids: Tensor, position: int) -> Tensor:
        """[B, L]: True at one position of every row."""
        mask = torch.zeros_like(ids, dtype=torch.bool)
        mask[:, position] = True
        return mask


def nonzero_positions(mask: Tensor) -> PositionIndex:
    """The rows and columns where a mask [B, L] is True."""
    rows, columns = mask.nonzero(as_tuple=True)
    return rows, columns


Law = Callable[[Probes], Iterator[Claim]]
SIDES = {"left": _("left"), "right": _("right")}


def future_claims(probes: Probes) -> Iterator[Claim]:
    """Causality: a token changed at position j changes no output before j, in evaluation and in training mode."""
    if not (probes.adapter.causal and probes.per_token):
        return
    for training in (False, True):
        a = probes.query(training=training)
        keys = probes.positions_to_change()[:2] if training else probes.positions_to_change()
        for first in range(0, len(keys), 2):
            # token j of each row is replaced; the outputs before it must stay
            pair = keys[first : first + 2]
            changed = torch.zeros_like(a.ids, dtype=torch.bool)
            changed[torch.arange(len(pair)), pair] = True
            b = replace(a, ids=probes.replace_tokens(a.ids, changed))
            for row, j in enumerate(pair):
                unaffected = torch.zeros_like(changed)
                unaffected[row, :j] = True
                yield Claim(
                    "future",
                    _with_mode(_("sees the future"), training),
                    a,
                    b,
                    nonzero_positions(unaffected),
                    True,
                    key=j,
                )


def _with_mode(message: Message, training: bool) -> Message:
    """The message of a claim, with a note if it is about training mode."""
    return _("{message} (in training mode)", message=message) if training else message


def window_claims(probes: Probes) -> Iterator[Claim]:
    """Windows: a token outside the receptive field of a position changes no output there."""
    receptive_fields = dict(probes.adapter.receptive_fields)
    if set(receptive_fields.get("", (None, None))) <= {None, 0} or not probes.per_token:
        return
    base = probes.query()
    for j in {0, *probes.positions_to_change(), probes.length - 1}:
        b = replace(base, ids=probes.replace_tokens(base.ids, probes.column_mask(base.ids, j)))

        def outside_of_module(path: str, j: int = j) -> PositionIndex:
            parents = [name for name in receptive_fields if path == name or path.startswith(name + ".")]
            receptive_field = receptive_fields[max(parents, key=len, default="")]
            return nonzero_positions(_outside_receptive_field(base.ids, j, receptive_field))

        outside = outside_of_module("")
        if len(outside[0]):
            message = _(
                "sees beyond its receptive field of {receptive_field} positions (back, ahead), summed over all layers",
                receptive_field=receptive_fields[""],
            )
            yield Claim("window", message, base, b, outside, exact=True, key=j, positions_for_module=outside_of_module)


def _outside_receptive_field(ids: Tensor, j: int, receptive_field: WindowSize) -> Tensor:
    """[B, L]: True at positions whose receptive field does not reach token j."""
    back, ahead = receptive_field
    positions = torch.arange(ids.shape[1], device=ids.device)
    outside = torch.zeros_like(positions, dtype=torch.bool)
    if back is not None:
        outside |= positions - j > back
    if ahead is not None:
        outside |= j - positions > ahead
    return outside.expand_as(ids)


def padding_claims(probes: Probes) -> Iterator[Claim]:
    """Padding: its tokens change no output, on either side; a row padded on the right has the output it has alone."""
    for side in probes.padding_sides:
        if "attention_mask" in probes.adapter.accepts:
            a, mask = _padded_query(probes, side)
            b = replace(a, ids=probes.replace_tokens(a.ids, ~mask))
            message = _("sees the padding on the {side}", side=SIDES[side])
            yield Claim("padding", message, a, b, nonzero_positions(mask), exact=True)
        if "source_attention_mask" in probes.adapter.accepts:
            a, mask = _padded_source_query(probes, side)
            source = probes.replace_tokens(a.model_kwargs["source"], ~mask, probes.adapter.source_vocab)
            b = replace(a, model_kwargs=a.model_kwargs | {"source": source})
            everywhere = nonzero_positions(torch.ones_like(a.ids))
            message = _("sees the source's padding on the {side}", side=SIDES[side])
            yield Claim("padding", message, a, b, everywhere, exact=True)
    if "attention_mask" in probes.adapter.accepts and "right" in probes.padding_sides:
        message = _("outputs change with padding on the right")
        yield _same_without_padding(probes, "right", "padding", message)
    if "source_attention_mask" in probes.adapter.accepts and "right" in probes.padding_sides:
        yield _same_without_source_padding(probes)


def position_claims(probes: Probes) -> Iterator[Claim]:
    """Positions: a row padded on the left has the output it has alone; positions are counted over real tokens."""
    if "attention_mask" in probes.adapter.accepts and "left" in probes.padding_sides:
        message = _("counts the padding on the left as positions")
        yield _same_without_padding(probes, "left", "positions", message)


def _padded_query(probes: Probes, side: str) -> tuple[Query, Tensor]:
    """Two rows: one without padding, one of which a third is padding."""
    query = probes.get_or_create(
        ("attention_mask", side), lambda: _with_padding_mask(probes, "attention_mask", side, probes.query().ids)
    )
    return query, query.model_kwargs["attention_mask"]


def _padded_source_query(probes: Probes, side: str) -> tuple[Query, Tensor]:
    query = probes.get_or_create(
        ("source_attention_mask", side),
        lambda: _with_padding_mask(probes, "source_attention_mask", side, probes.query().model_kwargs["source"]),
    )
    return query, query.model_kwargs["source_attention_mask"]


def _with_padding_mask(probes: Probes, name: str, side: str, ids: Tensor) -> Query:
    """The random query with a mask [B, L] under `name` that hides a third of the second row on one side."""
    mask = torch.ones_like(ids, dtype=torch.bool)
    num_padding = max(ids.shape[1] // 3, 1)
    if side == "left":
        mask[1, :num_padding] = False
    else:
        mask[1, -num_padding:] = False
    return replace(probes.query(), model_kwargs=probes.query().model_kwargs | {name: mask})


def _same_without_padding(probes: Probes, side: str, law: str, message: Message) -> Claim:
    """The padded row has the output of its real tokens alone."""
    b, mask = _padded_query(probes, side)
    real_columns = mask[1].nonzero().flatten()
    unpadded = Query(b.ids[1:, real_columns], {k: v[1:] for k, v in b.model_kwargs.items() if k == "source"})
    first_row = torch.zeros_like(real_columns)
    columns = torch.arange(len(real_columns), device=real_columns.device)
    return Claim(
        law, message, unpadded, b, (first_row, columns), exact=False, positions_b=(first_row + 1, real_columns)
    )


def _same_without_source_padding(probes: Probes) -> Claim:
    """The row with a padded source has the output of the row with the unpadded source."""
    b, mask = _padded_source_query(probes, "right")
    unpadded = Query(b.ids[1:], {"source": b.model_kwargs["source"][1:, mask[1]]})
    rows, columns = nonzero_positions(torch.ones_like(unpadded.ids))
    message = _("outputs change with padding on the right of the source")
    return Claim("padding", message, unpadded, b, (rows, columns), exact=False, positions_b=(rows + 1, columns))


def document_claims(probes: Probes) -> Iterator[Claim]:
    """Packing: two documents in one row do not see each other, and each has the output of the document alone."""
    if "document_ids" not in probes.adapter.accepts or not probes.per_token:
        return
    base = probes.query()
    start = probes.length // 2  # of the second document

    # row 0: document 1 is changed and document 2 must stay; row 1: the other way round
    document_ids = torch.ones_like(base.ids)
    document_ids[:, start:] = 2
    a = replace(base, model_kwargs=base.model_kwargs | {"document_ids": document_ids})
    changed_ids = torch.tensor([[1], [2]], device=document_ids.device)  # the document that is changed in each row
    b = replace(a, ids=probes.replace_tokens(a.ids, document_ids == changed_ids))
    for row, changed in enumerate((1, 2)):
        unaffected = document_ids != changed_ids
        unaffected[1 - row] = False
        message = _("document {other} sees document {changed} of its row", other=3 - changed, changed=changed)
        yield Claim("documents", message, a, b, nonzero_positions(unaffected), exact=True)

    # the second document alone
    alone = Query(base.ids[:1, start:])
    columns = torch.arange(probes.length - start, device=probes.device)
    first_row = torch.zeros_like(columns)
    message = _("a packed document has different outputs from the same document alone")
    yield Claim(
        "documents", message, alone, a, (first_row, columns), exact=False, positions_b=(first_row, columns + start)
    )


def batch_claims(probes: Probes) -> Iterator[Claim]:
    """Batch invariance: other rows, and the batch size, change no output."""
    base = probes.query()
    first_row = torch.zeros_like(base.ids, dtype=torch.bool)
    first_row[0] = True
    for training in (False, True):
        a = probes.query(training=training)
        message = _with_mode(_("a row sees another row of its batch"), training)
        b = replace(a, ids=probes.replace_tokens(a.ids, ~first_row))
        yield Claim("batch", message, a, b, nonzero_positions(first_row), exact=True)

    alone = Query(base.ids[:1], {k: v[:1] for k, v in base.model_kwargs.items()})
    message = _("a row has different outputs alone and in a batch")
    yield Claim("batch", message, alone, base, nonzero_positions(first_row), exact=False)


def cache_claims(probes: Probes) -> Iterator[Claim]:
    """KV cache: decoding in chunks (of one token and of several) has the output of one full forward pass."""
    if probes.adapter.step is None or not probes.per_token:
        return
    # full passes, and the positions at which each is cut into chunks
    full_queries: list[tuple[Query, tuple[int, ...]]] = [(probes.query(), (5, 6, 7, 10))]
    takes_mask = "attention_mask" in probes.adapter.step_accepts & probes.adapter.accepts
    if takes_mask and "left" in probes.padding_sides:
        full_queries.append((_padded_query(probes, "left")[0], (5, 6)))

    for full, boundaries in full_queries:
        edges = [0, *(edge for edge in boundaries if edge < probes.length), probes.length]
        padded = _(", padded on the left") if "attention_mask" in full.model_kwargs else ""
        chunks = [_cache_chunk(full, probes.adapter.step_accepts, *edge) for edge in pairwise(edges)]
        for index, (first, last) in enumerate(pairwise(edges)):
            attention_mask = full.model_kwargs.get("attention_mask", torch.ones_like(full.ids))
            rows, columns = nonzero_positions(attention_mask[:, first:last])
            b = replace(chunks[index], prefix=tuple(chunks[:index]))
            message = _(
                "tokens {first} to {last} after {first} in the cache{padded}: other logits than in the "
                "full forward pass",
                first=first,
                last=last - 1,
                padded=padded,
            )
            yield Claim("cache", message, full, b, (rows, columns + first), exact=False, positions_b=(rows, columns))


def _cache_chunk(query: Query, accepted: frozenset[str], first: int, last: int) -> Query:
    """Tokens first to last of a query, with the keyword arguments that a step accepts."""
    model_kwargs = {name: value for name, value in query.model_kwargs.items() if name in accepted}
    if "attention_mask" in model_kwargs:
        model_kwargs["attention_mask"] = model_kwargs["attention_mask"][:, first:last]
    return Query(query.ids[:, first:last], model_kwargs)


def backend_claims(probes: Probes) -> Iterator[Claim]:
    """Back ends: fused attention has the output of the eager formula."""
    base = probes.query()
    message = _("fused attention and the eager formula give different outputs")
    b = replace(base, context=_eager_attention)
    yield Claim("backend", message, base, b, nonzero_positions(torch.ones_like(base.ids)), exact=False)


@contextlib.contextmanager
def _eager_attention(model: nn.Module) -> Iterator[None]:
    """Headwater kernels use the eager formula while a tap has a hook; PyTorch's have switches."""
    handles = [tap.register_forward_hook(lambda *_: None) for tap in model.modules() if isinstance(tap, Tap)]
    fastpath_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel([SDPBackend.MATH]):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath_enabled)
        for handle in handles:
            handle.remove()


CLAIMS_BY_LAW: dict[str, Law] = {  # a law comes after the laws it depends on
    "batch": batch_claims,
    "future": future_claims,
    "window": window_claims,
    "padding": padding_claims,
    "positions": position_claims,
    "documents": document_claims,
    "cache": cache_claims,
    "backend": backend_claims,
}
