"""The processes that train one model together: replicas, or the weights divided among them by FSDP2."""

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from landscape.products.vectors import joint_length


class Shards:
    """The weights of which this process holds all, or a part of each.

    With weights divided by `fully_shard` all processes measure together, each on a mini-batch of its own: the loss is
    the mean over these, squared norms are sums over the parts. A replica measures for itself.

    Raises:
        ValueError: the weights are not all divided along one mesh of one dimension.
    """

    def __init__(self, model: nn.Module) -> None:
        parameters = [p for p in model.parameters() if p.requires_grad]
        self._device = parameters[0].device
        self._parts = [m for m in model.modules() if "FSDPModule" in {kind.__name__ for kind in type(m).__mro__}]
        self.divided = bool(self._parts)
        replica = next((part for part in model.modules() if isinstance(part, DistributedDataParallel)), None)
        self._group = None if replica is None else replica.process_group
        if self.divided:
            meshes = {getattr(p, "device_mesh", None) for p in parameters}
            (mesh,) = meshes if len(meshes) == 1 else (None,)
            if mesh is None or mesh.ndim > 1:
                raise ValueError(
                    "the weights of the model are not all divided along one mesh of one dimension; call fully_shard on "
                    "the whole model with such a mesh, or leave out the monitor"
                )
            self._group = mesh.get_group()
        self.processes = 1 if self._group is None else self._group.size()

    def add_up(self, *values: float) -> list[float]:
        """The sums over all processes, of replicas too."""
        totals = torch.tensor(values, dtype=torch.float64, device=self._device)
        self.add_up_in_place(totals)
        found: list[float] = totals.tolist()
        return found

    def add_up_in_place(self, values: Tensor) -> None:
        """Sums over all processes, of replicas too."""
        if self._group is not None:
            dist.all_reduce(values, group=self._group)

    def total(self, value: float) -> float:
        """The sum over the parts of the weights."""
        return self.add_up(value)[0] if self.divided else value

    def norm(self, parts: Iterable[Tensor]) -> float:
        """The norm of tensors of which this process holds all, or a part of each."""
        return math.sqrt(self.total(joint_length(list(parts)) ** 2))

    def mean(self, value: float) -> float:
        """The mean over the mini-batches of the processes that measure together."""
        return self.total(value) / self.processes if self.divided else value

    @contextlib.contextmanager
    def gathered_anew(self) -> Iterator[None]:
        """Forward passes that gather the weights as they are then: the outermost module keeps them otherwise."""
        with contextlib.ExitStack() as hooks:
            for part in self._parts:
                hooks.enter_context(part.register_forward_hook(_freed))
            yield


def _freed(module: nn.Module, *_: object) -> None:
    module.reshard()  # type: ignore[operator]


def own_parts(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights that this process holds, without a graph, in the memory of the parameters."""
    return {name: getattr(p.detach(), "_local_tensor", p.detach()) for name, p in parameters.items()}
