"""Results files with an attribute or an array that is missing or of another form: one sentence, whatever reads them."""

import random
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import synthetic

from landscape.doctor.rules import examine
from landscape.exchange.exporting import export
from landscape.plots import drawing, headlines
from landscape.plots.report import report
from landscape.results import reader
from landscape.results.group import copy
from landscape.results.merging import merge_files
from landscape.results.repair import repair
from landscape.results.unmerged_journals import standings
from landscape.running.run import reduce_of

pytestmark = pytest.mark.slow

Change = Callable[[h5py.Group], object]
VALUES: tuple[Any, ...] = (7, "junk", "[1]", "{}", np.arange(3.0), h5py.Empty("f8"), np.bytes_(b"\xff\xfe"))


def replaced(name: str, make: Callable[[tuple[int, ...]], Any], group: h5py.Group) -> None:
    data = make(group[name].shape)
    del group[name]
    if data is None:
        group.create_group(name)
    else:
        group.create_dataset(name, data=data)


ARRAYS: dict[str, Callable[[tuple[int, ...]], Any]] = {
    "group": lambda shape: None,
    "scalar": lambda shape: 1.0,
    "text": lambda shape: np.full(shape, b"junk").astype(object),
    "longer": lambda shape: np.ones([n + 1 for n in shape]),
    "without axes": np.ones,
    "complex": lambda shape: np.ones(shape, complex),
    "empty": lambda shape: h5py.Empty("f8"),
    "structured": lambda shape: np.zeros(shape, [("a", "f8")]),
    "nothing": lambda shape: np.full(shape, np.nan),
    "negative": lambda shape: -np.ones(shape),
}


def changes(group: h5py.Group) -> Iterator[tuple[str, Change]]:
    """Every change of one attribute or one array."""
    for name in group.attrs:
        yield f"without @{name}", partial(lambda name, group: group.attrs.__delitem__(name), name)
        for i, value in enumerate(VALUES):
            yield f"@{name} {i}", partial(lambda name, value, g: g.attrs.__setitem__(name, value), name, value)
    for name in (name for name in group if isinstance(group[name], h5py.Dataset)):
        yield f"without {name}", partial(lambda name, group: group.__delitem__(name), name)
        for kind, make in ARRAYS.items():
            yield f"{name} {kind}", partial(replaced, name, make)


def damaged(folder: Path, probes: tuple[str, ...], count: int, study: Path | None) -> Iterator[tuple[str, Path, Path]]:
    """So many changed files with one result each, drawn at random: what was changed, the file, and the good one."""
    stored = study or synthetic.write(folder / "all.h5", synthetic.NETWORKS[:1], probes=probes)
    drawn, ways = random.Random(count), []
    for probe in probes:
        good = folder / f"{probe}.h5"
        with h5py.File(stored) as file, h5py.File(good, "w") as alone:
            alone.attrs.update(file.attrs)
            (name,) = (f"{probe}/{name}" for name in file[probe] if name.startswith(synthetic.NETWORKS[0].label))
            copy(file[name], alone, name)
            ways += [(good, name, *way) for way in changes(file[name])]
    for good, name, what, _ in drawn.sample(ways, count):
        path = folder / "changed.h5"
        path.write_bytes(good.read_bytes())
        with h5py.File(path, "r+") as file:
            dict(changes(file[name]))[what](file[name])
        yield f"{name}: {what}", path, good


def complaints(read: Callable[[Path, Path], object], files: Iterator[tuple[str, Path, Path]]) -> list[str]:
    """What reading raised that is not one sentence with the name of the file."""
    found = []
    for what, path, good in files:
        try:
            read(path, good)
        except (ValueError, OSError) as error:
            if path.name not in str(error) or not str(error).isprintable():
                found.append(f"{what}: {error}")
        except Exception as error:
            found.append(f"{what}: {type(error).__name__}: {error}")
    return found


def joined(path: Path, good: Path) -> None:
    (out := path.with_name("joined.h5")).unlink(missing_ok=True)
    merge_files([good, path], out, reduce_of=reduce_of)


