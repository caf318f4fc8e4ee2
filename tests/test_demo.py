"""The command `demo`, from the networks to the report."""

from __future__ import annotations

from pathlib import Path

import pytest

from landscape.cli import demo
from landscape.probes import PROBES, probe_class
from landscape.results import reader


@pytest.mark.slow
def test_demo_measures_every_probe_on_every_network_that_it_applies_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smallest = {name: probe_class(name).smallest for name in PROBES}
    monkeypatch.setattr(demo, "COARSE", smallest)
    demo.demo(out=tmp_path, epochs=1, samples=32, quiet=True)
    found: dict[str, int] = {}
    for _, data in reader.groups(tmp_path / "results.h5"):
        found[data.attrs["probe"]] = found.get(data.attrs["probe"], 0) + 1
    measurable = {name for name, entry in PROBES.items() if not entry.needs and not probe_class(name).ordered}
    assert measurable <= set(found)
    assert {name for name in measurable if found[name] < 3} == {"attention", "attention-maps", "ensemble"}
    assert (tmp_path / "report.html").stat().st_size > 100_000
