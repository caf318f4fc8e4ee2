"""Read a results file as labelled arrays, the same as `xr.open_dataset(..., engine="h5netcdf")` returns.

Reading takes no locks, so a reader never blocks a writer; a writer replaces the whole file, so a reader always
sees a complete one. Links to other files are not followed.
"""

import contextlib
import json
import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self, cast

import h5py
import numpy as np
import xarray as xr
from xarray.backends import BackendArray
from xarray.core import indexing

from landscape.options import counted
from landscape.results import hdf5_file, malformed
from landscape.results.group import Group, attributes_in, checksum, handles, places_in, results_in
from landscape.results.handles import Guard, Handle, OnDemand, attributes_of
from landscape.results.run_key import Outcome

LARGE = 2**20  # bytes above which `streaming` leaves an array in the file
_open: dict[tuple[int, Path, tuple[int, ...]], list[tuple[str, xr.Dataset]]] = {}  # by thread, file, and its state


def open(path: Path | str) -> xr.DataTree:
    """Open a whole results file as an `xarray.DataTree`: `tree["hessian/vit_demo-digits-0123456789"]`.

    Raises:
        FileNotFoundError, ValueError: there is no such file, or it is not a results file; see the message.
    """
    path = Path(path)
    with _file(path) as file:
        nodes = {}
        for name, group in results_in(file):
            with malformed.readable(path, name, advice=f"{malformed.REPAIR}{path}"):
                nodes[name] = dataset_of(group)
        return xr.DataTree.from_dict(
            {"/": xr.Dataset(attrs=dict(attributes_of(h5py.h5g.open(file.id, b"/")))), **nodes}
        )


def groups(path: Path | str) -> list[tuple[str, xr.Dataset]]:
    """Every stored result as (group, dataset), by probe, oldest first; raises as `open`."""
    return find(path)


def find(path: Path | str, probe: str | None = None, label: str | None = None) -> list[tuple[str, xr.Dataset]]:
    """The results of a probe, of a label, or of both, in the order of `groups`; empty if there are none."""
    hdf5_file.check(Path(path))
    with streaming(path, probe, on_demand=True) as stored:
        found = [(name, cast(Stored, data)) for name, data in stored]
        return [(name, data.in_memory()) for name, data in found if label in (None, data.attrs.get("label"))]


@contextlib.contextmanager
def streaming(
    path: Path | str, probe: str | None = None, *, on_demand: bool = False
) -> Iterator[list[tuple[str, xr.Dataset]]]:
    """The results (of a probe), as `find` returns them, but arrays above a megabyte are read when used, and not kept.

    They can be used inside the `with` block only. So a file much larger than the memory can be drawn. `on_demand`: all
    arrays are read when used (`Stored`); within such a block for all probes, others of the file share its results.

    Raises:
        FileNotFoundError, ValueError: as `open`.
    """
    path = Path(path)
    key = threading.get_ident(), path.absolute(), hdf5_file.state_of(path)
    if key in _open:
        own = [(name, data) for name, data in _open[key] if probe in (None, name.partition("/")[0])]
        yield own if on_demand else [(name, cast(Stored, data).whole) for name, data in own]
        return
    hdf5_file.check(path, content=False)
    with hdf5_file.reading(path) as file, contextlib.ExitStack() as after:
        with hdf5_file.naming_damage(path):
            found = _ordered(_streamed(path, file, probe, on_demand))
        if on_demand and probe is None:
            _open[key] = found
            after.callback(_open.pop, key)
        yield found


def using(*paths: Path | str, names: Sequence[str] = ()) -> contextlib.AbstractContextManager[None]:
    """Say in one sentence what fails while results (all, or those of these names) are used, and if they were changed.

    Raises:
        ValueError: it failed.
    """

    def changed() -> bool:
        with contextlib.ExitStack() as files:
            stored = [one for path in paths for one in files.enter_context(streaming(path, on_demand=True))]
            return not all(cast(Stored, data).intact() for name, data in stored if not names or name in names)

    return malformed.readable(", ".join(map(str, paths)), *names, changed=changed)


