"""The monitor of a training run: sharpness and gradient noise on its first training samples, in the run folder."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np

from landscape.data.dataset import Batches
from landscape.monitoring.monitor import Monitor
from landscape.options import OptionError
from landscape.training import monitor_options, objectives, updates

FILE, SAMPLES = "monitor.h5", 64


def monitored(
    trainer: updates.Trainer, folder: Path, options: monitor_options.MonitorOptions | None, epochs_done: int
) -> AbstractContextManager[Monitor | None]:
    """The monitor of a run that has finished so many epochs; None without options.

    Measured is the cross-entropy of the first training samples, in the balanced order of the data set, without
    augmentation, mixing and label smoothing: as many as a mini-batch has, and at most `SAMPLES`. Another selection, by
    `--samples`, need not begin with them: the protocol says what they are. Under `torchrun` rank 0 measures.
    """
    if options is None:
        return nullcontext()
    if not isinstance(trainer.objective, objectives.Classification):
        raise OptionError("--monitor follows the cross-entropy of a classifier; leave it out without labels")
    images = trainer.images
    samples = min(SAMPLES, trainer.recipe.batch_size, len(images))
    batch = Batches(images.take(np.arange(samples)), samples)[0]
    start = epochs_done * trainer.schedule.per_epoch
    return Monitor(
        trainer.network, "", batch, every=options.every, overhead=options.overhead, out=folder / FILE,
        data=f"{images.name} train (first {samples} of the {len(images):,} trained on)", label=folder.name, start=start,
        overwrite=True, optimizer=trainer.optimizer, seed=trainer.seed,
    )  # fmt: skip
