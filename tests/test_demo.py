"""The command `demo`, from the networks to the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from landscape.cli import demo
from landscape.probes import PROBES, probe_class
from landscape.results import reader

SMALL: dict[str, dict[str, Any]] = {
    "vit_demo": {"dim": 12, "depth": 2, "heads": 2, "patch": 2},
    "resnet_demo": {"blocks": (1, 1), "width": 4},
    "alternet_demo": {"blocks": (1, 2), "msa": (0, 1), "heads": (1, 2), "width": 8, "head_dim": 8},
}


@pytest.mark.slow
def test_demo_measures_every_probe_on_every_network_that_it_applies_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smallest = {name: probe_class(name).smallest for name in PROBES}
    monkeypatch.setattr(demo, "COARSE", smallest)
    train = demo.run_training
    monkeypatch.setattr(demo, "run_training", lambda name, *args, **given: train(
        name, *args, **given, model_args=SMALL[name], fraction=0.1))  # fmt: skip
    demo.demo(out=tmp_path, epochs=1, samples=32, quiet=True)
    found: dict[str, int] = {}
    for _, data in reader.groups(tmp_path / "results.h5"):
        found[data.attrs["probe"]] = found.get(data.attrs["probe"], 0) + 1
    measurable = {name for name, entry in PROBES.items() if not entry.needs and not probe_class(name).ordered}
    assert measurable <= set(found)
    assert {name for name in measurable if found[name] < 3} == {"attention", "attention-maps", "ensemble"}
    assert (tmp_path / "report.html").stat().st_size > 100_000
