"""The laws a Transformer must keep, as claims. Each law is a generator; what it does not yield it does not judge.

B rows, L places. Random tokens are asked about; a fault that shows only for certain tokens may be missed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from headwater.core.masks import Reach
from headwater.core.taps import Tap
from headwater.inspection.calling import Calling
from headwater.inspection.claims import Ask, Claim
from headwater.inspection.traces import Places


@dataclass(frozen=True)
class Probes:
    """Random tokens to ask with, and the places to change. avoid: an id with a meaning of its own, such as padding.

    sides: where rows are padded. per_token: whether there is an answer for each place, or one for each row.
    """

    how: Calling
    length: int
    count: int
    draw: torch.Generator
    device: torch.device
    sides: tuple[str, ...] = ("left", "right")
    avoid: int = -1
    per_token: bool = True

    def ids(self, rows: int, length: int | None = None, vocab: int | None = None) -> Tensor:
        vocab = vocab or self.how.vocab
        ids = torch.randint(vocab, (rows, length or self.length), generator=self.draw)
        return torch.where(ids == self.avoid, (ids + 1) % vocab, ids).to(self.device)

    def changed(self, ids: Tensor, where: Tensor, vocab: int | None = None) -> Tensor:
        """Another token at each place that is True."""
        vocab = vocab or self.how.vocab
        other = (ids + 1 + torch.randint(max(vocab - 1, 1), ids.shape, generator=self.draw).to(ids.device)) % vocab
        other = torch.where(other == self.avoid, (other + 1) % vocab, other)
        other = torch.where(other == ids, (other + 1) % vocab, other)
        return torch.where(where, other, ids)

    def ask(self, rows: int) -> Ask:
        extras = (
            {"source": self.ids(rows, self.length + 4, self.how.source_vocab)} if "source" in self.how.takes else {}
        )
        return Ask(self.ids(rows), extras)

    def keys(self) -> list[int]:
        """Places to change: the last, the second, and some between them."""
        steps = max(self.count - 1, 1)
        return sorted({1 + round((self.length - 2) * i / steps) for i in range(self.count)}, reverse=True)

    def column(self, ids: Tensor, at: int) -> Tensor:
        where = torch.zeros_like(ids, dtype=torch.bool)
        where[:, at] = True
        return where


def listed(where: Tensor) -> Places:
    rows, columns = where.nonzero(as_tuple=True)
    return rows, columns


Law = Callable[[Probes], Iterator[Claim]]


def future(p: Probes) -> Iterator[Claim]:
    """A token changed at place j changes nothing before j, in evaluation and in training with its statistics."""
    if not (p.how.causal and p.per_token):
        return
    base = p.ask(2)
    for training in (False, True):
        a, mode = replace(base, training=training), " (in training mode)" if training else ""
        for j in p.keys() if not training else p.keys()[:2]:
            b = replace(a, ids=p.changed(a.ids, p.column(a.ids, j)))
            before = torch.ones_like(a.ids, dtype=torch.bool)
            before[:, j:] = False
            yield Claim("future", f"sees the future{mode}", a, b, listed(before), exact=True, key=j)


def window(p: Probes) -> Iterator[Claim]:
    """A token changed out of reach of a place, through all layers, changes nothing there."""
    reaches = dict(p.how.reach)
    if set(reaches.get("", (None, None))) <= {None, 0} or not p.per_token:
        return
    base = p.ask(2)
    for j in {0, *p.keys(), p.length - 1}:
        b = replace(base, ids=p.changed(base.ids, p.column(base.ids, j)))

        def beyond(path: str, j: int = j) -> Places:
            fits = [name for name in reaches if path == name or path.startswith(name + ".")]
            return listed(_out_of_reach(base.ids, j, reaches[max(fits, key=len, default="")]))

        places = beyond("")
        if len(places[0]):
            says = f"sees farther than its window of {reaches['']} places back and ahead in all layers together"
            yield Claim("window", says, base, b, places, exact=True, key=j, at=beyond)


def _out_of_reach(ids: Tensor, j: int, reach: Reach) -> Tensor:
    back, ahead = reach
    here = torch.arange(ids.shape[1], device=ids.device)
    out = torch.zeros_like(here, dtype=torch.bool)
    out = out if back is None else out | (here - j > back)
    out = out if ahead is None else out | (j - here > ahead)
    return out.expand_as(ids)


def padding(p: Probes) -> Iterator[Claim]:
    """What stands in the padding changes nothing, on either side; a row padded on the right answers as alone."""
    for side in p.sides:
        if "keep" in p.how.takes:
            a, keep = _padded(p, side)
            b = replace(a, ids=p.changed(a.ids, ~keep))
            yield Claim("padding", f"sees the padding on the {side}", a, b, listed(keep), exact=True)
        if "source_keep" in p.how.takes:
            a, keep = _padded_source(p, side)
            source = p.changed(a.extras["source"], ~keep, p.how.source_vocab)
            b, everywhere = replace(a, extras=a.extras | {"source": source}), listed(torch.ones_like(a.ids))
            yield Claim("padding", f"sees the source's padding on the {side}", a, b, everywhere, exact=True)
    if "keep" in p.how.takes and "right" in p.sides:
        yield _as_alone(p, "right", "padding", "answers differently when it is padded on the right")
    if "source_keep" in p.how.takes and "right" in p.sides:
        yield _source_alone(p)


def positions(p: Probes) -> Iterator[Claim]:
    """A row padded on the left answers as it does alone: places are counted over real tokens."""
    if "keep" in p.how.takes and "left" in p.sides:
        yield _as_alone(p, "left", "positions", "counts the padding on the left as places")


def _padded(p: Probes, side: str) -> tuple[Ask, Tensor]:
    """Two rows: one full, one with a third of padding."""
    a, spare = p.ask(2), max(p.length // 3, 1)
    keep = torch.ones_like(a.ids, dtype=torch.bool)
    keep[1, slice(0, spare) if side == "left" else slice(p.length - spare, None)] = False
    return replace(a, extras=a.extras | {"keep": keep}), keep


def _padded_source(p: Probes, side: str) -> tuple[Ask, Tensor]:
    a = p.ask(2)
    source = a.extras["source"]
    keep, spare = torch.ones_like(source, dtype=torch.bool), max(source.shape[1] // 3, 1)
    keep[1, slice(0, spare) if side == "left" else slice(source.shape[1] - spare, None)] = False
    return replace(a, extras=a.extras | {"source_keep": keep}), keep


def _as_alone(p: Probes, side: str, law: str, says: str) -> Claim:
    b, keep = _padded(p, side)
    real = keep[1].nonzero().flatten()
    alone = Ask(b.ids[1:, real], {k: v[1:] for k, v in b.extras.items() if k == "source"})
    one = torch.zeros_like(real)
    counted = torch.arange(len(real), device=real.device)
    return Claim(law, says, alone, b, (one, counted), exact=False, twins=(one + 1, real))


def _source_alone(p: Probes) -> Claim:
    b, keep = _padded_source(p, "right")
    alone = Ask(b.ids[1:], {"source": b.extras["source"][1:, keep[1]]})
    rows, columns = listed(torch.ones_like(alone.ids))
    says = "answers differently when its source is padded on the right"
    return Claim("padding", says, alone, b, (rows, columns), exact=False, twins=(rows + 1, columns))


def documents(p: Probes) -> Iterator[Claim]:
    """Two documents in one row do not see one another, and each answers as it does alone."""
    if "documents" not in p.how.takes or not p.per_token:
        return
    base, cut = p.ask(2), p.length // 2
    numbers = torch.ones_like(base.ids)
    numbers[:, cut:] = 2
    a = replace(base, extras=base.extras | {"documents": numbers})
    for changed in (1, 2):
        b = replace(a, ids=p.changed(a.ids, numbers == changed))
        says = f"document {3 - changed} sees document {changed} of its row"
        yield Claim("documents", says, a, b, listed(numbers != changed), exact=True)
    alone = Ask(base.ids[:1, cut:])
    at = torch.arange(p.length - cut, device=p.device)
    row, says = torch.zeros_like(at), "a second document answers differently from the same document alone"
    yield Claim("documents", says, alone, a, (row, at), exact=False, twins=(row, at + cut))


def batch(p: Probes) -> Iterator[Claim]:
    """What stands in other rows, and whether there are any, changes nothing."""
    base = p.ask(3)
    mine = torch.zeros_like(base.ids, dtype=torch.bool)
    mine[0] = True
    for training in (False, True):
        a, mode = replace(base, training=training), " (in training mode)" if training else ""
        b = replace(a, ids=p.changed(a.ids, ~mine))
        yield Claim("batch", f"a row sees another row of its batch{mode}", a, b, listed(mine), exact=True)
    alone = Ask(base.ids[:1], {k: v[:1] for k, v in base.extras.items()})
    yield Claim("batch", "a row answers differently alone and in a batch", alone, base, listed(mine), exact=False)


def cache(p: Probes) -> Iterator[Claim]:
    """Reading piece by piece through a cache (one token, and several at once) answers as reading the whole does."""
    if p.how.step is None or not p.per_token:
        return
    cuts = [0, *(cut for cut in (5, 6, 7, 10) if cut < p.length), p.length]
    wholes = [p.ask(2)]
    if "keep" in p.how.step_takes and "keep" in p.how.takes and "left" in p.sides:
        wholes.append(_padded(p, "left")[0])
    for whole in wholes:
        padded = ", padded on the left" if "keep" in whole.extras else ""
        pieces = [_piece(whole, p.how.step_takes, *cut) for cut in pairwise(cuts)]
        for nth, (first, last) in enumerate(pairwise(cuts)):
            rows, columns = listed(whole.extras.get("keep", torch.ones_like(whole.ids))[:, first:last])
            b = replace(pieces[nth], before=tuple(pieces[:nth]))
            says = f"token {first} to {last - 1} after {first} in the cache{padded}: answers as never in the whole"
            yield Claim("cache", says, whole, b, (rows, columns + first), exact=False, twins=(rows, columns))


def _piece(whole: Ask, takes: frozenset[str], first: int, last: int) -> Ask:
    extras = {k: v[:, first:last] if k == "keep" else v for k, v in whole.extras.items() if k in takes}
    return Ask(whole.ids[:, first:last], extras)


def back_end(p: Probes) -> Iterator[Claim]:
    """Fused attention answers as the formula spelled out does."""
    base = p.ask(2)
    b, says = replace(base, under=_spelled_out), "fused attention answers differently from the plain formula"
    yield Claim("back end", says, base, b, listed(torch.ones_like(base.ids)), exact=False)


@contextlib.contextmanager
def _spelled_out(model: nn.Module) -> Iterator[None]:
    """Ours spell the softmax out while somebody listens; PyTorch has switches for its own."""
    handles = [tap.register_forward_hook(lambda *_: None) for tap in model.modules() if isinstance(tap, Tap)]
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel([SDPBackend.MATH]):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for handle in handles:
            handle.remove()


CLAIMED: dict[str, Law] = {  # a law comes after those it rests on
    "batch": batch,
    "future": future,
    "window": window,
    "padding": padding,
    "positions": positions,
    "documents": documents,
    "cache": cache,
    "back end": back_end,
}
