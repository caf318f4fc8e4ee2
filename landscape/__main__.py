"""`python -m landscape`: the same as the command `landscape`."""

from landscape.cli.main import main

main()
