"""The cache of a running batch: rows join, leave, go back and change places, each with a length of its own.

Column c of a row holds the keys and values of its token at place c, so nothing is ever padded: what lies beyond a
row's length is later than any of its queries, and a causal rule hides it. Going back is therefore only a smaller
length, which is how rejected drafts are forgotten and how an interrupted step is undone.

    rows      [ a b c d . . . ]   lengths 4, 7, 2
              [ e f g h i j k ]
              [ l m . . . . . ]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwater.core.cache import Keys, Slot
from headwater.core.embed import Rows
from headwater.errors import BadInput

Pair = tuple[Tensor, Tensor]


class Held(NamedTuple):
    """A row of the cache: whose it is, and how many of its tokens have been read."""

    owner: Any
    length: int


class Slots:
    """The interface of core.cache.Cache, and what a running batch needs beyond it.

    room: k and v [R, G, C, D] of each attention, R and C at least the rows and columns in use.
    sources: k and v [R, H, S, D] of the source, for cross-attention; heard [R, S] is True where the source is real.
    home [B, C], ears [B]: after select(), in whose row of the room each token lies, and of sources; None: in its own.
    most: room is never made for more columns than that, as long as no row needs them.
    held is always replaced as a whole, after the tensors are in order: an interruption finds the old rows or the new.
    """

    def __init__(self, model: Any, owners: Iterable[Any] = (), most: int | None = None) -> None:
        lanes = model.writer.lanes
        if not lanes or any(rule.reach[1] != 0 for rule, _ in lanes):
            raise BadInput(
                "generate: every token may only see what came before it, this model looks ahead; use a decoder"
            )
        self.made_for, self.device = model.writer.spec, next(model.parameters()).device
        self.backs = [rule.reach[0] for rule, _ in lanes]  # how far back each lane sees; None without end
        self.held, self.most = [Held(owner, 0) for owner in owners], most
        self.room: dict[Slot, Pair] = {}
        self.sources: dict[Slot, Pair] = {}
        self.heard: Tensor | None = None
        self.home: Tensor | None = None
        self.ears: list[int] | None = None
        self.told: Rows | None = None
        self.stepper: Any = None  # reading.py keeps the compiled step here, for as long as the cache lives

    @property
    def lengths(self) -> list[int]:
        return [row.length for row in self.held]

    # ------------------------------------------------------------------------------- what the model asks of a cache

    @property
    def count(self) -> Tensor:
        """[B, 1], or [1, 1] where all rows have one length: the place of each row's next token."""
        lengths = self.lengths
        return torch.tensor(lengths[:1] if len(set(lengths)) == 1 else lengths, device=self.device)[:, None]

    @property
    def aligned(self) -> bool:
        return not any(self.lengths)

    def admit(self, rows: int, tokens: int) -> None:
        if rows != len(self.held):
            raise BadInput(f"cache: it holds {len(self.held)} rows, got {rows}; join() and leave() change their number")
        self.settle()

    def keys(self, lane: int, places: Tensor, keep: Tensor | None) -> Keys:
        """Columns are places, and only those that some row can still see are shown."""
        self.begins, self.new = self.lengths, places.shape[1]
        if self.aligned:
            return places, None
        first = self._first(lane)
        return torch.arange(first, max(self.begins) + self.new, device=self.device)[None], None

    def _first(self, lane: int) -> int:
        back = self.backs[lane]
        return 0 if back is None else max(0, min(self.begins) - back)

    def advance(self, tokens: int, keep: Tensor | None) -> None:
        self.held = [Held(owner, length + tokens) for owner, length in self.held]

    def extend(self, lane: int, slot: Slot, k: Tensor, v: Tensor) -> Pair:
        rows, last = len(self.begins), max(self.begins) + self.new
        room = self.room[slot] = _roomy(self.room.get(slot), (k, v), rows, last, self._spare(last))
        for kept, fresh in zip(room, (k, v), strict=True):
            self._write(kept, fresh, rows)
        if not any(self.begins):
            return k, v
        first = self._first(lane)
        return room[0][:rows, :, first:last], room[1][:rows, :, first:last]

    def reserve(self, slots: Iterable[Slot], columns: int, heads: int, width: int) -> None:
        """Make room for so many columns of every row, the same for all of them (an interrupted growth may differ)."""
        widest = max([columns, *(k.shape[2] for k, _ in self.room.values())])
        ample = self._spare(columns) if widest == columns else widest
        for slot in slots:
            like = self.room.get(slot) or (torch.zeros(1, heads, 1, width), torch.zeros(1, heads, 1, width))
            k, v = _roomy(self.room.get(slot), like, len(self.held), widest, ample)
            self.room[slot] = k.contiguous(), v.contiguous()

    def _spare(self, columns: int) -> int:
        """How many columns to make when there are too few: half as many again, so that copies stay rare."""
        ample = columns + max(64, columns // 2)
        return ample if self.most is None else max(columns, min(ample, self.most))

    def _write(self, kept: Tensor, fresh: Tensor, rows: int) -> None:
        if len(set(self.begins)) == 1:
            kept[:rows, :, self.begins[0] : self.begins[0] + self.new] = fresh
            return
        at = torch.tensor(self.begins, device=self.device)[:, None] + torch.arange(self.new, device=self.device)
        kept[torch.arange(rows, device=self.device)[:, None], :, at] = fresh.transpose(1, 2)

    def cross(self, slot: Slot, make: Callable[[], Pair]) -> Pair:
        if slot not in self.sources:
            self.sources[slot] = make()
        k, v = self.sources[slot]
        return k[: len(self.begins)], v[: len(self.begins)]

    # ------------------------------------------------------------------------------------------- the rows themselves

    def hear(self, memory: Rows) -> None:
        """Remember the source until its keys and values are kept, and which of its states are real."""
        assert memory.states is not None
        keep = memory.keep
        self.told, shape = memory, memory.states.shape[:2]
        self.heard = torch.ones(shape, dtype=torch.bool, device=self.device) if keep is None else keep

    @property
    def memory(self) -> Rows | None:
        """The source as the model wants it. Once its keys and values are kept, only its length matters."""
        if self.told is not None or self.heard is None:
            return self.told
        keep = self.heard[self.hears]
        return Rows(keep.long(), keep, states=torch.zeros(1, 1, 1, device=self.device).expand(*keep.shape, 1))

    @torch.inference_mode()
    def join(self, other: Slots) -> None:
        """Take in the rows of another cache of the same model, after our own."""
        self.settle(), other.settle()
        mine, total = len(self.held), len(self.held) + len(other.held)
        width, heard = max([*self.lengths, *other.lengths]), _width(self.heard, other.heard)
        for slot, given in other.room.items():
            self.room[slot] = room = _roomy(self.room.get(slot), given, total, width, self._spare(width))
            _fill(room, given, mine, total)
        for slot, given in other.sources.items():
            self.sources[slot] = room = _roomy(self.sources.get(slot), given, total, heard, heard)
            _fill(room, given, mine, total)
        self.heard = _joined(self.heard, other.heard, mine, total)
        self.held = [*self.held, *other.held]

    @torch.inference_mode()
    def leave(self, row: int) -> None:
        """Let a row go; the last one takes its place. Doing it again after an interruption does no harm."""
        self.settle()
        last = len(self.held) - 1
        if row != last:
            for pair in (*self.room.values(), *self.sources.values()):
                for kept in pair:
                    kept[row] = kept[last]
            if self.heard is not None:
                self.heard[row] = self.heard[last]
        self.held = [self.held[last] if i == row else one for i, one in enumerate(self.held[:last])]

    @torch.inference_mode()
    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order, some perhaps more than once: what beam search needs. Nothing is moved."""
        if list(rows) == list(range(len(self.held))):
            return
        last = max(self.lengths)
        home = self.homes(last) if self.home is not None else _own(len(self.held), last)
        held = [self.held[row] for row in rows]
        lengths = torch.tensor([one.length for one in held])
        read = torch.arange(last) < lengths[:, None]
        self.home = torch.where(read, home[list(rows)], _own(len(rows), last))  # type: ignore[index]
        self.ears, self.held = [self.hears[row] for row in rows], held
        if _clash(self.home, lengths):
            self.settle()

    @property
    def hears(self) -> list[int]:
        """In which row of sources each row's own lies."""
        return list(range(len(self.held))) if self.ears is None else self.ears

    def homes(self, columns: int) -> Tensor | None:
        """[B, columns] in whose row of the room each token lies, int32; what comes after a selection, in its own."""
        if self.home is None:
            return None
        rows, known = self.home.shape
        return torch.cat((self.home, _own(rows, max(0, columns - known))), 1)[:, :columns].contiguous()

    @torch.inference_mode()
    def settle(self) -> None:
        """Move every token into its own row, as modules want it."""
        if self.home is not None:
            last = max(self.lengths)
            home, columns = self.homes(last).long().to(self.device), torch.arange(last, device=self.device)  # type: ignore[union-attr]
            self.room = {
                slot: (_moved(k, home, columns), _moved(v, home, columns)) for slot, (k, v) in self.room.items()
            }
            self.home = None
        if self.ears is not None:
            ears = torch.tensor(self.ears, device=self.device)
            self.sources = {slot: (k[ears], v[ears]) for slot, (k, v) in self.sources.items()}
            self.heard = None if self.heard is None else self.heard[ears]
            self.ears = None

    def crop(self, lengths: Iterable[int]) -> None:
        """Forget all but the first tokens of each row, so many."""
        lengths = list(lengths)
        if any(n < held.length for n, held in zip(lengths, self.held, strict=True)):
            self.settle()  # the places that become free may hold what another row still sees
        self.held = [Held(row.owner, min(row.length, n)) for row, n in zip(self.held, lengths, strict=True)]

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for pair in (*self.room.values(), *self.sources.values()) for t in pair)


