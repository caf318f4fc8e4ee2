"""Further data sets, or losses, for a subject: `NAME=DATA[:SPLIT][@LOSS]`; and its samples under a corruption."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args

import torch

from landscape import data as datasets
from landscape.data import cifar, corruptions, dataset, file_contents, numpy_files, structure
from landscape.data.masks import with_unlabelled
from landscape.options import OptionError, alternatives, did_you_mean, require
from landscape.subject import mc_dropout, weights_cache
from landscape.subject.loading import adaptation, checks, load, next_tokens
from landscape.subject.loading.preprocessing import DataObject, load_images, resolved, with_provider
from landscape.subject.losses import MEANINGS, NAMES, Loss, cross_entropy, loss_of
from landscape.subject.spec import NO_OTHER_SPLIT, Spec, Split
from landscape.subject.subject import Origin, Subject

FORM = "NAME=DATA[:SPLIT][@LOSS], each NAME once, such as code=code.npy:test or exact=@score.py:exact_match"
SPLITS = get_args(Split)
FILES = (numpy_files.SUFFIX, ".npz", ".parquet")  # suffixes of data, which no module has


@dataclass(frozen=True)
class Further:
    """A data set by name; what is "" is that of the subject."""

    name: str
    data: str = ""
    split: str = ""
    loss: str = ""  # a name, or file.py:callable


def parse_further(option: str, texts: Sequence[str]) -> list[Further]:
    """Parse the values of an option.

    A split is what follows the last colon if it is one; a loss what follows the last @ if it is a known name or
    contains a colon.

    Raises:
        OptionError: one has no name or says nothing, a name is there twice, or a data set is followed by something else
            than a split or a loss.
    """
    found: list[Further] = []
    for text in texts:
        name, equals, rest = text.partition("=")
        before, at, loss = rest.rpartition("@")
        if not at or not (loss in NAMES or ":" in loss):
            if at and (_is_complete(before) or before.endswith(tuple(f":{split}" for split in SPLITS))):
                expected = alternatives([*NAMES, "file.py:callable"])
                raise OptionError(
                    f"--{option} {name}: {loss!r} is no loss; expected {expected}{did_you_mean(loss, NAMES)}"
                )
            before, loss = rest, ""
        data, colon, split = before.rpartition(":")
        if split not in SPLITS:
            if colon and _is_complete(data):
                raise OptionError(f"--{option} {name}: {split!r} is no split; expected {alternatives(SPLITS)}")
            data, split = before, ""
        known = [one.name for one in found]
        require(bool(equals and name.strip() and (data or split or loss)), option, text, FORM)
        require(name.strip() not in known, option, text, FORM)
        found.append(Further(name.strip(), data, split, loss))
    return found


def _is_complete(data: str) -> bool:
    """Whether the text names data, or none, so that what follows a colon or @ is meant as a split or a loss."""
    return not data or data in datasets.NAMES or ".py:" in data or Path(data).suffix in FILES


def short_name(subject: Subject) -> str:
    """The name of a subject's data without folders and suffix, for axes and tables."""
    name = subject.data.name
    path, _, function = name.rpartition(":")
    return function if path else Path(name).stem or name


@weights_cache.once_per_weights
def further_subjects(subject: Subject, further: tuple[Further, ...]) -> tuple[Subject, ...]:
    """The same network on other data, as many samples of each and as preprocessed as its own, without augmentation.

    Raises:
        FileNotFoundError, ValueError: the data or the loss cannot be used; see the message.
    """
    found = []
    for one in further:
        try:
            found.append(_on(subject, one))
        except (FileNotFoundError, ValueError) as error:
            if type(error) not in (FileNotFoundError, ValueError, OptionError):  # made from more than a text
                raise
            reason = str(error)  # which may begin with an option that was not given
            reason = reason[2:] if reason.startswith(("--loss ", "--data ")) else reason
            raise type(error)(f"--also {one.name}: {reason}") from error
    return tuple(found)


