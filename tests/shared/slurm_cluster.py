"""A Slurm cluster for tests and for the demo: a controller and nodes of this machine, in a folder of their own.

    python tests/shared/slurm_cluster.py FOLDER NODE...

starts the cluster with an allocation of these nodes, writes
``{"config": ..., "allocation": ..., "nodes": ..., "up_s": ...}`` in one line, and serves until SIGTERM, or until its
parent is gone. Needs slurmctld, slurmd, munged and Slurm's commands; root is not needed.
"""

import contextlib
import getpass
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Self

#: what must be there, and the packages of Debian and Ubuntu that bring it
PROGRAMS: Final = ("munged", "slurmctld", "slurmd", "srun", "salloc", "squeue", "scancel", "scontrol")
PACKAGES: Final = "slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge"
#: of each node; Slurm gives them out, and nothing opens them
GPUS: Final = 2
#: Slurm takes device files only for GPUs. These exist on every machine, and no step opens them.
_DEVICES: Final = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random")
_PATH: Final = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
#: one command of Slurm's; a controller that is not there makes each of them wait for 9 s
_COMMAND_S: Final = 120.0
_UP_S: Final = 300.0
_END_S: Final = 20.0
_LOOK_S: Final = 0.05

_CONF: Final = """\
ClusterName=rx
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/run/munge.sock
CredType=cred/munge
SlurmctldPort={port}
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
SlurmdPidFile={folder}/run/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool/%n
StateSaveLocation={folder}/state
MpiDefault=none
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1
ReturnToService=2
SlurmctldTimeout=5
MessageTimeout=60
BatchStartTimeout=300
KillWait=3
MinJobAge=60
InactiveLimit=0
OverTimeLimit=0
GresTypes=gpu
SwitchType=switch/none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
Include {folder}/site.conf
"""

#: what a site may have otherwise
_SITE: Final = {"SlurmdTimeout": "60"}


def missing() -> tuple[str, ...]:
    """The programs that a cluster needs and that this machine has not."""
    return tuple(program for program in PROGRAMS if shutil.which(program, path=_PATH) is None)


