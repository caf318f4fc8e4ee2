"""Measure how convex the loss is over a plane, by the Hessian at every grid point (Li et al. 2018, section 6)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, get_args

import numpy as np

from landscape import options
from landscape.curvature.lanczos import Spectrum
from landscape.curvature.spectrum import Request, spectrum
from landscape.headline import Headline
from landscape.options import at_least, one_of, regular_expression, require
from landscape.probe import Plan, Probe, Quantity, Unit, Values, make_texts
from landscape.products.mini_batch_means import over_mini_batches
from landscape.products.operator import Curvature
from landscape.subject.subject import Subject
from landscape.subject.weights_cache import once_per_weights
from landscape.weight_space import directions, plane_evaluator, planes, weight_uses

UNITS = "loss per squared weight"
ENDS = ("smallest", "largest", "smallest_residual", "largest_residual", "converged", "matvecs")


@dataclass(frozen=True)
class Convexity(Probe):
    """|lambda_min| / |lambda_max| of the full Hessian at w0 + x d1 + y d2 over a grid.

    lambda_min is the algebraically smallest and lambda_max the largest eigenvalue of the Hessian of loss + weight decay
    with respect to ALL trainable parameters, not of the plane: near 0 the loss is almost convex there, at 1 negative
    curvature is as strong as positive. Lanczos from one random start, which all points share, follows both ends; an
    eigenvalue lies within its residual, which bounds the error of the ratio. The directions are those of `surface` with
    the same seed and normalisation. 10 to 25 Hessian products over all samples per grid point.
    """

    name: ClassVar[str] = "convexity"
    differentiates: ClassVar[bool] = True
    uses: ClassVar[tuple[str, ...]] = ("weight_decay",)
    split: ClassVar[str] = "train"
    smallest: ClassVar[Mapping[str, Any]] = {"resolution": "2", "max_products": 8}
    headlines: ClassVar[Sequence[Headline]] = (
        Headline("|min| / |max| at the centre", "ratio", {"x": 0.0, "y": 0.0}),
        Headline("median", "ratio", {"x y": "median"}),
        Headline("greatest", "ratio", {"x y": "largest"}),
    )

    resolution: Annotated[str, "grid points per axis: N or NX,NY; odd numbers include the centre"] = "11"
    range: Annotated[str, "R, LOW:HIGH or XLOW:XHIGH,YLOW:YHIGH"] = "1"
    normalize: Annotated[directions.Normalize, "normalisation of the random directions, as in surface"] = "filter"
    ignore: Annotated[str, directions.IGNORE_HELP] = directions.POSITIONS
    tol: Annotated[float, "largest estimated relative error of both eigenvalues"] = 0.01
    max_products: Annotated[int, "cap on Hessian products per grid point"] = 100
    seed: Annotated[int, "seed of the directions and of the start vector"] = 0

    def __post_init__(self) -> None:
        make_texts(self, "resolution", "range")
        for count in options.parse_resolution("resolution", self.resolution):
            at_least("resolution", count, 2)
        options.parse_ranges("range", self.range)
        one_of("normalize", self.normalize, get_args(directions.Normalize))
        regular_expression("ignore", self.ignore)
        require(0 < self.tol < 1, "tol", self.tol, "above 0 and below 1")
        at_least("max_products", self.max_products, 2)

    def identity(self, subject: Subject) -> dict[str, Any]:
        """The parameters in the run key: numbers instead of their spelling, and which weights move."""
        grid, spans = options.parse_resolution("resolution", self.resolution), options.parse_ranges("range", self.range)
        return {"resolution": grid, "range": spans, "plane": self._plane(subject).identity}

    def plan(self, subject: Subject) -> Plan:
        plane, (nx, ny) = self._plane(subject), options.parse_resolution("resolution", self.resolution)
        (x_low, x_high), (y_low, y_high) = options.parse_ranges("range", self.range)
        return Plan(
            over={"x": directions.ticks(x_low, x_high, nx), "y": directions.ticks(y_low, y_high, ny)},
            quantities={
                "loss": Quantity("loss", subject.meaning.units),
                "smallest": Quantity("smallest Hessian eigenvalue", UNITS),
                "largest": Quantity("largest Hessian eigenvalue", UNITS),
                "smallest_residual": Quantity("residual of the smallest one, which lies within it", UNITS),
                "largest_residual": Quantity("residual of the largest one, which lies within it", UNITS),
                "converged": Quantity(f"1 where both have an estimated relative error of at most {self.tol:g}"),
                "matvecs": Quantity("Hessian products spent"),
            },
            summaries={
                "ratio": Quantity("|smallest| / |largest| Hessian eigenvalue", dims=("x", "y")),
                "ratio_bound": Quantity("largest error of the ratio, by the residuals", dims=("x", "y")),
            },
            about={axis: Quantity(name, plane.units) for axis, name in zip("xy", plane.names, strict=True)},
            facts={"statistics": "frozen", "not_moved": weight_uses.not_moved(subject, plane.directions)},
        )

    def sweep(self, subject: Subject, units: Sequence[Unit]) -> Iterator[Values]:
        """Points that share the directions and the start vector; the weights are written in place."""
        weight = next(iter(subject.parameters.values()))
        request = Request(1, "both", self.tol, None, 1.0, self.max_products, vectors=False, verify=False)
        with plane_evaluator.PlaneEvaluator(subject, self._plane(subject)) as evaluator:
            for unit in units:
                loss = evaluator.at(float(unit.at["x"]), float(unit.at["y"]))["loss"]  # the weights stay there
                product = over_mini_batches(Curvature(subject, subject.parameters, "double-backward"))
                try:
                    yield {"loss": loss, **_ends(spectrum(product, request, subject.size, self.seed, weight))}
                except FloatingPointError:  # the curvature is not finite this far out
                    yield {"loss": loss, **dict.fromkeys(ENDS, np.nan)}

    def reduce(self, data: Mapping[str, np.ndarray]) -> Values:
        """The ratio at every finished point, and how far the residuals allow it to be off."""
        smallest, largest = (np.abs(data[name]) for name in ("smallest", "largest"))
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = smallest / largest
            bound = (data["smallest_residual"] + ratio * data["largest_residual"]) / largest
        return {"ratio": ratio, "ratio_bound": bound}

    def _plane(self, subject: Subject) -> Any:
        return _plane(subject, "random", normalize=self.normalize, ignore=self.ignore, seed=self.seed)


_plane = once_per_weights(planes.plane_of)


def _ends(found: Spectrum) -> dict[str, float]:
    """Both ends of a spectrum with their residuals, in the order of `which` both: the largest first."""
    (largest, smallest), (above, below) = found.values.tolist(), found.residuals.tolist()
    return {
        "smallest": smallest, "largest": largest, "smallest_residual": below, "largest_residual": above,
        "converged": float(found.converged.all()), "matvecs": float(found.products),
    }  # fmt: skip