def _roomy(old: Pair | None, like: Pair, rows: int, columns: int, ample: int) -> Pair:
    """Room for so many rows and columns (then for an ample number), the old contents in it."""
    if old is not None and old[0].shape[0] >= rows and old[0].shape[2] >= columns:
        return old
    had_rows, had_columns = (0, 0) if old is None else (old[0].shape[0], old[0].shape[2])
    rows, columns = max(rows, had_rows), had_columns if columns <= had_columns else ample

    def bigger(index: int) -> Tensor:
        room = like[index].new_zeros(rows, like[index].shape[1], columns, like[index].shape[3])
        if old is not None:
            room[:had_rows, :, :had_columns] = old[index]
        return room

    return bigger(0), bigger(1)


def _fill(room: Pair, given: Pair, first: int, last: int) -> None:
    """Write rows first to last; the columns beyond become 0, for a NaN left behind would spoil even what no one
    attends to.
    """
    for kept, fresh in zip(room, given, strict=True):
        width = min(kept.shape[2], fresh.shape[2])
        kept[first:last, :, :width] = fresh[: last - first, :, :width]
        kept[first:last, :, width:] = 0


def _own(rows: int, columns: int) -> Tensor:
    """[rows, columns]: each token lies in its own row."""
    return torch.arange(rows, dtype=torch.int32)[:, None].expand(rows, columns)


def _moved(kept: Tensor, home: Tensor, columns: Tensor) -> Tensor:
    """[B, G, C, D] every token from its home [B, C]; what a row has not read yet may be anything."""
    return kept[home.clamp(max=len(kept) - 1), :, columns].transpose(1, 2)


def _clash(home: Tensor, lengths: Tensor) -> bool:
    """Whether a row's next token would be written over one that a longer row sees there. home [B, C], lengths [B]."""
    columns, rows = torch.arange(home.shape[1]), len(lengths)
    ends = lengths[home.long().clamp(max=rows - 1)]  # of the row that now writes there
    return bool(((columns < lengths[:, None]) & (home < rows) & (columns >= ends)).any())


def _width(*heard: Tensor | None) -> int:
    return max((h.shape[1] for h in heard if h is not None), default=0)


def _joined(mine: Tensor | None, theirs: Tensor | None, first: int, last: int) -> Tensor | None:
    if theirs is None:
        return mine
    joined = theirs.new_zeros(last, _width(mine, theirs))
    if mine is not None:
        joined[:first, : mine.shape[1]] = mine[:first]
    joined[first:, : theirs.shape[1]] = theirs[: last - first]
    return joined
