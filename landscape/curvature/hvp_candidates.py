"""The backends of Hessian products for one set of parameters, and which is the fastest for what is planned."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from landscape.curvature import stored_graphs
from landscape.curvature.hvp_forecast import LOADED, PlannedProducts, predicted, reason
from landscape.curvature.hvp_reference import Reference, seconds_of, spent
from landscape.curvature.operator import Curvature
from landscape.options import forecast_level, format_duration

log = logging.getLogger(__name__)


class Candidates:
    """The backends that are prepared, and what each of them costs as far as it is known.

    Args:
        reference: double backward on the first mini-batch.
        kinds: names of the other backends.
        key: under which earlier runs left notes and compiled code; empty for none.
        set_size: mini-batches per product of `together`, which needs two such sets.
        prepare: makes a backend.
    """

    def __init__(
        self,
        reference: Reference,
        kinds: Sequence[str],
        key: str,
        set_size: int,
        prepare: Callable[[str, PlannedProducts], Curvature],
    ) -> None:
        self._reference, self._key, self._set_size, self._make, self._said = reference, key, set_size, prepare, ""
        self._prepared = {"kept": reference.curved}
        self._costs = {"kept": reference.costs}
        self._notes = stored_graphs.read_notes(key)
        self._earlier, self._compilation = _number(self._notes.get("products")), 0.0
        for hvp in kinds:
            stored = stored_graphs.is_stored(key, hvp)
            self._costs[hvp] = predicted(hvp, reference.costs, reference.functions, self._notes, stored=stored)
            if hvp == "compiled" and not stored:
                self._compilation = self._costs[hvp].start

    def best(self, planned: PlannedProducts) -> Curvature:
        """The fastest for the planned products, prepared."""
        while (hvp := self._fastest(planned)) not in self._prepared:
            self._prepare(hvp, planned)
        said = reason(hvp, self._costs, planned, paid=self._paid(planned) if hvp == "compiled" else 0.0)
        if said != self._said:
            log.debug("Hessian products: %s", said)
        self._said = said
        if hvp != "compiled":
            self._note(products=self._earlier + planned.total)
        return self._prepared[hvp]

    def _fastest(self, planned: PlannedProducts) -> str:
        seconds = {hvp: costs.total(planned) for hvp, costs in self._costs.items()}
        if planned.batches < 2 * self._set_size:
            seconds.pop("together", None)
        if "compiled" in seconds and self._key:
            seconds["compiled"] -= min(self._paid(planned), self._costs["compiled"].start)
        return min(seconds, key=seconds.__getitem__)

    def _paid(self, planned: PlannedProducts) -> float:
        """Seconds that compiled code would have saved in earlier runs on this network, at most those of compiling it.

        As in ski rental: compiling once so much is lost takes at most twice as long as the best choice in hindsight.
        """
        each = {hvp: costs.each / planned.at_once for hvp, costs in self._costs.items()}
        compiled = each.pop("compiled")
        return min(self._earlier * max(min(each.values()) - compiled, 0.0), self._compilation)

    def _prepare(self, hvp: str, planned: PlannedProducts) -> None:
        """Prepare and measure a backend; one that does not work with this model is no candidate any more."""
        expected, start = self._costs.pop(hvp), spent()
        if hvp == "compiled":
            level, about = forecast_level(expected.start), format_duration(expected.start)
            log.log(level, "compiling first: about %s, once for this and later runs", about)
        try:
            made = self._make(hvp, planned)
            took = spent() - start
            once, each = seconds_of(replace(made, patterns=self._reference.patterns))
        except Exception as error:  # whatever a model's code, a pass over its graph or the compiler raises
            log.debug("no %s Hessian products: %s", hvp, str(error).partition("\n")[0] or type(error).__name__)
            return
        self._prepared[hvp], self._costs[hvp] = made, replace(expected, start=0.0, once=once, each=each)
        if expected.start != LOADED:  # of what an earlier run compiled it noted the seconds
            kept = self._costs["kept"]
            self._note(kept=[0.0, kept.once, kept.each], **{hvp: [took, once, each]})

    def _note(self, **notes: object) -> None:
        self._notes |= notes
        stored_graphs.write_notes(self._key, self._notes)


def _number(noted: object) -> float:
    return float(noted) if isinstance(noted, int | float) else 0.0
