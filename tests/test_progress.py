"""Progress: the rate that a running probe prints."""

from __future__ import annotations

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
