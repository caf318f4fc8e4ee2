"""Measure the norm of the gradient of every weight tensor."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch

from landscape import Headline, Plan, Probe, Quantity, Unit


@dataclass(frozen=True)
class GradientNorm(Probe):
    """Norm of the gradient of the mean loss of a mini-batch, per weight tensor, with its mean over mini-batches."""

    name: ClassVar[str] = "gradient-norm"
    api: ClassVar[int] = 1
    errors_over: ClassVar[str] = "mini-batches"  # in words; without it, samples
    headlines: ClassVar[tuple[Headline, ...]] = (
        Headline("largest norm", "norm", at={"tensor": "largest"}),  # with its interval, in `show`, `report`, `compare`
    )

    order: Annotated[float, "2 for the Euclidean norm, inf for the largest entry"] = 2.0

    def plan(self, subject):
        """A mini-batch is a unit: what is stored at once, and measured again if the run is stopped within it."""
        names = np.array(list(subject.parameters))
        return Plan(
            over={"batch": np.arange(len(subject.batches))},
            axes={"tensor": np.arange(len(names))},
            labels={"name": (Quantity("weight tensor", dims=("tensor",)), names)},
            quantities={"batch_norm": Quantity("norm of the gradient of a mini-batch", "loss / weight", ("tensor",))},
            summaries={
                "norm": Quantity(
                    "norm of the gradient", "loss / weight", ("tensor",), bounds="positive", error="mini-batches"
                ),  # with `norm_se`, its standard error
            },
            about={"batch": Quantity("mini-batch"), "tensor": Quantity("weight tensor")},
        )

    def measure(self, subject, unit: Unit):
        """The numbers of one unit."""
        with torch.enable_grad():
            gradients = torch.autograd.grad(subject.loss(unit.index[0]), list(subject.parameters.values()))
        return {"batch_norm": np.array([torch.linalg.vector_norm(g, self.order).item() for g in gradients])}

    def reduce(self, data):
        """The summaries, from all finished units."""
        norms = data["batch_norm"][data["done"] == 1]
        error = norms.std(axis=0, ddof=1) / np.sqrt(len(norms)) if len(norms) > 1 else np.full(norms.shape[1], np.nan)
        mean = norms.mean(axis=0) if len(norms) else error
        return {"norm": mean, "norm_se": error}
