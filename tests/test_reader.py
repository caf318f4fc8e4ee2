"""Reading a results file: the same arrays as any other reader, only its own, from a file at any moment."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import synthetic
import xarray as xr
from command_line import Command

from landscape.doctor import rules
from landscape.plots import headlines
from landscape.plots.figures import noise
from landscape.results import hdf5_file, reader
from landscape.results.group import checksum, results_in
from landscape.results.handles import Handle
from landscape.results.hdf5_file import CHECK

SOME = ("hessian", "surface", "lesion", "variance", "calibration")


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic.write(
        tmp_path_factory.mktemp("study") / "results.h5", synthetic.NETWORKS[:2], probes=SOME, share=0.7
    )


@pytest.fixture(scope="session", params=[SOME, pytest.param(synthetic.ALL, marks=pytest.mark.campaign)], ids=len)
def unfinished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Sequence[str], Path]:
    probes, networks = request.param, synthetic.NETWORKS[: 2 if request.param is SOME else 1]
    return probes, synthetic.shared(tmp_path_factory, f"unfinished_{len(probes)}", networks, probes=probes, share=0.7)


@pytest.mark.slow
def test_every_group_equals_what_h5netcdf_reads(unfinished: tuple[Sequence[str], Path]) -> None:
    probes, path = unfinished
    found = reader.groups(path)
    assert {name.partition("/")[0] for name, _ in found} == {*probes}
    for name, data in found:
        with xr.open_dataset(path, group=name, engine="h5netcdf") as other:
            xr.testing.assert_identical(data, other.load())


@pytest.mark.slow
def test_the_tree_equals_what_xarray_opens(study: Path) -> None:
    with xr.open_datatree(study, engine="h5netcdf") as other:
        xr.testing.assert_identical(reader.open(study), other.load())


@pytest.mark.slow
def test_axes_are_coordinates_and_attributes_are_plain_python(study: Path) -> None:
    ((_, data),) = reader.find(study, probe="surface", label=synthetic.NETWORKS[0].label)
    assert data["loss"].dims == ("x", "y")
    np.testing.assert_array_equal(data["loss"]["x"], np.linspace(-1, 1, 21))
    assert {type(value) for value in data.attrs.values()} <= {str, int, float}
    assert data["loss"].attrs == {"long_name": "loss", "units": "1", "bounds": "positive"}


def test_an_axis_of_another_length_is_told_with_the_command_that_saves_the_rest(tmp_path: Path) -> None:
    path = synthetic.write(tmp_path / "r.h5", synthetic.NETWORKS[:1], probes=("variance",))
    with h5py.File(path, "r+") as file:
        (group,) = file["variance"].values()
        array = group["variance"]
        axis = array.dims[0][0]
        name = axis.name.rpartition("/")[2]
        values = np.resize(axis[()], len(axis) + 1)
        array.dims[0].detach_scale(axis)
        del group[name]
        group[name] = values
        group[name].make_scale(name)
        array.dims[0].attach_scale(group[name])
        group.attrs[CHECK] = checksum(group)
    with reader.streaming(path, on_demand=True) as ((_, data),):
        for read in (lambda: data["variance"], lambda: data.sizes):
            with pytest.raises(ValueError, match=r"is not as landscape writes it .*landscape repair"):
                read()


@pytest.mark.slow
def test_groups_come_by_probe_then_by_time(study: Path) -> None:
    keys = [(name.partition("/")[0], data.attrs["created"]) for name, data in reader.groups(study)]
    assert keys == sorted(keys)


def test_find_takes_probe_and_label_together(study: Path) -> None:
    label = synthetic.NETWORKS[1].label
    assert {data.attrs["label"] for _, data in reader.find(study, label=label)} == {label}
    assert [name.partition("/")[0] for name, _ in reader.find(study, probe="hessian")] == ["hessian"] * 2
    assert reader.find(study, probe="hessian", label="nobody") == []


@pytest.mark.slow
def test_links_out_of_the_file_or_to_other_groups_are_not_followed(study: Path, tmp_path: Path) -> None:
    linked = tmp_path / "linked.h5"
    linked.write_bytes(study.read_bytes())
    groups = reader.groups(study)
    with h5py.File(linked, "r+") as file:
        file["hessian/outside-0000000000"] = h5py.ExternalLink("/etc/hostname", "/")
        file["hessian/inside-0000000001"] = h5py.SoftLink(f"/{groups[0][0]}")
        file["everything"] = h5py.ExternalLink(str(study), "/hessian")
        file[groups[0][0]]["stolen"] = h5py.ExternalLink(str(study), f"/{groups[0][0]}/done")
    assert [name for name, _ in reader.groups(linked)] == [name for name, _ in groups]
    assert "stolen" not in reader.groups(linked)[0][1]


@pytest.mark.slow
def test_what_is_no_answer_is_left_alone(study: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.h5"
    own.write_bytes(study.read_bytes())
    with h5py.File(own, "r+") as file:
        file["numbers"] = np.arange(3)
        file.create_group("notes/mine")
        file["hessian"].create_dataset("loose", data=1.0)
        file[reader.groups(study)[0][0]]["extra"] = np.arange(4.0)  # an array without scales
    assert len(reader.groups(own)) == len(reader.groups(study))
    assert reader.groups(own)[0][1]["extra"].dims == ("extra_0",)


@pytest.mark.slow
def test_a_reader_sees_the_file_while_a_writer_holds_it_open(study: Path, tmp_path: Path) -> None:
    busy = tmp_path / "busy.h5"
    busy.write_bytes(study.read_bytes())
    code = "import sys, h5py; file = h5py.File(sys.argv[1], 'r+'); print('open', flush=True); sys.stdin.readline()"
    with subprocess.Popen(
        [sys.executable, "-c", code, busy], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "open\n"
        assert len(reader.groups(busy)) == len(reader.groups(study))
        writer.communicate("\n")


@pytest.mark.slow
def test_summary_counts_units_and_says_what_was_found(study: Path) -> None:
    rows = {(row["probe"], row["label"]): row for row in headlines.summary(study)}
    row = rows["surface", synthetic.NETWORKS[0].label]
    assert (row["done"], row["units"], row["finished"], row["model"]) == (309, 441, "", "vit_ti")
    assert row["digest"] == "0000000000"
    assert "loss 0.2" in row["headline"]  # the centre, 0.2 + 6 tanh(0)
    ((_, data),) = reader.find(study, probe="lesion", label=synthetic.NETWORKS[0].label)
    lesion = headlines.numbers(data)
    assert str(headlines.with_intervals(data)["largest drop"]).endswith(", at stages.0.0.stem")
    assert lesion["largest drop"] == pytest.approx(0.25 + 0.03 - 0.005)
    assert lesion["intact accuracy"] == 0.75


def test_the_hessian_headline_is_the_share_of_negative_values(study: Path) -> None:
    for name, data in reader.find(study, probe="hessian"):
        values = data["eigenvalue"].values[data["done"].values == 1]
        assert headlines.numbers(data)["nep"] == pytest.approx((values < 0).mean())
        assert headlines.headline(study, name).startswith(f"nep {headlines.with_intervals(data)['nep']}, ape ")


def test_noise_in_bands_without_a_frequency_alone_names_them() -> None:
    data = xr.Dataset({"accuracy_drop": ("band", [np.nan])}, {"band": [0.05]}, {"empty_bands": "0.05"})
    assert noise.notes(data) == {"bands without a frequency": "0.05"}


def test_a_probe_without_a_headline_of_its_own_gives_its_scalars() -> None:
    data = xr.Dataset({"trace": 3.0, "missing": np.nan, "row": ("x", [1.0])}, attrs={"probe": "another"})
    assert headlines.numbers(data) == {"trace": 3.0}


def test_an_unknown_group_a_missing_and_a_foreign_file_are_refused_in_one_line(study: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no group hessian/nobody"):
        headlines.headline(study, "hessian/nobody")
    with pytest.raises(FileNotFoundError, match="run a probe first"):
        reader.open(tmp_path / "none.h5")
    (tmp_path / "text.h5").write_text("no")
    with pytest.raises(ValueError, match="not an HDF5 file"):
        reader.groups(tmp_path / "text.h5")


def test_the_results_in_the_documentation_are_as_they_were_stored() -> None:
    paths = sorted((Path(__file__).parents[1] / "docs" / "examples" / "results").glob("*.h5"))
    assert paths
    for path in paths:
        with h5py.File(path) as file:
            assert all(group.attrs[CHECK] == checksum(group) for _, group in results_in(file)), path.name


@pytest.mark.slow
def test_what_is_read_on_demand_is_what_the_whole_file_says(unfinished: tuple[Sequence[str], Path]) -> None:
    _, path = unfinished
    whole = reader.groups(path)
    with reader.streaming(path, on_demand=True) as found:
        assert headlines.rows(path, found) == headlines.rows(path, whole)
        for (name, data), (_, other) in zip(found, whole, strict=True):
            assert data.attrs == other.attrs
            for key in data.variables:
                np.testing.assert_array_equal(data[key].values, other[key].values)
                assert (data[key].dims, str(data[key].attrs)) == (other[key].dims, str(other[key].attrs))
            assert (data["done"] == 1).identical(other["done"] == 1), name
        assert rules._findings([rules.Result(path, *one) for one in found]) == rules._findings(
            [rules.Result(path, *one) for one in whole]
        )


def test_a_headline_reads_each_array_that_it_needs_once(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with h5py.File(study) as file:
        stored = sum(len(group) for kind in file.values() for group in kind.values())
    read: list[Handle] = []
    whole = Handle.array
    monkeypatch.setattr(Handle, "array", lambda self: (read.append(self), whole(self))[1])
    opened, open_array = [], hdf5_file._opened
    monkeypatch.setattr(hdf5_file, "_opened", lambda *about: (opened.append(about), open_array(*about))[1])
    headlines.summary(study)
    assert len(read) < 0.7 * stored
    assert len(opened) < 0.8 * stored  # the groups too


@pytest.mark.parametrize("words", [("show",), ("report", "--out", "r.html")])
def test_a_command_searches_the_file_once(
    words: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command_here: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    names = [f"net-{i}" for i in "abcdefghi"]  # too many for pictures
    path = synthetic.write(
        tmp_path / "r.h5", [synthetic.transformer(one, depth=1) for one in names], probes=("variance",)
    )
    counted, search = tmp_path / "searches", hdf5_file.checked_groups

    def checked_groups(*of: Any, **how: Any) -> Any:  # also in a child process
        with counted.open("a") as stream:
            stream.write("x")
        return search(*of, **how)

    monkeypatch.setattr(hdf5_file, "checked_groups", checked_groups)
    assert command_here(words[0], path, *words[1:])[0] in (0, 3)
    assert counted.read_text() == "x"


def test_an_array_in_another_file_is_refused_where_it_is_needed(study: Path, tmp_path: Path) -> None:
    path = tmp_path / "r.h5"
    path.write_bytes(study.read_bytes())
    with h5py.File(path, "r+") as file:
        (group, *_) = file["lesion"].values()
        shape = group["done"].shape
        del group["done"]
        group.create_dataset("done", shape, "u1", external=[("/etc/hostname", 0, 10**4)])
    with pytest.raises(ValueError, match=r"keeps the numbers of .* in another file"):
        headlines.summary(path)


def test_a_damaged_array_is_refused_where_it_is_needed(study: Path, tmp_path: Path) -> None:
    path = tmp_path / "r.h5"
    path.write_bytes(study.read_bytes())
    with h5py.File(path, "r+") as file:
        (group, *_) = file["lesion"].values()
        group["done"][...] = 7
    with pytest.raises(ValueError, match="done holds something else than 0 and 1"):
        headlines.summary(path)
