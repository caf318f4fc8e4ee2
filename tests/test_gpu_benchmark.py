"""The benchmark for a GPU: a dry run of all its stages on a CPU, and what its numbers are made from."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from analytic import tanh_net
from recording import Recorder
from simulated_cuda import simulated_cuda

import landscape
from landscape.products import hvp_backends
from landscape.products.hvp_backends import curvature
from landscape.subject import graph_replay
from landscape.subject.graph_replay import GraphReplay
from landscape.weight_space import cost_model

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
STAGES = ("probes", "hessian", "products", "surface", "features", "training", "language")
# What a machine with PyTorch alone lacks, and the script says it does without; an import of one fails.
BARE = """
import runpy, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"typer", "matplotlib", "h5netcdf", "safetensors", "torchvision", "timm"}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
sys.path.insert(0, sys.argv[1])
sys.argv = [sys.argv[1] + "/gpu.py", *sys.argv[2:]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of the benchmarks on the import path."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def dry_run(folder: Path, *stages: str, device: str = "cpu") -> str:
    command = [sys.executable, "-c", BARE, str(BENCHMARKS), "--small", "--device", device, "--out", str(folder)]
    if stages:
        command += ["--stage", *stages]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=folder).stdout


def table(page: str, stage: str) -> list[list[str]]:
    """The rows of a stage's first table, its header first."""
    section = page.partition(f"\n## `{stage}`: ")[2].partition("\n## ")[0]
    lines = next(part for part in section.split("\n\n") if part.startswith("|")).splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "---" not in line]


@pytest.mark.campaign
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_dry_run_fills_the_table_of_every_stage_and_continues_where_it_was_killed(
    device: str, tmp_path: Path
) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    dry_run(tmp_path, device=device)
    _fills_every_table((tmp_path / "GPU.md").read_text(), tmp_path)
    _continues(tmp_path, tmp_path / "killed", device)


def _fills_every_table(text: str, folder: Path) -> None:
    rows = [json.loads(line)["row"] for line in (folder / "gpu.jsonl").read_text().splitlines()[1:]]
    assert {stage for stage, _, _ in rows} == set(STAGES)
    assert [row for _, _, row in rows if "error" in row] == []
    assert "rows are not measured yet" not in text
    assert "A dry run without a GPU" in text or torch.cuda.is_available()

    probes = table(text, "probes")[1:]
    assert set(landscape.probes()) - {row[1] for row in probes} <= {"corruption", "tokens"}  # without their packages
    assert {row[-1] for row in probes} <= {"PASS", "not judged"}
    assert any(0 < float(row[-2]) < 1e-3 for row in probes), "differences of two precisions, none of them zero"

    columns, *hessian = table(text, "hessian")
    engines = {row[columns.index("engine")] for row in hessian}
    assert engines >= {"PyHessian", "curvlinops + eigsh", "double-backward", "traced", "traced x 2"}
    ours = [row for row in hessian if row[columns.index("engine")] in ("double-backward", "traced", "traced x 2")]
    assert {row[columns.index("missed")] for row in ours} == {"0/5"}
    products = {row[columns.index("products")] for row in ours}
    assert len(products) == 1, "equal searches whichever backend makes their products"

    columns, *surface = table(text, "surface")
    ways = {row[columns.index("way")]: row[columns.index("deviation, SE")] for row in surface}
    assert float(ways["exact fp32"]) == 0 < float(ways["bf16"])
    assert all(float(row[columns.index("s / point")]) > 0 for row in surface)
    assert all(int(row[3]) > 0 for row in table(text, "products")[1:])
    assert {row[1] for row in table(text, "features")[1:]} == {"bare forward", "the three", "with attention"}
    assert {row[2] for row in table(text, "training")[1:]} == {"fp32", "bf16"}
    assert table(text, "language")[1][0] == "tiny"


