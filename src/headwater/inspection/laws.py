"""The laws a Transformer must keep, as claims. Each law is a generator; what it does not yield it does not judge.

B rows, L places. Random tokens are asked about; a fault that shows only for certain tokens may be missed. Laws share
their questions: what was answered for one is not run again for another, and each of two rows asks about its own place.
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

from headwater.core.masks import Reach
from headwater.core.taps import Tap
from headwater.inspection.calling import Calling
from headwater.inspection.claims import Ask, Claim
from headwater.inspection.traces import Places
from headwater.inspection.words import Both


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
    made: dict[Any, Ask] = field(default_factory=dict, repr=False, compare=False)

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

    def once(self, key: Any, make: Callable[[], Ask]) -> Ask:
        """The question of that name, made when it is first asked."""
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]

    def ask(self, rows: int = 2, training: bool = False) -> Ask:
        """Random rows, and a source of their own where the model reads one."""
        if training:
            return self.once((rows, True), lambda: replace(self.ask(rows), training=True))
        return self.once((rows, False), lambda: Ask(self.ids(rows), self._source(rows)))

    def _source(self, rows: int) -> dict[str, Tensor]:
        takes = "source" in self.how.takes
        return {"source": self.ids(rows, self.length + 4, self.how.source_vocab)} if takes else {}

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
SIDE = {"left": "左", "right": "右"}


def future(p: Probes) -> Iterator[Claim]:
    """A token changed at place j changes nothing before j, in evaluation and in training with its statistics."""
    if not (p.how.causal and p.per_token):
        return
    for training in (False, True):
        a, keys = p.ask(training=training), p.keys()[:2] if training else p.keys()
        for first in range(0, len(keys), 2):
            pair = keys[first : first + 2]
            where = torch.zeros_like(a.ids, dtype=torch.bool)
            where[torch.arange(len(pair)), pair] = True
            b = replace(a, ids=p.changed(a.ids, where))
            for row, j in enumerate(pair):
                before = torch.zeros_like(where)
                before[row, :j] = True
                yield Claim(
                    "future", _mode("sees the future", "看到了未来", training), a, b, listed(before), True, key=j
                )


def _mode(en: str, zh: str, training: bool) -> Both:
    return Both(f"{en} (in training mode)", f"{zh}（训练模式下）") if training else Both(en, zh)


def window(p: Probes) -> Iterator[Claim]:
    """A token changed out of reach of a place, through all layers, changes nothing there."""
    reaches = dict(p.how.reach)
    if set(reaches.get("", (None, None))) <= {None, 0} or not p.per_token:
        return
    base = p.ask()
    for j in {0, *p.keys(), p.length - 1}:
        b = replace(base, ids=p.changed(base.ids, p.column(base.ids, j)))

        def beyond(path: str, j: int = j) -> Places:
            fits = [name for name in reaches if path == name or path.startswith(name + ".")]
            return listed(_out_of_reach(base.ids, j, reaches[max(fits, key=len, default="")]))

        places = beyond("")
        if len(places[0]):
            says = Both(
                f"sees farther than its window of {reaches['']} places back and ahead in all layers together",
                f"所有层合起来，看得比窗口远（窗口：向前、向后 {reaches['']} 个位置）",
            )
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
            says = Both(f"sees the padding on the {side}", f"看到了{SIDE[side]}边的填充")
            yield Claim("padding", says, a, b, listed(keep), exact=True)
        if "source_keep" in p.how.takes:
            a, keep = _padded_source(p, side)
            source = p.changed(a.extras["source"], ~keep, p.how.source_vocab)
            b, everywhere = replace(a, extras=a.extras | {"source": source}), listed(torch.ones_like(a.ids))
            says = Both(f"sees the source's padding on the {side}", f"看到了源文{SIDE[side]}边的填充")
            yield Claim("padding", says, a, b, everywhere, exact=True)
    if "keep" in p.how.takes and "right" in p.sides:
        says = Both("answers differently when it is padded on the right", "右边填充后，回答变了")
        yield _as_alone(p, "right", "padding", says)
    if "source_keep" in p.how.takes and "right" in p.sides:
        yield _source_alone(p)


def positions(p: Probes) -> Iterator[Claim]:
    """A row padded on the left answers as it does alone: places are counted over real tokens."""
    if "keep" in p.how.takes and "left" in p.sides:
        says = Both("counts the padding on the left as places", "把左边的填充也算作位置")
        yield _as_alone(p, "left", "positions", says)


def _padded(p: Probes, side: str) -> tuple[Ask, Tensor]:
    """Two rows: one full, one with a third of padding."""
    made = p.once(("keep", side), lambda: _hiding(p, "keep", side, p.ask().ids))
    return made, made.extras["keep"]


def _padded_source(p: Probes, side: str) -> tuple[Ask, Tensor]:
    made = p.once(("source_keep", side), lambda: _hiding(p, "source_keep", side, p.ask().extras["source"]))
    return made, made.extras["source_keep"]


def _hiding(p: Probes, name: str, side: str, ids: Tensor) -> Ask:
    keep, spare = torch.ones_like(ids, dtype=torch.bool), max(ids.shape[1] // 3, 1)
    keep[1, slice(0, spare) if side == "left" else slice(ids.shape[1] - spare, None)] = False
    return replace(p.ask(), extras=p.ask().extras | {name: keep})


def _as_alone(p: Probes, side: str, law: str, says: Both) -> Claim:
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
    says = Both("answers differently when its source is padded on the right", "源文右边填充后，回答变了")
    return Claim("padding", says, alone, b, (rows, columns), exact=False, twins=(rows + 1, columns))


def documents(p: Probes) -> Iterator[Claim]:
    """Two documents in one row do not see one another, and each answers as it does alone."""
    if "documents" not in p.how.takes or not p.per_token:
        return
    base, cut = p.ask(), p.length // 2
    numbers = torch.ones_like(base.ids)
    numbers[:, cut:] = 2
    a = replace(base, extras=base.extras | {"documents": numbers})
    mine = torch.tensor([[1], [2]], device=numbers.device)  # the document that is changed in each row
    b = replace(a, ids=p.changed(a.ids, numbers == mine))
    for row, changed in enumerate((1, 2)):
        others = numbers != mine
        others[1 - row] = False
        en, zh = (
            f"document {3 - changed} sees document {changed} of its row",
            f"同一行里，文档 {3 - changed} 看到了文档 {changed}",
        )
        yield Claim("documents", Both(en, zh), a, b, listed(others), exact=True)
    alone = Ask(base.ids[:1, cut:])
    at = torch.arange(p.length - cut, device=p.device)
    first = torch.zeros_like(at)
    says = Both("a second document answers differently from the same document alone", "第二个文档的回答与它单独时不同")
    yield Claim("documents", says, alone, a, (first, at), exact=False, twins=(first, at + cut))


def batch(p: Probes) -> Iterator[Claim]:
    """What stands in other rows, and whether there are any, changes nothing."""
    base = p.ask()
    mine = torch.zeros_like(base.ids, dtype=torch.bool)
    mine[0] = True
    for training in (False, True):
        a, says = (
            p.ask(training=training),
            _mode("a row sees another row of its batch", "一行看到了同批的另一行", training),
        )
        yield Claim("batch", says, a, replace(a, ids=p.changed(a.ids, ~mine)), listed(mine), exact=True)
    alone = Ask(base.ids[:1], {k: v[:1] for k, v in base.extras.items()})
    says = Both("a row answers differently alone and in a batch", "一行单独时与在批里时回答不同")
    yield Claim("batch", says, alone, base, listed(mine), exact=False)


def cache(p: Probes) -> Iterator[Claim]:
    """Reading piece by piece through a cache (one token, and several at once) answers as reading the whole does."""
    if p.how.step is None or not p.per_token:
        return
    wholes: list[tuple[Ask, tuple[int, ...]]] = [(p.ask(), (5, 6, 7, 10))]
    if "keep" in p.how.step_takes and "keep" in p.how.takes and "left" in p.sides:
        wholes.append((_padded(p, "left")[0], (5, 6)))
    for whole, at in wholes:
        cuts = [0, *(cut for cut in at if cut < p.length), p.length]
        padded = Both(", padded on the left", "、左边填充") if "keep" in whole.extras else Both("", "")
        pieces = [_piece(whole, p.how.step_takes, *cut) for cut in pairwise(cuts)]
        for nth, (first, last) in enumerate(pairwise(cuts)):
            rows, columns = listed(whole.extras.get("keep", torch.ones_like(whole.ids))[:, first:last])
            b = replace(pieces[nth], before=tuple(pieces[:nth]))
            says = Both(
                f"token {first} to {last - 1} after {first} in the cache{padded}: answers as never in the whole",
                f"缓存里已有 {first} 个{padded.zh}，再读第 {first} 到 {last - 1} 个：回答与整段读时不同",
            )
            yield Claim("cache", says, whole, b, (rows, columns + first), exact=False, twins=(rows, columns))


def _piece(whole: Ask, takes: frozenset[str], first: int, last: int) -> Ask:
    extras = {k: v[:, first:last] if k == "keep" else v for k, v in whole.extras.items() if k in takes}
    return Ask(whole.ids[:, first:last], extras)


def back_end(p: Probes) -> Iterator[Claim]:
    """Fused attention answers as the formula spelled out does."""
    base = p.ask()
    says = Both("fused attention answers differently from the plain formula", "融合的注意力与逐步公式回答不同")
    b = replace(base, under=_spelled_out)
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
