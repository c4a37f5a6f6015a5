"""The command line as typed: ``typed("job list --json")``."""

import json
import shlex

from click.testing import CliRunner

from rollmuxd.cli.main import cli


class Ran:
    """What a command came to."""

    def __init__(self, result):
        self.code, self.out, self.err = result.exit_code, result.stdout, result.stderr

    @property
    def json(self):
        return json.loads(self.out)

    @property
    def lines(self):
        return self.out.splitlines()


def typed(command, **more):
    """Run one command in this process. An error that is not the command's own is raised."""
    result = CliRunner().invoke(cli, shlex.split(command), prog_name="rollmuxd", **more)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Ran(result)
