"""The results file of every release is read by this version, and this version writes that of the newest one.

`python tests/test_results_format.py VERSION` stores the made-up results of a release beside the page that describes it.
"""

import contextlib
import gzip
import json
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import synthetic

import landscape
from landscape.results import group as groups
from landscape.results import handles, reader
from landscape.results import headline_numbers as measured
from landscape.results.group import results_in
from landscape.results.handles import LIST, Handle, attributes_of, links, opened
from landscape.results.object_headers import LEFT, Header, Image

RELEASES = sorted((Path(__file__).parents[1] / "docs/format").glob("*.h5.gz"))
Form = Mapping[str, tuple[tuple[str, ...], str, str]]  # axes, dtype and unit of every quantity


@pytest.fixture(params=RELEASES, ids=lambda path: path.name.removesuffix(".h5.gz"))
def released(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "results.h5"
    path.write_bytes(gzip.decompress(request.param.read_bytes()))
    return path


def forms(path: Path) -> dict[str, Form]:
    """How a file stores every quantity of the first network, by probe."""
    with h5py.File(path) as file:
        return {
            name.partition("/")[0]: {
                array: (item.dims(array, places), str(item.id.dtype), str(group[array].attrs.get("units", "")))
                for array, item in arrays.items()
            }
            for name, group in groups.results_in(file)
            if group.attrs["label"] == synthetic.NETWORKS[0].label
            for arrays in [groups.handles(group)]
            for places in [handles.places(group.id)]
        }


def numbers(path: Path) -> dict[str, Any]:
    """The headline numbers of a file by probe."""
    with reader.streaming(path) as stored:
        return {name.partition("/")[0]: measured.as_json(data)["numbers"] for name, data in stored}


@pytest.mark.slow
def test_the_file_of_a_release_is_read(released: Path, request: pytest.FixtureRequest) -> None:
    """Its headline numbers are those that the release itself read."""
    release = Path(request.node.callspec.params["released"])
    expected = json.loads(release.with_suffix("").with_suffix(".json").read_text())
    assert json.loads(json.dumps(numbers(released))) == expected


@pytest.mark.slow
def test_what_a_release_stores_is_stored_still(released: Path, study: Path, request: pytest.FixtureRequest) -> None:
    """Under the same names, over the same axes, in the same units; later versions may add to it."""
    found, before = forms(study), forms(released)
    for probe, form in before.items():
        assert form.items() <= found[probe].items(), probe
    if (
        request.node.callspec.params["released"].name == f"{landscape.__version__}.h5.gz"
    ):  # else the page of the version at hand lacks what was added
        assert found == before


if __name__ == "__main__":
    target = Path(__file__).parents[1] / "docs/format"
    with tempfile.TemporaryDirectory() as folder:
        made = synthetic.write(Path(folder) / "results.h5", synthetic.NETWORKS[:1])
        (target / f"{sys.argv[1]}.h5.gz").write_bytes(gzip.compress(made.read_bytes(), mtime=0))
        (target / f"{sys.argv[1]}.json").write_text(json.dumps(numbers(made), indent=1) + "\n")


# --- What is read from the bytes of a results file is what HDF5 says, and anything else is left to HDF5 ---


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
