#!/usr/bin/env python3
"""What the utility ``cuda-checkpoint`` does, by the CUDA driver's own calls: for machines without the utility.

Takes the same arguments and prints the same.

Calls and states: CUDA driver API, "CUDA Checkpointing" (from driver 570 on).
"""

import ctypes
import sys
from typing import Any

STATES = ("running", "locked", "checkpointed", "failed")
ACTIONS = {
    "lock": "cuCheckpointProcessLock",
    "checkpoint": "cuCheckpointProcessCheckpoint",
    "restore": "cuCheckpointProcessRestore",
    "unlock": "cuCheckpointProcessUnlock",
}


class LockArgs(ctypes.Structure):
    """CUcheckpointLockArgs: 64 bytes, of which the first four are said."""

    _fields_ = (("timeout_ms", ctypes.c_uint), ("reserved0", ctypes.c_uint), ("reserved1", ctypes.c_uint64 * 7))


class CudaError(Exception):
    """A call of the driver failed."""


def call(cuda: Any, name: str, *args: Any) -> None:
    """Call the driver. Raises CudaError with the driver's name for what went wrong."""
    function = getattr(cuda, name, None)
    if function is None:
        raise CudaError(f"{name} is not in this driver: it needs 570 or newer")
    code = function(*args)
    if code:
        text = ctypes.c_char_p()
        cuda.cuGetErrorName(code, ctypes.byref(text))
        raise CudaError(f"{name}: {(text.value or str(code).encode()).decode()}")


def act(cuda: Any, action: str, pid: int, timeout_ms: int) -> None:
    """Lock, checkpoint, restore or unlock a process."""
    args = ctypes.byref(LockArgs(timeout_ms=timeout_ms)) if action == "lock" else None
    call(cuda, ACTIONS[action], pid, args)


def state_of(cuda: Any, pid: int) -> str:
    """One of STATES."""
    state = ctypes.c_int(-1)
    call(cuda, "cuCheckpointProcessGetState", pid, ctypes.byref(state))
    return STATES[state.value] if 0 <= state.value < len(STATES) else f"state {state.value}"


def main(argv: list[str], cuda: Any = None) -> int:
    """As the utility: 0, or 1 with the reason on stderr."""
    options = {word: (argv[at + 1 :] or [""])[0] for at, word in enumerate(argv)}
    try:
        pid = int(options["--pid"])
        if cuda is None:
            cuda = ctypes.CDLL("libcuda.so.1")
        call(cuda, "cuInit", 0)
        if "--get-state" in options:
            print(state_of(cuda, pid))
        else:
            act(cuda, options["--action"], pid, int(options.get("--timeout", "0")))
    except (CudaError, OSError, KeyError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
