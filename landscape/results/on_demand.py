"""A result of an open file of which every array is opened, checked and read when it is asked for.

A result has some forty arrays, of which a headline and the rules of the doctor need ten. `Stored` and `Array` have what
these ask for; for everything else of a dataset or an array of xarray one is made.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import h5py
import numpy as np
import xarray as xr

from landscape.results import hdf5_file, reader
from landscape.results.group import dims
from landscape.results.hdf5_file import Handle, attributes_of
from landscape.results.malformed import REPAIR, check_array, check_done, readable


class Stored(Mapping[str, "Array"]):
    """A result; large arrays are not kept in memory."""

    def __init__(self, path: Path, group: h5py.Group) -> None:
        self._path, self._group, self._name = path, group, group.name.strip("/")
        self._arrays = dict[str, Array]()
        self.attrs = reader.attributes(group)

    @cached_property
    def whole(self) -> xr.Dataset:
        """All of it; large arrays stay in the file."""
        with self.reading():
            return reader.dataset_of(self._group, lazy=True)

    @cached_property
    def addresses(self) -> dict[str, int]:
        """Where the arrays lie in the file, by name; those with hard links alone."""
        group = self._group.id
        with self.reading():
            names = [name for name in group if group.links.get_info(name).type == h5py.h5l.TYPE_HARD]
            about = ((name.decode(), h5py.h5o.get_info(group, name)) for name in names)
            return {name: item.addr for name, item in about if item.type == h5py.h5o.TYPE_DATASET}

    @cached_property
    def places(self) -> dict[int, str]:
        """The arrays by where they lie."""
        return {address: name for name, address in self.addresses.items()}

    @property
    def variables(self) -> Mapping[str, Array]:
        """The arrays by name."""
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.values())

    def __iter__(self) -> Iterator[str]:
        return iter(self.addresses)

    def __len__(self) -> int:
        return len(self.addresses)

    def __contains__(self, name: object) -> bool:
        return name in self.addresses

    def __getitem__(self, name: str) -> Array:
        if name not in self._arrays:
            if name not in self.addresses:
                raise KeyError(name)
            with self.reading():
                item = h5py.h5o.open(self._group.id, name.encode())
                handle = Handle(item, item.shape, item.dtype)
                check_array(name, handle)
                self._arrays[name] = Array(self, name, handle)
        return self._arrays[name]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # numpy asks for its protocols
            raise AttributeError(name)
        return getattr(self.whole, name)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Turn whatever reading raises into one sentence about the file."""
        try:
            with readable(self._path, self._name, advice=f"{REPAIR}{self._path}"):
                yield
        except hdf5_file.DAMAGE as error:
            raise hdf5_file.damaged(self._path, error) from error


def results(path: Path | str) -> contextlib.AbstractContextManager[list[tuple[str, xr.Dataset]]]:
    """The results of a file as `reader.streaming` has them, but read on demand."""
    return reader.streaming(path, read=lambda file, group: cast(xr.Dataset, Stored(file, group)))


class Array:
    """An array of a result; operators give arrays of xarray."""

    def __init__(self, stored: Stored, name: str, handle: Handle) -> None:
        self._stored, self.name, self._handle = stored, name, handle
        self.dtype, self.shape = handle.dtype, handle.shape or ()
        self.ndim, self.size = len(self.shape), math.prod(self.shape)
        self.nbytes = self.size * self.dtype.itemsize
        self._values: np.ndarray | None = None

    @property
    def values(self) -> np.ndarray:
        """The numbers."""
        if self._values is not None:
            return self._values
        with self._stored.reading():
            values = self._handle.array()
            if self.name == "done":
                check_done(values)
        if self.nbytes <= reader.LARGE:
            self._values = values
        return values

    @cached_property
    def dims(self) -> tuple[str, ...]:
        """The names of the axes."""
        with self._stored.reading():
            return dims(self._handle.id, self.name, self._stored.places) if self.shape else ()

    @cached_property
    def attrs(self) -> dict[str, Any]:
        """The attributes."""
        with self._stored.reading():
            return attributes_of(self._handle.id)

    @property
    def whole(self) -> xr.DataArray:
        """The array as xarray has it, with its axes."""
        if self.nbytes > reader.LARGE:
            return self._stored.whole[self.name]
        scales = {axis: self._stored[axis] for axis in self.dims if axis in self._stored}
        coordinates = {axis: (axis, scale.values, scale.attrs) for axis, scale in scales.items()}
        return xr.DataArray(self.values, coordinates, self.dims, self.name, self.attrs)

    def transpose(self, *axes: str) -> Any:
        """The array with its axes in another order."""
        return self if axes == self.dims else self.whole.transpose(*axes)

    def item(self) -> Any:
        """The only number."""
        return self.values.item()

    def __float__(self) -> float:
        return float(self.values)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.values, dtype, copy=copy)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        return getattr(ufunc, method)(*(i.whole if isinstance(i, Array) else i for i in inputs), **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.whole, name)


def _operator(name: str) -> Callable[..., Any]:
    return lambda array, *others: getattr(array.whole, name)(*(o.whole if isinstance(o, Array) else o for o in others))


_TWO = ("add", "sub", "mul", "truediv", "pow", "and", "or", "radd", "rsub", "rmul", "rtruediv")
for _name in (*_TWO, "eq", "ne", "lt", "le", "gt", "ge", "neg", "abs", "invert", "getitem", "len", "iter", "bool"):
    setattr(Array, f"__{_name}__", _operator(f"__{_name}__"))