class Cluster:
    """Its processes, as children of this one. ``with`` starts and stops it."""

    def __init__(self, folder: Path, nodes: Sequence[str]) -> None:
        self.folder, self.nodes = folder, tuple(nodes)
        self.config = folder / "slurm.conf"
        #: for processes that are to find this cluster
        self.env = {**os.environ, "PATH": _PATH, "SLURM_CONF": str(self.config)}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        try:
            self._write()
            self._start("munged", *self._munged())
            self._until("munged has no socket", (self.folder / "run" / "munge.sock").exists)
            self.start_controller()
            for node in self.nodes:
                self.start_node(node)
            self._until("not all of its nodes are idle", self._all_idle)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if "slurmctld" in self._processes and self._processes["slurmctld"].poll() is None:
            with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired):
                self.command("scancel", "--full", "--user", getpass.getuser(), limit_s=_END_S)
        for name in tuple(self._processes):
            self.kill(name, signal.SIGTERM)
        self._kill_steps()

    def start_controller(self) -> None:
        """Its slurmctld, which reads what the last one has saved."""
        self._start("slurmctld", "slurmctld", "-D", "-f", str(self.config))

    def start_node(self, node: str) -> None:
        """The slurmd of a node, if it does not run."""
        if node in self._processes:
            return
        self._start(node, "slurmd", "-D", "-N", node, "-f", str(self.config))

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """End ``munged``, ``slurmctld``, or the slurmd of a node; its steps stay."""
        process = self._processes.pop(name, None)
        if process is None:
            return
        process.send_signal(number)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    @contextlib.contextmanager
    def site(self, **settings: str) -> Iterator[None]:
        """For a while, other settings of ``slurm.conf``."""
        try:
            self._write_site(settings)
            self.command("scontrol", "reconfigure")
            yield
        finally:
            self._write_site({})
            self.command("scontrol", "reconfigure")

    def command(self, *argv: str, limit_s: float = _COMMAND_S) -> str:
        """Run one of Slurm's commands; what it says. Raises RuntimeError with its error."""
        ran = subprocess.run(
            argv, env=self.env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_s, check=False
        )
        if ran.returncode != 0:
            raise RuntimeError(f"{' '.join(argv)}: {ran.stderr.strip() or ran.returncode}")
        return ran.stdout

    def allocate(self, *options: str) -> str:
        """An allocation that nothing runs in; its number, of several components the first one's."""
        ran = subprocess.run(
            ("salloc", "--no-shell", *options),
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_UP_S,
            check=False,
        )
        said = [line for line in ran.stderr.splitlines() if "Granted job allocation" in line]
        if ran.returncode != 0 or not said:
            raise RuntimeError(f"salloc {' '.join(options)}: {ran.stderr.strip()}")
        return said[0].split()[-1]

    def release(self, *allocations: str) -> None:
        """End all allocations that there are, and return when the nodes are idle again."""
        for allocation in allocations:
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                self.command("scancel", allocation)
        self._until("its nodes are not idle after scancel", self._all_idle)

    # ---- how ---------------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        for name in ("run", "log", "state", "spool"):
            (self.folder / name).mkdir(parents=True, exist_ok=True, mode=0o755)
        for node in self.nodes:
            (self.folder / "spool" / node).mkdir(exist_ok=True)
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        ports = free_ports(1 + len(self.nodes))
        host = socket.gethostname().partition(".")[0]
        lines = _CONF.format(
            host=host,
            user=getpass.getuser(),
            folder=self.folder,
            port=ports[0],
        )
        for node, port in zip(self.nodes, ports[1:], strict=True):
            lines += (
                f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8 Boards=1 SocketsPerBoard=1 "
                f"CoresPerSocket=8 ThreadsPerCore=1 RealMemory=4000 Gres=gpu:{GPUS} State=UNKNOWN\n"
            )
        lines += (
            "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1\n"
            "PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10\n"
        )
        self.config.write_text(lines)
        self._write_site({})
        devices = "".join(f"Name=gpu File={device}\n" for device in _DEVICES[:GPUS])
        (self.folder / "gres.conf").write_text(devices)
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=autodetect\n")

    def _write_site(self, settings: Mapping[str, str]) -> None:
        lines = (f"{name}={value}\n" for name, value in {**_SITE, **settings}.items())
        (self.folder / "site.conf").write_text("".join(lines))

    def _munged(self) -> tuple[str, ...]:
        run = self.folder / "run"
        return (
            *("munged", "--foreground", "--force", f"--socket={run / 'munge.sock'}"),
            *(f"--key-file={self.folder / 'munge.key'}", f"--pid-file={run / 'munged.pid'}"),
            *(f"--log-file={self.folder / 'log' / 'munged.log'}", f"--seed-file={run / 'munge.seed'}"),
        )

    def _start(self, name: str, *argv: str) -> None:
        program = shutil.which(argv[0], path=_PATH)
        if program is None:
            raise RuntimeError(f"there is no {argv[0]} here; install {PACKAGES}")
        with (self.folder / "log" / f"{name}.said").open("ab") as said:
            self._processes[name] = subprocess.Popen(
                (program, *argv[1:]),
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )

    def _all_idle(self) -> bool:
        with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired):
            states = self.command("sinfo", "--noheader", "--Node", "--partition=all", "--format=%T").split()
            return states == ["idle"] * len(self.nodes)
        return False

    def _until(self, what: str, look: Callable[[], bool]) -> None:
        give_up = time.monotonic() + _UP_S
        while not look():
            ended = [name for name, process in self._processes.items() if process.poll() is not None]
            if ended or time.monotonic() > give_up:
                raise RuntimeError(f"the Slurm cluster is not there: {what}{self._said(ended)}")
            time.sleep(_LOOK_S)

    def _said(self, ended: Sequence[str]) -> str:
        logs = [log for name in ended for log in sorted((self.folder / "log").glob(f"*{name}*"))]
        return "".join(f"; {log.name}: {log.read_text(errors='replace')[-800:]}" for log in logs)

    def _kill_steps(self) -> None:
        """What still carries the steps of this cluster: slurmstepd leaves its slurmd, and outlives it."""
        mark = f"SLURM_CONF={self.config}".encode()
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdecimal() and (entry / "comm").read_text() == "slurmstepd\n":
                    if mark in (entry / "environ").read_bytes().split(b"\0"):
                        os.kill(int(entry.name), signal.SIGKILL)


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on, all different."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    """A folder whose path is short: that of a Unix socket has 107 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="rxslurm", ignore_cleanup_errors=True) as name:
        yield Path(name)


def main(folder: str, *nodes: str) -> None:
    """Serve until SIGTERM, or until the parent is gone."""
    parent, began = os.getppid(), time.monotonic()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    if absent := missing():
        sys.exit(f"there is no {absent[0]} here; install {PACKAGES}")
    try:
        with short_folder() as short, Cluster(short, nodes) as cluster:
            allocation = cluster.allocate(f"--nodes={len(nodes)}", "--exclusive", f"--gres=gpu:{GPUS}")
            said = {
                "config": str(cluster.config),
                "allocation": allocation,
                "nodes": len(nodes),
                "up_s": round(time.monotonic() - began, 1),
            }
            sys.stdout.write(json.dumps(said) + "\n")
            sys.stdout.flush()
            while os.getppid() == parent:
                time.sleep(0.5)
    except RuntimeError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(*sys.argv[1:])
