"""Measure the gradient noise scale, simple and weighted by the curvature (McCandlish et al. 2018, arXiv 1812.06162)."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from landscape.headline import Headline
from landscape.options import at_least, regular_expression
from landscape.probe import Plan, Probe, Quantity, Unit, Values, derived_seed, report_products
from landscape.products import hvp_backends, memory_forecast, operator, parameter_selection
from landscape.products.mini_batch_means import (
    QUARTERS,
    Quarter,
    SampleGroups,
    mean_gradient,
    mean_products,
    quarter_size,
    sample_groups,
)
from landscape.products.vectors import dot
from landscape.statistics.ratio import noise_scales
from landscape.subject.loading.identity import of_first
from landscape.subject.subject import Subject
from landscape.subject.weights_cache import once_per_weights


@dataclass(frozen=True)
class NoiseScale(Probe):
    """Gradient noise scale: the batch size at which the noise of a mini-batch's gradient is as large as the gradient.

    With G the mean and S the covariance of the gradient of one sample, and H the Hessian, of loss + weight decay,

        simple = tr S / |G|^2 (eq. 2.9),  curvature = tr(H S) / (G' H G) (eq. 2.8).

    The samples are divided into `groups` of four quarters of m samples. With x_q the gradient of quarter q and g_i the
    mean of those of group i, four estimates without bias:

        tr S      = mean_i  m/3 sum_q |x_q - g_i|^2
        |G|^2     = mean_{i != j}  g_i' g_j
        tr(H S)   = mean_i  m/2 mean of  (x_0 - x_1)' H_23 (x_0 - x_1)  and  (x_2 - x_3)' H_01 (x_2 - x_3)
        G' H G    = mean_i  mean_{j in A_i, k in B_i}  g_j' H_i g_k.

    The first two are those of eq. A.2 with the batch sizes m and all samples, averaged over all quarters. The others
    need three independent factors, since the Hessian of a mini-batch depends on its gradient: H_23 is that of the
    quarters 2 and 3, independent of x_0 and x_1, for which E dd' = 2 S / m; and A_i, B_i are random halves of the
    groups other than i, so that E g_j' H_i g_k = E[g_j]' E[H_i] E[g_k]. One product H_i (mean of A_i) gives all k. The
    halves are the same distances from i for all i, so that every group is in as many A_i and B_i.

    Errors are those of a jackknife over groups, intervals Fieller's: bounded only where the denominator is told apart
    from 0. Where it is not, the noise scale is NaN and only a lower end is given; see `statistics.ratio`.

    Cost: two gradients and two Hessian products per sample, one gradient with `--simple`; one gradient more where a
    quarter of the free memory does not hold those of all quarters. Memory: `groups` gradients, which every process
    computes once, and nothing that grows with the number of mini-batches. A group is a unit.

    The samples are taken as independent draws. Their fixed order is class-balanced, so that |G|^2 is too low by at most
    tr(S_b) / N where classes do not fill the groups evenly, with S_b the covariance between classes.
    """

    name: ClassVar[str] = "noise-scale"
    differentiates: ClassVar[bool] = True
    uses: ClassVar[tuple[str, ...]] = ("weight_decay",)
    split: ClassVar[str] = "train"
    smallest: ClassVar[Mapping[str, Any]] = {"groups": 3}
    errors_over: ClassVar[str] = "groups of samples"
    headlines: ClassVar[Sequence[Headline]] = (Headline("simple", "simple"), Headline("curvature", "curvature"))

    groups: Annotated[int, "groups that the samples are divided into; their gradients are kept in memory"] = 32
    simple: Annotated[bool, "only the simple noise scale, without Hessian products"] = False
    params: Annotated[str, parameter_selection.PARAMS_HELP] = ""
    seed: Annotated[int, "seed of the division into quarters, and of the halves of the groups"] = 0

    def __post_init__(self) -> None:
        at_least("groups", self.groups, 3)
        regular_expression("params", self.params)

    def plan(self, subject: Subject) -> Plan:
        if subject.traits.coupled:
            raise ValueError(
                "the noise scale is that of a loss that is a mean over samples, but this loss couples the samples of a "
                "mini-batch, such as a contrastive one; use a loss that gives one value per sample"
            )
        parameter_selection.matching(subject.parameters, self.params)  # fails before any work where nothing matches
        size, what = quarter_size(subject, self.groups), "samples" if subject.divisible else "mini-batches"
        measured = QUARTERS * self.groups * size
        measured = measured if subject.divisible else sum(map(subject.samples, range(measured)))
        gradient, curved = "squared loss per squared weight", "cubed loss per weight to the fourth"
        other = ("other",)
        quantities = {
            "inner": Quantity("inner product of the gradients of two groups", gradient, other),
            "noise": Quantity("trace of the covariance of a sample's gradient, by the quarters of the group", gradient),
            "samples": Quantity("samples in the group"),
            "loss": Quantity("loss of the group", subject.meaning.units),
        }
        weighted = {
            "curved_inner": Quantity(
                "inner product of a group's gradient with this group's Hessian times the mean gradient of other groups",
                curved, other,
            ),
            "curved_noise": Quantity("trace of the group's Hessian times the covariance of the gradient", curved),
        }  # fmt: skip
        kinds = {"simple": ("squared_gradient", "|G|^2", "gradient_noise", "tr S", gradient)}
        if not self.simple:
            kinds["curvature"] = ("gradient_curvature", "G' H G", "curved_gradient_noise", "tr(H S)", curved)
        return Plan(
            over={"group": np.arange(self.groups)},
            axes={"other": np.arange(self.groups)},
            quantities={**quantities, **({} if self.simple else weighted)},
            summaries={name: quantity for kind, row in kinds.items() for name, quantity in _summary(kind, *row)},
            about={"group": Quantity("group of samples"), "other": Quantity("other group of samples")},
            facts={"quarter": f"{size} {what}", **of_first(subject, measured)},
        )

    def sweep(self, subject: Subject, units: Sequence[Unit]) -> Iterator[Values]:
        """One group after the other, with the gradients of all groups computed once."""
        found, gradients, of_quarters = _gradients(subject, self.groups, self.seed, self.params)
        parameters = parameter_selection.matching(found.subject.parameters, self.params)
        curved = None if self.simple else hvp_backends.curvature(found.subject, parameters, "double-backward")
        shares = sum(len(quarter.shares) for quarter in found.groups[0])
        offsets = random_order(self.groups - 1, self.seed)
        report_products(per_unit=0 if self.simple else 2 * shares)
        for unit in units:
            (i,) = unit.index
            own = of_quarters.pop(i, None) or [mean_gradient(found.subject, parameters, q) for q in found.groups[i]]
            values = _gradient_noise(found.groups[i], own, gradients, i)
            if curved is not None:
                others = [(i + offset) % self.groups for offset in offsets]
                quarters = [gradient for gradient, _ in own]
                values |= _curved_noise(curved, found.groups[i], quarters, gradients, others)
            yield values

    def reduce(self, data: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Both noise scales over all finished groups with finite gradients, with jackknife errors and intervals."""
        return noise_scales(data)


def _summary(kind: str, below: str, below_sign: str, above: str, above_sign: str, units: str) -> Iterator[Any]:
    about = f"{kind} noise scale {above_sign} / {below_sign}" if kind == "simple" else (
        f"curvature-weighted noise scale {above_sign} / {below_sign}"
    )  # fmt: skip
    unresolved = f"NaN where {below_sign} is not told apart from 0"
    yield kind, Quantity(f"{about}; {unresolved}", "samples", error="groups (jackknife)")
    yield f"{kind}_low", Quantity("lower end of its 95 % interval (Fieller)", "samples")
    yield f"{kind}_high", Quantity(f"upper end of it; infinite where {below_sign} is not told apart from 0", "samples")
    yield f"{kind}_resolved", Quantity(f"1 where {below_sign} is told apart from 0, else 0")
    yield below, Quantity(f"{below_sign}, without the noise", units, error="groups (jackknife)")
    yield above, Quantity(f"{above_sign} of one sample", units, error="groups")


@once_per_weights
def _gradients(
    subject: Subject, groups: int, seed: int, params: str
) -> tuple[SampleGroups, list[Tensor], dict[int, list[tuple[Tensor, Tensor]]]]:
    """The division of the samples, the mean gradient of every group, (n,) each, and `mean_gradient` of its quarters.

    The latter only where all of them fit into memory; each is needed once, and taken out then.
    """
    found = sample_groups(subject, groups, seed)
    parameters = parameter_selection.matching(found.subject.parameters, params)
    size = sum(p.numel() for p in parameters.values())
    room = memory_forecast.room_for_graphs(subject.device) // (QUARTERS * groups * subject.dtype.itemsize) >= size
    gradients, of_quarters = [], dict[int, list[tuple[Tensor, Tensor]]]()
    for i, quarters in enumerate(found.groups):
        total = sum(quarter.samples for quarter in quarters)
        gradient = torch.zeros(size, device=subject.device, dtype=subject.dtype)
        for quarter in quarters:
            of_quarter = mean_gradient(found.subject, parameters, quarter)
            gradient.add_(of_quarter[0], alpha=quarter.samples / total)
            if room:
                of_quarters.setdefault(i, []).append(of_quarter)
        gradients.append(gradient)
    return found, gradients, of_quarters


def _gradient_noise(
    quarters: Sequence[Quarter], of_quarters: Sequence[tuple[Tensor, Tensor]], gradients: Sequence[Tensor], i: int
) -> dict[str, Any]:
    """What a group says of |G|^2 and tr S, with the gradients of its quarters and their losses."""
    own, losses = zip(*of_quarters, strict=True)
    total = sum(quarter.samples for quarter in quarters)
    between = [quarter.samples * _square(x - gradients[i]) for quarter, x in zip(quarters, own, strict=True)]
    loss = torch.stack([quarter.samples / total * of for quarter, of in zip(quarters, losses, strict=True)]).sum()
    inner = [dot(gradients[i], other) for other in gradients]
    numbers = torch.stack([torch.stack(between).sum() / (QUARTERS - 1), loss.double(), *inner]).cpu().numpy()
    return {"noise": numbers[0], "loss": numbers[1], "inner": numbers[2:], "samples": total}


def _curved_noise(
    curved: operator.Curvature,
    quarters: Sequence[Quarter],
    own: Sequence[Tensor],
    gradients: Sequence[Tensor],
    others: Sequence[int],
) -> dict[str, Any]:
    """What a group says of tr(H S) and G' H G; `others` are the other groups in random order."""
    first, second = others[: len(others) // 2], others[len(others) // 2 :]
    mean = torch.stack([gradients[j] for j in first]).mean(dim=0)
    total = sum(quarter.samples for quarter in quarters)
    noise, turned = [], torch.zeros_like(mean)
    for a, c in ((0, 2), (2, 0)):  # the difference of quarters a and a + 1, with the Hessian of c and c + 1
        difference, pair = own[a] - own[a + 1], quarters[c : c + 2]
        of_difference, of_mean = mean_products(curved, pair, [difference, mean])
        noise.append(dot(difference, of_difference) / (1 / quarters[a].samples + 1 / quarters[a + 1].samples))
        turned.add_(of_mean, alpha=sum(quarter.samples for quarter in pair) / total)
    numbers = torch.stack([torch.stack(noise).mean(), *(dot(gradients[k], turned) for k in second)]).cpu().numpy()
    inner = np.full(len(gradients), math.nan)
    inner[second] = numbers[1:]
    return {"curved_inner": inner, "curved_noise": numbers[0]}


def random_order(count: int, seed: int) -> list[int]:
    """The numbers 1..count in random order."""
    generator = torch.Generator().manual_seed(derived_seed(seed, "halves"))
    return [1 + k for k in torch.randperm(count, generator=generator).tolist()]


def _square(vector: Tensor) -> Tensor:
    return dot(vector, vector)
