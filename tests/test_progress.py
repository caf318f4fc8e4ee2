"""Progress: the rate that a running probe prints, and the bar."""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from analytic import run_probe, tanh_net

from landscape.probe import Probe, listening, report_products, report_units, report_workers
from landscape.probes.density import Density
from landscape.probes.hessian import Hessian
from landscape.probes.trace import Trace
from landscape.probes.variance import Variance
from landscape.reporting import progress
from landscape.reporting.event_log import event_log
from landscape.reporting.progress import Advice, Progress


def test_set_up_before_the_first_unit_does_not_count_in_the_rate_nor_does_an_earlier_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock(monkeypatch)
    with Progress("surface") as report:
        clock.now += 120
        report_units(50, 100)
        report(51, 100)
        report_units(0, 41)
        for finished in (1, 21):
            clock.now += 40
            report(finished, 41)
    said = ["surface 1/41, 2 %", "surface 21/41, 51 %, 0.5/s, about 40 s left"]
    assert capsys.readouterr().err.splitlines()[-2:] == said


@pytest.mark.parametrize("place", ["terminal", "notebook", "notebook without widgets", "file", "quiet terminal"])
def test_in_python_a_bar_appears_after_a_second_where_it_can_be_seen(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([0.0, 0.9, 1.1, 60.0])
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(now)))
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: place.endswith("terminal"))
    monkeypatch.setattr(progress, "in_notebook", lambda: "notebook" in place)
    monkeypatch.setattr(progress, "find_spec", lambda name: None if "widgets" in place else object())
    shown = place in ("terminal", "notebook")
    with progress.Progress("hessian", quiet=place.startswith("quiet"), after=1.0, lines=False) as report:
        report(1, 4)
        assert report._bar is None
        report(2, 4)
        assert (report._bar is not None) == shown
        report(4, 4)


def test_a_bar_shows_a_label_as_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True)
    with Progress("trace vit[best] :x: a[/]", lines=False) as report:
        report(1, 4)
    assert "trace vit[best] :x: a[/]" in capsys.readouterr().err


def test_lines_name_the_workers_and_appear_while_a_unit_takes_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.02)
    with event_log(tmp_path / "log.jsonl"), Progress("surface"):
        report_units(3, 9)
        report_workers(2)
        until = time.monotonic() + 10
        while not (said := capsys.readouterr().err) and time.monotonic() < until:
            time.sleep(0.01)
    assert said.startswith("surface 3/9, 33 %, 2 workers\n")
    events = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    (counted, *_) = [event for event in events if event["event"] == "progress"]
    assert (counted["finished"], counted["total"], counted["workers"], counted["rate"]) == (3, 9, 2, None)
    assert [events[0]["event"], events[-1]["event"]] == ["start", "end"]


# --- forecasts, and products within a unit ---


