"""The monitor as a callback of the trainer of transformers."""

from collections.abc import Callable, Mapping
from typing import Any

from landscape.checkpoints.libraries import library
from landscape.monitoring.measurement import optimizer_in_use
from landscape.monitoring.monitor import Monitor

library("transformers")  # says in one line what to install

from transformers import TrainerCallback  # noqa: E402


def loss_of_model(model: Callable[..., Any], batch: Mapping[str, Any]) -> Any:
    """The loss that a model of transformers computes from a batch with labels."""
    return model(**batch).loss


class TransformersMonitor(TrainerCallback):
    """`landscape.Monitor` in a `transformers.Trainer(..., callbacks=[landscape.TransformersMonitor(batch)])`.

    Steps are the trainer's `global_step`, at which a run that resumes from a checkpoint continues its series. The
    optimiser is the trainer's.

    Args:
        batch: one mini-batch as the collator makes it: a dictionary of tensors, with labels.
        loss: default the loss that the model itself computes from its labels.
        **options: those of `landscape.Monitor`.
    """

    def __init__(self, batch: Any = None, loss: str | Callable[..., Any] = loss_of_model, **options: Any) -> None:
        self._arguments, self._options = (loss, batch), options
        self.monitor: Monitor | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        options = {"optimizer": optimizer_in_use(given.get("optimizer")), "start": state.global_step, **self._options}
        self.monitor = Monitor(given["model"], *self._arguments, **options)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self.monitor is not None:
            self.monitor.step(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self.monitor is not None:
            self.monitor.close()
