"""What is read from the bytes of a results file is what HDF5 says, and anything else is left to HDF5."""

import contextlib
from functools import partial
from pathlib import Path

import h5py
import numpy as np
import pytest
import synthetic

from landscape.results.group import results_in
from landscape.results.handles import LIST, Handle, attributes_of, links, opened
from landscape.results.object_headers import LEFT, Header, Image


def same(one: Handle, other: Handle, where: dict[int, str]) -> None:
    assert (one.shape, one.dtype, one.scales(where)) == (other.shape, other.dtype, other.scales(where))
    assert h5py.check_string_dtype(one.dtype) == h5py.check_string_dtype(other.dtype)
    assert (one.attributes_stored, one.stored_size(LIST)) == (other.attributes_stored, other.stored_size(LIST))
    assert repr(list(one.attributes().items())) == repr(list(other.attributes().items()))  # NaN too, and their types
    np.testing.assert_array_equal(one.array(), other.array(), strict=True)


@pytest.mark.slow
def test_a_header_says_what_hdf5_says_and_what_is_written_otherwise_is_left_to_it(tmp_path: Path) -> None:
    path = synthetic.write(tmp_path / "r.h5", synthetic.NETWORKS[:1], probes=("fourier", "hessian", "line"), share=0.5)
    with h5py.File(path, "r+") as file:
        name, group = next(results_in(file))
        group.attrs["empty"], group.attrs["several"], group.attrs["flag"] = "", [1.0, 2.0], True
        for kind in (">f8", "<f4", "S5"):
            group[f"other {kind[1:]}"] = np.zeros(3, kind)
        group.create_dataset("chunked", (5,), "f8", chunks=(2,))
        group.create_dataset("never written", (5,), "f8")
        group["none"] = np.zeros((0, 2))
    with h5py.File(path) as file:
        image, known, left = Image.of(file, 0), 0, set[str]()
        assert image is not None
        for result, group in results_in(file):
            own = image.header(h5py.h5o.get_info(group.id).addr)
            assert own is not None
            assert repr(dict(attributes_of(group.id))) == repr(dict(attributes_of(group.id, header=own)))
            where = {place: key for key, _, place in links(group.id)}
            for place, key in where.items():
                if header := image.header(place):
                    item = opened(group.id, key)
                    same(Handle(item), Handle(item, header), where)
                    known += 1
                else:
                    left.add(key)
                    assert result == name
    assert left == {"other f8", "other f4", "other 5", "chunked", "never written", "none"}
    assert known > 50


@pytest.mark.slow
def test_damaged_headers_are_read_or_left_to_hdf5(tmp_path: Path) -> None:
    path = synthetic.write(tmp_path / "r.h5", synthetic.NETWORKS[:1], probes=("hessian",))
    with h5py.File(path) as file:
        places = [place for _, group in results_in(file) for _, _, place in links(group.id)]
    content, rng = path.read_bytes(), np.random.default_rng(0)
    for _ in range(300):
        damaged = np.frombuffer(content, np.uint8).copy()
        damaged[rng.integers(len(damaged), size=len(damaged) // 50)] = rng.choice([0, 1, 255], len(damaged) // 50)
        image = Image(damaged.tobytes()[: rng.integers(len(damaged) // 2, len(damaged))])
        for place in rng.choice(places, 5):
            if not isinstance(header := image.header(int(place)), Header) or header.dtype is None:
                continue
            calls = [partial(header.value, name) for name in header.attributes]
            for call in (header.array, partial(header.scales, 8), *calls):
                with contextlib.suppress(*LEFT):
                    call()
