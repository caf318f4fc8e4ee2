"""The results file of every release is read by this version, and this version writes that of the newest one.

`python tests/test_results_format.py VERSION` stores the made-up results of a release beside the page that describes it.
"""

import gzip
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import pytest
import synthetic

import landscape
from landscape.results import group as groups
from landscape.results import handles, reader
from landscape.results import headline_numbers as measured

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
