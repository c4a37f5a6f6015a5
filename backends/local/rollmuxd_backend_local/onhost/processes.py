"""Processes of jobs on this machine: starting them, knowing them again, ending all of them.

A started process, and all that it starts in turn, carries a mark in its environment: no file could get lost. What has
removed the mark is known by its session. A mark is sealed with the daemon's name, which no job learns. So no other
login can make the mark of a launch that is not its own. A pid alone names no process: it may be another process's by
now. Pid and start time together are the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import stat
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from . import machine

#: the variable with the mark: its seal, job, number and launch
MARK = "ROLLMUX_LAUNCH"
#: how long those that are asked to end may take before they are made to; and those that are made to, all together
LEAVES_S = 2.0
GONE_S = 20.0
_LOOK_S = 0.02
#: how long a start waits for those before it: less than its caller waits, so that it hears why
_TURN_S = 20.0
_PLACE = "/tmp"  # see _turnstiles


class Launched(NamedTuple):
    """A living process of a launch."""

    pid: int
    started: str
    job: str
    number: int
    launch: str


def start(owner: str, order: dict[str, Any]) -> dict[str, Any]:
    """Start a job's process in a session of its own, after ending its earlier launches: its pid, its start time.

    ``order``: launch, job, number, argv, cwd, env, log (a file; empty: none), user (empty: this one), inherits (which
    variables it has besides ``env``, as patterns). Told again, it tells of the one there.

    Raises:
        machine.Refused: no such program, no such folder, a later launch is there.
        machine.Unknown: an earlier launch cannot be ended.
    """
    with _one_at_a_time():
        there = [one for one in launched(owner) if one.job == order["job"]]
        later = [one for one in there if one.number > order["number"]]
        if later:
            raise machine.Refused(f"launch {order['launch']} comes late: {later[0].launch} is there")
        for launch in dict.fromkeys(one.launch for one in there if one.launch != order["launch"]):
            stop(owner, launch)
        own = [one for one in there if one.launch == order["launch"]]
        if own:
            return {"pid": own[0].pid, "started": own[0].started}
        return _begin(owner, order)


def stop(owner: str, launch: str) -> bool:
    """End all that is left of a launch, the stubborn too, and return when nothing is. Whether there was anything.

    Raises:
        machine.Unknown: something cannot be ended (it hangs in the kernel, or is another user's).
    """
    began, any_there, empty = time.monotonic(), False, 0
    while empty < (2 if any_there else 1):  # twice: one that is just becoming another program cannot be found
        left = [one for one in launched(owner) if one.launch == launch]
        empty = 0 if left else empty + 1
        any_there = any_there or bool(left)
        took_s = time.monotonic() - began
        if took_s > GONE_S:
            raise machine.Unknown(f"of launch {launch} there still are pid {', '.join(str(one.pid) for one in left)}")
        for one in left:
            _signal(one.pid, one.started, signal.SIGTERM if took_s < LEAVES_S else signal.SIGKILL)
        if any_there:
            time.sleep(_LOOK_S)
    return any_there


def alive(owner: str, launch: str) -> bool:
    """Whether anything of a launch lives."""
    return any(one.launch == launch for one in launched(owner))


def kill(owner: str, pid: int, started: str, *, job: str, login: str) -> bool:
    """SIGKILL a process and what descends from it, if it was started then and is the job's. Whether it was.

    Only the job's client has said that it is. So of those that we started it has to be one of this job's. Of all others
    it has to be one of ``login`` (empty: none is).
    """
    if pid <= 1 or not started or pid in _ancestors() or _start_time(pid) != started:
        return False
    theirs = {one.pid: one.job for one in launched(owner)}
    uid = _uid_of(login)

    def is_its(one: int) -> bool:
        return theirs[one] == job if one in theirs else uid is not None and _user_of(one) == uid

    if not is_its(pid):
        return False
    ended = [(one, _start_time(one) or "") for one in descendants(pid) if is_its(one)]
    killed = _signal(pid, started, signal.SIGKILL)
    for descendant, its_start in ended:
        _signal(descendant, its_start, signal.SIGKILL)
    return killed


def launched(owner: str) -> list[Launched]:
    """All living processes that this owner (a daemon) has started here, and what they started, the oldest first."""
    stats = {pid: fields for pid in _pids() if (fields := stat_of(pid)) is not None and fields[0] not in "ZX"}
    marks: dict[int, tuple[str, ...]] = {pid: mark for pid in stats if _is_ours(owner, mark := _mark_of(pid))}
    for pid, fields in stats.items():  # one without its mark, in a session that one with a mark leads
        leader = int(fields[3])
        if pid not in marks and leader in marks and stats[leader][3] == str(leader):
            marks[pid] = marks[leader]
    found = [Launched(pid, stats[pid][19], job, int(number), launch) for pid, (_, job, number, launch) in marks.items()]
    return sorted(found, key=lambda one: (int(one.started), one.pid))


# ---- starting ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """A start that was given up may still be under way: the next one waits for it, and then finds its process."""
    give_up = time.monotonic() + _TURN_S
    while True:
        with contextlib.ExitStack() as held:
            there = _turnstiles()
            for path in there:
                lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                held.callback(os.close, lock)
                _lock(lock, path, give_up)
            if _turnstiles() == there:  # else one was cleaned away meanwhile, or has been made
                yield
                return


def _turnstiles() -> list[str]:
    """The folders, one as a rule, that all starts of this user lock, in this order; one is made where there is none.

    In a folder that all may write, since all logins of a user have that one on a host. A home may be missing, or on
    many hosts. So nothing there counts by its name. Only what is this user's, and open to no other, cannot be made,
    locked or moved by another user. If two are made at once, each start locks at least the one that was made first.
    """
    found = _own_folders()
    if not found:
        made = _make_folder()
        found = _own_folders()
        if not found:
            os.rmdir(made)
            raise machine.Refused(f"what this user makes in {_PLACE} is not its own: starts cannot wait for each other")
    return found


def _make_folder() -> str:
    made = f"{_PLACE}/{_prefix()}{os.urandom(8).hex()}"
    os.mkdir(made, 0o700)
    return made


def _own_folders() -> list[str]:
    prefix, found = _prefix(), []
    for name in os.listdir(_PLACE):
        if name.startswith(prefix):
            with contextlib.suppress(FileNotFoundError):
                about = os.lstat(f"{_PLACE}/{name}")
                if stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid() and not about.st_mode & 0o077:
                    found.append(f"{_PLACE}/{name}")
    return sorted(found)


def _prefix() -> str:
    return f".rollmuxd-{os.geteuid()}-"


def _lock(lock: int, path: str, give_up: float) -> None:
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        if time.monotonic() > give_up:
            raise machine.Unknown(
                f"another start as {machine.user_name(os.geteuid())} on this host has kept this one waiting for "
                f"{_TURN_S:g} s; see what it is at (lslocks has its pid; it holds {path}), and end it if it hangs"
            )
        time.sleep(_LOOK_S)


def _begin(owner: str, order: dict[str, Any]) -> dict[str, Any]:
    import shutil  # imported where it is needed, as what follows: most questions need none of it
    import subprocess

    mark = mark_of(owner, str(order["job"]), str(order["number"]), str(order["launch"]))
    plain = _inherited(order["inherits"])
    become, about_them = _identity(order["user"])
    env = {**plain, **about_them, **order["env"], MARK: "|".join(mark)}
    argv, cwd = list(order["argv"]), os.path.expanduser(order["cwd"] or env.get("HOME", "~"))
    if not os.path.isdir(cwd):
        raise machine.Refused(f"there is no folder {cwd}")
    program = shutil.which(os.path.join(cwd, argv[0]) if "/" in argv[0] else argv[0], path=env.get("PATH"))
    if program is None:
        raise machine.Refused(
            f"there is no program {argv[0]}, or it may not be run by {machine.user_name(os.geteuid())}"
        )

    def enter() -> None:
        _reset_score()
        become()

    with contextlib.ExitStack() as files:
        out: Any = subprocess.DEVNULL
        try:
            if order["log"]:
                log = os.path.expanduser(order["log"])
                os.makedirs(os.path.dirname(log), mode=0o700, exist_ok=True)
                opened = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
                out = files.enter_context(open(opened, "ab"))
            child = subprocess.Popen(
                argv,
                executable=program,
                cwd=cwd,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=enter,  # noqa: PLW1509  # this process has one thread
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            raise machine.Refused(f"{argv[0]}: {error}") from error
    started = _start_time(child.pid) or ""
    # The kernel shows a program's environment a moment after it has begun, and until then it could not be found.
    while child.poll() is None and _mark_of(child.pid) != mark:
        time.sleep(0.001)
    child.returncode = 0  # it is left to itself, and no warning is wanted of it
    return {"pid": child.pid, "started": started}


def _inherited(patterns: list[str]) -> dict[str, str]:
    """Of the environment here, what a job may have (see :mod:`rollmuxd.spi.environment`). No URL with a password is."""
    import fnmatch

    return {
        name: value
        for name, value in os.environ.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        and not ("@" in value and ("://" in value or name.lower().endswith("_proxy")))
    }


def _reset_score() -> None:
    """When memory is short, a job is like any process: what started it (the daemon, a Ray worker) may not be."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("0")


def _identity(name: str) -> tuple[Callable[[], None], dict[str, str]]:
    """How a process becomes a user (in its child, before it begins), and what its environment says then."""
    import pwd

    if not name or name == machine.user_name(os.geteuid()):
        return (lambda: None), {}
    if os.geteuid() != 0:
        raise machine.Refused(
            f"it is to run as {name}, and {machine.user_name(os.geteuid())} may not become another user"
        )
    try:
        user = pwd.getpwnam(name)
    except KeyError:
        raise machine.Refused(f"there is no user {name}") from None
    groups = os.getgrouplist(user.pw_name, user.pw_gid)

    def become() -> None:
        os.setgroups(groups)
        os.setgid(user.pw_gid)
        os.setuid(user.pw_uid)

    return become, {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name, "SHELL": user.pw_shell}


# ---- what the kernel says of processes -------------------------------------------------------------------------------


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def stat_of(pid: int) -> list[str] | None:
    """The fields of ``/proc/<pid>/stat`` from the third on. The second is the command's name, which may be anything."""
    fields = machine.read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields if len(fields) > 19 else None


def _user_of(pid: int) -> int | None:
    """The real uid of a process: whose it is, and which login may end it."""
    for line in machine.read(f"/proc/{pid}/status").splitlines():
        if line.startswith("Uid:"):
            return int(line.split()[1])
    return None


def _uid_of(login: str) -> int | None:
    import pwd

    try:
        return pwd.getpwnam(login).pw_uid if login else None
    except KeyError:
        return None


def _start_time(pid: int) -> str | None:
    fields = stat_of(pid)
    return fields[19] if fields is not None and fields[0] not in "ZX" else None


def mark_of(owner: str, job: str, number: str, launch: str) -> tuple[str, str, str, str]:
    """The mark of a launch of this owner's."""
    import hashlib
    import hmac

    sealed = f"{job}|{number}|{launch}".encode()
    return (hmac.new(owner.encode(), sealed, hashlib.sha256).hexdigest()[:32], job, number, launch)


def _is_ours(owner: str, mark: tuple[str, ...]) -> bool:
    return len(mark) == 4 and mark[2].isdecimal() and mark == mark_of(owner, *mark[1:])


def _mark_of(pid: int) -> tuple[str, ...]:
    """What a process carries as its mark; empty: nothing, or it is another user's process."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            env = file.read()
    except OSError:
        return ()
    wanted = f"{MARK}=".encode()
    for part in env.split(b"\0"):
        if part.startswith(wanted):
            return tuple(part[len(wanted) :].decode(errors="replace").split("|"))
    return ()


def descendants(pid: int) -> list[int]:
    """What a process has started, and these in turn; not what has lost its parent."""
    children: dict[int, list[int]] = {}
    for one in _pids():
        fields = stat_of(one)
        if fields is not None:
            children.setdefault(int(fields[1]), []).append(one)
    found = list(children.get(pid, ()))
    for one in found:  # grows while it is gone through
        found.extend(children.get(one, ()))
    return found


def _ancestors() -> set[int]:
    """This process and those that it descends from: ending one of them would be ending oneself."""
    found, pid = set(), os.getpid()
    while pid > 0:
        found.add(pid)
        fields = stat_of(pid)
        pid = int(fields[1]) if fields is not None else 0
    return found


def _signal(pid: int, started: str, number: int) -> bool:
    """Send a signal to the process that was started then, and to no other. Whether it was there."""
    # The handle is opened before the comparison, so that the pid cannot change hands in between. Python 3.8 has none.
    handle = None
    try:
        if hasattr(os, "pidfd_open"):
            handle = os.pidfd_open(pid)
        if _start_time(pid) != started:
            return False
        if handle is not None:
            signal.pidfd_send_signal(handle, number)
        else:
            os.kill(pid, number)
    except OSError:
        return False
    finally:
        if handle is not None:
            os.close(handle)
    return True
