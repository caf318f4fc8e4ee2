"""Measure robustness to adversarial changes of the pixels: FGSM (Goodfellow 2015) and PGD (Madry 2018)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from landscape.headline import HIGHER, LOWER, Headline
from landscape.options import OptionError, at_least, counted, parse_choices, require
from landscape.predictions.scores import padded
from landscape.probe import Plan, Probe, Quantity, Unit, Values, derived_seed, make_texts
from landscape.statistics.means import means_by_name
from landscape.subject import sample_statistics
from landscape.subject.loading.identity import protocol
from landscape.subject.pixels import (
    fgsm,
    loss_and_correctness_at,
    losses_of,
    parse_pixels,
    pgd,
    pixels_of,
    refuse_other_than_pixels,
)  # fmt: skip
from landscape.subject.sample_statistics import intact_per_sample
from landscape.subject.subject import Subject

METHODS = ("fgsm", "pgd")
STEP = 2.5  # times eps / steps, which reaches any point of the ball (Madry et al.)


@dataclass(frozen=True)
class Attack(Probe):
    """Accuracy and loss on images changed by at most eps per pixel so that the loss rises.

    Pixels are in [0, 1], before normalisation, and stay there; gradients pass through the normalisation, and through
    the mean of the probabilities of members (MC dropout). FGSM takes one step of eps along the sign of the gradient,
    PGD several smaller ones from a random point of the ball, each projected onto it. Of several restarts, the highest
    loss counts, and a sample is right only if it is right after all of them. Errors are over samples.
    """

    name: ClassVar[str] = "attack"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "park2022": {"eps": "0.007,0.3", "steps": 40, "step_size": "2/255", "random_start": False}
    }
    smallest: ClassVar[Mapping[str, Any]] = {"eps": "2/255", "steps": 2}
    headlines: ClassVar[Sequence[Headline]] = (
        *sample_statistics.INTACT,
        *(
            Headline(f"{method.upper()} at {{255*eps:g}}/255", quantity, {"method": method, "eps": "last"}, reading,
                     unless=unless)
            for method in METHODS
            for quantity, reading, unless in (("accuracy", HIGHER, ""), ("loss", LOWER, "accuracy"))
        ),
    )  # fmt: skip

    methods: Annotated[str, "fgsm, pgd, or both separated by commas"] = "fgsm,pgd"
    eps: Annotated[str, "largest change of a pixel in [0, 1], as numbers or fractions such as 8/255"] = (
        "0.5/255,1/255,2/255,4/255,8/255"
    )
    steps: Annotated[int, "steps of PGD"] = 20
    step_size: Annotated[str, "step of PGD in pixels in [0, 1]; default: 2.5 eps / steps"] = ""
    restarts: Annotated[int, "runs of PGD per sample, from different points"] = 1
    random_start: Annotated[bool, "PGD starts at a random point of the ball, else at the image itself"] = True
    seed: Annotated[int, "seed of the random starts"] = 0

    def __post_init__(self) -> None:
        make_texts(self, "methods", "eps", "step_size")
        methods = parse_choices("methods", self.methods, METHODS)
        require(len(set(methods)) == len(methods), "methods", self.methods, "each method once")
        sizes = parse_pixels("eps", self.eps)
        require(all(0 <= size <= 1 for size in sizes), "eps", self.eps, "from 0 to 1, such as 8/255")
        require(list(sizes) == sorted(set(sizes)), "eps", self.eps, "rising numbers")
        at_least("steps", self.steps, 1)
        at_least("restarts", self.restarts, 1)
        if self.step_size:
            require(0 < parse_pixels("step_size", self.step_size)[0] <= 1, "step_size", self.step_size, "above 0")
        if self.restarts > 1 and not self.random_start:
            raise OptionError(f"--restarts {self.restarts} without a random start are equal; drop --no-random-start")

    def identity(self, subject: Subject) -> dict[str, Any]:
        """The parameters, with texts parsed; without random starts the seed does not matter."""
        parsed = {"eps": parse_pixels("eps", self.eps), "methods": parse_choices("methods", self.methods, METHODS)}
        step = {"step_size": parse_pixels("step_size", self.step_size)} if self.step_size else {}
        return {**parsed, **step, **({} if self.random_start else {"seed": None})}

    def plan(self, subject: Subject) -> Plan:
        refuse_other_than_pixels(subject, "attack")
        methods, per_method = parse_choices("methods", self.methods, METHODS), ("method",)
        after, rows = ("method", "eps"), max(map(subject.samples, range(len(subject.batches))))
        return Plan(
            over={
                "batch": np.arange(len(subject.batches)),
                "method": np.arange(len(methods)),
                "eps": np.array(parse_pixels("eps", self.eps)),
            },
            axes={"row": np.arange(rows)},
            labels={"method_name": (Quantity("attack", dims=per_method), np.array(methods))},
            quantities={
                "sample_accuracy": subject.meaning.of_accuracy("accuracy of the sample under attack", ("row",)),
                "sample_loss": Quantity("loss of the sample under attack", subject.meaning.units, ("row",)),
                **sample_statistics.quantities(subject.meaning),
                "accuracy_sum": subject.meaning.of_accuracy("sum over samples of the accuracy under attack"),
                "accuracy_square_sum": subject.meaning.of_accuracy("sum over samples of its square"),
                "loss_sum": Quantity("sum over samples of the loss under attack", subject.meaning.units),
                "loss_square_sum": Quantity("sum over samples of its square", f"{subject.meaning.units}^2"),
            },
            summaries={
                "accuracy": subject.meaning.of_accuracy("accuracy under attack", after, "share", "samples"),
                "loss": Quantity(
                    "loss under attack", subject.meaning.units, after, bounds=subject.meaning.bounds, error="samples"
                ),
                **{
                    name: replace(quantity, dims=after)
                    for name, quantity in sample_statistics.summaries("eps", subject.meaning).items()
                },
            },
            about={
                "method": Quantity("attack"),
                "eps": Quantity("largest change of a pixel in [0, 1]"),
                "row": Quantity("sample in the mini-batch"),
            },
            facts={
                **sample_statistics.intact_means(subject),
                "intact_loss_se": sample_statistics.mean_and_standard_error(intact_per_sample(subject)[0])[1],
                "data_sha256": subject.data.sha256,
                "protocol": f"{protocol(subject)}, {self._in_words()}",
            },
        )

    def sweep(self, subject: Subject, units: Sequence[Unit]) -> Iterator[Values]:
        """Sizes and methods of one mini-batch share its pixels and random starts."""
        methods, current = parse_choices("methods", self.methods, METHODS), -1
        most = max(map(subject.samples, range(len(subject.batches))))
        for unit in units:
            batch, method, _ = unit.index
            if batch != current:
                current, pixels, losses = batch, pixels_of(subject, batch), losses_of(subject, batch)
                directions = self._directions(subject, batch, pixels)
            eps = float(unit.at["eps"])
            if methods[method] == "fgsm":
                found = [fgsm(losses, pixels, eps)]
            else:
                size = parse_pixels("step_size", self.step_size)[0] if self.step_size else STEP * eps / self.steps
                starts = [(pixels + eps * direction).clamp(0, 1) for direction in directions] or [pixels]
                found = [pgd(losses, pixels, eps, step=size, steps=self.steps, start=start) for start in starts]
            with subject.evaluating():
                each = torch.stack([loss_and_correctness_at(subject, batch, one) for one in found])
            after = torch.stack([each[:, 0].amax(dim=0), each[:, 1].amin(dim=0)]).cpu()
            loss, right = after
            each_loss, each_right = padded(after.double().numpy(), most, 1)
            yield {
                **sample_statistics.change(subject, batch, after), "accuracy_sum": right.sum().item(),
                "accuracy_square_sum": right.square().sum().item(), "loss_sum": loss.sum().item(),
                "loss_square_sum": loss.square().sum().item(), "sample_accuracy": each_right, "sample_loss": each_loss,
            }  # fmt: skip

    def reduce(self, data: Mapping[str, np.ndarray]) -> Values:
        """Means over all finished samples, and their standard errors."""
        return {**means_by_name(data, ("accuracy", "loss")), **sample_statistics.reduced(data)}

    def _directions(self, subject: Subject, batch: int, pixels: Tensor) -> list[Tensor]:
        """Uniform in [-1, 1] per restart, seeded by the sample's position in the data."""
        if not self.random_start:
            return []
        first = sample_statistics.first_row(subject, batch)
        found = []
        for restart in range(self.restarts):
            seeds = (derived_seed(self.seed, restart, first + row) for row in range(len(pixels)))
            drawn = [torch.rand(pixels.shape[1:], generator=torch.Generator().manual_seed(seed)) for seed in seeds]
            found.append(torch.stack(drawn).to(pixels) * 2 - 1)
        return found

    def _in_words(self) -> str:
        start = counted(self.restarts, "random start") if self.random_start else "from the image"
        size = f"steps of {self.step_size}" if self.step_size else f"steps of {STEP:g} eps / {self.steps}"
        pgd_words = f", PGD of {self.steps} {size}, {start}" if "pgd" in self.methods else ""
        return f"attacks on pixels in [0, 1]{pgd_words}"
