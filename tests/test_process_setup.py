"""What the command line sets for the whole process, and that the library sets nothing."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import forked
import pytest
import torch
from measured_runs import save

from landscape.cli import main, process_setup
from landscape.cli.process_setup import MALLOC, WAITING, end_by_signals, executor_of, importing
from landscape.options import OptionError
from landscape.probe import Unit, Values
from landscape.results import reader
from landscape.results.writer import Writer

ALLOCATE = """
import resource, sys, torch
from landscape.cli.process_setup import keep_freed_memory
if "keep" in sys.argv:
    keep_freed_memory()
def work():
    return [torch.ones(9_000_000) for _ in range(2)] and None
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        work()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(min(faults() for _ in range(6)))
"""
ENDING = """
import time
from landscape.cli.process_setup import end_by_signals
end_by_signals()
try:
    print("measuring", flush=True)
    time.sleep(600)
finally:
    print("merging", flush=True)
    time.sleep(600)
"""
IN_DESTRUCTORS = """
import os, signal, sys, time
from landscape.cli.process_setup import end_by_signals
end_by_signals()
class Gone:
    def __del__(self):
        os.kill(os.getpid(), int(sys.argv[1]))
        time.sleep(0)
try:
    Gone()
    time.sleep(600)
except BaseException as error:
    print(type(error).__name__)
"""
AT_THE_END = """
import os, signal, sys
from landscape.cli.process_setup import end_by_signals
end_by_signals()
class Last:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=int(sys.argv[1])):
        kill(pid, number)
last = Last()
try:
    os.kill(os.getpid(), int(sys.argv[1]))
except BaseException:
    sys.exit(7)
"""
AFTER_THE_LINE = """
import os, signal
from landscape.cli.main import _ended
from landscape.cli.process_setup import end_by_signals
end_by_signals()
_ended(130)
os.kill(os.getpid(), signal.SIGINT)
"""
AT_THE_START = """
import os, signal, sys
class Interrupts:
    def find_spec(self, name, *_):
        if name == "landscape.cli.main":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupts())
