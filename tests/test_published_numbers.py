"""What the pages of certificates and of invariances publish, measured again for a sample of their rows."""

import importlib
import random
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.campaign

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
DEAR = {"hessian", "density", "convexity", "trace-blocks", "flatness-batches", "flatness-noise", "step"}
REDRAWS, ROWS = 16, 20
OF_MLP = ("line-between", "hessian", "flatness-batches", "flatness-samples", "step", "noise-scale")


def benchmark(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module(name)


@pytest.mark.parametrize(("case", "network"), [*((case, "relu") for case in OF_MLP), ("surface", "resnet")])
def test_numbers_stay_the_same_where_that_is_declared(case: str, network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(benchmark("invariances", monkeypatch).violations(case, network)) == []


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # imported while a graph is traced
def test_a_sample_of_the_certificates_is_as_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificates = benchmark("certificates", monkeypatch)
    cases = sorted(set(certificates.CASES) - DEAR)
    random.Random(0).shuffle(cases)
    published = [line.split(" | ") for line in certificates.PAGE.read_text().splitlines() if line.startswith("| ")]
    coverage = {(cells[2], cells[1]): cells[-1].strip(" |") for cells in published if len(cells) == 9}
    left, chosen = ROWS, []
    while left > 0:
        chosen.append(cases.pop())
        left -= sum(case == chosen[-1] for case, _ in coverage)
    certificates.measure(chosen, REDRAWS, lines := tmp_path / "redraws.jsonl")
    again = [line.split(" | ") for line in certificates.page(certificates._lines(lines)).splitlines()]
    found = {(cells[2], cells[1]): cells[-1].strip(" |") for cells in again if len(cells) == 9 and cells[2] in chosen}
    assert len(found) >= ROWS
    assert {key: text for key, text in found.items() if "**" in text and "**" not in coverage[key]} == {}
