"""The processes that `torchrun` started, on GPUs or CPU cores of one or several machines, or this process alone."""

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from landscape.options import OptionError, first_line
from landscape.subject.device import device as device_named

T = TypeVar("T")
HEADER = 3  # numbers behind the entries of a sum: processes that failed, and two powers of the fingerprint
FINGERPRINTS = 64  # so few that their squares add up exactly in single precision, for up to 4,000 processes
SHARDED = {"FullyShardedDataParallel", "FSDPModule"}  # classes of modules that FSDP distributes, both versions
LINGERING = 2.0  # seconds that a process with the store waits for the others
CLAIM = "landscape/error"  # key of the store at which the process that prints an error is the first


class Disconnected(RuntimeError):
    """Another process of the group has ended."""


@dataclass(frozen=True)
class ProcessGroup:
    """This process among those that share a piece of work; the main process, of rank 0, decides, writes and prints."""

    rank: int = 0  # 0 to size - 1
    size: int = 1  # number of processes

    def on_main_process(self, work: Callable[[], T]) -> T:
        """Run `work` in the main process and return its result in all; its errors are raised in all, so none hangs."""
        if self.size == 1:
            return work()
        outcome: list[object] = [None, None]
        if self.rank == 0:
            try:
                outcome[0] = work()
            except Exception as error:
                outcome[1] = error
        outcome = self.broadcast(outcome)
        if isinstance(outcome[1], Exception):
            raise outcome[1]
        return outcome[0]  # type: ignore[return-value]

    def broadcast(self, message: T) -> T:
        """What the main process calls this with, in all processes."""
        if self.size == 1:
            return message
        box = [message]
        with _connected():
            dist.broadcast_object_list(box, device=torch.device("cpu"))
        return box[0]

    def all_reduce(self, values: Tensor) -> Tensor:
        """Replace `values` by their sum over the processes, in all of them."""
        if self.size > 1:
            with _connected():
                dist.all_reduce(values)
        return values

    def in_all(self, work: Callable[[], T]) -> T:
        """Run `work` in every process and return its result; an error in one is raised in all."""
        if self.size == 1:
            return work()
        error: Exception | None = None
        try:
            result = work()
        except Exception as raised:
            error = raised
        self._raise_first(error)
        return result

    def require_equal(self, what: str, value: str) -> None:
        """Reject a text that differs between processes. Raises ValueError: in all of them."""
        others = self._gathered(value)
        if len(set(others)) > 1:
            listed = ", ".join(f"{other} in process {rank + 1}" for rank, other in enumerate(others))
            raise ValueError(
                f"{what} differ between the processes ({listed}); give all machines the same files, options and "
                "versions"
            )

    def summed(self, add: Callable[[Tensor], None], vector: Tensor) -> Tensor:
        """The sum over the processes of what each adds to zeros, by one all-reduce; see `products.operator`.

        `vector`, (n,), is what the sum depends on, and has its shape. It has to be the same in all processes to the
        last bit, which a fingerprint in the same message tells.

        Raises:
            Exception: what `add` raised in a process is raised in all.
            RuntimeError: the vectors differ.
        """
        sums, error = vector.new_zeros(vector.numel() + HEADER), None
        mark = _fingerprint(vector)
        sums[-HEADER + 1] = mark
        sums[-HEADER + 2] = mark**2
        try:
            add(sums[:-HEADER])
        except Exception as raised:
            error = raised
            sums[-HEADER] = 1.0
        failed, marks, squares = self.all_reduce(sums)[-HEADER:].tolist()
        if failed:
            self._raise_first(error)
        if self.size * squares != marks**2:
            raise RuntimeError(
                "the processes computed different vectors from the same numbers; give them equal hardware, equal "
                "numbers of threads (OMP_NUM_THREADS) and equal versions of PyTorch"
            )
        return sums[:-HEADER]

    def _gathered(self, value: Any) -> list[Any]:
        """What every process calls this with, by rank."""
        found: list[Any] = [value] * self.size
        if self.size > 1:
            with _connected():
                dist.all_gather_object(found, value)
        return found

    def _raise_first(self, error: Exception | None) -> None:
        """Raise the error of the first process that has one, in all."""
        errors = self._gathered(None if error is None else portable(error))
        rank = next((rank for rank, found in enumerate(errors) if found is not None), None)
        if rank is not None:
            raise error if rank == self.rank and error is not None else errors[rank]


