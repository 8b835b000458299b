"""Distributed training: process groups and collectives, DDP with summed gradients, FSDP2."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import GradBucket, all_reduce
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from headwater.core.init import init_buffers
from headwater.core.model import Model, Transformer
from headwater.data.collate import IGNORE_INDEX, TARGET_FIELDS
from headwater.errors import Unavailable
from headwater.i18n import _
from headwater.tasks.batch import LossFn, TensorBatch
from headwater.training.launch import die_with_launcher
from headwater.tuning import copy_adapter, tuning_of
from headwater.tuning.base import trained_parameters
from headwater.weights.native import copy_into

# --------------------------------------------------------------------------------------------------
# Process groups: rank, world size, all-reduce, all-gather, broadcast, for one process or several (torch.distributed).
#
# Ranks decide alike because they decide by numbers that all of them have. Who starts the processes: launch.py.


T = TypeVar("T")

RENDEZVOUS_TIMEOUT = timedelta(seconds=45)  # all ranks must have connected
COLLECTIVE_TIMEOUT = timedelta(seconds=120)  # ranks work alike: none is so long behind the others, unless it hangs
ROLL_CALL_TIMEOUT = timedelta(seconds=5)  # after a failed collective, for every rank that lives to answer


class SingleProcess:
    """A process group of one: every collective is the identity."""

    rank = 0
    world_size = 1
    device = "cpu"

    def all_reduce_sum(self, values: Sequence[float]) -> list[float]:
        """All-reduce: each number summed over all ranks."""
        return list(values)

    def all_gather(self, values: Sequence[float]) -> list[list[float]]:
        """All-gather: the numbers of every rank, equally many on each."""
        return [list(values)]

    def all_gather_object(self, value: T) -> list[T]:
        """The object of every rank."""
        return [value]

    def broadcast(self, value: T) -> T:
        """The object of rank 0, on every rank."""
        return value

    def broadcast_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Write the values of rank 0 into the tensors of every rank."""

    def device_mesh(self) -> Any:
        """All processes as a mesh of one dimension; a single process has none."""
        raise NotImplementedError

    def missing_ranks(self) -> list[int]:
        """After a failed collective: the ranks that do not answer."""
        return []

    def shutdown(self) -> None:
        """Leave the process group, after the last collective."""


