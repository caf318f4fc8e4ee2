"""The same network on other samples of its data, or on the same ones in other mini-batches."""

from dataclasses import replace

import numpy as np

from landscape.data.dataset import Batches, BatchList, Images
from landscape.subject.spec import NO_OTHER_SPLIT, Spec, Split
from landscape.subject.subject import Subject


def rebatched(subject: Subject, batch_size: int) -> Subject:
    """The same samples in mini-batches of another size."""
    if not isinstance(subject.batches, Batches) or subject.batches.batch_size == batch_size:
        return subject
    spec = replace(subject.spec, batch_size=int(batch_size)) if subject.spec else None
    return replace(subject, batches=replace(subject.batches, batch_size=int(batch_size)), spec=spec)


def on_split(subject: Subject, split: Split, samples: int | str) -> Subject:
    """The same model on another split of its data.

    Raises:
        ValueError: the data were made in Python and have no other split.
    """
    if subject.origin.part is None:
        raise ValueError(NO_OTHER_SPLIT)
    spec = replace(subject.spec, split=split, samples=samples) if subject.spec else None
    return _on(subject, subject.origin.part(split, samples).for_device(subject.device), spec)


def on_rows(subject: Subject, rows: np.ndarray) -> Subject:
    """The same model on some of its samples."""
    assert subject.images is not None
    return _on(subject, subject.images.take(rows), None)


def on_first(subject: Subject, samples: int) -> Subject:
    """The first of the samples, in the same order; all of them for batches made in Python."""
    if subject.images is None or samples >= len(subject):
        return subject
    images = replace(subject.images, inputs=subject.images.inputs[:samples], targets=subject.images.targets[:samples])
    return _on(subject, images, replace(subject.spec, samples=int(samples)) if subject.spec else None)


def _on(subject: Subject, samples: Images | BatchList, spec: Spec | None) -> Subject:
    if isinstance(samples, BatchList):
        return replace(subject, batches=samples, spec=spec)
    batches = subject.batches
    batches = replace(batches, images=samples) if isinstance(batches, Batches) else Batches(samples, subject.batch_size)
    return replace(subject, batches=batches, spec=spec)
