"""The epochs of a training run for TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from landscape.training.train import Progress

FOLDER = "tensorboard"  # in the run folder


class Board:
    """Event files in the run folder, made with the first epoch; called with every finished one.

    Raises:
        ImportError: the optional package is absent.
    """

    def __init__(self, out: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ImportError(
                "--tensorboard needs a package: pip install 'landscape-probes[tensorboard]'; or go without"
            ) from None
        self._make: Any = SummaryWriter
        self._folder = out / FOLDER
        self._writer: Any = None

    def __call__(self, done: Progress) -> None:
        """Write one epoch, for good."""
        if self._writer is None:
            self._writer = self._make(str(self._folder))
        scalars = {
            "loss/train": done.train_loss, "loss/test": done.loss, "accuracy/test": done.accuracy, "lr": done.lr,
            "seconds": done.seconds,
        }  # fmt: skip
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, done.epoch)
        self._writer.flush()