class ProcessGroup(SingleProcess):
    """The process group of torchrun or --nproc, over gloo (CPU) or nccl (CUDA)."""

    def __init__(self, device: str = "cpu") -> None:
        backend = "nccl" if device.startswith("cuda") else "gloo"
        try:
            store, self.rank, self.world_size = next(dist.rendezvous("env://", timeout=RENDEZVOUS_TIMEOUT))
            attempt = f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"  # torchrun keeps one store for all
            self.store = dist.PrefixStore(attempt, store)
            dist.init_process_group(
                backend, store=self.store, rank=self.rank, world_size=self.world_size, timeout=COLLECTIVE_TIMEOUT
            )
        except (RuntimeError, ValueError) as error:
            place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            why = str(error).splitlines()[0][:100]
            raise Unavailable(
                _(
                    "the processes must connect at {place}, they cannot ({why}); check that the port is free, the "
                    "address is right and all of them were started",
                    place=place,
                    why=why,
                )
            ) from None
        self.device = device

    def all_reduce_sum(self, values: Sequence[float]) -> list[float]:
        sums = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(sums)
        return [float(x) for x in sums.tolist()]

    def all_gather(self, values: Sequence[float]) -> list[list[float]]:
        row = torch.tensor(values, dtype=torch.float64, device=self.device)  # [N]
        rows = row.new_empty(self.world_size * len(row))
        dist.all_gather_single(rows, row)
        gathered: list[list[float]] = rows.view(self.world_size, -1).tolist()
        return gathered

    def all_gather_object(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: T) -> T:
        values = [value]
        dist.broadcast_object_list(values, src=0, device=torch.device(self.device))
        return values[0]

    def broadcast_tensors(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            dist.broadcast(tensor, src=0)

    def device_mesh(self) -> Any:
        """All ranks as a mesh of one dimension."""
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(torch.device(self.device).type, (self.world_size,))

    def missing_ranks(self) -> list[int]:
        """After a failed collective: every rank that lives signs in at the store; those that do not are missing.

        In a thread, because a store behind a broken network may never answer. It is the first process's, or its
        launcher's: without it, rank 0 is missing.
        """
        missing = [0]

        def call_roll() -> None:
            with suppress(RuntimeError):  # the store does not answer
                missing[:] = self._roll_call()

        roll_call = threading.Thread(target=call_roll, daemon=True)
        roll_call.start()
        roll_call.join(2 * ROLL_CALL_TIMEOUT.total_seconds())
        return missing

    def _roll_call(self) -> list[int]:
        keys = [f"alive/{rank}" for rank in range(self.world_size)]
        self.store.set(keys[self.rank], "")
        with suppress(RuntimeError):  # not all within the timeout
            self.store.wait(keys, ROLL_CALL_TIMEOUT)
        return [rank for rank, key in enumerate(keys) if not self.store.check([key])]

    def shutdown(self) -> None:
        # A gloo thread releases the tensors of the last collective after it has returned, and needs the interpreter for
        # that: a process that ends meanwhile would be aborted. The barrier waits without holding the interpreter.
        with suppress(RuntimeError):  # another rank may have ended
            dist.barrier()
        dist.destroy_process_group()


def init_distributed(device: str = "cpu") -> SingleProcess:
    """The process group this process was started in (WORLD_SIZE, RANK), or a single process."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ:
        die_with_launcher()
        return ProcessGroup(device)
    return SingleProcess()


# --------------------------------------------------------------------------------------------------
# Model parallelism: a single device, data parallel (DDP), or fully sharded (FSDP2), with the same loss curve.
#
# Gradients are summed over ranks, and the loss of a step is Σ losses / Σ targets over all of them.


def to_local(tensor: Tensor) -> Tensor:
    """The local shard of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """A full copy of a tensor. Where it is sharded, every rank must call this."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach().clone()


def distribute_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Shard a full tensor, of which every rank has a copy, like another one."""
    if not isinstance(like, DTensor) or tensor.shape != like.shape:
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


class LossModule(nn.Module):
    """The summed loss as one forward pass: the module that DDP and FSDP2 wrap."""

    def __init__(self, model: Transformer, loss_fn: LossFn) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(self, micro_batch: TensorBatch, label_smoothing: float) -> Tensor:
        return self.loss_fn(self.model, micro_batch, label_smoothing)


class SingleDevice:
    """One process, one copy of the model."""

    sharded = False

    def __init__(self, model: Transformer, loss_fn: LossFn, dist: SingleProcess) -> None:
        self.model = model
        self.dist = dist
        self.module: Any = self.wrap(LossModule(model, loss_fn))

    def wrap(self, module: LossModule) -> nn.Module:
        """Distribute the module over the ranks."""
        return module

    def loss(self, micro_batch: TensorBatch, label_smoothing: float) -> Tensor:
        loss: Tensor = self.module(micro_batch, label_smoothing)
        return loss

    def set_sync(self, last: bool) -> None:
        """Before each forward pass of a step; last: its backward pass sums the gradients over all ranks."""

    def grads_ready_time(self) -> float:
        """time.perf_counter() when this rank had computed its gradients and began to wait for the others."""
        return time.perf_counter()

    def sum_over_shards(self, squared_norms: Sequence[float]) -> list[float]:
        """Squared gradient norms, summed over the ranks that hold shards."""
        return list(squared_norms)

    @contextmanager
    def full_model(self) -> Iterator[Transformer]:
        """The unsharded model, for evaluation and saving."""
        yield self.model


class DataParallel(SingleDevice):
    """Data parallel (DDP): a copy per rank; gradients are all-reduced in buckets during the backward pass."""

    def wrap(self, module: LossModule) -> nn.Module:
        # find_unused_parameters: an objective may leave a head out, a batch an embedding
        wrapped = DistributedDataParallel(
            module, forward_sync_buffers=False, find_unused_parameters=True, gradient_as_bucket_view=True
        )
        wrapped.register_comm_hook(None, lambda state, bucket: self._all_reduce(bucket))
        return wrapped

    def _all_reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Communication hook: a sum over ranks in place of DDP's mean."""
        self.last_bucket_time = time.perf_counter()
        work = all_reduce(bucket.buffer(), async_op=True)
        summed: Future[Tensor] = work.get_future().then(lambda future: future.value()[0])
        return summed

    def set_sync(self, last: bool) -> None:
        self.module.require_backward_grad_sync = last

    def grads_ready_time(self) -> float:
        return self.last_bucket_time


class FullySharded(SingleDevice):
    """Fully sharded (FSDP2): weights, gradients and moments take 1 / world_size of the memory on each rank.

    A layer's weights are all-gathered just before it is used.
    """

    sharded = True

    def wrap(self, module: LossModule) -> nn.Module:
        for part in (*_unique_layers(self.model), module):
            _fully_shard(part, self.dist)
        return module

    def set_sync(self, last: bool) -> None:
        self.module.set_requires_gradient_sync(last)

    def sum_over_shards(self, squared_norms: Sequence[float]) -> list[float]:
        return self.dist.all_reduce_sum(squared_norms)

    @contextmanager
    def full_model(self) -> Iterator[Transformer]:
        gathered = {path: full_tensor(p) for path, p in self.model.named_parameters()}
        full = _empty_model(self.model.spec, self.dist.device)
        copy_into(full, gathered, _("the gathered weights"))
        yield full


def broadcast_model(model: Transformer | None, like: Transformer, dist: SingleProcess) -> Transformer | None:
    """The model of rank 0 on every rank, which may not see its files; None where rank 0 has none.

    like: the model that learns, on every rank. Of a tuned one the adapter alone is broadcast: the base is there.
    """
    if not dist.broadcast(model is not None):
        return None
    if model is None:
        model = _empty_model(like.spec, dist.device) if tuning_of(like) is None else copy_adapter(like).eval()
    dist.broadcast_tensors(parameter.detach() for parameter in trained_parameters(model).values())
    return model


def _empty_model(spec: Model, device: str) -> Transformer:
    """A model in eval mode whose weights are to be written."""
    model = spec.on_meta()
    model.to_empty(device=device)
    init_buffers(model)
    return model.eval()


def pad_micro_batches(
    micro_batches: list[dict[str, Tensor]], num_micro_batches: int, make_filler: Callable[[], dict[str, Tensor]]
) -> list[dict[str, Tensor]]:
    """As many micro-batches as the rank with the most of them: every rank takes part in every collective.

    make_filler: some batch; its targets are ignored
    """
    missing = num_micro_batches - len(micro_batches)
    return micro_batches + [without_targets(make_filler())] * missing if missing else micro_batches


def without_targets(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """A filler micro-batch: the same inputs, every target ignored."""
    return batch | {name: torch.full_like(batch[name], IGNORE_INDEX) for name in TARGET_FIELDS if name in batch}


def has_targets(batch: TensorBatch) -> bool:
    """Whether a micro-batch is no filler. The loss of a filler counts zero times: that of a codec reads no targets."""
    return any(bool((batch[name] != IGNORE_INDEX).any()) for name in TARGET_FIELDS if name in batch)


def _unique_layers(model: Transformer) -> list[nn.Module]:
    """Every layer once, though a stack may share layers."""
    stacks = [stack for stack in (model.encoder, model.decoder) if stack is not None]
    return list({id(layer): layer for stack in stacks for layer in stack.layers}.values())


def _fully_shard(module: Any, dist: SingleProcess) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(module, mesh=dist.device_mesh())
    module.set_gradient_divide_factor(1.0)  # a sum, not a mean
    module.set_force_sum_reduction_for_comms(True)  # gloo has no average


def parallelize(model: Transformer, loss_fn: LossFn, dist: SingleProcess, fsdp: bool) -> SingleDevice:
    """Distribute a model over the ranks: data parallel, or fully sharded."""
    if dist.world_size == 1:
        return SingleDevice(model, loss_fn, dist)
    return (FullySharded if fsdp else DataParallel)(model, loss_fn, dist)
