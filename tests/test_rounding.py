"""Numbers are written with the digits that their errors call for."""

import numpy as np
import pytest

from landscape.plots import headlines
from landscape.plots.comparison.rows import signed
from landscape.results.headline_numbers import Measured
from landscape.statistics.rounding import interval, plus_minus


@pytest.mark.parametrize(
    ("value", "error", "digits", "text"),
    [
        (0.12345, 0.0123, 2, "0.123 ± 0.012"),
        (816.95, 89.4, 2, "817 ± 89"),
        (1740.6, 99.9, 2, "1740 ± 100"),
        (4.3164, 0.0876, 1, "4.32 ± 0.09"),
        (2.04, 0.0963, 1, "2.0 ± 0.1"),
        (1740.6, 99.9, 1, "1700 ± 100"),
        (0.5, np.nan, 1, "0.5"),
        (1 / 3, 0.0, 1, "0.3333"),
        (np.nan, 0.1, 1, "nan"),
        (1.5e-12, 2e-13, 1, "1.5e-12 ± 2e-13"),
        (1.5e12, 2e10, 1, "1.5e+12 ± 2e+10"),
    ],
)
def test_digits_follow_the_error(value: float, error: float, digits: int, text: str) -> None:
    assert plus_minus(value, error, digits) == text


def test_digits_of_an_interval_follow_its_width() -> None:
    assert interval(0.12345, 0.1, 0.15, sign=True) == "+0.123 [+0.100, +0.150]"
    assert interval(1e-12, np.nan, np.nan) == "1e-12"
    assert signed(interval(-1e-12, -3e-12, 1e-12)) == "−1e-12 [−3e-12, 1e-12]"


def test_a_headline_puts_the_interval_beside_its_number() -> None:
    even = Measured("barrier", 4.3164, 0.04, 4.2288, 4.404)
    uneven = Measured("ape", 4.3164, 0.04, 4.25, 4.5)
    assert (even.in_words(), uneven.in_words()) == ("4.32 ± 0.09", "4.32 [4.25, 4.50]")
    found = {"barrier": even.in_words(), "barrier_se": 0.04, "mean": 3.25, "at": "stage 2"}
    assert headlines.text(found) == "barrier 4.32 ± 0.09, mean 3.25, at stage 2"
