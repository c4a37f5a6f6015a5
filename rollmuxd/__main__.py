"""``python -m rollmuxd``: the command line, where the script of that name is not on PATH."""

from rollmuxd.cli.main import main

main()
