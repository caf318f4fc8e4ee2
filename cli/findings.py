"""Judge each claim by its numbers, one per seed, and tabulate the verdicts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from landscape.cli.claims import Claim, Results
from landscape.results.rounding import plus_minus
from landscape.results.statistics import mean_and_standard_error
from landscape.statistics.intervals import FEWEST, LEVEL, p_value, quantile

LEAST_SEEDS = 3  # for a verdict: two may agree by chance
RULE = (
    "A claim holds if Student's t test over seeds tells its number apart from zero, at 95 %, on the claimed side, and "
    "fails if on the other side. Otherwise, and with fewer than three seeds, we cannot tell. Intervals are given from "
    f"{FEWEST} seeds on. Small networks with short training decide little."
)
Verdict: TypeAlias = Literal["holds", "fails", "cannot tell"]


@dataclass(frozen=True)
class Finding:
    """A claim with its numbers, one per seed."""

    claim: Claim
    numbers: Sequence[float]

    @property
    def mean(self) -> float:
        """Mean over seeds; NaN if one of the numbers is."""
        return float(np.mean(self.numbers)) if len(self.numbers) else math.nan

    @property
    def half_width(self) -> float:
        """Half the width of the 95 % interval over seeds; NaN of fewer than four, or if a number is."""
        return half_width_over_seeds(self.numbers)

    @property
    def verdict(self) -> Verdict:
        """See `RULE`."""
        if len(self.numbers) < LEAST_SEEDS:
            return "cannot tell"
        mean, error = mean_and_standard_error(np.asarray(self.numbers, dtype=float))
        if not p_value(mean, error, len(self.numbers)) < 1 - LEVEL:
            return "cannot tell"
        return "holds" if math.copysign(1, self.mean) == self.claim.sign else "fails"


def half_width_over_seeds(numbers: Sequence[float]) -> float:
    """Half the width of the 95 % interval of a mean; NaN of fewer than four numbers, or if one is."""
    if not numbers:
        return math.nan
    return float(quantile(len(numbers)) * mean_and_standard_error(np.asarray(numbers, dtype=float))[1])


def findings(claims: Iterable[Claim], studies: Sequence[Results]) -> list[Finding]:
    """Every claim with its numbers from the studies, one per seed, that have all results it needs."""
    return [
        Finding(claim, [claim.compute(results) for results in studies if all(need in results for need in claim.needs)])
        for claim in claims
    ]


def markdown_table(findings: Sequence[Finding]) -> str:
    """The findings as a Markdown table, a row per claim, and the number of each verdict below it."""
    lines = [
        "| claim | source | number | claimed | published | here, 95 % over seeds | per seed | verdict |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for finding in findings:
        claim = finding.claim
        here = plus_minus(finding.mean, finding.half_width, 2) if finding.numbers else "not measured"
        each = ", ".join(f"{number:.3g}" for number in finding.numbers)
        sign = "negative" if claim.sign < 0 else "positive"
        lines.append(
            f"| {claim.statement} | {claim.source} | {claim.number} | {sign} | {claim.published} | {here} | {each} "
            f"| **{finding.verdict}** |"
        )
    verdicts = [finding.verdict for finding in findings]
    counts = ", ".join(f"{verdicts.count(word)} {word}" for word in dict.fromkeys(sorted(verdicts, reverse=True)))
    return "\n".join([*lines, "", f"In all: {counts}.", ""])
