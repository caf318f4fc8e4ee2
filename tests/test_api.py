"""`landscape.load`, `landscape.measure`, `landscape.open`: the results of `run`, in one call."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import xarray as xr
from measured_runs import ARGUMENTS, save
from torch import nn

import landscape
from landscape import models
from landscape.api import loading_defaults
from landscape.checkpoints.raw_files import file_sha256
from landscape.options import OptionError
from landscape.probes import PROBES, probe_class
from landscape.reporting import progress
from landscape.results import hdf5_file

FEW: dict[str, Any] = {"samples": 16, "batch_size": 8}


@pytest.fixture(scope="module")
def final(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("study") / "checkpoints" / "resnet-digits" / "final.pt"
    return save(path, recipe={}, epoch=1.0)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "results.h5"


def refuse(done: int, total: int) -> None:
    raise AssertionError("a finished run was measured again")


@pytest.mark.slow
def test_a_loaded_subject_is_measured_once_and_its_result_is_labelled(final: Path, out: Path) -> None:
    subject = landscape.load(final, **FEW)
    data = landscape.measure("variance", subject, out=out)
    assert isinstance(data, xr.Dataset)
    assert data["variance"].dims == ("layer",)
    assert data.attrs["label"] == "resnet-digits"
    assert data.attrs["protocol"] == "digits test, 16 samples, batch size 8, no augmentation, weight decay 0, seed 0"
    assert bool((data["done"] == 1).all())
    assert landscape.measure("variance", landscape.load(final, **FEW), out=out, report=refuse).identical(data)
    with pytest.raises(AssertionError, match="measured again"):
        landscape.measure("variance", subject, out=out, overwrite=True, report=refuse)


@pytest.mark.slow
def test_load_takes_all_test_samples_and_measure_1024_of_the_probes_own_split(final: Path, out: Path) -> None:
    assert len(landscape.load(final)) == 360
    data = landscape.measure("variance", final, out=out)
    assert data.attrs["protocol"].startswith("digits test, 360 samples, batch size 128")
    data = landscape.measure("surface", str(final), out=out, resolution=2)
    assert data.attrs["protocol"].startswith("digits train, 1024 samples, batch size 128")


@pytest.mark.slow
def test_options_go_to_the_probe_and_to_loading(final: Path, out: Path) -> None:
    options = {"top": 1, "batches": 1, "weight_decay": 0.5, "split": "test", "device": "cpu", **FEW}
    data = landscape.measure("hessian", final, out=out, label="mine", **options)
    assert (data.sizes["batch"], data.sizes["rank"]) == (1, 1)
    assert "digits test, 16 samples, batch size 8" in data.attrs["protocol"]
    assert "weight decay 0.5" in data.attrs["protocol"]
    assert data.attrs["label"] == "mine"


def test_the_newest_checkpoint_is_measured_by_default(final: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(final.parents[2])
    data = landscape.measure("variance", **FEW)
    assert data.attrs["checkpoint_sha256"] == file_sha256(final)
    assert Path("results.h5").exists()


@pytest.mark.slow
def test_a_module_made_in_python_is_measured(out: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(768, 10))
    subject = landscape.load(model, data="digits", label="linear", **FEW)
    data = landscape.measure("surface", subject, out=out, resolution=3)
    with torch.no_grad():
        losses = [subject.loss(i).item() for i in range(2)]
    assert data["loss"].sel(x=0, y=0).item() == pytest.approx(np.mean(losses), rel=1e-6)
    assert data.attrs["label"] == "linear"
    assert data.attrs["protocol"].startswith("digits test, 16 samples, batch size 8")
    subject = landscape.load(model, data="digits", split="train", **FEW)
    data = landscape.measure("surface", subject, out=None, resolution=3)
    assert data.attrs["protocol"].startswith("digits train, 16 samples, batch size 8")  # before, it said test


def without_times(data: xr.Dataset) -> xr.Dataset:
    kept = {name: value for name, value in data.attrs.items() if name not in ("created", "finished")}
    assert data.attrs["finished"]
    return data.drop_attrs(deep=False).assign_attrs(kept)


@pytest.mark.slow
@pytest.mark.parametrize("probe", ["hessian", "surface", "fourier"])
def test_a_result_in_memory_is_that_of_the_file_to_the_last_attribute(
    probe: str, final: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = probe_class(probe).smallest
    stored = landscape.measure(probe, landscape.load(final, **FEW), out=out, **options)
    monkeypatch.chdir(out.parent)
    files = sorted(out.parent.rglob("*"))
    monkeypatch.setattr(h5py, "File", None)
    alone = landscape.measure(probe, landscape.load(final, **FEW), out=None, **options)
    assert sorted(out.parent.rglob("*")) == files
    xr.testing.assert_identical(without_times(alone), without_times(stored))
    assert alone.encoding == stored.encoding
    assert list(alone.variables) == list(stored.variables)


@pytest.mark.slow
def test_shared_passes_and_staged_and_tuned_probes_need_no_file(final: Path, out: Path) -> None:
    subject = landscape.load(final, **FEW)
    stored, alone = (landscape.features(subject, out=where) for where in (out, None))
    assert list(alone) == list(stored)
    for name, data in alone.items():
        xr.testing.assert_identical(without_times(data), without_times(stored[name]))
    preview = landscape.measure("surface", subject, out=None, resolution=5, preview=True)
    assert bool((preview["done"] == 1).all())
    tuned = landscape.measure("surface", subject, out=None, resolution=3, tune=True)
    assert "batch_size" in tuned.attrs["choices"]


def test_a_module_is_measured_with_data_and_refused_without(out: Path) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(768, 10))
    data = landscape.measure("hessian", model, data="digits", out=None, top=1, samples=16)
    assert data.attrs["protocol"].startswith("digits train, 16 samples, batch size 16")
    assert landscape.evaluate(model, data="digits")["samples"] == 360
    with pytest.raises(OptionError, match=r"Sequential is a module without data; give data=\.\.\. with it"):
        landscape.measure("hessian", model, out=out)


def test_python_has_its_names_and_lists_the_probes(tmp_path: Path) -> None:
    code = (
        "import sys, landscape; names = dir(landscape); table = landscape.probes(); assert 'torch' not in sys.modules;"
        "print(names, landscape.__version__); print(table); import landscape.probes; print(landscape.probes() == table)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names, *table, same = done.stdout.splitlines()
    for name in ("Subject", "__version__", "compare", "evaluate", "features", "load", "measure", "open", "probes"):
        assert f"'{name}'" in names
    assert [row.split()[0] for row in table] == list(PROBES)
    assert re.search(r"^hessian +Extreme Hessian eigenvalues of every mini-batch", done.stdout, re.MULTILINE)
    assert same == "True"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tops": 3}, r"hessian has no option tops; it has .*top.*which.*; did you mean top\?"),
        ({"resolution": 3}, r"hessian has no option resolution"),
        ({"samples": 4}, r"samples must be given to landscape.load"),
        ({"top": 0}, r"--top must be at least 1, got 0"),
        ({"preset": "park2021"}, r"--preset must be park2022 for hessian, got park2021"),
        ({"batch_size": "16"}, "--batch-size must be a whole number, got '16'"),
        ({"batch_size": 2.5}, "--batch-size must be a whole number, got 2.5"),
        ({"weight_decay": "small"}, "--weight-decay must be a number, got 'small'"),
        ({"top": "five"}, "--top must be a whole number, got 'five'"),
        ({"top": 2.5}, "--top must be a whole number, got 2.5"),
        ({"params": {"head": 1}}, "--params must be a text, as on the command line, got {'head': 1}"),
        ({"mean": "0.5", "std": 0.2}, "one number per channel and --std above 0, such as --mean 0.5 --std 0.25"),
        ({"tol": "tight"}, "--tol must be a number, got 'tight'"),
        ({"verify": "yes"}, "--verify must be True or False, got 'yes'"),
        ({"model": nn.Linear(2, 2)}, r"the first argument: landscape\.load\(module, data=\.\.\.\)"),
        ({"model": nn.Linear}, "is the first argument"),
        ({"data": lambda: None}, "is not called; give what it returns"),
    ],
)
def test_options_that_do_not_fit_are_usage_errors(options: dict[str, Any], said: str, final: Path, out: Path) -> None:
    loads = {"batch_size", "weight_decay", "mean", "model", "data"} & options.keys()
    subject = final if loads else landscape.load(final, **FEW)
    with pytest.raises(OptionError, match=said):
        landscape.measure("hessian", subject, out=out, **options)
    assert not out.exists()


@pytest.mark.slow
def test_other_values_of_another_type(final: Path, out: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no probe features; .*; landscape.features\(...\) measures several"):
        landscape.measure("features", final, out=None)
    with pytest.raises(ValueError, match=r"there is no probe hesian; expected one of surface, .*hessian"):
        landscape.measure("hesian", final, out=out)
    with pytest.raises(OptionError, match="--layers must be a text or a list of texts, got 3"):
        landscape.measure("variance", final, out=out, layers=3)
    with pytest.raises(OptionError, match=r"--range must be a text, .*, got \(-1, 1\)"):
        landscape.measure("surface", final, out=out, range=(-1, 1))
    with pytest.raises(OptionError, match="a checkpoint is a path or a module, got a OrderedDict"):
        landscape.load(nn.Linear(2, 2).state_dict(), data="digits")  # type: ignore[arg-type]
    found = landscape.measure("hessian", final, out=out, top=np.int64(1), tol=np.float64(1e-2), **FEW)
    assert found.sizes["rank"] == 1


def test_evaluate_returns_the_metrics(final: Path) -> None:
    found = landscape.evaluate(final, **FEW)
    assert found == landscape.evaluate(landscape.load(final, **FEW))
    assert (found["samples"], found["accuracy_se"] > 0) == (16, True)
    with pytest.raises(OptionError, match=r"samples must be given to landscape\.load"):
        landscape.evaluate(landscape.load(final, **FEW), samples=3)


@pytest.mark.slow
def test_the_protocol_is_printed_once_for_each_probe_of_a_subject(
    final: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    line = (
        "hessian of resnet-digits: digits test, 16 samples, batch size 8, no augmentation, weight decay 0, seed 0 "
        "(defaults of hessian: batch_size=16, samples=1024, split='train')"
    )

    def printed(times: int = 1, **options: Any) -> list[str]:
        subject = landscape.load(final, **FEW)
        for _ in range(times):
            landscape.measure("hessian", subject, out=None, top=1, batches=1, hvp="double-backward", **options)
        return capsys.readouterr().err.splitlines()

    assert printed(times=2) == [line]
    assert printed(quiet=True) == []
    with caplog.at_level("ERROR", logger="landscape"):
        assert printed() == []
    with caplog.at_level("INFO"):  # as by logging.basicConfig
        assert printed() == []
    assert line in caplog.messages


@pytest.mark.slow
def test_a_report_of_the_callers_takes_the_place_of_all_progress(
    final: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "UNIT_SECONDS", 0.0)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    heard: list[tuple[int, int]] = []
    landscape.measure("trace", final, out=None, vectors=4, report=lambda done, of: heard.append((done, of)), **FEW)
    assert heard == [(1, 2), (2, 2)]
    assert "Hessian products" not in capsys.readouterr().err


@pytest.mark.slow
def test_several_planes_are_several_groups_and_the_last_is_returned(final: Path, out: Path) -> None:
    subject = landscape.load(final, **FEW)
    data = landscape.measure("surface", subject, out=out, resolution=3, directions=2, seed=5)
    groups = [tree.to_dataset() for tree in landscape.open(out)["surface"].children.values()]
    assert len(groups) == 2
    alone = landscape.measure("surface", subject, out=out, resolution=3, seed=6, report=refuse)
    assert alone.identical(data)
    assert not np.allclose(groups[0]["loss"], groups[1]["loss"])


@pytest.mark.slow
def test_a_single_word_is_a_list_of_one(final: Path, out: Path) -> None:
    subject = landscape.load(final, **FEW)
    data = landscape.measure("fourier", subject, out=out, layers="layer1.0$")
    assert data["name"].values.tolist() == ["layer1.0"]
    assert landscape.measure("fourier", subject, out=out, layers=["layer1.0$"], report=refuse).identical(data)


@pytest.mark.slow
def test_a_preset_sets_probe_and_loading(final: Path, out: Path) -> None:
    with pytest.raises(ValueError, match=r"--augment uses the checkpoint's own recipe and this one has none"):
        landscape.measure("hessian", final, out=out, preset="park2022")  # the preset augments
    data = landscape.measure("hessian", final, out=out, preset="park2022", augment=False, top=1, samples=16)
    said = "digits train, 16 samples, batch size 16, no augmentation, weight decay 0.05, seed 0"
    assert data.attrs["protocol"] == said


def test_the_package_offers_its_names() -> None:
    assert set(landscape.__all__) == {
        "Headline", "LightningMonitor", "Monitor", "Plan", "Probe", "Quantity", "Subject", "TransformersMonitor",
        "Unit", "__version__", "compare", "evaluate", "features", "load", "measure", "open", "probes", "study",
    }  # fmt: skip
    with pytest.raises(AttributeError, match="has no attribute close"):
        landscape.close  # noqa: B018


# --- networks in memory in place of checkpoint files ---


def networks(count: int) -> list[nn.Module]:
    made = []
    for seed in range(count):
        torch.manual_seed(seed)
        model = models.build("resnet_demo", classes=10, image_size=16, **ARGUMENTS).train()
        model(torch.randn(32, 3, 16, 16))  # statistics of batch norm of its own
        made.append(model)
    return made


def bits(model: nn.Module) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in model.state_dict().items()}


def same_numbers(one: xr.Dataset, other: xr.Dataset) -> bool:
    names = one.variables.keys() - {"name", "path_name"}
    pairs = [(one.variables[name].to_base_variable(), other.variables[name].to_base_variable()) for name in names]
    return one.variables.keys() == other.variables.keys() and all(mine.equals(theirs) for mine, theirs in pairs)


@pytest.mark.slow
def test_lines_and_planes_go_through_networks_in_memory_as_through_their_files(tmp_path: Path) -> None:
    start, *ends = networks(3)
    paths = [tmp_path / f"{name}.pt" for name in "bc"]
    for path, model in zip(paths, ends, strict=True):
        torch.save(model.state_dict(), path)
    subject = landscape.load(start, data="digits", **FEW)
    kept = [bits(model) for model in (start, *ends)]
    labelled = landscape.load(ends[1], data="digits", label="c, v1.2", **FEW)
    for probe, option, options in (("line", "along", {"resolution": 3}), ("surface", "plane", {"resolution": "3"})):
        stored = landscape.measure(probe, subject, out=None, **{option: f"{paths[0]},{paths[1]}"}, **options)
        given = [tuple(ends), [ends[0].state_dict(), labelled], (paths[0], labelled), tuple(paths)]
        results = [landscape.measure(probe, subject, out=None, **{option: one}, **options) for one in given]
        assert all(same_numbers(found, stored) for found in results)
        assert landscape.measure(probe, subject, out=None, **{option: given[0]}, **options).equals(results[0])
    names = landscape.measure("line", subject, out=None, along=[labelled, ends[0], ends[0]], resolution=3)["name"]
    assert names.values.tolist() == ["towards c__v1_2", "towards module", "towards module-2"]
    assert [bits(model) for model in (start, *ends)] == kept
    assert all(module.training for model in (start, *ends) for module in model.modules())


@pytest.mark.slow
def test_a_line_to_a_network_is_stored_by_its_weights_and_takes_those_of_the_moment(out: Path) -> None:
    start, end = networks(2)
    subject = landscape.load(start, data="digits", **FEW)
    first = landscape.measure("line", subject, out=out, along=end, resolution=3)
    assert landscape.measure("line", subject, out=out, along=end, resolution=3, report=refuse).identical(first)
    with torch.no_grad():
        for p in end.parameters():
            p.mul_(0.9)
    assert not landscape.measure("line", subject, out=out, along=end, resolution=3).equals(first)


@pytest.mark.slow
def test_similarity_to_a_network_in_memory(tmp_path: Path, final: Path) -> None:
    start, end = networks(2)
    subject = landscape.load(final, **FEW)
    before = bits(end)
    found = landscape.measure("similarity", subject, out=None, against=end)
    assert found.attrs["against"] == "module"
    assert bits(end) == before
    assert all(module.training for module in end.modules())
    stored = save(tmp_path / "end.pt", state_dict=end.state_dict(), recipe={}, epoch=1.0)
    assert same_numbers(found, landscape.measure("similarity", subject, out=None, against=stored))
    weights = landscape.measure("similarity", landscape.load(start, data="digits", **FEW), out=None,
                                against=end.state_dict())  # fmt: skip
    assert weights.attrs["against"] == "state_dict"


@pytest.mark.parametrize(
    ("probe", "options", "message"),
    [
        ("surface", {"plane": nn.Linear(1, 1)}, "plane takes 2 networks in memory, got 1"),
        ("line", {"along": {"lr": 0.1}}, "state_dict holds no weights: expected a dict of tensors"),
        ("line", {"along": nn.Linear(1, 1)}, "module has another architecture"),
    ],
)
def test_what_is_no_fitting_network_is_rejected(probe: str, options: dict[str, Any], message: str, final: Path) -> None:
    with pytest.raises(ValueError, match=message):
        landscape.measure(probe, landscape.load(final, **FEW), out=None, **options)


# --- a results file that grows ---


@pytest.mark.slow
def test_results_of_a_training_loop_are_not_read_again_at_every_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[Path] = []
    whole = hdf5_file.checked_groups
    monkeypatch.setattr(
        hdf5_file, "checked_groups", lambda file, path, links: checked.append(path) or whole(file, path, links=links)
    )
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    subject = landscape.load(model, data=(torch.randn(8, 3), torch.arange(8) % 2))
    path = tmp_path / "results.h5"
    for _ in range(3):
        landscape.measure("hessian", subject, out=path, top=1, hvp="double-backward", quiet=True)
        with torch.no_grad():
            model.weight.add_(0.1)
    assert checked == []  # only this process has written it
    with h5py.File(path, "a") as file:
        file["hessian/far"] = h5py.ExternalLink("elsewhere.h5", "/")
    with pytest.raises(ValueError, match="holds a link instead of data"):
        landscape.measure("hessian", subject, out=path, top=1, hvp="double-backward", quiet=True)


def test_a_checkout_that_is_not_installed_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its version is unknown then."""
    from importlib import metadata

    from landscape.results import run_key

    def version(name: str, of: Any = metadata.version) -> str:
        if name == "landscape-probes":
            raise metadata.PackageNotFoundError(name)
        return str(of(name))

    monkeypatch.setattr(metadata, "version", version)
    run_key.versions.cache_clear()
    try:
        data = (torch.randn(4, 3), torch.randint(2, (4,)))
        trace = landscape.measure("trace", nn.Linear(3, 2), data=data, batch_size=4, vectors=4, out=None, quiet=True)
        assert '"landscape": "not installed"' in trace.attrs["versions"]
    finally:
        run_key.versions.cache_clear()


