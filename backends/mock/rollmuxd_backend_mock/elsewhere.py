"""Made-up bytes on hosts that other backends reach: what the mock's residency driver does there.

With it the demo, and tests of a backend, run on real hosts without GPUs. Their backend reads made-up GPUs from a file
of the host (option ``made_up_gpus`` of local and ssh). To move bytes in it, the backend runs
:mod:`rollmuxd_backend_mock.on_host` there.
"""

import json
from importlib.resources import files
from typing import Final

from rollmuxd.spi import ContactLost, NotDone, Probed, Ran, StateOrder, runs_commands
from rollmuxd.spi.options import filled
from rollmuxd_backend_mock import on_host

_SCRIPT: Final = (files("rollmuxd_backend_mock") / "on_host.py").read_bytes()
_LIMIT_S: Final = 3_600.0
_PROBE_S: Final = 10.0


class Elsewhere:
    """Moves made-up bytes by commands on the order's host; ``{host}`` in the file's name is filled in."""

    def __init__(self, made_up_gpus: str, *, copy_gbps: float, record: str, python: str) -> None:
        self._file = made_up_gpus
        self._copy_gbps = copy_gbps
        self._record = record
        self._python = python

    async def perform(self, method: str, order: StateOrder) -> None:
        """Load, park or discard."""
        ran = await self._run(method, order, _LIMIT_S)
        if ran.exit_code != on_host.DONE:
            said = ran.stderr.decode(errors="replace").strip() or f"exit code {ran.exit_code}"
            if ran.exit_code != on_host.NOT_DONE or "Traceback" in said:
                raise ContactLost(f"{method} on {order.host}: {said}")
            raise NotDone(f"{method} of job {order.name!r} on {order.host}: {said}")

    async def probe(self, order: StateOrder) -> Probed:
        """What became of an order, as the host has written it down."""
        try:
            ran = await self._run("probe", order, _PROBE_S)
        except (NotDone, ContactLost) as error:
            return Probed(known=False, error=str(error))
        match ran.exit_code:
            case on_host.DONE:
                return Probed(known=True, done=True)
            case on_host.NOT_DONE:
                return Probed(known=True, error="it was begun and not finished")
            case on_host.NOT_BEGUN:
                return Probed(known=True, error="it was not begun", begun=False)
        return Probed(known=False)

    async def _run(self, do: str, order: StateOrder, limit_s: float) -> Ran:
        state = order.state
        key = f"{order.job} run {order.run} {order.pool} {order.node}"
        told = {
            "do": do,
            "file": filled(self._file, order),
            "record": self._record,
            "key": key,
            "order_key": f"{order.order} {order.kind.value} {key}",
            "order": order.order,
            "stamp": [order.stamp.incarnation, order.stamp.number],
            "issued_at": order.issued_at,
            "host": order.host,
            "gpus": order.gpus,
            "mb": state.gpu_mb,
            "agreed_mb": state.residual_mb,
            "copy_s": state.gpu_mb * len(order.gpus) / 1000 / self._copy_gbps,
            "job": order.job,
            "name": order.name,
            "run": order.run,
            "pool": order.pool,
            "node": order.node,
            "pid": order.pid,
            "started": order.started,
        }
        argv = (self._python, "-", json.dumps(told))
        return await runs_commands(order.backend).run(order.host, argv, stdin=_SCRIPT, timeout_s=limit_s)