def _on(subject: Subject, further: Further) -> Subject:
    own = subject.spec or Spec(batch_size=subject.batch_size)
    loss = loss_of(further.loss) if further.loss else _own_loss(subject, further.name)
    changes = {"data": further.data, "split": cast(Split, further.split)}
    spec = replace(own, augment=False, recipe="", loss=loss.name, **{k: v for k, v in changes.items() if v})  # type: ignore[arg-type]
    if further.data or own.data or subject.data.name != "in memory":
        spec, samples = _read(subject, spec, loss)
    else:
        samples = _in_memory(subject, spec, loss, further.split)
    found = Subject(
        model=subject.model,
        batches=samples if isinstance(samples, dataset.BatchList) else dataset.Batches(samples, spec.batch_size),
        label=further.name, spec=spec, checkpoint=subject.checkpoint, seed=subject.seed,
        origin=Origin(original=subject.origin.original, objects=subject.origin.objects),
    )  # fmt: skip
    with load.measuring(found):
        checks.refuse_vocabulary(found)
        found = next_tokens.with_next_tokens(adaptation.adapted(found, loss))
        checks.refuse_misfit(found)
        return mc_dropout.with_members(found, subject.members)


def _read(subject: Subject, spec: Spec, loss: Loss) -> tuple[Spec, dataset.Images | dataset.BatchList]:
    """The data that a spec names, or the checkpoint, for a loss; and the spec with its preprocessing."""
    if spec.block_size is None and spec.data.endswith(numpy_files.SUFFIX) and subject.images is not None:
        spec = replace(spec, block_size=subject.images.inputs.shape[1] if subject.images.sequences else None)
    layout = replace(structure.BatchLayout.of(subject.model.forward), called_by_loss=loss.takes_model)
    given = DataObject(None, None, lambda: layout, loss.takes_batch, loss.function is cross_entropy)
    spec, samples = resolved(spec, with_provider(spec, subject.checkpoint), subject.checkpoint, given)
    return spec, samples.for_device(subject.device)


def _in_memory(subject: Subject, spec: Spec, loss: Loss, split: str) -> dataset.Images | dataset.BatchList:
    """The subject's own samples, which were made in Python, for another loss.

    Raises:
        ValueError: they have no other split; or their targets are those of the cross-entropy.
    """
    if split:
        raise ValueError(NO_OTHER_SPLIT)
    samples = subject.batches if isinstance(subject.batches, dataset.BatchList) else subject.images
    if samples is None:
        samples = dataset.BatchList(list(subject.batches), list(subject.batches), subject.data.name)
    if loss.function is cross_entropy:
        return with_unlabelled(samples, spec.ignore_index, keep=spec.ordered)
    if subject.dense or next_tokens.of_tokens(subject):
        raise ValueError(
            "for the cross-entropy the targets of data made in Python are the next tokens, or negative without a "
            "label, which another loss would not expect; name the data: --data file.py:function"
        )
    return samples


def _own_loss(subject: Subject, name: str) -> Loss:
    if subject.losses in MEANINGS:
        return Loss(subject.losses, subject.traits.name)
    if not subject.traits.name:
        raise ValueError(f"the loss was made in Python and cannot be named for the data {name}; add @file.py:callable")
    return loss_of(subject.traits.name)


AUTO, GENERATED = "auto", "generated"
DESIGNED_FOR = 224  # px, the images that the severities of the package were chosen for
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """Where corrupted samples come from."""

    folder: Path | None  # of files; None: they are made
    names: tuple[str, ...]  # the corruptions that it has
    in_words: str  # for the protocol
    made: Any = None  # package and seed of those that are made

    def identity(self, subject: Subject, names: Sequence[str], severities: Sequence[int]) -> Any:
        """What tells these corruptions from others in the digest of a run: of files the content that is read.

        Of ImageNet-C, whose pictures would take minutes to read, the names and sizes of the pictures.
        """
        if self.folder is None:
            return self.made
        if _is_cifar(self.folder):
            samples = (subject.spec or Spec()).samples
            return [[name, *cifar.content(self.folder, name, severities, samples)] for name in names]
        places = [(name, severity) for name in names for severity in severities]
        return [[*place, file_contents.listing_sha256(corruptions.pictures(self.folder, *place))] for place in places]

    def images(self, subject: Subject, name: str, severity: int, seed: int) -> dataset.Images:
        """The subject's samples under a corruption, in their order.

        Raises:
            FileNotFoundError, ValueError: a file is missing, or does not match the clean samples.
        """
        clean = images_of(subject)
        if self.folder is None:
            made = corruptions.kept(clean.inputs.cpu(), name, severity, seed)
            return replace(clean, inputs=made).for_device(subject.device)
        spec = subject.spec or Spec()
        if _is_cifar(self.folder):
            short = next(key for key, (place, _) in cifar.FOLDERS.items() if place == self.folder.name)
            spec = replace(spec, data=f"{short}:{name}:{severity}", data_root=self.folder.parent)
        else:  # pictures that already have the size of the network
            crop = "1" if spec.crop else ""
            spec = replace(spec, data=str(corruptions.pictures(self.folder, name, severity)), crop=crop)
        found = load_images(spec, subject.checkpoint)
        assert isinstance(found, dataset.Images)
        if not torch.equal(found.targets, clean.targets.cpu()):
            raise ValueError(
                f"{spec.data} has {len(found)} samples with other classes than the {len(clean)} of "
                f"{subject.data.in_words}, in whose order it must be; give the clean images it was made of with --data"
            )
        return replace(found, mean=clean.mean, std=clean.std).for_device(subject.device)


