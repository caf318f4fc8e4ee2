"""What made-up networks are called and made of, and the quantities that several probes share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from landscape.probe import Quantity, Unit, Values

Measure = Callable[[Unit], Values]
PARAMETERS: Mapping[str, Mapping[str, Any]] = {
    "surface": {"seed": 0},
    "hessian": {"seed": 0},
    "noise": {"eps": "0.7"},
    "ensemble": {"draws": 20, "orders": 2},
}


@dataclass(frozen=True)
class Network:
    """What a made-up network is called and made of: kind and stage of every layer."""

    label: str
    model: str
    kinds: tuple[str, ...]
    stages: tuple[int, ...]
    width: float = 1.0  # of its valley

    @property
    def names(self) -> list[str]:
        return [f"stages.{s}.{i}.{kind}" for i, (s, kind) in enumerate(zip(self.stages, self.kinds, strict=True))]


def transformer(label: str, model: str = "vit_ti", depth: int = 12) -> Network:
    return Network(label, model, ("stem", *(("msa", "mlp") * depth)), (0,) * (2 * depth + 1), 0.7)


def convolutional(label: str, model: str = "resnet50", blocks: Sequence[int] = (3, 4, 6, 3)) -> Network:
    stages = [stage for stage, count in enumerate(blocks, start=1) for _ in range(count)]
    return Network(label, model, ("stem", *(("conv",) * len(stages))), (0, *stages), 1.5)


def hybrid(label: str, model: str = "alternet50") -> Network:
    kinds = ("conv",) * 3 + ("conv",) * 3 + ("msa",) + ("conv",) * 5 + ("msa",) + ("conv", "msa") * 2
    return Network(label, model, ("stem", *kinds), (0, *(1,) * 3, *(2,) * 4, *(3,) * 6, *(4,) * 4), 1.0)


def labels(network: Network, axis: str) -> dict[str, tuple[Quantity, np.ndarray]]:
    n = len(network.kinds)
    reduces = np.r_[0, np.diff(network.stages) > 0] * (np.array(network.kinds) != "stem")
    reduces[1] = 0  # the first stage keeps the stem's map
    values = {"name": network.names, "kind": network.kinds, "stage": network.stages, "depth": np.arange(n) / (n - 1)}
    return {key: (Quantity(key, dims=(axis,)), np.array(value)) for key, value in values.items()} | {
        "reduces": (Quantity("1 where the map gets smaller", dims=(axis,)), reduces.astype(int))
    }


def quantities(dims: tuple[str, ...], *names: str) -> dict[str, Quantity]:
    def bounds(name: str) -> str:
        return "share" if name in ("nep", "accuracy") else "positive" if name in ("ape", "loss", "variance") else ""

    return {
        name: Quantity(name.replace("_", " "), dims=dims, over="samples" if name.endswith("_se") else "",
                       bounds=bounds(name))
        for name in names
    }  # fmt: skip
