"""The Tab key, for the names of what there is. Of commands and options click knows itself."""

from __future__ import annotations

import os
from collections.abc import Callable

import click
from click.shell_completion import CompletionItem

from rollmuxd.cli import common


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
