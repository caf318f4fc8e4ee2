"""Check and parse the values of options, on the command line and in Python, with one error for all."""

import contextlib
import difflib
import functools
import math
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
BOOLEANS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
MATCHING_SECONDS = 5.0  # that matching all names of a network may take; it takes milliseconds
MOST_POINTS = 5_000  # along an axis: more would not fit into memory or a lifetime
SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


class OptionError(ValueError):
    """An option has an invalid value, whatever is measured: a usage error (exit code 2 on the command line)."""


@contextlib.contextmanager
def reading(what: Path | str, *, says: bool = False) -> Iterator[None]:
    """Give whatever reading a file or folder raises one line that names it.

    One that has the name in it stays as it is; with `says`, so does every ValueError and RuntimeError.

    Raises:
        ValueError: instead of errors that say nothing to who gave the file, such as a TypeError.
    """
    try:
        yield
    except (OptionError, MemoryError):
        raise
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(what)
        raise
    except Exception as error:
        said, kind = printable(" ".join(str(error).split())), type(error)
        spoken = kind in (ValueError, RuntimeError) or kind.__module__.startswith("landscape.")
        if isinstance(error, ImportError) or (spoken and (says or str(what) in said)):
            raise
        reason = said if spoken and said else f"{kind.__name__}: {said}"
        raise ValueError(f"{what} cannot be read ({reason[:300]}); give another copy") from error


def naming(function: Callable[Concatenate[Path, P], T]) -> Callable[Concatenate[Path, P], T]:
    """A reader whose errors name the file that is its first argument, as inside `reading`."""

    @functools.wraps(function)
    def read(path: Path, /, *args: P.args, **options: P.kwargs) -> T:
        with reading(path):
            return function(path, *args, **options)

    return read


def invalid(name: str, value: object, expected: str) -> OptionError:
    """The error of an invalid value, to be raised: "--name must be EXPECTED, got VALUE"."""
    return OptionError(f"--{name.replace('_', '-')} must be {expected}, got {value}")


def require(holds: bool, name: str, value: object, expected: str) -> None:
    """Raise an OptionError unless a condition on the value of an option holds."""
    if not holds:
        raise invalid(name, value, expected)


def plain_value(name: str, value: Any, like: object) -> Any:
    """A value given in Python, checked to be a number where an option's default `like` is one; NumPy's made Python's.

    Where it is text, numbers and lists of texts become text; lists of numbers only where it lists some itself, since
    elsewhere two numbers may be the ends of a range.

    Raises:
        OptionError: it is something else.
    """
    if isinstance(like, bool):
        require(str(value) in ("True", "False"), name, repr(value), "True or False")
        return bool(value)
    if isinstance(like, int):
        require(isinstance(value, Integral) and not isinstance(value, bool), name, repr(value), "a whole number")
        return value if isinstance(value, int) else int(value)
    if isinstance(like, float):
        require(isinstance(value, Real) and not isinstance(value, bool), name, repr(value), "a number")
        return float(value)
    if isinstance(like, str) and isinstance(value, Real | Mapping | list | tuple):
        listed = [value] if isinstance(value, Real) else list(value)
        kinds = Real | str | PathLike if isinstance(value, Real) or "," in like else str | PathLike
        known = not isinstance(value, Mapping) and all(isinstance(one, kinds) for one in listed)
        require(known, name, repr(value), "a text, as on the command line")
        return ",".join(map(str, listed))
    return value


def at_least(name: str, value: float, least: float) -> None:
    """Raise an OptionError if an option is below its minimum, infinite, or not a number at all."""
    require(value >= least, name, value, f"at least {least:g}")
    require(value < math.inf, name, value, "finite")


def one_of(name: str, value: str, choices: Iterable[str]) -> None:
    """Raise an OptionError unless an option is one of the choices."""
    known = list(choices)
    require(value in known, name, value, alternatives(known))


def regular_expression(name: str, text: str) -> None:
    """Raise an OptionError unless an option is a regular expression."""
    try:
        re.compile(text)
    except re.error as error:
        raise invalid(name, f"{text} ({error})", "a regular expression") from None


