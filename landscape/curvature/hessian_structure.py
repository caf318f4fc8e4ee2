"""How the Hessian of a mini-batch is made: its diagonal, its Gauss-Newton part, and what lies between its blocks.

All of it comes from products with Rademacher vectors v. With G the Gauss-Newton matrix (Schraudolph 2002), N = H - G,
and H_bd the Hessian without what lies between the blocks:

    off_block           |(H - H_bd) v| / |H v|, the relative error of the block-diagonal approximation
    block_cosine        cosine of the angle between H v and H_bd v
    non_gauss_newton    |N v| / |H v|: what the Gauss-Newton approximation leaves out

each a mean over v. Granziol & Juarev (arXiv 2602.00816, abstract) judge block-diagonal approximations of large language
models by their relative error and the alignment of directions. The ratios of the rows of one block compare the block's
entries of the same vectors. The diagonal is the mean of v * H v (Bekas, Kokiopoulou & Saad 2007).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from landscape.curvature import block_diagonal, stored_spectrum
from landscape.probe import Quantity, derived_seed
from landscape.products.mini_batch_means import over_mini_batches
from landscape.products.operator import Curvature
from landscape.random_vectors import signs

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
LINEAR = ("diagonal", "diagonal_mean")  # means over samples of those of mini-batches: their errors add in squares
PREFIX = "batch_"


def over_batches(data: Mapping[str, np.ndarray], names: Mapping[str, object]) -> dict[str, np.ndarray]:
    """Means over finished mini-batches weighted by their samples, by name, and their standard errors.

    The diagonal is that over all samples, with the error over random vectors. Everything else is a mean over
    mini-batches of what differs between them: its error is that of their spread, which contains that of the random
    vectors; with one mini-batch the latter alone.
    """
    found: dict[str, np.ndarray] = {}
    for name in names:
        if name.endswith("_se"):
            continue
        values, errors = data[PREFIX + name], data.get(f"{PREFIX}{name}_se")
        rows = values.reshape(len(values), -1).astype(float)
        known = (data["done"] == 1) & np.isfinite(rows).any(axis=1)
        if not known.any():
            return {}
        share = data["samples"][known] / data["samples"][known].sum()
        mean = np.tensordot(share, values[known].astype(float), axes=1)
        found[name] = mean
        if errors is None:
            continue
        squares = np.tensordot(share**2, errors[known].astype(float) ** 2, axes=1)
        count = len(share)
        if name not in LINEAR and count > 1:
            squares = np.tensordot(share**2, (values[known] - mean) ** 2, axes=1) * count / (count - 1)
        found[f"{name}_se"] = np.sqrt(squares)
    return found


Diagonal = Literal["none", "summary", "full"]
RATIOS = {
    "off_block": "|(H - H_bd) v| / |H v|, H_bd the block diagonal, mean over random vectors",
    "block_cosine": "cosine of the angle between H v and H_bd v, mean over random vectors",
    "non_gauss_newton": "|N v| / |H v|, N the Hessian without its Gauss-Newton part, mean over random vectors",
}
ABOUT = {"tensor": Quantity("parameter tensor"), "quantile": Quantity("share of entries below")}
OF_ROWS = ("off_block", "non_gauss_newton")
CURVATURE = "loss per squared weight"
SE = "its standard error over random vectors"


@dataclass(frozen=True)
class Structure:
    """What to measure beside the trace, and what of it is stored."""

    blocks: block_diagonal.BlockKind = "none"
    diagonal: Diagonal = "none"
    vectors: int = 32  # of the diagonal; the ratios take a quarter of them

    @property
    def ratio_vectors(self) -> int:
        return max(2, self.vectors // 4) if self.blocks != "none" else 0

    @property
    def products(self) -> int:
        """Products with the mini-batch, those with the block diagonal and with Gauss-Newton included."""
        whole = self.vectors if self.diagonal != "none" else self.ratio_vectors
        return whole + 2 * self.ratio_vectors

    def axes(self, parameters: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
        found: dict[str, np.ndarray] = {}
        if self.blocks != "none":
            found["block"] = np.arange(len(block_diagonal.Partition.of(parameters, self.blocks).names))
        if self.diagonal != "none":
            found |= {"tensor": np.arange(len(parameters)), "quantile": np.array(QUANTILES)}
        if self.diagonal == "full":
            found["parameter"] = np.arange(sum(p.numel() for p in parameters.values()))
        return found

    def labels(self, parameters: Mapping[str, Tensor]) -> dict[str, tuple[Quantity, np.ndarray]]:
        found = {}
        if self.blocks != "none":
            partition = block_diagonal.Partition.of(parameters, self.blocks)
            found["name"] = Quantity("block", dims=("block",)), np.array(partition.names)
            found["size"] = Quantity("parameters of the block", dims=("block",)), np.array(partition.sizes)
        if self.diagonal != "none":
            sizes = np.array([p.numel() for p in parameters.values()])
            found["tensor_name"] = Quantity("parameter tensor", dims=("tensor",)), np.array(list(parameters))
            found["tensor_size"] = Quantity("parameters of the tensor", dims=("tensor",)), sizes
        return found

    def quantities(self) -> dict[str, Quantity]:
        """Of a mini-batch."""
        return {f"batch_{name}": quantity for name, quantity in self._stored("").items()}

    def summaries(self) -> dict[str, Quantity]:
        """Over mini-batches."""
        return self._stored("; mean over mini-batches")

    def require_storable(self, parameters: Mapping[str, Tensor], batches: int) -> None:
        """Check that the full diagonal fits a results file. Raises ValueError: it does not."""
        size, most = 8 * (batches + 2) * sum(p.numel() for p in parameters.values()), stored_spectrum.LARGEST_RESULT
        if self.diagonal == "full" and size > most:
            raise ValueError(
                f"--diagonal full would store {size / 2**30:.1f} GiB, more than {most / 2**30:.0f} GiB; use summary, "
                "fewer --params, or a larger --batch-size"
            )

    def _stored(self, over: str) -> dict[str, Quantity]:
        found: dict[str, Quantity] = {}

        def add(name: str, text: str, units: str = "1", dims: tuple[str, ...] = (), dtype: str = "float64") -> None:
            found[name] = Quantity(f"{text}{over}", units, dims, dtype)
            found[f"{name}_se"] = Quantity(
                "its standard error" if over else SE, units, dims, dtype, over="random vectors"
            )

        if self.blocks != "none":
            for name, text in RATIOS.items():
                add(name, text)
            for name in OF_ROWS:
                add(f"rows_{name}", f"in the rows of the block, {RATIOS[name]}", dims=("block",))
        if self.diagonal != "none":
            dims = ("tensor",)
            add("diagonal_mean", "mean of the tensor's entries of the diagonal", CURVATURE, dims)
            add("diagonal_square", "sum of squares of these entries, without bias", f"({CURVATURE})^2", dims)
            found["diagonal_sd"] = Quantity(
                f"standard deviation of these entries, without the noise of the estimates{over}", CURVATURE, dims
            )
            found["diagonal_quantile"] = Quantity(
                f"quantile of the estimates of these entries, which noise widens{over}", CURVATURE, (*dims, "quantile")
            )
        if self.diagonal == "full":
            add("diagonal", "diagonal of the Hessian", CURVATURE, ("parameter",), "float32")
        return found

    def measure(self, curved: Curvature, product: Callable[[Tensor], Tensor], i: int, seed: int) -> dict[str, Any]:
        """All of it for mini-batch i, whose products v -> H v are given."""
        parts = block_diagonal.Partition.of(curved.parameters, self.blocks) if self.blocks != "none" else None
        others: list[Callable[[Tensor], Tensor]] = []
        if parts is not None:
            alike = (curved.of(blocks=parts.members), curved.of(operator="ggn"))
            others = [over_mini_batches(one, [i]) for one in alike]
        like = next(iter(curved.parameters.values()))
        ratios: list[Tensor] = []
        samples: list[Tensor] = []
        for at in range(self.vectors if self.diagonal != "none" else self.ratio_vectors):
            drawn = derived_seed(seed, i, "structure", at)
            v = signs(curved.size, drawn, device=like.device, dtype=like.dtype)
            image = product(v)
            if parts is not None and at < self.ratio_vectors:
                ratios.append(_ratios(parts, image, *[other(v) for other in others]))
            if self.diagonal != "none":
                samples.append(v * image)
        values = _summary_of_ratios(torch.stack(ratios).cpu().numpy()) if ratios else {}
        if samples:
            sizes = [p.numel() for p in curved.parameters.values()]
            values |= _summary_of_diagonal(torch.stack(samples).cpu(), sizes, full=self.diagonal == "full")
        return values

    def reduce(self, data: Mapping[str, np.ndarray]) -> dict[str, Any]:
        found: dict[str, Any] = dict(over_batches(data, self.summaries()))
        return found | self._counts(data) if found else {}

    def _counts(self, data: Mapping[str, np.ndarray]) -> dict[str, float]:
        """How many values the errors are of: random vectors, or mini-batches where these differ in what is measured."""
        batches, found = int((data["done"] == 1).sum()), dict[str, float]()
        for name in (name for name in self.summaries() if name.endswith("_se")):
            vectors = self.vectors if name.startswith("diagonal") else self.ratio_vectors
            alike = name.removesuffix("_se") in LINEAR or batches == 1
            found |= {f"batch_{name}.n": vectors, f"{name}.n": vectors * batches if alike else batches}
        return found


def _ratios(parts: block_diagonal.Partition, image: Tensor, block_image: Tensor, gauss_newton: Tensor) -> Tensor:
    """|H v|^2, |(H - H_bd) v|^2, |N v|^2, <H v, H_bd v> and |H_bd v|^2, of all rows and each block, (5, 1 + block)."""
    off, rest = image - block_image, image - gauss_newton
    pairs = ((image, image), (off, off), (rest, rest), (image, block_image), (block_image, block_image))
    table = []
    for left, right in pairs:
        product = left.double() * right.double()
        table.append(torch.stack([product.sum(), *(parts.part(product, i).sum() for i in range(len(parts.names)))]))
    return torch.stack(table)


def _summary_of_ratios(table: np.ndarray) -> dict[str, Any]:
    """Mean and standard error over vectors, from (vector, 5, 1 + block)."""
    whole, off, rest, inner, block = table.transpose(1, 0, 2)
    with np.errstate(all="ignore"):
        off_block, non_gauss_newton = np.sqrt(off / whole), np.sqrt(rest / whole)
        cosine = inner[:, 0] / np.sqrt(whole[:, 0] * block[:, 0])
    ratios = {"off_block": off_block[:, 0], "non_gauss_newton": non_gauss_newton[:, 0], "block_cosine": cosine}
    ratios |= {"rows_off_block": off_block[:, 1:], "rows_non_gauss_newton": non_gauss_newton[:, 1:]}
    errors = {f"batch_{name}_se": part.std(axis=0, ddof=1) / np.sqrt(len(part)) for name, part in ratios.items()}
    return errors | {f"batch_{name}": part.mean(axis=0) for name, part in ratios.items()}


def _summary_of_diagonal(samples: Tensor, sizes: Sequence[int], *, full: bool) -> dict[str, Any]:
    """From v * H v of every random vector, (vector, n): mean, spread and quantiles of the entries of every tensor.

    The square of an estimate is too large by its variance: the sum of squares is that over pairs of different vectors.
    """
    count = len(samples)
    mean, error = samples.mean(dim=0), samples.std(dim=0) / np.sqrt(count)
    columns: dict[str, list[Any]] = {}
    for part, own in zip(torch.split(samples, list(sizes), dim=1), torch.split(mean, list(sizes)), strict=True):
        found = _moments(part.double().numpy())
        found["quantile"] = np.quantile(own.double().numpy(), QUANTILES)
        for name, value in found.items():
            columns.setdefault(f"batch_diagonal_{name}", []).append(value)
    values: dict[str, Any] = {name: np.array(rows) for name, rows in columns.items()}
    if full:
        values |= {"batch_diagonal": mean.float().numpy(), "batch_diagonal_se": error.float().numpy()}
    return values


def _moments(samples: np.ndarray) -> dict[str, Any]:
    """Mean and sum of squares of the entries of a tensor with errors over vectors, and their spread."""
    count, size = samples.shape
    means = samples.mean(axis=1)
    own, total = (samples**2).sum(axis=1), samples.sum(axis=0)
    left_out = total @ total - 2 * samples @ total + own  # |sum without vector a|^2
    squares = (left_out - (own.sum() - own)) / ((count - 1) * (count - 2))
    square = (total @ total - own.sum()) / (count * (count - 1))
    mean, mean_error = means.mean(), means.std(ddof=1) / np.sqrt(count)
    return {
        "mean": mean, "mean_se": mean_error,
        "square": square, "square_se": np.sqrt((count - 1) * squares.var()),
        "sd": np.sqrt(max(square / size - mean**2 + mean_error**2, 0.0)),
    }  # fmt: skip
