"""This machine: which boot it is, its RAM, limits and clock; which process a pid is."""

from __future__ import annotations

import os
import resource
import sys
import time
from typing import Any


class Refused(Exception):
    """What was asked for was not done, for certain; says why."""


class Unknown(Exception):
    """What was asked cannot be told, or was done in part; says why, and what to do."""


_MB = 10**6
#: the inode of the machine's own PID namespace (PROC_PID_INIT_INO of the kernel)
_FIRST_PID_NAMESPACE = "pid:[4026531836]"


def read(path: str) -> str:
    """A small file; empty where it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def boot_id() -> str:
    """Another one after each restart of the machine. Raises OSError where the system does not tell."""
    found = read("/proc/sys/kernel/random/boot_id")
    if not found:
        raise OSError("/proc/sys/kernel/random/boot_id cannot be read: this backend needs Linux with /proc mounted")
    return found


def in_a_pid_namespace() -> bool:
    """Whether process numbers here are others than the machine's own: in most containers. In doubt, yes."""
    try:
        return os.readlink("/proc/self/ns/pid") != _FIRST_PID_NAMESPACE
    except OSError:
        return True


def ram() -> dict[str, int]:
    """RAM in MB: ``total_mb`` that may be used here (a container's limit counts), ``available_mb`` now."""
    told = dict(line.split(":", 1) for line in read("/proc/meminfo").splitlines() if ":" in line)

    def kib(name: str) -> int:
        return int(told[name].split()[0]) * 1024 // _MB if name in told else 0

    total = kib("MemTotal")
    limits = [total, *(_limit_mb(path) for path in _limit_files())]
    return {"total_mb": min((limit for limit in limits if limit), default=0), "available_mb": kib("MemAvailable")}


def _limit_files() -> list[str]:
    """Where a limit of this process's cgroup may be, and of those above it, in both versions of cgroups."""
    files = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"]
    for line in read("/proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        top, name = "/sys/fs/cgroup", "memory.max"
        if number != "0":
            if "memory" not in controllers.split(","):
                continue
            top, name = "/sys/fs/cgroup/memory", "memory.limit_in_bytes"
        while path.strip("/"):
            files.append(f"{top}{path}/{name}")
            path = os.path.dirname(path)
    return files


def _limit_mb(path: str) -> int:
    """A limit in MB; 0: none."""
    said = read(path)
    return int(said) // _MB if said.isdecimal() and int(said) < 2**60 else 0


def about() -> dict[str, Any]:
    """What an operator wants to know of a machine."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    return {
        "python": ".".join(str(part) for part in sys.version_info[:3]),
        "kernel": os.uname().release,
        "time": time.time(),
        "ram": ram(),
        # -1: no limit
        "memlock_mb": -1 if soft == resource.RLIM_INFINITY else soft // _MB,
        "shm_mb": -1 if shm is None else shm.f_blocks * shm.f_frsize // _MB,
        "pid_namespace": in_a_pid_namespace(),
        "user": user_name(os.geteuid()),
    }


def process_name(pid: int) -> str:
    """The command's name; empty where it is gone."""
    return read(f"/proc/{pid}/comm")


def process_user(pid: int) -> str:
    """Whose it is; empty where it is gone."""
    try:
        return user_name(os.stat(f"/proc/{pid}").st_uid)
    except OSError:
        return ""


def user_name(uid: int) -> str:
    """By name where there is one."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