def _streamed(path: Path, file: h5py.File, probe: str | None, on_demand: bool) -> Iterator[tuple[str, xr.Dataset]]:
    for checked in hdf5_file.checked_groups(file, path, on_demand=on_demand):
        _, kind, *name = checked.path.split("/") if checked.path else ("", "")
        if len(name) == 1 and probe in (None, kind) and h5py.h5a.exists(checked.id, b"probe"):
            with malformed.readable(path, f"{kind}/{name[0]}", advice=f"{malformed.REPAIR}{path}"):
                stored = Stored(path, checked)
                yield f"{kind}/{name[0]}", cast(xr.Dataset, stored) if on_demand else stored.whole


def _ordered(found: Iterable[tuple[str, xr.Dataset]]) -> list[tuple[str, xr.Dataset]]:
    return sorted(found, key=lambda item: (item[0].partition("/")[0], str(item[1].attrs.get("created", "")), item[0]))


def by_checkpoint(found: list[tuple[str, xr.Dataset]]) -> list[tuple[str, xr.Dataset]]:
    """Results ordered by when their checkpoint first appeared in the file; every figure uses this order."""
    first: dict[str, tuple[str, str]] = {}
    for _, data in found:
        label, created = (str(data.attrs.get(key, "")) for key in ("label", "created"))
        first[label] = min(first.get(label, (created, label)), (created, label))
    return sorted(found, key=lambda item: first[str(item[1].attrs.get("label", ""))])


def result(path: Path | str, group: str) -> xr.Dataset:
    """One stored result, by the name of its group.

    Raises:
        ValueError: the file holds no such group; FileNotFoundError, ValueError: as `open`.
    """
    with _file(Path(path)) as file:
        if group not in dict(results_in(file)):
            raise ValueError(f"{path} holds no group {group}; expected one of those that landscape show lists")
        with malformed.readable(path, group, advice=f"{malformed.REPAIR}{path}"):
            return dataset_of(file[group])


def measured(path: Path | None, outcome: Outcome) -> xr.Dataset:
    """The result of a run: in the file, or without one the run's own."""
    if path is not None:
        return result(path, outcome.group)
    assert outcome.data is not None
    return outcome.data


def finished_units(data: xr.Dataset) -> int:
    """How many units of a result are finished."""
    return int(np.count_nonzero(data.variables["done"].values == 1)) if "done" in data else 0


def unfinished(data: xr.Dataset) -> str:
    """How much of a result is finished, such as "62 of 225 units"; "" if all of it is."""
    done, units = finished_units(data), int(data.variables["done"].size) if "done" in data else 0
    return f"{done:,} of {counted(units, 'unit', ',')}" if done < units else ""


@contextlib.contextmanager
def _file(path: Path) -> Iterator[h5py.File]:
    hdf5_file.check(path)
    with hdf5_file.reading(path) as file, hdf5_file.naming_damage(path):
        yield file


class _Parts(BackendArray):
    """An array of an open file, read part by part."""

    def __init__(self, item: h5py.Dataset) -> None:
        self.item, self.shape, self.dtype = item, item.shape, item.dtype

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        outer = indexing.IndexingSupport.OUTER_1VECTOR
        return indexing.explicit_indexing_adapter(key, self.shape, outer, lambda part: np.asarray(self.item[part]))


class Array:
    """An array of a result, of which the values, the axes and the attributes are read when they are asked for.

    For what it has not itself it is an xarray variable of all of it.
    """

    def __init__(self, name: str, array: Handle, places: Mapping[int, str], lazy: bool, guard: Guard) -> None:
        self._name, self._array, self._places, self._lazy, self._guard = name, array, places, lazy, guard

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return self._array.shape or ()

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> np.dtype:
        return self._array.dtype

    @cached_property
    def dims(self) -> tuple[str, ...]:
        """Names of the axes."""
        with self._guard():
            return self._array.dims(self._name, self._places)

    @cached_property
    def attrs(self) -> Mapping[str, Any]:
        with self._guard():
            return self._array.attributes(self._guard)

    @cached_property
    def held(self) -> Any:
        """The numbers or texts, or where they lie."""
        with self._guard():
            malformed.check_array(self._name, self._array)
            values = _array(self._array, self._lazy)
            if self._name == "done":
                malformed.check_done(values)
        return values

    @property
    def values(self) -> np.ndarray:
        return self.held if isinstance(self.held, np.ndarray) else np.asarray(self.variable.values)

    @cached_property
    def variable(self) -> xr.Variable:
        return xr.Variable(self.dims, self.held, dict(self.attrs), fastpath=True)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.values, dtype=dtype)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # numpy asks for its protocols
            raise AttributeError(name)
        return getattr(self.variable, name)


