"""``rollmuxd completion``: the Tab key, for commands, options, and the names of what there is."""

from __future__ import annotations

import os
from collections.abc import Callable

import click
from click.shell_completion import CompletionItem, get_completion_class

from rollmuxd.cli import common

SHELLS = ("bash", "zsh", "fish")


@click.command(short_help="Complete commands and names with the Tab key.")
@click.argument("shell", type=click.Choice(SHELLS), required=False)
def completion(shell: str | None) -> None:
    """Print what makes SHELL (default: yours) complete commands, and names of jobs, nodes, hosts, groups and slots.

    \b
    bash:  rollmuxd completion bash > ~/.local/share/bash-completion/completions/rollmuxd
    zsh:   rollmuxd completion zsh > ~/.zfunc/_rollmuxd      (a folder of your $fpath)
    fish:  rollmuxd completion fish > ~/.config/fish/completions/rollmuxd.fish
    """  # noqa: D301  # click's sign for lines that are not to be filled
    name = shell or os.path.basename(os.environ.get("SHELL", ""))  # noqa: PTH119  # a word, and no file
    known = get_completion_class(name) if name in SHELLS else None
    if known is None:
        raise common.Failed(f"the shell is {name or 'not known'}, and this knows {', '.join(SHELLS)}; name one of them")
    root = click.get_current_context().find_root()
    click.echo(known(root.command, {}, "rollmuxd", "_ROLLMUXD_COMPLETE").source())


def names_of(path: str, *names: str) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """Completes with what a list of the daemon has, by these of its fields; with nothing where there is no daemon."""

    def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        url = context.params.get("url") or os.environ.get("ROLLMUX_URL")
        key = context.params.get("api_key") or os.environ.get("ROLLMUX_API_KEY")
        try:
            daemon = common.connect(url, key)
            try:
                items = daemon.get(path, limit=1000)["items"]
            finally:
                daemon.close()
        except Exception:  # the Tab key asks for names, and no errors
            return []
        found = dict.fromkeys(str(item[name]) for name in names for item in items if item.get(name))
        return [CompletionItem(name) for name in found if name.startswith(incomplete)]

    return complete