def matching(name: str, expression: str, texts: Iterable[str], *, whole: bool = False) -> list[str]:
    """The texts in which the regular expression of an option is found, or which are `whole` such.

    Raises:
        OptionError: as `time_limit`.
    """
    fits = re.compile(expression).fullmatch if whole else re.compile(expression).search
    with time_limit(name, expression):
        return [text for text in texts if fits(text)]


@contextlib.contextmanager
def time_limit(name: str, expression: str) -> Iterator[None]:
    """End the matching of an expression such as (a+)+$, which takes twice as long with every character.

    `re` heeds signals, so that a timer ends it; only the main thread may set one, elsewhere there is no limit.

    Raises:
        OptionError: it took more than `MATCHING_SECONDS`.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def end(number: int, frame: object) -> None:
        raise invalid(
            name, expression, f"an expression that is matched in {MATCHING_SECONDS:g} s (no repeats of repeats)"
        )

    start, handler = time.monotonic(), signal.signal(signal.SIGALRM, end)
    before = signal.setitimer(signal.ITIMER_REAL, MATCHING_SECONDS)
    try:
        yield
    finally:
        left = max(before[0] - (time.monotonic() - start), 1e-3) if before[0] else 0.0
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, left, before[1])


def alternatives(words: Sequence[str]) -> str:
    """Words as a choice: `a, b or c`."""
    return " or ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def listed(names: Iterable[object], most: int = 3) -> str:
    """The first few names, and how many more there are: `a, b, c and 4 more`."""
    words = list(map(str, names))
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


def counted(count: int, noun: str, form: str = "") -> str:
    """A number of things: `1 unit`, `3 batches`; `form` formats the number."""
    plural = "" if count == 1 else "es" if noun.endswith(("tch", "ss", "x")) else "s"
    return f"{count:{form}} {noun}{plural}"


def nearest(word: str, known: Iterable[str], noun: str) -> str:
    """What there is instead of a word that matches nothing: `similar names are A, B`, or the first names, or none."""
    names = list(dict.fromkeys(filter(None, known)))
    if near := difflib.get_close_matches(word, names, 3, 0.4):
        return f"similar names are {', '.join(near)}"
    return f"its {noun}s are {listed(names, 5)}" if names else f"it has no {noun} with a name"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown word: `; did you mean A or B?`, or "" if nothing is near."""
    near = difflib.get_close_matches(word, list(known), 3)
    return f"; did you mean {alternatives(near)}?" if near else ""


def parse_numbers(name: str, text: str) -> tuple[float, ...]:
    """Parse `0.5,0.5,0.5`. Raises OptionError: a part is not a number, or is infinite or NaN."""
    numbers = _numbers(text, ",", float)
    finite = bool(numbers) and all(map(math.isfinite, numbers))
    require(finite, name, text or "nothing", "finite numbers separated by commas")
    return tuple(numbers)


def _numbers(text: str, separator: str, kind: Callable[[str], T]) -> list[T]:
    """The numbers in a text; none if a part is not a number."""
    try:
        return [kind(part) for part in text.split(separator)]
    except ValueError:
        return []


def parse_choices(name: str, text: str, choices: Iterable[str]) -> tuple[str, ...]:
    """Parse `png,pdf`, each of which has to be one of the choices. Raises OptionError: one is not."""
    known = list(choices)
    parts = tuple(part.strip().lower() for part in text.split(","))
    for part in parts:
        one_of(name, part, known)
    return parts


def parse_resolution(name: str, text: str) -> tuple[int, int]:
    """Parse `N` or `NX,NY`. Raises OptionError: it is something else."""
    parts = _numbers(text, ",", int)
    require(len(parts) in (1, 2), name, text, "N or NX,NY")
    require(max(parts) <= MOST_POINTS, name, text, f"at most {MOST_POINTS:,} points per axis")
    return parts[0], parts[-1]


def parse_shard(name: str, text: str) -> tuple[int, int]:
    """Parse `I/N`, the I-th of N shards; (1, 1) if empty. Raises OptionError: it is something else."""
    if not text:
        return 1, 1
    number, _, of = text.partition("/")
    valid = number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)
    require(valid, name, text, "I/N, the I-th of N shards, such as 1/8 up to 8/8")
    return int(number), int(of)