@pytest.mark.slow
def test_the_seed_of_a_loaded_subject_is_that_of_the_probe_unless_it_is_given() -> None:
    torch.manual_seed(0)
    network, data = torch.nn.Linear(4, 3), (torch.randn(16, 4), torch.arange(16) % 3)
    zero, one = (landscape.load(network, data=data, seed=seed) for seed in (0, 1))
    found = [
        landscape.measure("trace", subject, out=None, quiet=True, vectors=4, **options)
        for subject, options in ((zero, {}), (one, {}), (one, {"seed": 0}), (zero, {"seed": 1}))
    ]
    traces = [float(data.trace) for data in found]
    assert traces[0] == traces[2] != traces[1] == traces[3]
    assert found[0].attrs["protocol"].endswith("seed 0")
    assert found[3].attrs["protocol"].endswith("seed 0 (seed 1 of the trace)")


def test_mini_batches_have_128_samples_but_of_hessian_and_of_frames_as_large_as_masks() -> None:
    sizes = {name: loading_defaults(probe_class(name))["batch_size"] for name in PROBES}
    assert {name: size for name, size in sizes.items() if size != 128} == {"hessian": 16, "stream": 16}


@pytest.mark.parametrize(
    ("probe", "options", "said"),
    [
        ("noise-scale", {"groups": 3, "simple": True}, ", 36 samples, "),  # in quarters of three
        ("flatness", {"measures": "sam", "params": "weight"}, ", parameters matching weight"),
        ("flatness", {"measures": "sam", "seed": 1}, " (seed 1 of the flatness)"),
    ],
)
def test_a_protocol_says_what_a_probe_measured_of_the_samples_and_the_parameters_and_with_which_seed(
    probe: str, options: dict[str, Any], said: str
) -> None:
    torch.manual_seed(0)
    subject = landscape.load(torch.nn.Linear(4, 3), data=(torch.randn(40, 4), torch.arange(40) % 3), batch_size=16)
    assert said in landscape.measure(probe, subject, out=None, quiet=True, **options).attrs["protocol"]