SINGLE_PROCESS = ProcessGroup()


@contextmanager
def process_group() -> Iterator[ProcessGroup]:
    """The connected process group that `torchrun` started, or this process alone."""
    if not dist.is_available() or not dist.is_torchelastic_launched() or int(os.environ["WORLD_SIZE"]) == 1:
        yield SINGLE_PROCESS
        return
    # Only gradients and products go over NCCL; everything else goes over the CPU, also between GPUs. Where a process
    # has died, the others raise an error after the time-out of the group, instead of being aborted.
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield ProcessGroup(dist.get_rank(), dist.get_world_size())
        dist.barrier()  # leave together: closing a connection that another process still uses aborts that process
    finally:
        dist.destroy_process_group()


def portable(error: Exception) -> Exception:
    """An error with the same message, and the same meaning for the command line, that can be sent to a process."""
    text = str(error) or type(error).__name__
    return OptionError(text) if isinstance(error, OptionError) else RuntimeError(text)


def first_to_fail() -> bool:
    """Whether this process is the first of its group with an error, which it alone prints; also if none answers."""
    if not dist.is_initialized():
        return True
    with contextlib.suppress(Exception):  # whatever a store raises whose process is gone
        store = dist.distributed_c10d._get_default_store()
        first = bool(store.add(CLAIM, 1) == 1)
        # Without torchrun's agent the store ends with the main process, which the others still have to ask.
        hosted_here = dist.get_rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        end = time.monotonic() + (LINGERING if hosted_here else 0.0)
        while time.monotonic() < end and store.add(CLAIM, 0) < dist.get_world_size():
            time.sleep(0.05)
        return first
    return True


def device_of(name: str, processes: ProcessGroup) -> torch.device:
    """The device of this process; several processes on one machine get a GPU each.

    Raises:
        OptionError: the name is unknown, or means one GPU for all.
        ValueError: this machine does not have it.
    """
    device = device_named(name)
    if device.type != "cuda" or processes.size == 1:
        return device
    if ":" in name:
        raise OptionError(
            f"--device {name} is one GPU for {processes.size} processes; give cuda, with which each gets its own"
        )
    device = device_named(f"cuda:{os.environ['LOCAL_RANK']}")
    torch.cuda.set_device(device)
    return device


def refuse_sharded(module: nn.Module, refused: Collection[str] = SHARDED) -> None:
    """Reject modules whose weights FSDP has distributed: pieces cannot be measured, and have no second derivative."""
    kinds = {kind.__name__ for part in module.modules() for kind in type(part).__mro__}
    parts = any(type(p).__name__ == "DTensor" for p in module.parameters()) and not kinds & SHARDED - {*refused}
    if kinds & {*refused} or parts:
        raise ValueError(
            f"the module ({type(module).__name__}) is sharded by FSDP, which has no double backward: a layer's weights "
            "are freed after its first backward pass, and Hessian products need them in a second one; gather them into "
            "the plain module (torch.distributed.checkpoint.state_dict.get_model_state_dict with full_state_dict) and "
            "measure that: processes of torchrun hold all weights each and share the samples"
        )


@contextmanager
def _connected() -> Iterator[None]:
    """Turn the error of a connection that another process has closed into one line."""
    try:
        yield
    except RuntimeError as error:
        why = first_line(error)[:120]
        raise Disconnected(
            f"another process of the group has ended ({why}); everything finished is kept, run the same command to "
            "resume"
        ) from error


def _fingerprint(vector: Tensor) -> Tensor:
    """A small whole number that follows from the bits of a vector, on its device: to read it would wait."""
    bits = vector.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[vector.element_size()])
    return bits.sum(dtype=torch.int64) % FINGERPRINTS
