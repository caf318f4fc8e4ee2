"""Set up every process that runs tests, before torch is imported: its signals and threads."""

import gc
import importlib.util
import os
import signal
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.error import URLError

import pytest
from command_line import foreign_options

if TYPE_CHECKING:
    from landscape.running.executor import Executor

# Imports and rewritten asserts leave many objects and little garbage: to look for it took a quarter of the collection.
gc.disable()

# A shell starts background jobs with Ctrl-C ignored, which they hand on; the tests that press it need it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# One thread in every process, those that tests start too: tensors are small, and parallel workers share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["LANDSCAPE_CACHE"] = ""  # the user's own recorded graphs stay as they are
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as the command line does, where more threads are set

os.fsync = lambda fd: None  # no test outlives a power cut, and thousands of results would wait for the disk


# They import timm, torchvision or transformers, which takes a process ten seconds: one process gets them all.
OF_LIBRARIES = {
    f"test_{name}.py" for name in (
        "adapters", "attention_products", "bring_your_own", "families", "hostile", "language", "monitor_in_libraries",
        "padding", "providers", "sensitivity", "smoothing", "symmetry", "timm_keys", "weight_uses", "zoo",
    )
}  # fmt: skip
DRAWN = ("test_plots.py", "test_plots_from_python.py", "test_probe.py")  # what needs no generated corruption


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """One thread in this process, as in the workers whose numbers are compared."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first, then libraries' networks; skip generated corruptions without the package that makes them."""
    items.sort(key=lambda item: (item.path.name != "test_demo.py", item.path.name not in OF_LIBRARIES))
    if importlib.util.find_spec("imagecorruptions") is not None:
        return
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        of_probe = "corruption" in (parameters.get(key) for key in ("probe", "name", "journey"))
        if of_probe and item.path.name not in DRAWN:
            item.add_marker(pytest.mark.skip(reason="needs imagecorruptions-imaug"))


def pytest_collection_finish() -> None:
    """Exclude the objects of the imported libraries from garbage collections, which they slow down, and begin those."""
    gc.set_threshold(10_000, 10, 50)  # libraries that tests import make a full one take 0.3 s
    gc.freeze()
    gc.enable()


LEFT = pytest.StashKey[set[Path]]()


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[LEFT] = set(session.config.rootpath.glob("*.h5*"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail where a test has left a results file in the user's folder, which is where measurements go by default."""
    if new := sorted(set(session.config.rootpath.glob("*.h5*")) - session.config.stash[LEFT]):
        print(f"\ntests left {', '.join(path.name for path in new)} in {session.config.rootpath}; give them out=None")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make downloads fail, and look for data only where a test puts them."""

    def refuse(*_: object, **__: object) -> None:
        raise URLError("tests have no network")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    monkeypatch.delenv("LANDSCAPE_DATA", raising=False)


@pytest.fixture(scope="session")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The made-up numbers of every probe and three networks, for figures; a test that changes the file copies it."""
    import synthetic

    return synthetic.shared(tmp_path_factory, "study")


@pytest.fixture(scope="session")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small network of whose probes one unit is finished."""
    import synthetic

    return synthetic.shared(tmp_path_factory, "begun", [synthetic.SMALL], share=0.001)


@pytest.fixture(scope="session")
def half(tmp_path_factory: pytest.TempPathFactory, begun: Path) -> Path:
    import synthetic

    return synthetic.shared(tmp_path_factory, "half", [synthetic.SMALL], share=0.4, resumed=begun)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory, half: Path) -> Path:
    import synthetic

    return synthetic.shared(tmp_path_factory, "small", [synthetic.SMALL], resumed=half)


@pytest.fixture(scope="session")
def few(study: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three networks of the probes that findings and the report's table are made of; quickly read."""
    import synthetic

    kept = {"surface", "hessian", "trace", "fourier", "lesion", "variance"}
    to = tmp_path_factory.mktemp("few") / "results.h5"
    return synthetic.changed(study, to, lambda file: [file.pop(probe) for probe in {*file} - kept])


@pytest.fixture(scope="session")
def snapshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three snapshots of a tiny residual network; beside it a network with attention."""
    import measured_runs

    return measured_runs.with_snapshots(tmp_path_factory.mktemp("resnet-digits"))


@pytest.fixture(scope="session")
def executors() -> Iterator["Mapping[str, Executor]"]:
    """Two threads, and a process of its own, which all tests of the session share."""
    import measured_runs

    with measured_runs.threads_and_processes() as executors:
        yield executors


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one run of initial weights on digits."""
    from landscape.cli.main import exit_code

    folder = tmp_path_factory.mktemp("study")
    run = folder / "checkpoints" / "resnet_demo-digits"
    assert exit_code(["train", "resnet_demo", "--data", "digits", "--epochs", "0", "--out", str(run), "--quiet"]) == 0
    return folder


@pytest.fixture
def command_here(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command line: (exit code, stdout, stderr)."""
    from landscape.cli.main import exit_code

    def run(*words: str | Path) -> tuple[int, str, str]:
        code = exit_code([str(word) for word in words])
        captured = capsys.readouterr()
        assert code == 0 or not foreign_options([str(word) for word in words], captured.err)
        return code, captured.out, captured.err

    return run


@pytest.fixture
def command(
    trained: Path, monkeypatch: pytest.MonkeyPatch, command_here: Callable[..., tuple[int, str, str]]
) -> Callable[..., tuple[int, str, str]]:
    """Run a command line beside the checkpoints: (exit code, stdout, stderr)."""
    monkeypatch.chdir(trained)
    monkeypatch.delenv("LANDSCAPE_DATA", raising=False)
    return command_here


@pytest.fixture
def unsaved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are made, but neither laid out nor written."""
    from landscape.plots import drawing

    monkeypatch.setattr(
        drawing, "_save", lambda name, page, folder, formats: [page() and folder / f"{name}.{end}" for end in formats]
    )
