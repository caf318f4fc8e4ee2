"""Campaigns: calls that fail, and faults of machines and users while commands measure a small network of digits."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from fault_checks import machine, users
from fault_checks.commands import MAKE, ended, start

pytestmark = pytest.mark.campaign

FAILING_CALLS = Path(__file__).parents[1] / "benchmarks" / "failing_calls.py"
Check = Callable[[Path], str]
FAULTS: Sequence[Check] = (  # in one test, which measures once what no fault has happened to
    machine.foreign_journals, machine.damaged_file, machine.clock_jumps, machine.fsync, machine.read_only_folder,
    machine.torn_journal, users.results_deleted, users.same_question_twice, users.polling_reader,
    users.checkpoint_replaced, users.two_commands,
)  # fmt: skip
# Those that are asked for by MOMENTS=10: Ctrl-C is in test_executors.py, test_cli.py and test_process_setup.py too.
LONG: Sequence[Check] = (users.sigint, users.eight_commands)


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("cc"), reason="compiles what the calls go through")
def test_a_call_that_changes_a_file_may_be_the_last_or_fail() -> None:
    command = [sys.executable, str(FAILING_CALLS), "--stride", "41"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    *cases, total = (row.strip("| ").split(" | ") for row in process.stdout.splitlines()[2:])
    assert [name for name, *_ in cases] == ["run", "merge", "repair", "report", "train"]
    assert int(total[-2]) > 15
    assert int(total[-1]) == 0


@pytest.mark.parametrize("checks", [FAULTS, *[[check] for check in LONG if "MOMENTS" in os.environ]])
def test_faults_of_machines_and_users_end_as_they_should(checks: Sequence[Check], tmp_path: Path) -> None:
    code, said = ended(start([*MAKE, "--out", "made"], tmp_path))
    assert code == 0, said
    wrong = {}
    for check in checks:
        folder = tmp_path / check.__name__
        folder.mkdir()
        shutil.copy(tmp_path / "made" / "final.pt", folder)
        wrong[check.__name__] = check(folder)
    assert not any(wrong.values()), wrong
