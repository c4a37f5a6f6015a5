"""``rollmuxd run``: wait for a place, start a job's commands on its GPUs, and end the job with them.

What is started here belongs to the user that typed it. It runs as that user, in groups of processes of its own. Neither
stopping nor killing the daemon touches it. Its training loop joins the run that was registered here: it finds
``ROLLMUX_JOB`` and ``ROLLMUX_RUN_KEY`` in its environment.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Final, TypeVar

import click
import msgspec
from msgspec import structs

from rollmuxd.cli.common import Call, Failed, part, talks
from rollmuxd.cli.logs import begin, folder_of, watched_by
from rollmuxd.cli.processes import ProcessGroup, start_apart
from rollmuxd.cli.run import job_file
from rollmuxd.cli.run.job_file import JobFile, Role
from rollmuxd.cli.run.private_ray import own_ray
from rollmuxd.client import calls
from rollmuxd.client.errors import Conflict, NotFound, RollmuxError, TooManyRequests, Unavailable, Unreachable
from rollmuxd.client.retry import persist
from rollmuxd.client.session import CLEAN_UP_CALL_S, CLEAN_UP_S, LAST_CALL_S, Session, new_id
from rollmuxd.daemon.hosts.cuda_env import visible

T = TypeVar("T")

#: how often the daemon is asked for a place, and whether the job is still there
ASK_S: Final = 1.0
#: one such call; while the job waits, its answer says what would let it in, which may take seconds to find out
LOOK_S: Final = 10.0
#: one call beside the commands, of which the signals are: Ctrl-C waits for it
BESIDE_S: Final = 2.0
_OVER: Final = ("ended", "lost", "quarantined")
#: what the shell says of a program that Ctrl-C has ended
_INTERRUPTED: Final = 130


@click.command(short_help="Start a job's commands once it has its place.")
@click.option("--job", "path", required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--detach", is_flag=True, help="Run without this terminal; rollmuxd job logs -f shows its output.")
@click.option("--host", help="The host that this machine is to the daemon (default: by its name, or the only one).")
@click.option("--grace", "grace_s", default=10.0, show_default=True, help="Seconds to end in, before being killed.")
@click.option("--replace", is_flag=True, help="End a run of the same job that is still alive.")
@click.option("--key", hidden=True, help="The key of a run that was registered already.")
@click.option("--logs", hidden=True, type=click.Path(file_okay=False, path_type=Path), help="Write output there.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@talks
def run(
    call: Call,
    path: Path,
    command: tuple[str, ...],
    *,
    detach: bool,
    host: str | None,
    grace_s: float,
    replace: bool,
    key: str | None,
    logs: Path | None,
) -> None:
    """Register a job, wait for its place, run its commands there, end it. The exit status is that of the command.

    \b
    rollmuxd run --job job.toml -- python train.py

    \b
    name = "math-7b"                                   # job.toml: the keys of rollmuxd.job()
    slo = 2.0
    rollout = {nodes = 1, gpu_gb = 60, ram_gb = 80}
    train = {nodes = 1}

    \b
    [roles.server]                                     # instead of a command on the command line:
    command = "vllm serve ./model --port 8000"         # they start together, and when one ends all do
    pool = "rollout"
    [roles.trainer]
    command = ["accelerate", "launch", "train.py"]
    pool = "train"

    Each command sees the GPUs of its pools (CUDA_VISIBLE_DEVICES), and which they are (ROLLMUX_GPUS). One of them
    talks to the daemon: the loop that uses rollmuxd.job with the same name. Signals are passed on.
    """  # noqa: D301  # click's sign for lines that are not to be filled
    job = job_file.read(path, command)
    key = key or new_id()
    if detach:
        _detach(call, job, command, key, host=host, grace_s=grace_s, replace=replace)
        return
    sys.exit(_Run(call, job, key, replace=replace).to_its_end(host, grace_s, logs))


class _Run:
    """One run of a job, from its registration to its end."""

    def __init__(self, call: Call, job: JobFile, key: str, *, replace: bool) -> None:
        self._call, self._daemon, self._job, self._key = call, call.daemon, job, key
        self._talk = Session(job.registration(key, replace=replace), tell=_say)
        self._talk.on_session = self._heard
        self._session = ""
        self._beat_every_s = self._beat_at = 0.0
        self._step_s = ASK_S

    def _heard(self, view: Any) -> None:
        self._session, self._beat_every_s = view.session, view.heartbeat_s
        self._daemon.journal = view.journal
        self._step_s = min(ASK_S, view.heartbeat_s)

    def to_its_end(self, host: str | None, grace_s: float, logs: Path | None) -> int:
        """The exit status of the first command that ended."""
        why, finished = "rollmuxd run was interrupted", False
        try:
            with contextlib.ExitStack() as files, ProcessGroup(grace_s) as processes:
                self._daemon.run(self._talk.start())
                gpus = self._gpus(self._until_placed(), host)
                ray = self._own_ray(files, gpus, logs)
                for role in self._job.roles:
                    self._start(processes, role, gpus, files.enter_context(_output(logs, role.name)), ray)
                ended = self._until_one_ends(processes, grace_s)
                if ended is None:
                    why = ""  # another call has ended it
                    return 1
                name, status = ended
                why, finished = f"{name} ended with exit status {status}", status == 0
                if len(self._job.roles) > 1:
                    _say(f"{why}; the others are ended")
            return status
        except KeyboardInterrupt:
            return _INTERRUPTED
        except Failed as error:
            why = error.message
            raise
        except RollmuxError as error:
            why = str(error) if self._talk.job else ""  # refused: there is nothing to end
            raise
        finally:
            if why:
                self._end(why, finished=finished)

    # ---- waiting for a place -----------------------------------------------------------------------------------------

    def _until_placed(self) -> Mapping[str, Any]:
        said = ""
        while True:
            view = self._view()
            if view is not None:
                if view["status"] in _OVER:
                    raise Failed(f"job {view['name']} is {view['status']}: {view.get('reason') or 'no reason given'}")
                if view["pins"]:
                    if said:
                        _say(f"{view['name']} has its place")
                    return view
                reasons = (view.get("waiting") or {}).get("reasons") or [{"text": view["status"]}]
                if reasons[0]["text"] != said:
                    said = reasons[0]["text"]
                    _say(f"{view['name']} waits for a place: {said}")
            self._beat()
            time.sleep(self._step_s)

    def _view(self, timeout_s: float = LOOK_S) -> dict[str, Any] | None:
        """The job as it is; None: the daemon is away, which stops nothing."""
        try:
            path = f"/v1/jobs/{part(self._talk.job)}"
            view: dict[str, Any] = self._daemon.call(calls.Call("GET", path, Any, timeout_s=timeout_s))
        except (Unreachable, Unavailable, TooManyRequests):
            return None
        return view

    def _beat(self) -> None:
        """Keep the session of this process, until the training loop opens its own."""
        if not self._session or time.monotonic() < self._beat_at:
            return
        self._beat_at = time.monotonic() + self._beat_every_s
        try:
            self._daemon.post(f"/v1/sessions/{part(self._session)}/heartbeat", {}, timeout_s=BESIDE_S)
        except (Conflict, NotFound):
            self._session = ""  # a newer one took over
        except RollmuxError:
            pass  # heartbeats continue

    # ---- running -----------------------------------------------------------------------------------------------------

    def _gpus(self, view: Mapping[str, Any], host: str | None) -> dict[str, list[str]]:
        """The GPUs of each pool on this host; none where the daemon only watches. Raises Failed: it sits elsewhere."""
        names = dict.fromkeys(name for pinned in view["pins"].values() for name in pinned)
        if not names:
            return {}
        nodes: dict[str, Any] = {}
        for name in names:
            ask: calls.Call[Any] = calls.Call("GET", f"/v1/nodes/{part(name)}", Any, timeout_s=LOOK_S)
            nodes[name] = self._daemon.run(persist(ask, tell=_say))
        hosts = list(dict.fromkeys(node["host"] for node in nodes.values()))
        here = host or (socket.gethostname() if socket.gethostname() in hosts or len(hosts) > 1 else hosts[0])
        if here not in hosts or (len(hosts) > 1 and host is None):
            raise Failed(
                f"job {view['name']} got nodes of {', '.join(hosts)}, and this is {here}; run it there (--host NAME "
                "says what this machine is called), or name its nodes in the job's file (named = [...])"
            )
        return {
            pool: [gpu["gpu"] for name in names if nodes[name]["host"] == here for gpu in nodes[name]["gpus"]]
            for pool, names in view["pins"].items()
        }

    def _environment(self, gpus: list[str] | None) -> dict[str, str]:
        """Ours, with these GPUs (None: as it is), and with what makes ``rollmuxd.job`` join this run."""
        joins = {
            "ROLLMUX_URL": str(self._daemon.address),
            "ROLLMUX_JOB": self._talk.name,
            "ROLLMUX_RUN_KEY": self._key,
        }
        if self._call.api_key:
            joins["ROLLMUX_API_KEY"] = self._call.api_key
        return {**os.environ, **(visible(gpus) if gpus is not None else {}), **joins}

    def _own_ray(self, files: contextlib.ExitStack, gpus: Mapping[str, list[str]], logs: Path | None) -> dict[str, str]:
        """The Ray that the job wants for itself; what its commands need to know of it."""
        if self._job.ray is None:
            return {}
        mine = list(dict.fromkeys(gpu for some in gpus.values() for gpu in some))
        # Ray's workers have the environment that Ray was started with, and a loop may be in one of them.
        env = self._environment(mine if gpus else None)
        out = files.enter_context(_output(logs, "ray"))
        told = files.enter_context(own_ray(self._job.ray, mine if gpus else None, env, out, self._beat))
        _say(f"a Ray of its own at {told['RAY_ADDRESS']}, on {', '.join(mine) or 'the GPUs that it finds'}")
        return told

    def _start(
        self,
        processes: ProcessGroup,
        role: Role,
        gpus: Mapping[str, list[str]],
        out: IO[bytes] | None,
        more: Mapping[str, str],
    ) -> None:
        mine = list(dict.fromkeys(gpu for pool in role.pools or gpus for gpu in gpus.get(pool, ())))
        env = {**self._environment(mine if gpus else None), **more, **role.env}
        try:
            pid = processes.start(role.name, role.argv, env=env, cwd=role.cwd, out=out)
        except (OSError, ValueError) as error:
            raise Failed(f"role {role.name}: {role.argv[0]} could not be started: {error}") from error
        where = (", ".join(mine) or "no GPU") if gpus else "the GPUs that it takes: the daemon only watches"
        _say(f"{role.name}: pid {pid} on {where}")

    def _until_one_ends(self, processes: ProcessGroup, grace_s: float) -> tuple[str, int] | None:
        """The first command that ends; None: the job has ended first."""
        asked = time.monotonic()
        while (ended := processes.wait(self._step_s)) is None:
            self._beat()
            if time.monotonic() - asked < max(ASK_S, self._beat_every_s):
                continue
            asked = time.monotonic()
            view = self._view(BESIDE_S)
            if view is not None and (view["status"] == "ended" or view["run"] != self._talk.run):
                # Its loop has ended it, and the command has to save, or to take itself down; or is about to hear of it.
                ended = processes.wait(math.inf if view.get("finished") else grace_s)
                if ended is None:
                    why = view.get("reason") or "no reason given"
                    _say(f"{view['name']}: run {self._talk.run} was ended ({why}); so are its commands")
                break
        return ended

    def _end(self, why: str, *, finished: bool) -> None:
        """The job ends with its commands, unless its training loop has ended it already. Takes seconds at most.

        One more where that is interrupted: a second Ctrl-C.
        """
        try:
            self._tell_end(why, CLEAN_UP_S, finished=finished)
        except KeyboardInterrupt:
            with contextlib.suppress(KeyboardInterrupt):
                self._tell_end(why, LAST_CALL_S, finished=finished)

    def _tell_end(self, why: str, limit_s: float, *, finished: bool) -> None:
        until = time.monotonic() + limit_s

        def ask(call: calls.Call[T]) -> T:
            call = structs.replace(call, timeout_s=CLEAN_UP_CALL_S)
            return self._daemon.run(persist(call, until=until, clock=time.monotonic, tell=_say))

        try:
            if not self._talk.job:
                # Interrupted before it was answered: asked again under the same key it is that run, and takes no
                # other's place.
                view = ask(calls.register(structs.replace(self._talk.body, replace=False)))
                self._talk.job, self._talk.run = view.job, view.run
            # A newer run may have taken its place at any time; of one that has ended already, nothing changes.
            ask(calls.end_job(self._talk.job, why, run=self._talk.run, finished=finished))
        except (Conflict, NotFound):
            pass
        except RollmuxError as error:
            _say(f"could not tell the daemon that {self._talk.name} is over: {error}")


def _detach(
    call: Call, job: JobFile, command: tuple[str, ...], key: str, *, host: str | None, grace_s: float, replace: bool
) -> None:
    """Register here, so that a refusal is seen here; the rest is done by a process without a terminal."""
    view = call.post("/v1/jobs", msgspec.to_builtins(job.registration(key, replace=replace)))
    logs = folder_of(view["name"], key)
    begin(logs, (*(role.name for role in job.roles), *(["ray"] if job.ray else [])))
    more = ["--host", host] if host else []
    argv = ["run", "--job", str(job.path), "--key", key, "--logs", str(logs), "--grace", f"{grace_s:g}", *more]
    env = {**os.environ, "ROLLMUX_URL": str(call.daemon.address)}
    if call.api_key:
        env["ROLLMUX_API_KEY"] = call.api_key
    pid = start_apart([*argv, "--", *command], logs / "run.log", env)
    watched_by(logs, pid)
    told = {"job": view["job"], "name": view["name"], "run": view["run"], "pid": pid, "logs": str(logs)}
    said = f"{told['name']} is job {told['job']}, run {told['run']}; watched by pid {pid}"
    call.answer(told, lambda told: click.echo(f"{said}\nrollmuxd job logs -f {told['name']}"))


def _output(logs: Path | None, name: str) -> contextlib.AbstractContextManager[IO[bytes] | None]:
    """Where a role's output goes; None: where ours goes."""
    return contextlib.nullcontext() if logs is None else (logs / f"{name}.log").open("ab")


def _say(text: str) -> None:
    click.echo(f"rollmuxd: {text}", err=True)