def parse_range(name: str, text: str, expected: str = "R or LOW:HIGH", *, whole: str = "") -> tuple[float, float]:
    """Parse `R` as (-R, R), or `LOW:HIGH`; `whole` is the text of the option if this is a part of it.

    Raises:
        OptionError: it is something else, or LOW is not below HIGH.
    """
    numbers, shown = _numbers(text, ":", float), whole or text
    require(len(numbers) in (1, 2), name, shown or "nothing", expected)
    low, high = (-numbers[0], numbers[0]) if len(numbers) == 1 else numbers
    require(-math.inf < low < high < math.inf, name, shown, f"{expected} from a low to a higher number")
    return low, high


def parse_ranges(name: str, text: str) -> tuple[tuple[float, float], tuple[float, float]]:
    """Parse `R`, `LOW:HIGH` or `XLOW:XHIGH,YLOW:YHIGH` as ((x_low, x_high), (y_low, y_high)).

    Raises:
        OptionError: it is something else, or a low end is not below its high end.
    """
    parts, expected = text.split(","), "R, LOW:HIGH or XLOW:XHIGH,YLOW:YHIGH"
    require(len(parts) <= 2, name, text, expected)
    return parse_range(name, parts[0], expected, whole=text), parse_range(name, parts[-1], expected, whole=text)


def parse_count(name: str, value: int | str | None, available: int) -> int:
    """Parse a number such as `64`, a share such as `10%` (rounded up), or `all` (also None); at most all available.

    Raises:
        OptionError: it is something else, or below 1.
    """
    text = "all" if value is None else str(value)
    if text == "all":
        return available
    try:
        count = math.ceil(available * float(text[:-1]) / 100) if text.endswith("%") else int(text)
    except (ValueError, OverflowError):  # inf% is a number without a ceiling
        raise invalid(name, text, "a number, a share such as 10%, or all") from None
    require(count >= 1, name, text, "at least 1")
    return min(count, available)


def printable(value: Any) -> str:
    """A value as text that cannot steer a terminal: names in files are anybody's."""
    text = str(value)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type if it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def parse_bytes(name: str, text: str) -> int | None:
    """Parse an amount of memory such as `8GiB` or `500MB`; None for "". Raises OptionError: it is 0 or no amount."""
    if not text:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKMGT])(i?)B?", text)
    if found is None or not float(found[1]):
        raise invalid(name, text, "an amount such as 8GiB or 500MB")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** ("KMGT".index(found[2].upper()) + 1))


def parse_assignments(name: str, assignments: Iterable[str]) -> dict[str, str]:
    """Parse words such as `width=32`; dashes in a key become underscores. Raises OptionError: one has no key or `=`."""
    found = {}
    for text in assignments:
        key, equals, value = text.partition("=")
        require(bool(equals and key.strip()), name, text, "KEY=VALUE")
        found[key.strip().replace("-", "_")] = value
    return found


def parse_arguments(name: str, assignments: Iterable[str]) -> dict[str, Any]:
    """Parse words such as `width=32` into values: numbers, booleans, None, tuples of them, or the text itself.

    Raises:
        OptionError: one has no key or no equals sign.
    """
    return {key: _literal(text) for key, text in parse_assignments(name, assignments).items()}


def _literal(text: str) -> Any:
    if "," in text:
        return tuple(_literal(part) for part in text.split(","))
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False, "none": None}.get(text.lower(), text)


def parse_duration(name: str, text: str) -> float:
    """Parse `90s`, `30m` or `2h` into seconds. Raises OptionError: it is none of these, or not positive."""
    try:
        found = float(text[:-1]) * SECONDS[text[-1:]]
    except (ValueError, KeyError):
        found = math.nan
    require(0 < found < math.inf, name, text, "a time such as 90s, 30m or 2h")
    return found


def format_duration(seconds: float) -> str:
    """Seconds in readable form: 45 s, 12 min, 3 h 20 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