def exported(path: Path, good: Path) -> None:
    export(path, path.parent / "exported", ["tomgoldstein", "csv", "vtp"])


def drawn(path: Path, good: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of numbers that make no sense
        report(path, path.with_suffix(".html"), drawing.draw(path, path.parent / "figures"))


EVERY = tuple(synthetic.MADE_UP)
Case = tuple[Callable[[Path, Path], object], tuple[str, ...], int]
CASES: dict[str, tuple[Case, Case]] = {  # what reads: of few results a few changes; the campaign draws others
    name: ((read, few, count), (read, many, most))
    for name, read, few, count, many, most in (
        ("show", lambda path, good: headlines.summary(path), ("trace", "line", "noise", "lesion"), 20, EVERY, 200),
        ("pending", lambda path, good: standings(path), ("trace", "noise"), 20, ("trace", "noise"), 25),
        (
            "doctor", lambda path, good: examine([path]), ("trace", "line", "lesion"), 20,
            ("trace", "line", "lesion"), 25,
        ),
        ("merge", joined, ("trace", "noise"), 20, ("trace", "noise"), 25),
        ("export", exported, ("surface", "line"), 12, ("surface", "line"), 40),
        ("plot", drawn, ("trace", "noise"), 4, EVERY, 10),
    )
}  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(few, id=name, marks=[pytest.mark.slow] * (name == "plot")) for name, (few, _) in CASES.items()),
        *(pytest.param(many, id=f"{name}-campaign", marks=pytest.mark.campaign) for name, (_, many) in CASES.items()),
    ],
)
def test_a_result_that_was_changed_is_refused_in_a_sentence(
    case: Case, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    read, probes, count = case
    study = request.getfixturevalue("study") if probes is EVERY else None
    assert complaints(read, damaged(tmp_path, probes, count, study)) == []


def test_the_sentence_names_the_result_and_what_is_wrong(tmp_path: Path) -> None:
    path = synthetic.write(tmp_path / "r.h5", synthetic.NETWORKS[:1], probes=("trace",))
    with h5py.File(path, "r+") as file:
        (name,) = (f"trace/{name}" for name in file["trace"])
        file[name].attrs["label"] = 7
    with pytest.raises(ValueError, match=rf"r\.h5: {name} is not as landscape writes it \(the attribute label is 7"):
        reader.groups(path)


@pytest.mark.parametrize(
    ("used", "read"),
    [
        ("landscape.plots.headlines.divided", headlines.summary),
        ("landscape.plots.drawing._save", lambda path: drawing.draw(path, path.parent / "figures")),
        ("landscape.plots.report.document", lambda path: report(path, path.with_suffix(".html"), [])),
        ("landscape.doctor.rules._findings", lambda path: examine([path, path])),
    ],
)
def test_what_fails_with_results_that_nobody_changed_is_not_blamed_on_them(
    used: str, read: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("unknown colour")

    path = synthetic.write(tmp_path / "r.h5", synthetic.NETWORKS[:1], probes=("trace",))
    monkeypatch.setattr(used, fail)
    with pytest.raises(ValueError, match=r"r\.h5: .*unknown colour; the results are as landscape wrote them") as caught:
        read(path)
    assert "not as landscape writes it" not in str(caught.value)
    with h5py.File(path, "r+") as file:
        next(iter(file["trace"].values())).attrs["samples"] = 7
    with pytest.raises(ValueError, match=r"is not as landscape writes it .*unknown colour"):
        read(path)


def test_repair_leaves_out_a_result_that_no_command_reads(tmp_path: Path) -> None:
    path = synthetic.write(tmp_path / "r.h5", synthetic.NETWORKS[:2], probes=("trace",))
    with h5py.File(path, "r+") as file:
        first, second = (f"trace/{name}" for name in file["trace"])
        del file[first].attrs["label"]
        file[first].attrs["label"] = np.arange(3)
    found = repair(path, tmp_path / "repaired.h5")
    assert found.kept == [second]
    assert [name for name, _ in reader.groups(tmp_path / "repaired.h5")] == [second]
