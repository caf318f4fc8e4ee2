"""Measure robustness to adversarial changes of the pixels: FGSM (Goodfellow 2015) and PGD (Madry 2018)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from landscape.options import OptionError, at_least, parse_choices, require
from landscape.probe import Plan, Probe, Quantity, Unit, Values, derived_seed
from landscape.results.statistics import mean_and_standard_error_from_sums
from landscape.subject import outputs, sample_statistics
from landscape.subject.identity import protocol
from landscape.subject.members import unpositioned, with_inputs
from landscape.subject.outputs import intact_per_sample
from landscape.subject.subject import Subject

METHODS = ("fgsm", "pgd")
STEP = 2.5  # times eps / steps, which reaches any point of the ball (Madry et al.)
Losses = Callable[[Tensor], Tensor]  # pixels in [0, 1] -> a loss per sample


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
        for name in ("methods", "eps", "step_size"):  # Python callers may give numbers
            value = getattr(self, name)
            text = value if isinstance(value, str) else ",".join(map(str, np.atleast_1d(value).tolist()))
            object.__setattr__(self, name, text)
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
        return {**asdict(self), **parsed, **step, **({} if self.random_start else {"seed": 0})}

    def plan(self, subject: Subject) -> Plan:
        refuse_other_than_pixels(subject)
        loss, right = intact_per_sample(subject)
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
                "accuracy": subject.meaning.of_accuracy("accuracy under attack", after),
                "accuracy_se": subject.meaning.of_accuracy("its standard error over samples", after),
                "loss": Quantity("loss under attack", subject.meaning.units, after),
                "loss_se": Quantity("its standard error over samples", subject.meaning.units, after),
                **{
                    name: Quantity(quantity.long_name, quantity.units, after)
                    for name, quantity in sample_statistics.summaries("eps", subject.meaning).items()
                },
            },
            about={
                "batch": Quantity("mini-batch"),
                "method": Quantity("attack"),
                "eps": Quantity("largest change of a pixel in [0, 1]"),
                "row": Quantity("sample in the mini-batch"),
            },
            facts={
                "intact_loss": loss.mean().item(),
                "intact_loss_se": sample_statistics.mean_and_standard_error(loss)[1],
                "intact_accuracy": right.mean().item(),
                "data_sha256": subject.data_sha256,
                "protocol": f"{protocol(subject)}, {self._in_words()}",
            },
        )

    def measure(self, subject: Subject, unit: Unit) -> Values:
        (values,) = self.sweep(subject, [unit])
        return values

    def sweep(self, subject: Subject, units: Sequence[Unit]) -> Iterator[Values]:
        """Sizes and methods of one mini-batch share its pixels and random starts."""
        methods, current = parse_choices("methods", self.methods, METHODS), -1
        most = max(map(subject.samples, range(len(subject.batches))))
        for unit in units:
            batch, method, _ = unit.index
            if batch != current:
                current, (whole, targets) = batch, subject.batch(batch)
                pixels = pixels_of(subject, batch)
                directions = self._directions(subject, batch, pixels)

            def losses(changed: Tensor, whole: Any = whole, targets: Any = targets) -> Tensor:
                inputs = with_inputs(whole, as_inputs(subject, changed, unpositioned(whole)))
                return subject.losses(subject.outputs(inputs), targets)

            eps = float(unit.at["eps"])
            if methods[method] == "fgsm":
                found = [fgsm(losses, pixels, eps)]
            else:
                size = parse_pixels("step_size", self.step_size)[0] if self.step_size else STEP * eps / self.steps
                starts = [(pixels + eps * direction).clamp(0, 1) for direction in directions] or [pixels]
                found = [pgd(losses, pixels, eps, step=size, steps=self.steps, start=start) for start in starts]
            with subject.evaluating():
                each = torch.stack(
                    [
                        outputs.loss_and_correctness(
                            subject, with_inputs(whole, as_inputs(subject, one, unpositioned(whole))), targets
                        )
                        for one in found
                    ]
                )
            after = torch.stack([each[:, 0].amax(dim=0), each[:, 1].amin(dim=0)]).cpu()
            loss, right = after
            yield {
                **sample_statistics.change(subject, batch, after),
                "accuracy_sum": right.sum().item(),
                "accuracy_square_sum": right.square().sum().item(),
                "loss_sum": loss.sum().item(),
                "loss_square_sum": loss.square().sum().item(),
                "sample_accuracy": _padded(right, most),
                "sample_loss": _padded(loss, most),
            }

    def reduce(self, data: Mapping[str, np.ndarray]) -> Values:
        """Means over all finished samples, and their standard errors."""
        done = data["done"] == 1
        n = np.where(done, data["samples"], 0.0).sum(axis=0)
        found: dict[str, np.ndarray] = {}
        for name in ("accuracy", "loss"):
            total, squares = (np.where(done, data[f"{name}_{k}"], 0.0).sum(axis=0) for k in ("sum", "square_sum"))
            found[name], found[f"{name}_se"] = mean_and_standard_error_from_sums(total, squares, n)
        return {**found, **sample_statistics.reduced(data, batches=0)}

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
        start = f"{self.restarts} random start{'s' * (self.restarts > 1)}" if self.random_start else "from the image"
        size = f"steps of {self.step_size}" if self.step_size else f"steps of {STEP:g} eps / {self.steps}"
        pgd_words = f", PGD of {self.steps} {size}, {start}" if "pgd" in self.methods else ""
        return f"attacks on pixels in [0, 1]{pgd_words}"


def _padded(values: Tensor, rows: int) -> np.ndarray:
    """Values of the samples of a mini-batch, with NaN for those that it lacks to the largest one."""
    return np.pad(values.double().numpy(), (0, rows - len(values)), constant_values=np.nan)


def fgsm(losses: Losses, pixels: Tensor, eps: float) -> Tensor:
    """One step of eps along the sign of the gradient of the loss, clamped to [0, 1]."""
    return (pixels + eps * gradient(losses, pixels).sign()).clamp(0, 1)


def pgd(losses: Losses, pixels: Tensor, eps: float, *, step: float, steps: int, start: Tensor) -> Tensor:
    """Steps along the sign of the gradient, each projected onto the ball of eps around the pixels and onto [0, 1]."""
    changed = start
    for _ in range(steps):
        changed = changed + step * gradient(losses, changed).sign()
        changed = (pixels + (changed - pixels).clamp(-eps, eps)).clamp(0, 1)
    return changed


def gradient(losses: Losses, pixels: Tensor) -> Tensor:
    """Gradient of the sum of the losses by the pixels; that of each sample, as the losses are independent."""
    with torch.inference_mode(False), torch.enable_grad():
        leaf = pixels.detach().clone().requires_grad_()
        (found,) = torch.autograd.grad(losses(leaf).sum(), leaf)
    return found.detach()


def pixels_of(subject: Subject, batch: int) -> Tensor:
    """Pixels of a mini-batch in [0, 1], in the precision of the model."""
    images = subject.images
    if images is None or not images.mean:
        inputs: Any = unpositioned(subject.batch(batch)[0])
        return cast(Tensor, inputs)
    rows = slice(batch * subject.batch_size, (batch + 1) * subject.batch_size)
    return images.inputs[rows].to(subject.device).to(subject.dtype) / 255


def as_inputs(subject: Subject, pixels: Tensor, like: Any) -> Tensor:
    """What the model takes for pixels in [0, 1]: normalised as the data are."""
    images = subject.images
    if images is None or not images.mean:
        return pixels
    mean, std = (torch.tensor(values, dtype=pixels.dtype).view(-1, 1, 1) for values in (images.mean, images.std))
    return ((pixels - mean.to(pixels.device)) / std.to(pixels.device)).to(like.dtype)


def refuse_other_than_pixels(subject: Subject) -> None:
    """Reject inputs that are no pixels in [0, 1], of which eps would have no meaning, and losses of whole batches.

    Raises:
        ValueError: the inputs are something else; says what.
    """
    if subject.whole == "both" or subject.mean_only:
        raise ValueError(
            "attack needs a loss per sample of (outputs, targets), got one that calls the model or gives a mean; "
            "give --loss cross-entropy"
        )
    inputs = unpositioned(subject.batch(0)[0])
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point() or inputs.ndim != 4:
        got = f"{tuple(inputs.shape)} {inputs.dtype}" if isinstance(inputs, Tensor) else f"a {type(inputs).__name__}"
        raise ValueError(f"attack needs images (N, C, H, W), got {got}; measure it on image data")
    if getattr(subject.batches, "augmentation", None) is not None:
        raise OptionError("--augment changes the pixels that are attacked; drop it: attack measures clean images")
    if subject.images is not None and subject.images.mean:
        return
    low, high = extremes(subject)
    if low < 0 or high > 1:
        raise ValueError(
            f"attack needs pixels in [0, 1], got inputs from {low:.3g} to {high:.3g} that are "
            "used as they are; return uint8 pictures, and give --mean and --std"
        )


def extremes(subject: Subject) -> tuple[float, float]:
    """The smallest and the largest value of all inputs, which are tensors."""
    batches: list[Any] = [unpositioned(inputs) for inputs, _ in subject.each_batch()]
    found = torch.stack([torch.stack(torch.aminmax(inputs)) for inputs in batches])
    return found[:, 0].min().item(), found[:, 1].max().item()


def parse_pixels(name: str, text: str) -> tuple[float, ...]:
    """Parse `0.007,2/255`.

    Raises:
        OptionError: a part is not a number or a fraction.
    """
    found = []
    for part in text.split(","):
        try:
            above, slash, below = part.partition("/")
            found.append(float(above) / (float(below) if slash else 1.0))
        except (ValueError, ZeroDivisionError):
            require(False, name, text or "nothing", "numbers or fractions such as 8/255, separated by commas")
    return tuple(found)
