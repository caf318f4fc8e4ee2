"""Measure robustness to noise of one frequency band (Park & Kim 2022, Fig. 2b and Fig. D.6)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from landscape.data import structure
from landscape.headline import Headline
from landscape.layers.fourier import band_pass, published_ring, ring, signs
from landscape.layers.linear_classifier import with_linear_classifier
from landscape.layers.pooled_features import LEAST_SAMPLES, training_samples
from landscape.options import OptionError, at_least, one_of, parse_count, parse_numbers, require
from landscape.probe import Plan, Probe, Quantity, Unit, Values, derived_seed, make_texts
from landscape.subject import pixels, sample_statistics
from landscape.subject.loading.identity import protocol
from landscape.subject.members import unpositioned, with_inputs
from landscape.subject.subject import Subject

Ring = Literal["symmetric", "park2022"]
RINGS = {"symmetric": ring, "park2022": published_ring}
LINEAR_ONLY = ("pool", "train_samples")  # parameters of a linear classifier
FIRST, LAST = 0.0, 1.0  # zero frequency and the highest, in units of pi


@dataclass(frozen=True)
class Noise(Probe):
    """Accuracy drop and loss increase under x + Re IFFT2(FFT2(delta) M_f), delta = eps sign(N(0, 1)).

    M_f passes the ring of frequencies within `half_width` of f, by their larger component; `ring` park2022 takes the
    masks of the published code, whose squares hold one frequency less on the positive side than on the negative. delta
    is drawn once per image, in the normalised input space, and shared by all bands. One pass over the samples per band
    and one without noise. Standard errors are of the paired differences per sample. A ring that holds no frequency of
    the images gives NaN and is listed in `empty_bands`. With `classifier` linear the classes are those of logistic
    regression, fitted to the last layer's features of clean samples of the train split: encoders without a classifier
    of their own can be compared, as Park et al. (2023) do by linear probing.
    """

    name: ClassVar[str] = "noise"
    smallest: ClassVar[Mapping[str, Any]] = {"bands": "0.2,0.3,0.7"}
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"park2022": {"ring": "park2022"}}
    headlines: ClassVar[Sequence[Headline]] = (
        *sample_statistics.INTACT,
        *sample_statistics.largest(
            "band",
            "at {band:g} π",
            column=14,
            title="noise drop",
            definition="largest accuracy drop, or loss increase, under noise of one band of frequencies",
        ),
    )

    bands: Annotated[str, "centre frequencies of the bands, in units of pi"] = "0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9"
    half_width: Annotated[float, "half the width of a band, in units of pi"] = 0.1
    ring: Annotated[
        Ring, "frequencies of a band: symmetric about zero, or those of the published code, which are not"
    ] = "symmetric"
    eps: Annotated[
        str, "amplitude of the noise per pixel before filtering; several such as 0.3,0.7 give one result each"
    ] = "0.7"
    equal_energy: Annotated[
        bool, "rescale the noise of every image and band to the same norm, the root mean square over the bands"
    ] = False
    classifier: Annotated[
        Literal["own", "linear"],
        "the network's own, or linear: fitted to its last layer, also for encoders without one",
    ] = "own"
    pool: Annotated[
        Literal["mean", "cls"], "features of a linear classifier: mean over positions, or the class token"
    ] = "mean"
    train_samples: Annotated[str, "samples of the train split to fit a linear classifier to: a number, or all"] = "8192"
    pictures: Annotated[int, "store the noise of every band on the first N images, and the masks, as pictures"] = 0
    seed: Annotated[int, "seed of the noise"] = 0

    def __post_init__(self) -> None:
        make_texts(self, "bands", "eps")
        one_of("ring", self.ring, get_args(Ring))
        self._check_classifier()
        at_least("pictures", self.pictures, 0)
        inside = all(FIRST <= centre <= LAST for centre in parse_numbers("bands", self.bands))
        require(inside, "bands", self.bands, "frequencies from 0 to 1, in units of pi")
        for name, text in (("half-width", str(self.half_width)), ("eps", self.eps)):
            require(all(0 < value < np.inf for value in parse_numbers(name, text)), name, text, "above 0")

    def _check_classifier(self) -> None:
        one_of("classifier", self.classifier, ("own", "linear"))
        one_of("pool", self.pool, ("mean", "cls"))
        object.__setattr__(self, "train_samples", str(self.train_samples))
        at_least("train_samples", parse_count("train_samples", self.train_samples, 10**9), LEAST_SAMPLES)
        if self.classifier == "linear":
            object.__setattr__(self, "logits", False)
            return
        for name in LINEAR_ONLY:
            if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                raise OptionError(f"--{name.replace('_', '-')} {getattr(self, name)} needs --classifier linear")

    def variants(self) -> "list[Noise]":
        """One study per size of the noise."""
        return [replace(self, eps=str(size)) for size in parse_numbers("eps", self.eps)]

    def identity(self, subject: Subject) -> dict[str, Any]:
        """Texts parsed to numbers, and the digest of the training samples for their number."""
        known: dict[str, Any] = {"bands": parse_numbers("bands", self.bands), "eps": parse_numbers("eps", self.eps)}
        if self.classifier == "own":
            return known | dict.fromkeys(LINEAR_ONLY)
        images = training_samples(subject, self.train_samples).images
        return known | ({"train_samples": images.sha256} if images is not None else {})

    def plan(self, subject: Subject) -> Plan:
        masks = self._masks(subject)
        read = self._read(subject)
        centres = np.array(parse_numbers("bands", self.bands))
        counts = masks.sum(axis=(1, 2))
        return Plan(
            over={"batch": np.arange(len(subject.batches)), "band": centres},
            axes=self._picture_axes(masks),
            labels={
                "frequencies": (Quantity("frequencies of the images in the band", dims=("band",)), counts),
                **self._pictures(subject, masks),
            },
            quantities={
                **sample_statistics.quantities(subject.meaning),
                "noise_square_sum": Quantity("sum over samples of the mean square of the noise", "input^2"),
            },
            summaries={
                **sample_statistics.summaries("band", subject.meaning),
                "noise_rms": Quantity("root mean square of the noise per pixel", "input", ("band",)),
            },
            about={"band": Quantity("centre of the band", "pi")},
            facts={
                **sample_statistics.intact_means(read),
                "empty_bands": ", ".join(f"{centre:g}" for centre in centres[counts == 0]),
                **self._protocol(subject),
            },
        )

    def sweep(self, subject: Subject, units: Sequence[Unit]) -> Iterator[Values]:
        """Bands of one mini-batch share its noise."""
        wanted, read = self._masks(subject), self._read(subject)
        masks = torch.from_numpy(wanted).to(subject.device, subject.dtype)
        norm = self._norm(subject)
        current = -1
        for unit in units:
            batch, band = unit.index
            if batch != current:
                (whole, targets), current = subject.batch(batch), batch
                inputs = unpositioned(whole)
                spectrum = torch.fft.rfft2(self._signs(subject, batch, inputs))
            if not wanted[band].any():
                missing = dict.fromkeys([*sample_statistics.quantities(), "noise_square_sum"], np.nan)
                yield {**missing, "samples": subject.samples(batch)}
                continue
            noise = self._filtered(spectrum, masks[band], norm)
            with subject.evaluating():
                after = sample_statistics.loss_and_correctness(read, with_inputs(whole, inputs + noise), targets)
            square = noise.double().square().mean(dim=(1, 2, 3)).sum()
            together = torch.cat([after.flatten(), square.view(1)]).cpu()  # one transfer per unit
            yield {
                **sample_statistics.change(read, batch, together[:-1].view_as(after)),
                "noise_square_sum": together[-1].item(),
            }

    def reduce(self, data: Mapping[str, np.ndarray]) -> Values:
        done = data["done"] == 1
        n = np.where(done, data["samples"], 0.0).sum(axis=0)
        with np.errstate(invalid="ignore", divide="ignore"):
            square = np.where(done, data["noise_square_sum"], 0.0).sum(axis=0) / n
        return {**sample_statistics.reduced(data), "noise_rms": np.sqrt(square)}

    def _read(self, subject: Subject) -> Subject:
        """The subject with the classifier that is asked for."""
        if self.classifier == "own":
            return subject
        return with_linear_classifier(subject, self.pool, self.train_samples).subject

    def _protocol(self, subject: Subject) -> dict[str, str | float]:
        if self.classifier == "own":
            return {}
        readout = with_linear_classifier(subject, self.pool, self.train_samples)
        return {
            "classifier": readout.in_words,
            "classifier_penalty": readout.penalty,
            "classifier_gradient": readout.gradient,
            "protocol": f"{protocol(subject)}, {readout.in_words}",
        }

    def _filtered(self, spectrum: Tensor, mask: Tensor, norm: float) -> Tensor:
        """The noise of a band from the spectrum of the signs, (N, C, H, W)."""
        noise = self._size * band_pass(spectrum, mask, (mask.shape[0], mask.shape[1]))
        if self.equal_energy:
            norms = torch.linalg.vector_norm(noise, dim=(1, 2, 3), keepdim=True)
            noise = noise * (norm / norms.clamp_min(torch.finfo(noise.dtype).tiny))
        return noise

    def _picture_axes(self, masks: np.ndarray) -> dict[str, np.ndarray]:
        _, height, width = masks.shape
        sizes = {"picture": self.pictures, "channel": 3, "row": height, "column": width}
        return {name: np.arange(size) for name, size in sizes.items()} if self.pictures else {}

    def _pictures(self, subject: Subject, masks: np.ndarray) -> dict[str, tuple[Quantity, np.ndarray]]:
        """Masks, and the first images without and with the noise of every band, as colours."""
        if not self.pictures:
            return {}
        inputs = pixels.first_inputs(subject, self.pictures)
        spectrum, norm = torch.fft.rfft2(self._signs_of(range(len(inputs)), inputs)), self._norm(subject)
        noisy = [inputs + self._filtered(spectrum, torch.from_numpy(mask).to(inputs), norm) for mask in masks]
        image, place = ("channel", "row", "column"), ("band", "row", "column")
        shifted = np.fft.fftshift(masks > 0, axes=(1, 2)).astype(np.uint8)
        return {
            "mask": (Quantity("1 where the band passes, zero frequency in the centre", dims=place), shifted),
            "image": (Quantity("image", dims=("picture", *image)), pixels.colours(subject, inputs)),
            "noisy_image": (
                Quantity("image with the noise of a band", dims=("band", "picture", *image)),
                np.stack([pixels.colours(subject, x, like=inputs) for x in noisy]),
            ),
        }

    @property
    def _size(self) -> float:
        sizes = parse_numbers("eps", self.eps)
        if len(sizes) != 1:
            raise ValueError(f"eps={self.eps} means {len(sizes)} results; measure each of its variants()")
        return sizes[0]

    def _masks(self, subject: Subject) -> np.ndarray:
        """M_f of every band, (band, H, W)."""
        inputs = subject.batches[0][0]
        if not isinstance(inputs, Tensor) or subject.traits.whole == "both":
            got = "a loss that calls the model" if subject.traits.whole == "both" else structure.kind_of(inputs)
            raise ValueError(
                f"noise is added to the model's input, which has to be one tensor (N, C, H, W); got {got}; "
                "measure it with a loss of (outputs, targets) on image data"
            )
        if inputs.ndim != 4 or not inputs.is_floating_point():
            raise ValueError(
                f"noise needs images (N, C, H, W) of floating-point numbers, got {tuple(inputs.shape)} {inputs.dtype}; "
                "measure it on image data"
            )
        height, width = inputs.shape[-2:]
        centres = parse_numbers("bands", self.bands)
        return np.stack([RINGS[self.ring](height, width, f - self.half_width, f + self.half_width) for f in centres])

    def _norm(self, subject: Subject) -> float:
        """Root mean square over the bands of the expected norm of an image's noise, E |noise|^2 = eps^2 C |M_f|^2."""
        counts = (self._masks(subject).astype(float) ** 2).sum(axis=(1, 2))
        channels = subject.batches[0][0].shape[1]
        return float(self._size * np.sqrt(channels * counts[counts > 0].mean())) if counts.any() else 0.0

    def _signs(self, subject: Subject, batch: int, inputs: Tensor) -> Tensor:
        """Random signs of every image, seeded by its index in the data, so that the batch size does not matter."""
        start = sample_statistics.first_row(subject, batch)
        return self._signs_of(range(start, start + len(inputs)), inputs)

    def _signs_of(self, rows: Iterable[int], inputs: Tensor) -> Tensor:
        seeds = (derived_seed(self.seed, row) for row in rows)
        return torch.stack([signs(tuple(inputs.shape[1:]), seed) for seed in seeds]).to(inputs)
