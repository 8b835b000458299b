"""The processes that train one model together, each on its share of every batch.

What must be decided together is decided by numbers that all of them have seen. How the model itself is spread over them
is said in spread.py; that all of them live, in pulse.py.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from headwater.errors import Unavailable
from headwater.training.pulse import Pulse

MEETING = timedelta(seconds=45)  # all processes must have come
PATIENCE = timedelta(minutes=60)  # the others wait while the first evaluates; whether it lives, its pulse says
MOST_WORDS = 240


class Alone:
    """One process: nothing to agree on, nothing to add up."""

    rank, world = 0, 1

    def sums(self, numbers: Sequence[float]) -> list[float]:
        """Each number, summed over all processes."""
        return list(numbers)

    def told(self, numbers: Sequence[float]) -> list[float]:
        """What the first process knows."""
        return list(numbers)

    def slots(self, number: float) -> list[float]:
        """A number at this process's place in a row of zeros: summed, they are what each of them said."""
        return [number if rank == self.rank else 0.0 for rank in range(self.world)]

    def words(self, text: str) -> str:
        """What the first process has to say that has anything to say. All of them must ask."""
        raw = text.encode()[:MOST_WORDS]
        row = [float(byte) for byte in raw.ljust(MOST_WORDS, b"\0")]
        rows = [row if rank == self.rank else [0.0] * MOST_WORDS for rank in range(self.world)]
        heard = self.sums([byte for each in rows for byte in each])
        said = [bytes(map(int, heard[i : i + MOST_WORDS])) for i in range(0, len(heard), MOST_WORDS)]
        return next((raw.rstrip(b"\0").decode(errors="replace") for raw in said if raw[0]), "")

    def leave(self) -> None:
        """Part as friends."""


class Team(Alone):
    """Processes started by torchrun or by --processes, speaking through gloo (CPU) or nccl (CUDA)."""

    def __init__(self, device: str = "cpu") -> None:
        backend = "nccl" if device.startswith("cuda") else "gloo"
        try:
            store, self.rank, self.world = next(dist.rendezvous("env://", timeout=MEETING))
            attempt = f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"  # torchrun keeps one store for all
            self.pulse = Pulse(dist.PrefixStore(attempt, store.clone()), self.rank, self.world)
            self.pulse.start(MEETING)
            shared = dist.PrefixStore(attempt, store)
            dist.init_process_group(backend, store=shared, rank=self.rank, world_size=self.world, timeout=PATIENCE)
        except (RuntimeError, ValueError) as error:
            place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            why = str(error).splitlines()[0][:100]
            raise Unavailable(f"the processes must meet at {place}, they can not ({why}); "
                              "is the port free, the name right, and did all of them start?") from None  # fmt: skip
        self.device = device

    def sums(self, numbers: Sequence[float]) -> list[float]:
        held = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(held)
        return [float(x) for x in held.tolist()]

    def told(self, numbers: Sequence[float]) -> list[float]:
        count = int(self.sums([len(numbers) if self.rank == 0 else 0])[0])
        return self.sums(numbers if self.rank == 0 else [0.0] * count)

    def mesh(self) -> Any:
        """All processes in one row."""
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(torch.device(self.device).type, (self.world,))

    def leave(self) -> None:
        dist.barrier()  # whoever is ready waits for the others, and says meanwhile that it lives
        self.pulse.stop()
        dist.barrier()  # the first holds the store: it may not go while another still listens for pulses
        dist.destroy_process_group()


def team(device: str = "cpu") -> Any:
    """The team this process was started in, or none."""
    return Team(device) if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ else Alone()
