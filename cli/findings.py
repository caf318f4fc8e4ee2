"""Judge each claim by its numbers, one per seed, and tabulate the verdicts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from scipy import stats

from landscape.cli.claims import Claim, Results

CONFIDENCE = 0.95
LEAST_SEEDS = 3  # for a verdict: an interval from two may be narrow, or empty, by chance
RULE = (
    "A claim holds if the 95 % interval of Student's t over seeds lies on the claimed side of zero, and fails if it "
    "lies on the other side. Otherwise, and with fewer than three seeds, we cannot tell. Small networks with short "
    "training decide little."
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
        """Half the width of the 95 % interval (Student's t) over seeds; infinite for one seed, NaN if a number is."""
        return t_interval(self.numbers)

    @property
    def verdict(self) -> Verdict:
        """See `RULE`."""
        if len(self.numbers) < LEAST_SEEDS or not abs(self.mean) > self.half_width:
            return "cannot tell"
        return "holds" if math.copysign(1, self.mean) == self.claim.sign else "fails"


def t_interval(numbers: Sequence[float]) -> float:
    """Half the width of the 95 % interval (Student's t) of a mean; infinite for one number, NaN if one is."""
    count = len(numbers)
    if count < 2:
        return math.inf
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1) * (np.std(numbers, ddof=1) / count**0.5))


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
        here = f"{finding.mean:.3g} ± {finding.half_width:.2g}" if finding.numbers else "not measured"
        each = ", ".join(f"{number:.3g}" for number in finding.numbers)
        sign = "negative" if claim.sign < 0 else "positive"
        lines.append(
            f"| {claim.statement} | {claim.source} | {claim.number} | {sign} | {claim.published} | {here} | {each} "
            f"| **{finding.verdict}** |"
        )
    verdicts = [finding.verdict for finding in findings]
    counts = ", ".join(f"{verdicts.count(word)} {word}" for word in dict.fromkeys(sorted(verdicts, reverse=True)))
    return "\n".join([*lines, "", f"In all: {counts}.", ""])
