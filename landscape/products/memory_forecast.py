"""How much memory the products and stored vectors of a search need, said before the start and kept within a limit."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from landscape.data import memory, structure
from landscape.data.memory import binary_bytes
from landscape.products.chunked_cross_entropy import LOGITS, chunked_head, losses_of
from landscape.products.hessian_product import differentiable_attention
from landscape.subject.restoration import evaluation_mode
from landscape.subject.subject import Subject
from landscape.subject.weights_cache import once_per_weights

GRAPH = 6  # memory of the products of a graph in that of the tensors that a forward pass saves for its gradient
VECTORS = 10  # of the length of the parameters beside the stored ones: gradients with graphs, sums, temporary ones
CHUNKS = 5  # tensors of the logits that are held at once
SAID = 2**30  # bytes from which the forecast is said where nobody gave a limit
SHORT = 0.5  # of the free memory, from which freed memory is returned at once, for up to half as much time again
SHARE = 0.9  # of the free memory that mini-batches are planned for
KEPT = 0.25  # of the free memory that graphs of further mini-batches may take

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MemoryForecast:
    """Bytes of graphs and vectors that a measurement holds: not the peak of the process, which is higher."""

    vectors: int  # temporary ones of the length of the parameters
    stored: int  # vectors of the search
    graph: int  # of the products of a whole mini-batch
    samples: int  # of a mini-batch, or 1 where it cannot be split
    chunk: int = 0  # logits of a language model that are held at once

    @property
    def fixed(self) -> int:
        """What no smaller mini-batch saves."""
        return self.vectors + self.stored + self.chunk

    def micro_batches(self, most: float) -> int:
        """Into how many parts a mini-batch is divided, so that everything takes at most so many bytes.

        One sample at a time is the least; 1 where the memory of a graph is not known.
        """
        fitting = math.floor((most - self.fixed) * self.samples / self.graph) if self.graph else self.samples
        return math.ceil(self.samples / max(1, fitting))

    def total(self, micro_batches: int) -> int:
        """With mini-batches divided into so many parts."""
        return self.fixed + math.ceil(self.graph * math.ceil(self.samples / micro_batches) / self.samples)


def planned_micro_batches(subject: Subject, parameters: Mapping[str, Tensor], stored: int) -> int:
    """Into how many parts mini-batches are divided from the start; logs the forecast, `stored` bytes of it vectors.

    A GPU raises an error where its memory is exhausted, and mini-batches are divided then: without a limit that was
    given, the forecast, which is an upper estimate, divides none there.

    Raises:
        ValueError: not even single samples keep within the limit that was given.
    """
    found, limit = forecast(subject, parameters, stored), memory.limit()
    on_cpu = subject.device.type == "cpu"
    free = memory.available() if on_cpu else memory.available_on(subject.device)
    parts = found.micro_batches(SHARE * free if limit is None else min(limit, free)) if on_cpu or limit else 1
    needed = found.total(parts)
    if limit is not None and needed > limit:
        raise ValueError(
            f"--memory {binary_bytes(limit)} is less than one sample at a time needs, {_in_words(found, parts)}; "
            f"give --memory {math.ceil(needed / 2**30)}GiB, or fewer parameters (--params)"
        )
    said = _said(subject)
    if (limit is not None or needed >= SAID or parts > 1) and not said:
        log.debug("planned for: about %s; the peak of the process is higher", _in_words(found, parts))
        said.append(needed)
        if limit is not None or needed > SHORT * free:
            memory.return_freed_memory()
    return parts


def room_for_graphs(device: torch.device) -> float:
    """Bytes that graphs of further mini-batches may take, which are rebuilt otherwise.

    None within a limit that was given, and on a GPU, whose recordings hold one mini-batch.
    """
    return 0.0 if device.type != "cpu" or memory.limit() is not None else KEPT * memory.available()


@once_per_weights
def _said(subject: Subject) -> list[int]:
    """Empty before the forecast is said: every layer has its own curvature."""
    return []


def _in_words(found: MemoryForecast, parts: int) -> str:
    whole = f"a mini-batch in {parts} parts" if parts > 1 else "a mini-batch"
    graph = binary_bytes(found.total(parts) - found.fixed)
    return (
        f"{binary_bytes(found.total(parts))} ({binary_bytes(found.stored)} stored vectors, "
        f"{binary_bytes(found.vectors + found.chunk)} temporary ones, {graph} graphs of {whole})"
    )


def forecast(subject: Subject, parameters: Mapping[str, Tensor], stored: int) -> MemoryForecast:
    """What the products of a mini-batch need, with `stored` bytes of vectors: an upper estimate."""
    size = sum(p.numel() * p.element_size() for p in parameters.values())
    samples = subject.samples(0) if subject.divisible else 1
    logits = CHUNKS * LOGITS * subject.dtype.itemsize if chunked_head(subject, subject.batch(0)[1]) else 0
    return MemoryForecast(VECTORS * size, stored, GRAPH * samples * _saved_by_one(subject), samples, logits)


@once_per_weights
def _saved_by_one(subject: Subject) -> int:
    """Bytes that a pass of one sample, or of a mini-batch that cannot be split, saves for its gradient; 0 if it fails.

    The weights do not count.
    """
    known = {p.untyped_storage().data_ptr() for p in subject.model.parameters()}
    sizes: dict[int, int] = {}
    kept: list[Tensor] = []  # so that no storage is freed and its address taken again

    def save(tensor: Tensor) -> Tensor:
        tensor, storage = tensor.detach(), tensor.untyped_storage()  # an operation that holds its output is never freed
        if storage.data_ptr() not in known:
            sizes[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    inputs, targets = subject.batch(0)
    head = chunked_head(subject, targets)
    try:
        if subject.divisible:
            first = torch.zeros(1, dtype=torch.long)  # copies: a slice would hold the storage of all
            inputs, targets = structure.rows_of(inputs, first), structure.rows_of(targets, first)
        with differentiable_attention(), torch.enable_grad(), evaluation_mode(subject.model):
            with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
                loss = losses_of(subject, head, lambda: subject.outputs(inputs), targets)
            del loss
    except Exception:  # whatever a model's own code raises; its measurement raises it again
        return 0
    return sum(sizes.values())
