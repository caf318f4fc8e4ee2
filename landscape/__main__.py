"""`python -m landscape`: the same as the command `landscape`."""

from landscape.cli.process_setup import end_at_once_by_ctrl_c

end_at_once_by_ctrl_c()
from landscape.cli.main import main  # noqa: E402

main()