def test_arguments_are_given_as_a_mapping_or_as_words() -> None:
    inputs, targets = torch.randn(8, 5), torch.arange(8) % 3
    subject = landscape.load(nn.Linear(5, 3), data=(inputs, targets), batch_size=4)
    options = {"optimizer": "adam", "optimizer_state": False, "out": None, "quiet": True}
    words, mapping = ["lr=0.1", "betas=0.5,0.9", "maximize=False"], {"lr": 0.1, "betas": (0.5, 0.9), "maximize": False}
    results = [landscape.measure("step", subject, optimizer_arg=of, **options) for of in (words, mapping)]
    assert results[0].attrs["parameters"] == results[1].attrs["parameters"]
    block = landscape.subject.spec.Spec(smooth_at="a", smooth_block={"blur": 2, "padding": "grow"})
    assert block == landscape.subject.spec.Spec(smooth_at="a", smooth_block="blur=2,padding=grow")
    with pytest.raises(OptionError, match="--layers must be a text or a list of texts"):
        landscape.measure("variance", subject, layers={"a": 1})


def test_more_samples_are_advised_where_there_are_more() -> None:
    data = (torch.randn(8, 5), torch.arange(8) % 3)
    for samples, said in ((8, "--batches 2$"), (4, "--batches 1 or raise --samples$")):
        subject = landscape.load(nn.Linear(5, 3), data=data, samples=samples, batch_size=4)
        with pytest.raises(ValueError, match=said):
            landscape.measure("hessian", subject, batches=3, out=None, quiet=True)
    with pytest.raises(ValueError, match="in memory has no more"):
        landscape.measure("calibration", landscape.load(nn.Linear(5, 3), data=(data[0][:1], data[1][:1])), out=None)
