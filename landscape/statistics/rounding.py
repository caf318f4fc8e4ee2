"""Write numbers with the digits that their errors call for: one way for terminal, figures, tables and report."""

import math


def plus_minus(value: float, error: float, digits: int = 1) -> str:
    """A value to the last of so many digits of its error, and that error; without one four digits of the value.

    >>> plus_minus(4.3164, 0.0876)
    '4.32 ± 0.09'
    """
    if not (math.isfinite(error) and error > 0 and math.isfinite(value)):
        return f"{value:.4g}"
    places = _places(error, digits)
    if places > 7 or places < -3:
        return f"{value:.3g} ± {error:.{digits}g}"
    return f"{_to(value, places)} ± {_to(error, places)}"


def interval(value: float, low: float, high: float, digits: int = 2, *, sign: bool = False) -> str:
    """A value with the ends of its interval, to so many digits of its half width; `sign` writes plus signs."""
    plus = "+" if sign else ""
    if not (math.isfinite(low) and math.isfinite(high) and high > low):
        return f"{value:{plus}.4g}"
    places = _places((high - low) / 2, digits)
    if places > 7 or places < -3:
        return f"{value:{plus}.3g} [{low:{plus}.3g}, {high:{plus}.3g}]"
    return "{} [{}, {}]".format(*(_to(part, places, plus) for part in (value, low, high)))


def _places(error: float, digits: int) -> int:
    """Decimal places of the last of the leading digits of an error, after rounding: 0.096 is 0.1 with one digit."""
    return digits - 1 - int(f"{error:.{digits - 1}e}".partition("e")[2])


def _to(value: float, places: int, plus: str = "") -> str:
    return f"{round(float(value), places):{plus}.{max(places, 0)}f}"  # NumPy rounds 0.175 to 0.18