exec(sys.argv[1])
"""
AT_ONCE = "landscape: ended at once; everything finished is kept, run the same command to resume\n"
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("GLIBC_TUNABLES", *(name for name, _, _ in MALLOC))}


def _faults(*arguments: str, **environment: str) -> int:
    """The fewest page faults of six times in which the same tensors are allocated: the heap grows a little at first."""
    out, errors = forked.Popen(["-c", ALLOCATE, *arguments], env=ENVIRONMENT | environment).communicate()
    assert out, errors
    return int(out)


@pytest.mark.slow
@pytest.mark.skipif(not os.confstr_names.get("CS_GNU_LIBC_VERSION"), reason="glibc's business")
def test_freed_memory_is_reused_without_page_faults_unless_the_user_has_set_malloc() -> None:
    kept = _faults("keep")
    assert 5 * kept < _faults()
    assert 5 * kept < _faults("keep", MALLOC_TRIM_THRESHOLD_="131072")


def _waiting(*lines: str, **environment: str) -> str:
    code = "\n".join(["import os", *lines, f"print([os.environ.get(name) for name in {WAITING}])"])
    clean = {name: value for name, value in ENVIRONMENT.items() if name not in WAITING}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=clean | environment
    )
    return run.stdout.strip()


def test_a_command_tells_threads_to_wait_unless_the_user_has() -> None:
    setup = "import landscape.cli.process_setup as setup; setup.set_up_process()"
    assert _waiting(setup) == "['passive', None, None]"
    assert _waiting(setup, GOMP_SPINCOUNT="7") == "[None, '7', None]"


@pytest.mark.slow
def test_a_command_imports_without_garbage_collection_and_collects_afterwards_and_nothing_else_changes() -> None:
    lines = [
        "import gc; from landscape.cli.measuring import command_of; command_of('trace')",
        "print(gc.isenabled(), gc.get_freeze_count() > 10_000, sum(s['collections'] for s in gc.get_stats()))",
        "import landscape.api, landscape.cli.main, landscape.cli.process_setup as setup",
        "assert not any(name in os.environ for name, _, _ in setup.MALLOC)",
    ]
    collected, waiting = _waiting(*lines).splitlines()
    enabled, frozen, collections = collected.split()
    assert (enabled, frozen) == ("True", "True")
    assert int(collections) < 300  # 90 with a CPU build of PyTorch, 110 with one for CUDA; about 1,500 otherwise
    assert waiting == "[None, None, None]"


@pytest.mark.slow
@pytest.mark.skipif(not os.confstr_names.get("CS_GNU_LIBC_VERSION"), reason="libgomp's business")
def test_the_openmp_library_of_torch_is_told_not_to_spin() -> None:
    (library,) = Path(torch.__file__).parent.glob("lib/libgomp*")  # loaded alone: torch takes two seconds
    code = f"import ctypes; from landscape.cli.process_setup import set_up_process as s; s(); ctypes.CDLL('{library}')"
    clean = {name: value for name, value in ENVIRONMENT.items() if name not in WAITING}
    environment = {**clean, "OMP_DISPLAY_ENV": "verbose"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert "GOMP_SPINCOUNT = '0'" in run.stderr


@pytest.mark.parametrize(
    ("first", "second", "code"),
    [(signal.SIGINT, signal.SIGINT, 130), (signal.SIGTERM, signal.SIGTERM, 143), (signal.SIGTERM, signal.SIGINT, 130)],
)
def test_a_second_signal_ends_a_command_that_is_ending_at_once_and_in_one_line(
    first: signal.Signals, second: signal.Signals, code: int
) -> None:
    hearing = functools.partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    command = [sys.executable, "-c", ENDING]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=hearing
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "measuring\n"
        process.send_signal(first)
        assert process.stdout.readline() == "merging\n"
        process.send_signal(second)
        _, err = process.communicate(timeout=300)
    assert process.returncode == code
    assert err == AT_ONCE


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, "KeyboardInterrupt"), (signal.SIGTERM, "Terminated")])
def test_a_signal_within_a_destructor_ends_the_command_too(number: int, raised: str) -> None:
    """Python ignores what is raised there."""
    command = [sys.executable, "-c", IN_DESTRUCTORS, str(number)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert (ended.stdout, ended.stderr) == (f"{raised}\n", "")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_that_was_caught_by_what_it_interrupted_ends_the_command_after_the_unit(
    number: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a library or a network that takes every exception for one of its own."""
    written, write = [], Writer.write

    def interrupted(self: Writer, unit: Unit, values: Values) -> None:
        write(self, unit, values)
        written.append(unit)
        with contextlib.suppress(BaseException):
            if len(written) == 3:
                signal.raise_signal(number)

    monkeypatch.setattr(Writer, "write", interrupted)
    words = ["line", str(save(tmp_path / "final.pt")), "--samples", "8", "--out", str(tmp_path / "r.h5")]
    before = {each: signal.signal(each, process_setup._end) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert main.exit_code(words) == code
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    ((_, data),) = reader.find(tmp_path / "r.h5")
    assert reader.finished_units(data) == len(written) == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_python_ends_leaves_the_exit_code(number: int) -> None:
    assert subprocess.run([sys.executable, "-c", AT_THE_END, str(number)], check=False, timeout=300).returncode == 7


@pytest.mark.slow
def test_a_second_ctrl_c_after_the_line_that_says_so_ends_the_command_without_another() -> None:
    ended = subprocess.run([sys.executable, "-c", AFTER_THE_LINE], capture_output=True, text=True, check=False)
    assert ended.returncode == 130
    assert ended.stderr == "landscape: interrupted; everything finished is kept, run the same command to resume\n"


@pytest.mark.parametrize("start", ["import landscape.__main__", "import landscape_probes; landscape_probes.main()"])
def test_ctrl_c_before_the_command_is_imported_ends_it_in_one_line(start: str) -> None:
    command = [sys.executable, "-c", AT_THE_START, start]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", AT_ONCE)


def test_a_command_in_the_background_of_a_shell_ignores_ctrl_c_as_the_shell_wants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_to: list[int] = []
    monkeypatch.setattr(signal, "getsignal", lambda n: signal.SIG_IGN if n == signal.SIGINT else signal.SIG_DFL)
    monkeypatch.setattr(signal, "signal", lambda number, _: set_to.append(number))
    end_by_signals()
    assert set_to == [signal.SIGTERM]


@pytest.mark.slow
def test_a_reader_of_a_pipe_that_leaves_ends_a_command_without_an_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    code = f"import os; os.dup2({writing}, 1); from landscape.cli.main import main; main(['models'])"
    child = forked.Popen([sys.executable, "-c", code], pass_fds=[writing])
    os.close(writing)
    assert (child.communicate(300), child.returncode) == (("", ""), 0)


def test_workers_of_its_own_exclude_those_of_a_scheduler() -> None:
    with pytest.raises(OptionError, match="--workers 2 starts workers of its own"), executor_of(2, "tcp://[::1]:1"):
        pass


@pytest.mark.slow
def test_a_program_with_torch_keeps_its_garbage_collection() -> None:
    before = gc.get_freeze_count()
    with importing():
        assert gc.isenabled()
    assert gc.get_freeze_count() == before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_that_an_import_makes_an_error_of_ends_the_command_as_a_signal(
    number: int, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(arguments: list[str], standalone_mode: bool) -> None:
        try:
            process_setup._end(number, None)
        except BaseException as error:  # as extensions do whose initialisation it interrupts
            raise ImportError("initialization failed") from error

    monkeypatch.setattr(main, "_tree", lambda: interrupted)
    assert main.exit_code([]) == code
    assert "everything finished is kept" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "said"),
    [(MemoryError(), "none left"), (torch.OutOfMemoryError("CUDA out of memory.\nTried"), "CUDA .*d")],
)
def test_lack_of_memory_is_one_line_with_what_needs_less(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lacking() -> None:
        raise error

    monkeypatch.setattr(main, "_tree", lacking)
    assert main.exit_code(["fourier"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        rf"landscape: out of memory \({said}\); everything .* is kept, give a smaller --batch-size.*", line
    )