def _continues(folder: Path, killed: Path, device: str) -> None:
    """Only the rows that are missing are measured again, and a half-written line counts as missing."""
    killed.mkdir()
    lines = (folder / "gpu.jsonl").read_text().splitlines()
    training = [line for line in lines[1:] if json.loads(line)["row"][0] == "training"]
    kept = [line for line in lines if line not in training]
    (killed / "gpu.jsonl").write_text("\n".join([*kept, training[0], training[1][:40]]))

    said = dry_run(killed, "training", device=device)

    now = (killed / "gpu.jsonl").read_text().splitlines()
    assert now[: len(kept) + 1] == [*kept, training[0]]
    assert [json.loads(line)["row"][:2] for line in now[len(kept) + 1 :]] == [json.loads(training[1])["row"][:2]]
    assert said.count("training: ") == 2, "one row and the end"


def test_rows_of_another_machine_are_refused(benchmarks: None, tmp_path: Path) -> None:
    from gpu_stages.steps import RowsFile

    RowsFile(tmp_path / "gpu.jsonl", "NVIDIA H100").add("hessian", ("a", 1), {"seconds": 1.0})
    assert RowsFile(tmp_path / "gpu.jsonl", "NVIDIA H100").of("hessian") == {("a", 1): {"seconds": 1.0}}
    with pytest.raises(ValueError, match=r"holds rows of NVIDIA H100, and this run is of a CPU; .* --out"):
        RowsFile(tmp_path / "gpu.jsonl", "a CPU")


@pytest.mark.parametrize("cut", [1, 2, 5, 30])
def test_half_a_row_is_measured_again(cut: int, benchmarks: None, tmp_path: Path) -> None:
    """Wherever the last line was cut, of its end alone too, the rows before it stay and later ones are readable."""
    from gpu_stages.steps import RowsFile

    path = tmp_path / "gpu.jsonl"
    file = RowsFile(path, "here")
    file.add("probes", ("a",), {"differences": {"loss": 0.0}})
    file.add("probes", ("b",), {"differences": {"loss": 0.0}})
    path.write_text(path.read_text()[:-cut])
    found = RowsFile(path, "here")
    assert list(found.of("probes")) == ([("a",), ("b",)] if cut == 1 else [("a",)])
    found.add("probes", ("c",), {})
    assert list(RowsFile(path, "here").of("probes")) == [*found.of("probes")]


@pytest.mark.slow
@pytest.mark.campaign
def test_floors_count_the_passes_and_products_of_a_probe(benchmarks: None, tmp_path: Path) -> None:
    import floors

    made = {}
    for probe, samples in (("variance", 9), ("trace", 3), ("trajectory", 3)):
        _, needs = floors.measured(probe, floors.load("vit_demo", probe, samples, tmp_path), 60.0, tmp_path)
        made[probe] = needs.samples
    assert made["variance"]["forward", 9] == 9
    assert not any(made["variance"][kind, 9] for kind in ("backward", "product"))
    assert made["trajectory"]["forward", 3] >= 4 * 3
    assert made["trace"]["product", 3] >= 32 * 3, "xtrace's products, and those by which the backend is chosen"


def test_a_row_keeps_what_the_package_said(benchmarks: None) -> None:
    from gpu_stages.steps import Step, measured, messages

    def say() -> dict[str, Any]:
        for log in (graph_replay._log, hvp_backends.log, cost_model._log):
            log.debug("no CUDA graph of the %s", log.name.rpartition(".")[2])
        return {"seconds": 1.0}

    row = measured(Step(("a", 1), say), torch.device("cpu"))
    said = [f"no CUDA graph of the {part}" for part in ("graph_replay", "hvp_backends", "cost_model")]
    assert row == {"seconds": 1.0, "messages": said}
    assert messages({("a", 1): row, ("b", 1): row}) == [f"- {text} (a 1; 2 in all)" for text in said]
    assert not logging.getLogger("landscape.subject").handlers