class Clock:
    """Time that passes only when told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: self.now))

    def products(self, count: int, seconds: float) -> None:
        for _ in range(count):
            self.now += seconds
            report_products(1)


def test_the_forecast_of_products_comes_from_the_first_unit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock(monkeypatch)
    with Progress("hessian vit", advice=Advice(batches=True)) as report:
        report_units(0, 64)
        report_products(7)  # of a benchmark before the sweep
        clock.now += 20
        report_products(per_unit=20)
        clock.products(16, 0.1)
        report(1, 64)
        assert not capsys.readouterr().err
        clock.products(1, 0.1)
        for unit in range(2, 65):
            report(unit, 64)
    assert capsys.readouterr().err == "hessian vit: about 2 min\n"


def test_a_long_unit_shows_its_products_and_the_forecast_names_a_shorter_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock(monkeypatch)
    with Progress("hessian vit", advice=Advice(batches=True)) as report:
        report_units(0, 64)
        report_products(per_unit=20)
        clock.products(12, 5.0)
        report(1, 64)
    assert capsys.readouterr().err.splitlines() == [
        "hessian vit: about 1 h 47 min; --batches 6 takes about 10 min",
        "hessian vit 0/64, 0 %, product 6 of about 20",
        "hessian vit 0/64, 0 %, product 12 of about 20",
    ]


def test_a_run_of_less_than_ten_seconds_has_no_forecast(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock(monkeypatch)
    for seconds in (0.15, 0.16):
        with Progress("hessian vit", advice=Advice(batches=True)) as report:
            report_units(0, 4)
            report_products(per_unit=16)
            for unit in range(4):
                clock.products(16, seconds)
                report(unit + 1, 4)
    assert capsys.readouterr().err == "hessian vit: about 10 s\n"


@pytest.mark.slow
def test_lines_during_a_long_unit_say_its_products(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.02)
    with Progress("hessian gpt", advice=Advice(silent=True)):
        report_units(0, 1)
        report_products(per_unit=64)
        report_products(5)
        time.sleep(0.2)
    assert "hessian gpt 0/1, 0 %, product 5 of about 64" in capsys.readouterr().err.splitlines()


def test_units_without_products_have_a_forecast_from_ten_seconds_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock, advice = Clock(monkeypatch), Advice(samples=1024, batch_size=128)
    for seconds, said in (
        (0.01, []),
        (1.2, []),
        (1.3, ["fourier: about 10 s"]),
        (300.0, ["fourier: about 40 min; --samples 256 takes about 10 min"]),
    ):
        with Progress("fourier", advice=advice) as report:
            report_units(0, 8)
            for unit in range(1, 9):
                clock.now += seconds
                report(unit, 8)
        assert [line for line in capsys.readouterr().err.splitlines() if "about" in line and "left" not in line] == said


@pytest.mark.parametrize("quiet", [False, True])
def test_in_python_only_long_runs_have_a_forecast(
    quiet: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock(monkeypatch)
    for seconds in (0.01, 1.0):
        with Progress("trace", quiet=quiet, after=1.0, lines=False, advice=Advice(at_most=True)):
            report_units(0, 8)
            report_products(per_unit=32)
            clock.products(3, seconds)
    assert capsys.readouterr().err == ("" if quiet else "trace: at most 4 min\n")


@pytest.mark.parametrize(
    ("probe", "said"),
    [
        (Hessian(), "; --batches 4 takes about 10 min"),
        (Hessian(scope="dataset"), "; --samples 4 takes about 8 min"),
        (Hessian(per_layer=True), "; --samples 4 takes about 8 min"),
        (Trace(), "; --samples 4 takes about 8 min"),
        (Variance(), "; --samples 4 takes about 8 min"),
    ],
)
def test_a_long_run_names_options_that_make_it_about_ten_minutes(probe: Probe, said: str) -> None:
    advice = Advice.of([probe], tanh_net(sizes=(4, 4, 4, 4, 4)))
    assert advice.shorter(16, 2400.0) == said
    assert advice.shorter(16, 500.0) == ""


@pytest.mark.parametrize(
    "probe",
    [
        Trace(vectors=8), Hessian(top=1), Density(vectors=2, steps=4), Hessian(top=1, scope="dataset"),
        Trace(vectors=4, tol=0.9),
    ],
)  # fmt: skip
def test_every_product_is_reported(probe: Probe) -> None:
    heard: list[Any] = []
    listener = SimpleNamespace(units=lambda *a: None, products=lambda made, per_unit: heard.append((made, per_unit)))
    subject = tanh_net(sizes=(6, 6, 6))
    with listening(listener):
        found = run_probe(probe, subject)
    spent = found["matvecs" if "matvecs" in found else "products"].sum()
    passes = 3 if isinstance(probe, Density) or getattr(probe, "scope", "") == "dataset" else 1
    begun = next(i for i, (_, per_unit) in enumerate(heard) if per_unit)  # before: the benchmark of a backend
    assert sum(made for made, _ in heard[begun:]) == passes * spent
    expected = [per_unit for _, per_unit in heard if per_unit]
    assert expected
    if isinstance(probe, Trace | Density):
        assert expected[0] * len(found["done"]) == passes * spent
