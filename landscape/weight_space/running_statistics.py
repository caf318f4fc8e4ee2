"""What batch norm's running statistics are at a point of a line or plane: the meaning of `--bn`."""

from __future__ import annotations

from dataclasses import dataclass

from landscape.subject.batchnorm import INTERPOLATING, recalibration


@dataclass(frozen=True)
class RunningStatistics:
    """Frozen by default: those of the checkpoint, at every point."""

    interpolate: bool = False  # between checkpoints, together with all else that no direction moves
    recalibrate: int = 0  # mini-batches over which they are averaged anew at every point; 0 for none

    @classmethod
    def parse(cls, text: str, *, interpolate: bool = False) -> RunningStatistics:
        """The value of `--bn`; `interpolate`: whether there are checkpoints to interpolate between.

        Raises:
            OptionError: the text has no meaning.
        """
        return cls(interpolate=interpolate) if text in INTERPOLATING else cls(recalibrate=recalibration(text))

    def __str__(self) -> str:
        """As stored with the result."""
        if self.interpolate:
            return "interpolated between the checkpoints"
        return f"refreshed on {self.recalibrate} mini-batches at every point" if self.recalibrate else "frozen"


FROZEN = RunningStatistics()
OWN = RunningStatistics(interpolate=True)  # every checkpoint has its own
