"""Faults of machines and users while a command measures: each check states what must happen, and says whether it did.

    python benchmarks/faults.py [--only read_only_folder,sigint]

Every check runs real commands on a small network of digits, in a folder of its own. Exit code 1 if one fails.
"""

import argparse
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from fault_checks import machine, users
from fault_checks.commands import MAKE, ended, start

CHECKS: dict[str, Callable[[Path], str]] = {
    check.__name__: check
    for check in (
        machine.read_only_folder, machine.torn_journal, machine.foreign_journals,
        machine.damaged_file, machine.clock_jumps, machine.fsync, users.sigint,
        users.same_question_twice, users.polling_reader, users.checkpoint_replaced, users.results_deleted,
        users.two_commands, users.eight_commands,
    )
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=",".join(CHECKS))
    failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        code, said = ended(start([*MAKE, "--out", "made"], Path(temporary)))
        assert code == 0, said
        for name in parser.parse_args().only.split(","):
            folder = Path(temporary) / name
            folder.mkdir()
            shutil.copy(Path(temporary) / "made" / "final.pt", folder)
            check = CHECKS[name]
            about = check.__doc__ or ""
            wrong = check(folder)
            failed += bool(wrong)
            print(f"| {name} | {about} | {'FAILED: ' + wrong if wrong else 'as it should be'} |", flush=True)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
