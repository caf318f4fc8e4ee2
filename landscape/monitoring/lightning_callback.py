"""The monitor as a callback of Lightning."""

from collections.abc import Callable
from typing import Any

from landscape.checkpoints.libraries import library
from landscape.monitoring.measurement import optimizer_in_use
from landscape.monitoring.monitor import Monitor

library("lightning")  # says in one line what to install

from lightning.pytorch import LightningModule, Trainer  # noqa: E402
from lightning.pytorch.callbacks import Callback  # noqa: E402


class LightningMonitor(Callback):
    """`landscape.Monitor` in a Lightning trainer: `Trainer(callbacks=[landscape.LightningMonitor(loss, batch)])`.

    Steps are the trainer's `global_step`, at which a run that resumes from a checkpoint continues its series. The
    optimisers are the trainer's, and rows go to its loggers by the module's `log_dict`, as `monitor/loss` and so on.

    Args:
        loss: of (outputs, targets), (outputs, batch) or (model, batch), the model being the LightningModule.
        batch: one mini-batch.
        **options: those of `landscape.Monitor`.
    """

    def __init__(self, loss: str | Callable[..., Any] = "", batch: Any = None, **options: Any) -> None:
        self._arguments, self._options = (loss, batch), options
        self.monitor: Monitor | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        options = {"optimizer": optimizer_in_use(trainer.optimizers), "start": trainer.global_step, **self._options}
        options.setdefault("on_row", lambda row: pl_module.log_dict({f"monitor/{name}": v for name, v in row.items()}))
        self.monitor = Monitor(pl_module, *self._arguments, **options)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self.monitor is not None:
            self.monitor.step(trainer.global_step)

    def teardown(self, *_: Any, **__: Any) -> None:
        if self.monitor is not None:
            self.monitor.close()
