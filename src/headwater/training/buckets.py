"""Gradients summed over processes in buckets, while the way back still goes on.

torch's DistributedDataParallel wraps one forward pass, averages, and wants a backward pass from every process. Here a
loss calls several parts of a model, a sum must stay a sum, a process may have no rows in a step, and a parameter no
gradient. So its idea is kept without its wrapper: a full bucket is sent while the next one is being filled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

BYTES = 8 << 20  # of a bucket: large enough that a message's fixed cost is small, small enough that several overlap


class Buckets:
    """Every process sends the same buckets in the same order: the last parameters first, as their gradients come."""

    def __init__(self, parameters: Iterable[Tensor], most: int = BYTES) -> None:
        self.buckets = list(_filled(reversed([p for p in parameters if p.requires_grad]), most))
        self.missing: list[int] = []  # gradients each bucket still waits for; empty while nothing is awaited
        self.sent: list[tuple[Any, Tensor]] = []
        for number, bucket in enumerate(self.buckets):
            for p in bucket:
                p.register_post_accumulate_grad_hook(self._came(number))

    def expect(self) -> None:
        """The next backward pass is the last of this step: what comes now is complete."""
        self.missing = [len(bucket) for bucket in self.buckets]

    def _came(self, number: int) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            if self.missing:
                self.missing[number] -= 1
                self._send()

        return hook

    def _send(self) -> None:
        while len(self.sent) < len(self.buckets) and self.missing[len(self.sent)] == 0:
            flat = torch.cat([_grad(p).flatten() for p in self.buckets[len(self.sent)]])
            self.sent.append((dist.all_reduce(flat, async_op=True), flat))

    def settle(self) -> None:
        """Send what has not been sent, zeros for gradients that never came; wait; every gradient is the sum of all."""
        self.missing = [0] * len(self.buckets)
        self._send()
        for bucket, (work, flat) in zip(self.buckets, self.sent, strict=True):
            work.wait()
            parts = flat.split([p.numel() for p in bucket])
            torch._foreach_copy_(
                [_grad(p) for p in bucket], [part.view_as(p) for part, p in zip(parts, bucket, strict=True)]
            )
        self.missing, self.sent = [], []


def _grad(p: Tensor) -> Tensor:
    if p.grad is None:
        p.grad = torch.zeros_like(p)
    return p.grad


def _filled(parameters: Iterable[Tensor], most: int) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for p in parameters:
        if bucket and (sum(q.nbytes for q in bucket) + p.nbytes > most or bucket[0].dtype != p.dtype):
            yield bucket
            bucket = []
        bucket.append(p)
    if bucket:
        yield bucket
