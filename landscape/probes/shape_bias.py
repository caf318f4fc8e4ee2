"""Measure whether a network decides by shape or by texture (Geirhos et al. 2019, arXiv 1811.12231)."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from landscape.data import cue_conflict, decoding, file_contents, structure
from landscape.data.dataset import Images
from landscape.data.preprocessing import Resize, parse_crop
from landscape.headline import Headline
from landscape.options import OptionError
from landscape.probe import Plan, Probe, Quantity, Unit, Values
from landscape.subject import members, weights_cache
from landscape.subject.loading.further_data import images_of
from landscape.subject.loading.identity import protocol
from landscape.subject.spec import Spec
from landscape.subject.subject import Subject

WHAT = "cue conflicts"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Conflicts:
    """Pictures with the categories of their shape and of their texture."""

    images: Images  # their targets are not used
    shape: np.ndarray  # (N,) positions in `names`
    texture: np.ndarray
    names: tuple[str, ...]  # of the categories
    average: np.ndarray  # (classes, category)
    left_out: int  # pictures of other categories
    in_words: str


@dataclass(frozen=True)
class ShapeBias(Probe):
    """The share of decisions for the shape among those for the shape or the texture of cue-conflict pictures.

    A decision is the category with the largest mean probability of its classes. Pictures come from a folder of files
    such as cat1-elephant2.png; without one they are made of the samples: the phase of the Fourier transform of one
    image (shape) with the amplitude of another (texture). Standard errors are over pictures.
    """

    name: ClassVar[str] = "shape-bias"
    places: ClassVar[Mapping[str, Sequence[str]]] = {"cues": (), "mapping": ()}
    headlines: ClassVar[Sequence[Headline]] = (
        Headline("shape bias", "shape_bias", column=17, title="shape bias",
                 definition="shape decisions among shape and texture decisions"),
        Headline("by shape", "shape_accuracy"),
        Headline("by texture", "texture_accuracy"),
    )  # fmt: skip

    cues: Annotated[
        str,
        "folder of cue-conflict pictures named like cat1-elephant2.png; default: phase and amplitude of the samples",
    ] = ""
    mapping: Annotated[
        str, "JSON file {category: [class numbers]}, for 1000 classes say; default: the names of the classes"
    ] = ""

    def identity(self, subject: Subject) -> dict[str, Any]:
        """The parameters, with names and content of the pictures and the content of the mapping for their paths."""
        return {"cues": self._contents, "mapping": self._categories(subject)}

    def plan(self, subject: Subject) -> Plan:
        found = self._conflicts(subject)
        if found.left_out:
            _log.info("%d pictures are left out: their categories are no classes of the model", found.left_out)
        each = ("category",)
        return Plan(
            over={"batch": np.arange(-(-len(found.shape) // subject.batch_size))},
            axes={"category": np.arange(len(found.names))},
            labels={"category_name": (Quantity("category of the shape", dims=each), np.array(found.names))},
            quantities={
                "pictures": Quantity("pictures", dims=each),
                "by_shape": Quantity("decisions for the shape", dims=each),
                "by_texture": Quantity("decisions for the texture", dims=each),
            },
            summaries={
                "category_bias": Quantity(
                    "shape bias of the pictures of a shape", dims=each, bounds="share", error="pictures"
                ),
                "shape_bias": Quantity(
                    "shape decisions among shape and texture decisions", bounds="share", error="pictures"
                ),
                "shape_accuracy": Quantity("share of decisions for the shape"),
                "texture_accuracy": Quantity("share of decisions for the texture"),
            },
            facts={
                "source": found.in_words,
                "left_out": found.left_out,
                "protocol": f"{protocol(subject)}, {len(found.shape)} {found.in_words}",
            },
        )

    def measure(self, subject: Subject, unit: Unit) -> Values:
        (batch,), found = unit.index, self._conflicts(subject)
        rows = slice(batch * subject.batch_size, (batch + 1) * subject.batch_size)
        pixels = found.images.inputs[rows]
        inputs: Any = found.images.normalised(pixels.to(subject.device)).to(subject.dtype)
        if subject.members:
            positions = torch.arange(rows.start, rows.start + len(pixels), device=subject.device)
            inputs = members.Positioned(inputs, positions)
        with subject.evaluating():
            probabilities = structure.logits_in(subject.outputs(inputs)).double().softmax(dim=1).detach().cpu().numpy()
        decision, shape = (probabilities @ found.average).argmax(axis=1), found.shape[rows]
        count = partial(np.bincount, minlength=len(found.names))
        return {
            "pictures": count(shape).astype(float),
            "by_shape": count(shape, decision == shape),
            "by_texture": count(shape, decision == found.texture[rows]),
        }

    def reduce(self, data: Mapping[str, np.ndarray]) -> Values:
        """Shares over all finished pictures; NaN where no picture was decided by either."""
        done = data["done"] == 1
        pictures, shape, texture = (
            np.where(done[:, None], data[name], 0.0).sum(axis=0) for name in ("pictures", "by_shape", "by_texture")
        )
        category, category_se = _share(shape, shape + texture)
        bias, bias_se = _share(shape.sum(), (shape + texture).sum())
        with np.errstate(invalid="ignore", divide="ignore"):
            accuracies = shape.sum() / pictures.sum(), texture.sum() / pictures.sum()
        return {
            "category_bias": category, "category_bias_se": category_se, "category_bias_se.n": shape + texture,
            "shape_bias": bias, "shape_bias_se": bias_se, "shape_bias_se.n": (shape + texture).sum(),
            "shape_accuracy": accuracies[0], "texture_accuracy": accuracies[1],
        }  # fmt: skip

    def _categories(self, subject: Subject) -> dict[str, list[int]]:
        clean, spec = images_of(subject, WHAT), subject.spec or Spec()
        classes = outputs_of_model(subject)
        if self.mapping:
            return cue_conflict.read_mapping(Path(self.mapping).expanduser(), classes)
        return cue_conflict.class_names(spec.data or clean.name, classes)

    def _conflicts(self, subject: Subject) -> Conflicts:
        categories = tuple((name, *of) for name, of in self._categories(subject).items())
        return conflicts(subject, self.cues, categories, self._contents)

    @property
    def _contents(self) -> tuple[tuple[str, str], ...]:
        """Name and digest of every picture."""
        cues = cue_conflict.listed(Path(self.cues).expanduser()) if self.cues else []
        return tuple((cue.path.name, file_contents.file_sha256(cue.path)) for cue in cues)


@weights_cache.once_per_weights
def conflicts(
    subject: Subject, cues: str, categories: tuple[tuple[Any, ...], ...], contents: tuple[tuple[str, str], ...]
) -> Conflicts:
    """The pictures to decide, with their categories; `contents` tells them from others of the same names.

    Raises:
        OptionError: none of the pictures is of two categories of the model.
    """
    clean, classes = images_of(subject, WHAT), outputs_of_model(subject)
    mapping = {str(name): list(of) for name, *of in categories}
    names, average = tuple(mapping), cue_conflict.matrix_of(mapping, classes)
    if not cues:
        of_class = {number: i for i, numbers in enumerate(mapping.values()) for number in numbers}
        made, shape, texture = cue_conflict.recombined(clean.inputs.cpu(), clean.targets.cpu())
        pairs = [
            (of_class.get(s, -1), of_class.get(t, -1)) for s, t in zip(shape.tolist(), texture.tolist(), strict=True)
        ]
        kept = [i for i, (s, t) in enumerate(pairs) if s >= 0 and t >= 0 and s != t]
        pixels, words = made[kept], "pictures with the phase of one sample and the amplitude of another (generated)"
    else:
        listed = cue_conflict.listed(Path(cues).expanduser())
        pairs = [
            (names.index(cue.shape), names.index(cue.texture)) if {cue.shape, cue.texture} <= set(names) else (-1, -1)
            for cue in listed
        ]
        kept = [i for i, (s, _) in enumerate(pairs) if s >= 0]
        pixels = decoded([listed[i].path for i in kept], cues, subject) if kept else torch.empty(0)
        words = f"pictures of {Path(cues).name}"
    if not kept:
        there = ", ".join(sorted({cue.shape for cue in listed})[:16]) if cues else "one of them each"
        known = f"{', '.join(names[:16])}{' ...' * (len(names) > 16)}"
        raise OptionError(
            f"--cues {cues or 'of the samples'}: no picture has shape and texture among the categories {known}; the "
            f'pictures are of {there}; give --mapping FILE.json such as {{"cat": [281, 282], "dog": [151, 152]}}'
        )
    of_pictures = np.array([pairs[i] for i in kept])
    images = Images(pixels, torch.zeros(len(kept), dtype=torch.long), cues, classes, clean.size, clean.mean, clean.std)
    return Conflicts(images, of_pictures[:, 0], of_pictures[:, 1], names, average, len(pairs) - len(kept), words)


def decoded(paths: list[Path], name: str, subject: Subject) -> Tensor:
    """Pictures as (N, 3, size, size) uint8, resized as the subject's data are."""
    spec, size = subject.spec or Spec(), images_of(subject, WHAT).size
    own = spec.interpolation or spec.crop
    resize = Resize(spec.interpolation or "bilinear", parse_crop(spec.crop) if spec.crop else 1.0) if own else None
    pictures = (decoding.Picture(i, str(path), str(path)) for i, path in enumerate(paths))
    return torch.from_numpy(
        decoding.decoded(pictures, name=name, count=len(paths), of=len(paths), size=size, resize=resize)
    )


@weights_cache.once_per_weights
def outputs_of_model(subject: Subject) -> int:
    """Number of classes of the model."""
    inputs, _ = subject.example()
    with subject.evaluating():
        return int(structure.logits_in(subject.outputs(inputs)).shape[1])


def _share(part: Any, whole: Any) -> tuple[np.ndarray, np.ndarray]:
    """A share and its standard error, that of a mean of zeros and ones."""
    with np.errstate(invalid="ignore", divide="ignore"):
        share = np.asarray(part / whole)
        return share, np.sqrt(share * (1 - share) / np.where(whole > 1, whole - 1, np.nan))