def source_of(subject: Subject, wanted: str, names: Sequence[str], seed: int) -> Source:
    """The source that `auto`, `generated` or a folder means for the samples of a subject.

    `auto` takes the files of CIFAR-10-C or CIFAR-100-C under the data root where they are, else makes the corruptions.

    Raises:
        OptionError: the folder holds no such files, or not the corruption asked for.
        ValueError: the samples are no images of 8 bits, or the package that makes corruptions is not installed.
    """
    clean = images_of(subject)
    folder = None if wanted in (AUTO, GENERATED) else Path(wanted).expanduser()
    spec = subject.spec or Spec()
    if wanted == AUTO and spec.split == "test":
        folder = cifar.folder_of(clean.name, spec.data_root)
    if folder is None:
        made = corruptions.maker()
        stronger = f", severities as for {DESIGNED_FOR} px" if clean.size < DESIGNED_FOR else ""
        if stronger:
            _log.info(
                "corruptions are generated by %s; its severities are made for %d px and stronger on images of %d px "
                "than the files of CIFAR-10-C", made, DESIGNED_FOR, clean.size,
            )  # fmt: skip
        words = f"corruptions generated by {made} (seed {seed}){stronger}"
        return Source(None, corruptions.SETS["all"], words, [made, seed])
    there = cifar.names_in(folder) if _is_cifar(folder) else corruptions.names_in(folder)
    if not there:
        raise OptionError(
            f"--source {folder} holds neither CORRUPTION.npy files in a folder named CIFAR-10-C or CIFAR-100-C, nor "
            "CORRUPTION/SEVERITY/CLASS/ pictures; give such a folder, auto or generated"
        )
    if spec.split != "test":
        raise OptionError(f"--split {spec.split} has no corrupted files; give --split test or --source generated")
    for name in names:
        if name not in there:
            hint = did_you_mean(name, there)
            raise OptionError(f"--corruptions {name} is not in {folder}; it has {', '.join(there)}{hint}")
    return Source(folder, there, f"corruptions of {folder.name}")


def images_of(subject: Subject, what: str = "corruptions") -> dataset.Images:
    """The subject's samples, which must be images of 8 bits per channel. Raises ValueError: they are something else."""
    clean = subject.images
    if clean is None or clean.inputs.dtype != torch.uint8 or clean.inputs.ndim != 4 or clean.inputs.shape[1] != 3:
        got = f"{tuple(clean.inputs.shape)} {clean.inputs.dtype}" if clean is not None else "mini-batches of a callable"
        raise ValueError(
            f"{what} need images (N, 3, H, W) of uint8, got {got}; measure it on --data cifar10 or an image folder"
        )
    return clean


def with_images(subject: Subject, images: dataset.Images) -> Subject:
    """The same model on other images, in mini-batches of the same size."""
    assert isinstance(subject.batches, dataset.Batches)
    return replace(subject, batches=replace(subject.batches, images=images))


def _is_cifar(folder: Path) -> bool:
    return folder.name in {place for place, _ in cifar.FOLDERS.values()}
