"""Measure how steady predictions are on slowly changing images (Hendrycks & Dietterich 2019, CIFAR-10-P)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from landscape.data import cifar, perturbations, sampling
from landscape.data.dataset import Images
from landscape.data.preprocessing import resized
from landscape.data.structure import logits_in
from landscape.headline import Headline
from landscape.options import OptionError, did_you_mean, require
from landscape.predictions.scores import padded
from landscape.probe import Plan, Probe, Quantity, Unit, Values, make_texts
from landscape.statistics.means import means_by_name
from landscape.subject import sample_statistics, weights_cache
from landscape.subject.loading.further_data import AUTO, GENERATED, images_of
from landscape.subject.loading.identity import protocol
from landscape.subject.members import with_inputs
from landscape.subject.spec import Spec
from landscape.subject.subject import Subject

ALL, WHAT = "all", "sequences"
SCORES = {
    "consistency": ("share of neighbouring frames with the same prediction", "1"),
    "cross_entropy": ("cross-entropy of neighbouring frames, - sum_c p(t+1) log p(t)", "nats"),
    "accuracy": ("accuracy over all frames", "1"),
}


@dataclass(frozen=True)
class Perturbation(Probe):
    """Consistency and cross-entropy consistency of the predictions along sequences of slowly changing images.

    Consistency is the mean over neighbouring frames of [argmax_t = argmax_t+1], cross-entropy consistency that of
    - sum_c p_t+1 log p_t. The sequences are the files of CIFAR-10-P or CIFAR-100-P where they are, else they are
    generated: translate, rotate, scale, brightness and Gaussian noise. Frames of noise are independent of each other.
    Standard errors are over images.
    """

    name: ClassVar[str] = "perturbation"
    places: ClassVar[Mapping[str, Sequence[str]]] = {"source": (AUTO, GENERATED)}
    smallest: ClassVar[Mapping[str, Any]] = {"perturbations": "translate,gaussian_noise", "source": GENERATED}
    headlines: ClassVar[Sequence[Headline]] = (
        Headline("consistency", "mean_consistency"),
        Headline("cross-entropy consistency", "mean_cross_entropy"),
        Headline("accuracy", "mean_accuracy"),
    )

    perturbations: Annotated[str, "all, or names separated by commas such as translate,rotate"] = ALL
    source: Annotated[
        str, "auto: CIFAR-10-P or CIFAR-100-P under --data-root, else generated; generated; or such a folder"
    ] = AUTO
    seed: Annotated[int, "seed of generated noise"] = 0

    def __post_init__(self) -> None:
        make_texts(self, "perturbations")
        require(bool(self.source), "source", "nothing", f"{AUTO}, {GENERATED} or a folder")
        require(bool(self.perturbations), "perturbations", "nothing", "all, or names separated by commas")

    def identity(self, subject: Subject) -> dict[str, Any]:
        """The parameters, with the content of the sequences for their place."""
        folder, files = self._folder(subject), []
        if folder is not None:
            rows, names, count = rows_of(subject), self._names(subject), images_in_split(subject)
            files = [[name, perturbations.content(folder, name, count, rows)] for name in names]
        return {"perturbations": self._names(subject), "source": files or GENERATED}

    def plan(self, subject: Subject) -> Plan:
        folder, names = self._folder(subject), self._names(subject)
        frames = [self._frames(subject, name) for name in names]
        where = f"sequences of {folder.name}" if folder else f"generated sequences (seed {self.seed})"
        sums = {
            f"{name}{end}": Quantity(f"sum over images of the {text}{what}", units + power)
            for name, (text, units) in SCORES.items()
            for end, what, power in (("_sum", "", ""), ("_square_sum", ", squared", "^2" if units != "1" else ""))
        }
        return Plan(
            over={"perturbation": np.arange(len(names)), "batch": np.arange(len(subject.batches))},
            axes={"frame": np.arange(max(frames))},
            labels={
                "perturbation_name": (Quantity("perturbation", dims=("perturbation",)), np.array(names)),
                "frames": (Quantity("frames of a sequence", dims=("perturbation",)), np.array(frames)),
            },
            quantities={
                "samples": Quantity("images in the mini-batch"),
                **sums,
                **{
                    f"{name}_at_sum": Quantity(f"sum over images of the {text}, per frame", units, ("frame",))
                    for name, (text, units) in SCORES.items()
                },
            },
            summaries={
                **{
                    name: Quantity(
                        text, units, ("perturbation",), error="images",
                        bounds="positive" if name == "cross_entropy" else "share",
                    )
                    for name, (text, units) in SCORES.items()
                },
                **{
                    f"{name}_at": Quantity(f"{text}, per frame and the next", units, ("perturbation", "frame"))
                    for name, (text, units) in SCORES.items()
                },
                **{
                    f"mean_{name}": Quantity(f"{text}, mean over perturbations", units)
                    for name, (text, units) in SCORES.items()
                },
            },
            facts={"source": where, "protocol": f"{protocol(subject)}, {where}"},
        )  # fmt: skip

    def measure(self, subject: Subject, unit: Unit) -> Values:
        which, batch = unit.index
        names, count = self._names(subject), subject.samples(batch)
        sequence = self._sequence(subject, names[which], sample_statistics.first_row(subject, batch), count)
        longest = max(self._frames(subject, name) for name in names)
        per_frame = _along(subject, batch, sequence)
        per_image = {name: values.mean(0) for name, values in per_frame.items()}
        return {
            "samples": count,
            **{f"{name}_sum": values.sum().item() for name, values in per_image.items()},
            **{f"{name}_square_sum": values.square().sum().item() for name, values in per_image.items()},
            **{f"{name}_at_sum": padded(values.sum(1).numpy(), longest) for name, values in per_frame.items()},
        }

    def reduce(self, data: Mapping[str, np.ndarray]) -> Values:
        """Means over all finished images, and their standard errors; means over perturbations once all are finished."""
        done = data["done"] == 1
        n = np.where(done, data["samples"], 0.0).sum(axis=1)
        found = means_by_name(data, SCORES, batches=1)
        for name in SCORES:
            at = np.where(done[..., None], data[f"{name}_at_sum"], 0.0).sum(axis=1)
            with np.errstate(invalid="ignore", divide="ignore"):
                found[f"{name}_at"] = at / n[:, None]
            found[f"mean_{name}"] = np.asarray(found[name].mean() if done.all() else np.nan)
        return found

    def _folder(self, subject: Subject) -> Path | None:
        clean, spec = images_of(subject, WHAT), subject.spec or Spec()
        if self.source == GENERATED:
            return None
        if self.source == AUTO:
            return perturbations.folder_of(clean.name, spec.data_root) if spec.split == "test" else None
        folder = Path(self.source).expanduser()
        if not any(folder.glob("*.npy")):
            raise OptionError(f"--source {folder} holds no PERTURBATION.npy files; give CIFAR-10-P, auto or generated")
        if clean.name not in perturbations.FOLDERS or spec.split != "test":
            raise OptionError(
                f"--source {folder} has sequences of the test images of CIFAR, got {clean.name} {spec.split}; give "
                "--data cifar10 --split test, or --source generated"
            )
        return folder

    def _names(self, subject: Subject) -> tuple[str, ...]:
        folder = self._folder(subject)
        there = sorted(path.stem for path in folder.glob("*.npy")) if folder else list(perturbations.FRAMES)
        there = [name for name in there if name != "labels"]
        names = there if self.perturbations == ALL else [part.strip() for part in self.perturbations.split(",")]
        for name in names:
            if name not in there:
                known = f"{', '.join(there)}, or {ALL}"
                place = f"{folder} has" if folder else "generated are"
                raise OptionError(
                    f"--perturbations has no {name or 'empty name'}; {place} {known}{did_you_mean(name, there)}"
                )
        require(len(set(names)) == len(names), "perturbations", self.perturbations, "different names")
        return tuple(names)

    def _frames(self, subject: Subject, name: str) -> int:
        if (folder := self._folder(subject)) is None:
            return perturbations.FRAMES[name]
        return int(perturbations.opened(folder, name, images_in_split(subject)).shape[1])

    def _sequence(self, subject: Subject, name: str, first: int, count: int) -> Tensor:
        """Sequences of consecutive samples, (count, frames, 3, H, W) uint8."""
        clean, folder = images_of(subject, WHAT), self._folder(subject)
        if folder is None:
            return perturbations.generated(clean.inputs[first : first + count].cpu(), name, self.seed, first=first)
        array, rows = perturbations.opened(folder, name, images_in_split(subject)), rows_of(subject)
        pixels = np.stack([array[row] for row in rows[first : first + count]]).transpose(0, 1, 4, 2, 3)
        frames = torch.from_numpy(np.ascontiguousarray(pixels))
        sized = resized(Images(frames.flatten(0, 1), torch.empty(0), name, 0, frames.shape[-1]), clean.size or None)
        return sized.inputs.view(*frames.shape[:2], *sized.inputs.shape[1:])


def _along(subject: Subject, batch: int, sequence: Tensor) -> dict[str, Tensor]:
    """`SCORES` of neighbouring frames (frames - 1, N), the accuracy of every one (frames, N), on the CPU."""
    inputs, targets = subject.batch(batch)
    clean = images_of(subject, WHAT)
    with subject.evaluating():
        logarithms = torch.stack(
            [
                logits_in(subject.outputs(with_inputs(inputs, _normalised(subject, clean, frame)))).detach().double()
                for frame in sequence.transpose(0, 1)
            ]
        ).log_softmax(dim=2)
        predicted, probabilities = logarithms.argmax(dim=2), logarithms.exp()
        same = (predicted[1:] == predicted[:-1]).double()
        terms = torch.where(probabilities[1:] > 0, probabilities[1:] * logarithms[:-1], 0.0)
        right = (predicted == targets).double()
    found = torch.cat([same, -terms.sum(dim=2), right]).cpu()  # one transfer
    return dict(zip(SCORES, torch.split(found, [len(same), len(same), len(right)]), strict=True))


def _normalised(subject: Subject, clean: Images, frame: Tensor) -> Tensor:
    return clean.normalised(frame.to(subject.device)).to(subject.dtype)


@weights_cache.once_per_weights
def rows_of(subject: Subject) -> np.ndarray:
    """Rows of the test split that the samples are, in their order.

    Raises:
        ValueError: the samples are others than the first ones of the test split's fixed order.
    """
    spec, clean = subject.spec or Spec(), images_of(subject, WHAT)
    whole = cifar.load(clean.name, root=spec.data_root, split="test")
    rows = sampling.subset(whole.targets.numpy(), None)[: len(subject)]
    if not np.array_equal(whole.targets.numpy()[rows], clean.targets.cpu().numpy()):
        raise ValueError(f"the samples are not the first ones of {clean.name}; give --source generated")
    return rows


@weights_cache.once_per_weights
def images_in_split(subject: Subject) -> int:
    """Number of images of the whole test split."""
    spec = subject.spec or Spec()
    return len(cifar.load(images_of(subject, WHAT).name, root=spec.data_root, split="test"))