def _arrays(
    where: Mapping[int, str], arrays: Mapping[str, Handle], *, lazy: bool, guard: Guard = contextlib.nullcontext
) -> Mapping[str, Array]:
    """The arrays of a result by their `places`; `lazy` leaves large ones in the file, which must stay open."""
    return OnDemand(arrays, lambda name: Array(name, arrays[name], where, lazy, guard))


class Stored(Mapping[str, xr.DataArray]):
    """A result of an open file that reads an array when it is asked for: of forty a headline needs ten.

    For what it has not itself it is a dataset of all of them (`whole`).
    """

    def __init__(self, path: Path, group: hdf5_file.Group) -> None:
        self._name, self._group, self._arrays = group.path.strip("/"), group.id, group.datasets
        self._reading = _Reading(path, self._name)
        self.encoding = {"group": self._name}
        self.attrs = attributes_of(group.id, self._reading, malformed.check_attribute, group.header)
        malformed.check_identity(self.attrs, self._name.partition("/")[0])
        where = {place: name for name, place in group.members.items()}
        self.variables = _arrays(where, group.datasets, lazy=True, guard=self._reading)

    @cached_property
    def whole(self) -> xr.Dataset:
        with self._reading:
            return _dataset(self.variables, self.attrs, self._name)

    def in_memory(self) -> xr.Dataset:
        """All of it, which the file need not stay open for."""
        with self._reading:
            return self.whole.load()

    def intact(self) -> bool:
        """Whether everything is as it was written, by the checksum."""
        with self._reading:
            return bool(self.attrs.get(hdf5_file.CHECK) == checksum(h5py.Group(self._group), self._arrays, self.attrs))

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays in memory."""
        return sum(array.dtype.itemsize * math.prod(array.shape or ()) for array in self._arrays.values())

    __eq__, __hash__ = object.__eq__, object.__hash__  # it is one of the file, whose numbers stay as they are

    def __iter__(self) -> Iterator[str]:
        return iter(self.variables)

    def __len__(self) -> int:
        return len(self.variables)

    def __contains__(self, name: object) -> bool:
        return name in self.variables

    def __getitem__(self, name: str) -> xr.DataArray:
        found = self.variables[name].variable
        axes = {axis: self.variables[axis].variable for axis in map(str, found.dims) if axis in self}
        with self._reading:
            return xr.DataArray(found, axes, name=name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # numpy asks for its protocols
            raise AttributeError(name)
        return getattr(self.whole, name)


class _Reading(contextlib.AbstractContextManager[None]):
    """Says in one sentence what reading a result raises; without a generator, because it surrounds every value."""

    def __init__(self, path: Path, name: str) -> None:
        self._path, self._name = path, name

    def __call__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            advice = f"{malformed.REPAIR}{self._path}"
            with hdf5_file.naming_damage(self._path), malformed.readable(self._path, self._name, advice=advice):
                raise error


def _array(array: Handle, lazy: bool) -> Any:
    if lazy and array.dtype.kind in "fiu" and array.dtype.itemsize * math.prod(array.shape or ()) > LARGE:
        return indexing.LazilyIndexedArray(_Parts(h5py.Dataset(array.id)))
    return array.array()


def dataset_of(group: Group) -> xr.Dataset:
    """A stored result, or one in memory, as a labelled dataset in memory.

    Raises:
        ValueError: an array or an attribute is not as it is written; see the message.
    """
    about, name = dict(attributes_in(group)), group.name.strip("/")
    malformed.check_attributes(about, name.partition("/")[0])
    return _dataset(_arrays(places_in(group), handles(group), lazy=False), about, name)


def _dataset(arrays: Mapping[str, Array], about: Mapping[str, Any], name: str) -> xr.Dataset:
    data = xr.Dataset({name: array.variable for name, array in arrays.items()}, attrs=dict(about))
    data.encoding["group"] = name
    return data


def parameters_of(data: xr.Dataset) -> dict[str, Any]:
    """The parameters that can change a result: not the backend of Hessian-vector products."""
    found: dict[str, Any] = json.loads(data.attrs.get("parameters", "{}"))
    return {key: value for key, value in found.items() if key != "hvp"}