@pytest.mark.campaign
def test_a_stage_ends_within_its_time_and_continues(benchmarks: None, tmp_path: Path) -> None:
    """No step is begun that would take as long as the longest before it and end too late; the next call does it."""
    from gpu_stages.steps import RowsFile, Settings, Step, run

    class Stage:
        TITLE = ABOUT = ""

        def steps(self, settings: Settings) -> list[Step]:
            def wait() -> dict[str, Any]:
                time.sleep(0.05)
                return {}

            return [Step((i,), wait) for i in range(4)]

        def tables(self, rows: Any) -> str:
            return ""

    def left(seconds: float) -> int:
        settings = Settings(torch.device("cpu"), True, tmp_path, until=time.monotonic() + seconds)
        return run("waits", Stage(), settings, RowsFile(tmp_path / "gpu.jsonl", "here"))

    assert left(0.07) == 3, "one fits, and a second one would not"
    assert left(0.0) == 2, "every call gets on"
    assert left(60.0) == 0
    assert list(RowsFile(tmp_path / "gpu.jsonl", "here").of("waits")) == [(0,), (1,), (2,), (3,)]


@pytest.mark.campaign
def test_a_slow_kind_of_row_leaves_the_time_to_others_and_chosen_rows_alone_are_measured(
    benchmarks: None, tmp_path: Path
) -> None:
    from gpu_stages.steps import RowsFile, Settings, Step, run

    clock = iter(range(0, 1000))

    class Stage:
        TITLE = ABOUT = ""

        def steps(self, settings: Settings) -> list[Step]:
            keys = [("net", 32, engine, i) for i in range(2) for engine in ("quick", "slow")] + [
                ("other", 32, "quick", 0)
            ]
            return [
                Step(key, lambda key=key: {"seconds": [next(clock) for _ in range(9 * (key[2] == "slow"))]})
                for key in keys
            ]

        def tables(self, rows: Any) -> str:
            return ""

    def keys(folder: Path, until: float, **chosen: tuple[str, ...]) -> list[tuple[Any, ...]]:
        file, pages = RowsFile(folder / "gpu.jsonl", "here"), []
        settings = Settings(torch.device("cpu"), True, folder, until=until, **chosen)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("gpu_stages.steps.time.monotonic", lambda: next(clock))
            left = run("net", Stage(), settings, file, lambda: pages.append(1))
        found = [*file.of("net")]
        assert (len(pages), left) == (
            len(found),
            sum(settings.wants(s.key) for s in Stage().steps(settings)) - len(found),
        )
        return found

    everything = keys(tmp_path / "all", 1e9)
    assert len(everything) == 5
    limited = keys(tmp_path / "limited", next(clock) + 24.0)
    assert limited == [("net", 32, "quick", 0), ("net", 32, "slow", 0), ("net", 32, "quick", 1)], (
        "a new kind may be slow"
    )
    assert keys(tmp_path / "only", 1e9, only=("net-32",), engines=("quick",)) == [limited[0], limited[2]]


def test_errors_are_rows_but_running_out_of_time_is_not(benchmarks: None, tmp_path: Path) -> None:
    from gpu_stages.steps import OutOfTime, Step, measured

    def fail() -> dict[str, Any]:
        raise RuntimeError("CUDA out of memory.\n  Tried to allocate 2 GiB")

    def late() -> dict[str, Any]:
        raise OutOfTime("not finished after 3 s")

    row = measured(Step(("a",), fail), torch.device("cpu"))
    assert row == {"error": "RuntimeError: CUDA out of memory. Tried to allocate 2 GiB"}
    with pytest.raises(OutOfTime):
        measured(Step(("a",), late), torch.device("cpu"))


