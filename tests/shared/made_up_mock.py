"""The mock's residency driver, which moves made-up bytes on hosts that other backends reach, too.

With it the demo, and tests of a backend, run on real hosts without GPUs. Their backend reads made-up GPUs from a file
of the host (option ``made_up_gpus`` of local and ssh). To move bytes in it, the backend runs
:mod:`made_up_moves` there.

As a program, ``made_up_mock.py daemon run ...`` is ``rollmuxd daemon run`` with this in place of the mock's driver.
``[residency.mock]`` has the file (``made_up_gpus``), and ``copy_gbps``, ``record`` and ``python``.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

import made_up_moves

import rollmuxd_backend_mock
from rollmuxd.spi import Channel, ContactLost, NotDone, Probed, Ran, StateOrder, runs_commands
from rollmuxd.spi.options import Options, filled
from rollmuxd_backend_mock import MockResidency
from rollmuxd_backend_mock.residency import mock_of

_SCRIPT: Final = Path(made_up_moves.__file__).read_bytes()
_LIMIT_S: Final = 3_600.0
_PROBE_S: Final = 10.0


class MadeUpResidency(MockResidency):
    """The mock's driver where an order's host is a mock, and elsewhere one that moves bytes by commands."""

    elsewhere: "Elsewhere | None" = None

    @classmethod
    async def open(cls, channel: Channel, options: Mapping[str, Any]) -> Self:
        given = Options("residency driver mock", options, ("made_up_gpus", "copy_gbps", "record", "python"))
        driver = await super().open(channel, {})
        if file := given.text("made_up_gpus", ""):
            driver.elsewhere = Elsewhere(
                file,
                copy_gbps=given.seconds("copy_gbps", 20.0) or 20.0,
                record=given.text("record", ""),
                python=given.text("python", "python3"),
            )
        return driver

    async def probe(self, order: StateOrder) -> Probed:
        if self.elsewhere is not None and mock_of(order) is None:
            return await self.elsewhere.probe(order)
        return await super().probe(order)

    async def _perform(self, method: str, order: StateOrder, do: Any) -> None:
        if self.elsewhere is not None and mock_of(order) is None:
            await self.elsewhere.perform(method, order)
            return
        await super()._perform(method, order, do)


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
        if ran.exit_code != made_up_moves.DONE:
            said = ran.stderr.decode(errors="replace").strip() or f"exit code {ran.exit_code}"
            if ran.exit_code != made_up_moves.NOT_DONE or "Traceback" in said:
                raise ContactLost(f"{method} on {order.host}: {said}")
            raise NotDone(f"{method} of job {order.name!r} on {order.host}: {said}")

    async def probe(self, order: StateOrder) -> Probed:
        """What became of an order, as the host has written it down."""
        try:
            ran = await self._run("probe", order, _PROBE_S)
        except (NotDone, ContactLost) as error:
            return Probed(known=False, error=str(error))
        match ran.exit_code:
            case made_up_moves.DONE:
                return Probed(known=True, done=True)
            case made_up_moves.NOT_DONE:
                return Probed(known=True, error="it was begun and not finished")
            case made_up_moves.NOT_BEGUN:
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
        argv = (self._python, "-I", "-S", "-", json.dumps(told))
        return await runs_commands(order.backend).run(order.host, argv, stdin=_SCRIPT, timeout_s=limit_s)


if __name__ == "__main__":
    from rollmuxd.cli.main import main

    rollmuxd_backend_mock.MockResidency = MadeUpResidency
    main()
