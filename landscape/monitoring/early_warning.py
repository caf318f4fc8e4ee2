"""Announce a loss spike from the rows of a monitor, before the loss shows it."""

import math
from collections import deque
from statistics import median

SHARE, RISE = 0.05, 4.0  # of the loss, and of the median of earlier rows, that the cost of an update exceeds
EARLIER, LEAST = 20, 10  # rows before those in question, and the least of them
IN_A_ROW = 2  # rows above both


class EarlyWarning:
    """Follows the second-order cost of the updates, actual - predicted change of the loss, which is about u'Hu / 2.

    Critical sharpness over its threshold is about this cost over -g'u. On mini-batches g'u has either sign, and single
    rows lie far above the threshold in sound trainings too; the cost does not depend on that sign.
    """

    def __init__(self) -> None:
        self._costs: deque[float] = deque(maxlen=EARLIER + IN_A_ROW)
        self.above = 0  # rows in a row

    def alarm(self, loss: float, actual: float, predicted: float) -> float:
        """1 where a spike is announced, 0 where not, NaN where that is not known: no update, or few rows before."""
        cost, earlier = actual - predicted, [*self._costs][:-IN_A_ROW]
        if math.isfinite(cost):
            self._costs.append(cost)
        if not math.isfinite(cost) or len(earlier) < LEAST:
            return math.nan
        above = cost > max(RISE * median(earlier), SHARE * (loss - actual))
        self.above = self.above + 1 if above else 0
        return float(self.above >= IN_A_ROW)
