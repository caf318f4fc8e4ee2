"""The installed command `landscape`, named like the distribution: it runs where `landscape` is another package."""

import sys


def main() -> None:
    """Run the command line, or say in one line that another package of that name comes first."""
    import landscape

    if "measure" not in getattr(landscape, "__all__", ()):
        place = landscape.__file__ or [*landscape.__path__]
        sys.exit(
            f"landscape: import landscape finds another package, {place}, not that of landscape-probes; install "
            "this one into a virtual environment of its own and unset PYTHONPATH, see docs/faq.md"
        )
    from landscape.cli.process_setup import end_at_once_by_ctrl_c

    end_at_once_by_ctrl_c()
    from landscape.cli.main import main as run

    run()