def test_idle_time_is_what_no_kernel_or_copy_covers(benchmarks: None) -> None:
    """Kernels that overlap on two streams count once; launches and annotations do not occupy the device."""
    from gpu_stages.timing import busy_seconds

    events = [
        {"cat": "kernel", "ts": 0.0, "dur": 10.0}, {"cat": "kernel", "ts": 5.0, "dur": 10.0},
        {"cat": "kernel", "ts": 6.0, "dur": 2.0}, {"cat": "gpu_memcpy", "ts": 100, "dur": 1},
        {"cat": "gpu_memset", "ts": 100.5, "dur": 1.0}, {"cat": "cuda_runtime", "ts": 0.0, "dur": 500.0},
        {"cat": "gpu_user_annotation", "ts": 0.0, "dur": 500.0}, {"cat": "kernel", "ts": 7.0},
    ]  # fmt: skip
    assert busy_seconds(events) == pytest.approx(16.5e-6)
    assert busy_seconds([]) == 0.0


def test_idle_time_is_that_of_work_which_has_run_before(benchmarks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu_stages import timing

    order: list[str] = []

    class Recorded:
        def __init__(self, **options: Any) -> None: ...

        def __enter__(self) -> Recorded:
            order.append("profiled:")
            return self

        def __exit__(self, *error: object) -> None: ...

        def export_chrome_trace(self, path: str) -> None:
            Path(path).write_text(json.dumps({"traceEvents": [{"cat": "kernel", "ts": 0.0, "dur": 5e5}]}))

    def timed(work: Any, device: torch.device) -> float:
        order.append("timed:")
        work()
        return 2.0

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(timing, "profile", Recorded)
    monkeypatch.setattr(timing, "seconds", timed)
    assert timing.share_outside_kernels(lambda: order.append("work"), torch.device("cuda")) == 0.75
    assert order == ["work", "timed:", "work", "profiled:", "work"]


def test_the_clock_of_a_gpu_waits_for_its_work(benchmarks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import measuring

    order: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: order.append("wait"))
    monkeypatch.setattr(time, "perf_counter", lambda: order.append("read") or 0.0)
    measuring.seconds(lambda: order.append("work"), measuring.clock_of("cuda"))
    assert order == ["wait", "read", "work", "wait", "read"]
    assert measuring.clock_of("cpu") is time.process_time


def test_a_surface_without_a_bare_pass_or_a_measurable_time_has_a_row(benchmarks: None) -> None:
    from gpu_stages.surfaces import tables

    at = ("vit_s", 32, 0)
    measured = {"images": 10, "seconds": 0.0, "losses": [(1.0, 0.1)]}
    text = tables({(*at, "exact fp32"): measured})
    (line,) = text.splitlines()[2:]
    assert [cell.strip() for cell in line.split("|")][1:8:6] == ["vit_s", "n/a"]


def test_weights_whose_writing_was_interrupted_are_made_again(
    benchmarks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpu_stages.networks import prepared

    def interrupted(state: object, path: Path) -> None:
        Path(path).write_bytes(b"half")
        raise KeyboardInterrupt

    sizes = {"folder": tmp_path, "small": True, "batch_size": 4, "batches": 1}
    make = partial(prepared, "vit_demo", 16, "trained", torch.device("cpu"), **sizes)
    with monkeypatch.context() as context:
        context.setattr(torch, "save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            make()
    first, second = ([p.tolist() for p in make().model.parameters()] for _ in range(2))
    assert first == second


def test_probes_are_timed_by_one_clock(benchmarks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu_stages import probes
    from gpu_stages.steps import Settings

    clocks: list[str] = []
    monkeypatch.setattr(probes, "seconds", lambda work, device: clocks.append(device.type) or work() or 1.0)
    monkeypatch.setattr(probes, "_network", lambda *_: torch.nn.Linear(1, 1))
    monkeypatch.setattr(landscape, "measure", lambda *_, **options: xr.Dataset())
    with simulated_cuda():
        probes.compared("alternet_demo", "line", Settings(torch.device("cuda"), True, tmp_path))
    assert clocks == ["cuda", "cuda"]


def test_products_of_a_data_set_are_counted(benchmarks: None, tmp_path: Path) -> None:
    from gpu_stages import products
    from gpu_stages.steps import Settings

    row = products._measured("vit_demo", 16, "top 5 of all samples", Settings(torch.device("cpu"), True, tmp_path))
    assert row["products"] >= 2 * 3
    assert row["seconds"] > 0
    assert "| vit_demo | 16 | top 5 of all samples |" in products.tables(
        {("vit_demo", 16, "top 5 of all samples"): row}
    )


@pytest.mark.campaign
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # of which torch's compiler makes use
def test_compiled_products_of_curvlinops_are_the_eager_ones(benchmarks: None) -> None:
    pytest.importorskip("curvlinops")
    from other_engines import curvlinops

    subject = tanh_net()
    compiled, eager = (curvlinops(subject, 0, compiled=flag)[0] for flag in (True, False))
    np.testing.assert_allclose(compiled, eager, rtol=1e-3)


def test_differences_are_relative_to_the_greatest_value(benchmarks: None) -> None:
    from gpu_stages.probes import difference, verdict

    nan = math.nan
    assert difference(np.array([2.0, -4.0, nan]), np.array([2.0, -4.1, nan])) == pytest.approx(0.025)
    assert difference(np.array([1.0, nan]), np.array([1.0, 2.0])) == math.inf
    assert difference(np.array([math.inf, 1.0]), np.array([math.inf, 1.0])) == 0.0
    assert difference(np.array([math.inf, 1.0]), np.array([math.inf, 2.0])) == 1.0
    assert difference(np.zeros(2), np.array([0.0, 0.5])) == 0.5
    assert difference(np.full(1, 1e-6), np.full(1, 2e-6), "degree") < 1e-8
    row = {"judged": True, "differences": {"loss": 1e-2, "accuracy": 1e-2, "spectrum": 1e-5}}
    assert verdict("surface", row) == ("FAIL", ["loss"])
    assert verdict("surface", {**row, "judged": False}) == ("not judged", [])
    assert verdict("hessian", {"judged": True, "differences": {"matvecs": 0.3, "eigenvalue": 1e-4}}) == ("PASS", [])


@pytest.mark.campaign
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_products_of_any_number_of_mini_batches_can_be_compared(benchmarks: None) -> None:
    from gpu_stages.variants import side_by_side

    subject = tanh_net(sizes=(4, 4, 4))
    counts = []
    for wanted in (2, 3, 0):
        own = replace(subject)  # what is traced is kept with the subject
        with side_by_side(wanted):
            counts.append(curvature(own, own.parameters, "traced", batched=True).batched)
    assert counts == [2, 3, 0]


def test_cuda_graphs_can_be_switched_off(benchmarks: None) -> None:
    from gpu_stages.variants import cuda_graphs

    recorder = Recorder()
    replay = GraphReplay(lambda x: [2 * x], "doubling", capture=recorder)
    with cuda_graphs(False):
        assert replay.at([])(torch.ones(1))[0] == 2
        assert recorder.recordings == 0
    with cuda_graphs(True):
        assert replay.at([])(torch.ones(1))[0] == 2
        assert recorder.recordings == 1


def test_the_page_in_the_repository_is_that_of_its_rows(benchmarks: None) -> None:
    import gpu
    from gpu_stages.page import FINDINGS, page
    from gpu_stages.steps import RowsFile, Settings

    committed = (BENCHMARKS / "GPU.md").read_text()
    lines = committed.partition("## Machine\n\n")[2].partition("\n\n")[0].splitlines()
    facts = dict(line.removeprefix("- ").split(": ", 1) for line in lines)
    origin = f"{facts['nvidia-smi name']}, PyTorch {facts['PyTorch']}"
    file, settings = RowsFile(BENCHMARKS / "gpu.jsonl", origin), Settings(torch.device("cuda"), False, BENCHMARKS)
    assert committed == page(gpu.stages(), file, facts, settings)
    assert FINDINGS.read_text() in committed
