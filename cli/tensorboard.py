"""Write the epochs of a training run as TensorBoard event files."""

from functools import partial
from pathlib import Path
from typing import Any

from landscape.training.train import EpochResult

FOLDER = "tensorboard"  # in the run folder


class EventFiles:
    """Event files in the run folder, created with the first epoch; called with every finished epoch.

    Raises:
        ImportError: TensorBoard is not installed.
    """

    def __init__(self, out: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ImportError(
                "--tensorboard needs a package: pip install 'landscape-probes[tensorboard]'; or leave the option out"
            ) from None
        self._make: Any = partial(SummaryWriter, str(out / FOLDER))
        self._writer: Any = None

    def __call__(self, done: EpochResult) -> None:
        """Write one epoch, and flush it to disk."""
        if self._writer is None:
            self._writer = self._make()
        scalars = {
            "loss/train": done.train_loss, "loss/test": done.loss, "accuracy/test": done.accuracy, "lr": done.lr,
            "seconds": done.seconds,
        }  # fmt: skip
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, done.epoch)
        self._writer.flush()
