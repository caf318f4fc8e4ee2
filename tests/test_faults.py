"""The campaigns of `benchmarks/` in short: calls that fail, faults of machines and users while commands measure."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.campaign

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
FAULTS = (  # Ctrl-C, also twice, is in test_executors.py, test_cli.py and test_process_setup.py
    ("foreign_journals", "damaged_file", "clock_jumps", "fsync", "read_only_folder", "torn_journal"),
    ("results_deleted", "same_question_twice", "polling_reader", "checkpoint_replaced", "two_commands"),
)


def ran(script: str, *words: str) -> list[str]:
    """The table that a script prints."""
    command = [sys.executable, str(BENCHMARKS / script), *words]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout.splitlines()


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("cc"), reason="compiles what the calls go through")
def test_a_call_that_changes_a_file_may_be_the_last_or_fail() -> None:
    *cases, total = (row.strip("| ").split(" | ") for row in ran("failing_calls.py", "--stride", "41")[2:])
    assert [name for name, *_ in cases] == ["run", "merge", "repair", "report", "train"]
    assert int(total[-2]) > 15
    assert int(total[-1]) == 0


@pytest.mark.parametrize("faults", FAULTS, ids=" ".join)
def test_faults_of_machines_and_users_end_as_they_should(faults: tuple[str, ...]) -> None:
    rows = ran("faults.py", "--only", ",".join(faults))
    assert [row.split(" | ")[0].strip("| ") for row in rows] == list(faults)
    assert all(row.endswith("as it should be |") for row in rows)
