"""``rollmuxd gateway run|status|demo``. ``rollmuxd --help`` imports this module: what is heavy comes with a command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rollmuxd_gateway.settings import Settings

#: file descriptors of one stream: the client's socket and the engine's
_PER_STREAM = 2


@click.group(short_help="In front of a job's engines: moves responses between them, token by token.")
def gateway() -> None:
    """The rollout gateway of one job.

    A framework sends its prompts to the gateway, with no other change. The gateway continues responses on other engines
    when one fails. It gathers the tail of a rollout on few GPUs when another job waits for the rest.
    """


@gateway.command()
@click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="A gateway.toml; without one: the defaults, and replicas register themselves.",
)
@click.option("--listen", help="HOST:PORT, over what the file says.")
@click.option("--replica", "replicas", multiple=True, metavar="URL", help="One vLLM engine more; may be repeated.")
def run(config: Path | None, listen: str | None, replicas: tuple[str, ...]) -> None:
    """Run the gateway, until it is stopped."""
    import logging

    import uvicorn

    from rollmuxd.cli.common import Failed
    from rollmuxd_gateway.app import App
    from rollmuxd_gateway.net.asgi import Asgi
    from rollmuxd_gateway.settings import Wrong

    settings = _settings(config, listen, replicas)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line per call
    host, port = settings.address()
    try:
        app = App(settings)
        asgi = Asgi(app)
        if settings.link == "own":
            from rollmuxd_gateway.link.own import OwnLink

            key = next((key.decode() for key in asgi.keys["control"]), "")
            app.own = OwnLink(app, f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}", key)  # noqa: S104
    except Wrong as error:
        raise Failed(str(error)) from error
    _check_descriptors(settings, max(1, len(settings.replica)) * 256)
    # No access log: a path may name a model, and a line per call costs more than the call.
    # Connections are kept for longer than a rollout's pauses: a client that reuses one while it closes sees a reset.
    uvicorn.run(
        asgi,
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=5,
        timeout_keep_alive=600,
    )


@gateway.command()
@click.option("--url", default="http://127.0.0.1:8400", show_default=True, help="Where the gateway listens.")
@click.option("--key", help="A key for control, where the gateway asks for one.")
@click.option("--json", "as_json", is_flag=True, help="Print the answer as one JSON object.")
def status(url: str, key: str | None, as_json: bool) -> None:
    """Show how far the rollout is, and what each replica does."""
    import httpx

    from rollmuxd.cli.common import Failed, print_json

    try:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        answer = httpx.get(f"{url.rstrip('/')}/rollmux/rollout", headers=headers, timeout=10)
    except httpx.HTTPError as error:
        raise Failed(
            f"no gateway answers at {url} ({type(error).__name__}); start it with `rollmuxd gateway run`"
        ) from error
    if answer.status_code != 200:
        raise Failed(f"{url} answered {answer.status_code}: {answer.text[:300]}")
    told: dict[str, Any] = answer.json()
    if as_json:
        print_json(told)
        return
    done = f"{told['done']} of {told['total']}" if told["total"] else f"{told['finished']}"
    click.echo(f"rollout {told['number']} is {told['status']}: {done} responses done, {told['live']} live")
    if told["in_step"] != "off":
        click.echo(f"  degree {told['tp']}; changes within the rollout: {told['switches']}, {told['in_step']}")
    for replica in told["replicas"]:
        where = ", ".join(replica["gpus"]) or replica["url"]
        click.echo(f"  {replica['id']}  {replica['status']:9} {replica['live']:5} live  {where}")


def _settings(config: Path | None, listen: str | None, replicas: tuple[str, ...]) -> Settings:
    import msgspec

    from rollmuxd.cli.common import Failed
    from rollmuxd_gateway.settings import ReplicaSettings, Wrong, check_url, load, read

    try:
        settings = load(config)
        if listen:
            settings = read({**msgspec.to_builtins(settings), "listen": listen})
        more = tuple(ReplicaSettings(check_url(url, settings.allow_hosts)) for url in replicas)
        return msgspec.structs.replace(settings, replica=settings.replica + more)
    except Wrong as error:
        raise Failed(str(error)) from error


def _check_descriptors(settings: Settings, streams: int) -> None:
    """More streams than descriptors end in the middle of a rollout: raise the limit, or say so at the start."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = streams * _PER_STREAM + 64
    if soft < need and hard != soft:
        soft = hard if hard == resource.RLIM_INFINITY else min(hard, max(need, 65_536))
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft != resource.RLIM_INFINITY and soft < need:
        click.echo(f"{streams} streams need {need} open files, and this process may have {soft}: ulimit -n", err=True)


@gateway.command()
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
@click.option(
    "--link", type=click.Choice(["loop", "own"]), default="loop", show_default=True, help="own: by traffic alone."
)
@click.option("--iterations", default=4, type=click.IntRange(2, 1000), show_default=True, help="Of each job.")
@click.option("--requests", default=64, type=click.IntRange(8, 4096), show_default=True, help="Responses in a rollout.")
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Write a picture of the rollouts here.")
@click.option("--keep", type=click.Path(path_type=Path, file_okay=False), help="Leave logs and journals here.")
def demo(as_json: bool, link: str, iterations: int, requests: int, html: Path | None, keep: Path | None) -> None:
    """Two jobs share four made-up GPUs: what is gained when the tail of a rollout is released?

    Starts a daemon, eight engines without a model, and two gateways. It needs no GPU, and takes about two minutes.
    """
    import tempfile

    from rollmuxd.cli.common import Failed, print_json
    from rollmuxd_demo.children import Children
    from rollmuxd_gateway import demo as play

    def say(text: str) -> None:
        click.echo(text, err=as_json)

    try:  # before a run that takes minutes
        if html is not None:
            html.open("a").close()
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Failed(str(error)) from error
    shape = play.Shape(iterations=iterations, requests=requests)
    with (
        tempfile.TemporaryDirectory(prefix="rollmuxd-gateway-", ignore_cleanup_errors=True) as name,
        Children() as children,
    ):
        folder = (keep or Path(name)) / "runs"
        result, part = (play.run if link == "loop" else play.run_own)(folder, children, shape, say)
    wrong = (play.problems if link == "loop" else play.problems_own)(result)
    if html is not None:
        from rollmuxd_gateway.picture import picture

        html.write_text(picture(part))
    if as_json:
        print_json({**result, "ok": not wrong})
    else:
        for figure, value in result.items():
            click.echo(f"{figure:28} {value}")
    if wrong:
        raise Failed("; ".join(wrong))
