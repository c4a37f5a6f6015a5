"""``rollmuxd dashboard``: a link to the dashboard, with a login."""

from __future__ import annotations

from pathlib import Path

import click

from rollmuxd.cli.common import NO_DAEMON, Call, Failed, config_option, load_settings, talks
from rollmuxd.cli.feed import Span
from rollmuxd.daemon.files import find


@click.command()
@config_option
@click.option("--expires", type=Span(), default="12h", show_default=True, metavar="TIME", help="Until when it opens.")
@talks
def dashboard(call: Call, config: Path | None, expires: int) -> None:
    """Print a link that opens the dashboard, with a login.

    The daemon is this machine's. For an admin (such as the daemon's own user) it makes an API key that expires. The
    key stands behind the # of the link, which browsers send to no server. Without the role admin it prints the address,
    where you log in with your key.
    """
    running = find(load_settings(config).daemon.state_dir.absolute())
    if running is None:
        raise Failed("no daemon runs here; start one: rollmuxd daemon start", NO_DAEMON)
    if running.url is None:
        raise Failed("the daemon listens on no TCP port; set daemon.listen, or forward its socket by ssh -L")
    me = call.get("/v1/me")
    if me["role"] != "admin":
        link, hint = f"{running.url}/", f"log in with the key of {me['owner']}/{me['user']}"
    else:
        key = call.post("/v1/keys", {**{name: me[name] for name in ("owner", "user", "role")}, "expires_s": expires})
        link, hint = f"{running.url}/#key={key['secret']}", f"it opens until {key['expires_at']}, with the role admin"
    call.answer({"url": link}, lambda view: click.echo(view["url"]))
    if not call.as_json:
        click.echo(hint, err=True)
