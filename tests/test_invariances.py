"""What must not change a number: the cases of the benchmark that take seconds, on its networks."""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
CASES = (
    *(
        (case, "relu")
        for case in ("line-between", "hessian", "flatness-batches", "flatness-samples", "step", "noise-scale")
    ),
    ("surface", "resnet"),
)


@pytest.mark.campaign
@pytest.mark.parametrize(("case", "network"), CASES)
def test_numbers_stay_the_same_where_that_is_declared(case: str, network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    invariances = importlib.import_module("invariances")
    assert list(invariances.violations(case, network)) == []
