"""Progress: the rate that a running probe prints, and the bar."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from landscape import progress


def test_set_up_before_the_first_unit_does_not_count_in_the_rate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = iter([0.0, 120.0, 160.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    with progress.Progress("surface") as report:
        report(1, 41)
        report(21, 41)
    assert capsys.readouterr().err.splitlines() == [
        "surface 1/41, 2 %",
        "surface 21/41, 51 %, 0.5/s, about 40 s left",
    ]


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
