"""What a backend and a residency driver must do, as tests: subclass, say how yours is made, run pytest.

    class TestMine(BackendContract):
        host = "box"
        async def make(self):
            return await MyBackend.open([HostConfig(id="box", gpus=("box/gpu0", "box/gpu1"))], {})

The tests' names are the sentences of the contract. Some are about things that only you can bring about (a host that
goes away, a process that is yours to end). They are skipped until you override the method that the reason names.

Needs pytest with pytest-asyncio, and anyio. Not imported by :mod:`rollmuxd.spi`, which stays free of them.

The sentences are in modules, by subject. A backend: :mod:`~rollmuxd.spi.contract.hosts` (what is seen of a host, and
what is not when it is away), :mod:`~rollmuxd.spi.contract.processes`, :mod:`~rollmuxd.spi.contract.commands`,
:mod:`~rollmuxd.spi.contract.exchanges`. A driver: :mod:`~rollmuxd.spi.contract.moves` and
:mod:`~rollmuxd.spi.contract.probes`. An optical switch: :mod:`~rollmuxd.spi.contract.fabric`. What an author gives is
in :mod:`~rollmuxd.spi.contract.given` and :mod:`~rollmuxd.spi.contract.rig`. Import from this module only.
"""

import pkgutil

import pytest

# Before they are imported: a sentence that is broken then shows the values, as in a test module of one's own.
pytest.register_assert_rewrite(*(room.name for room in pkgutil.iter_modules(__path__, f"{__name__}.")))

from rollmuxd.spi.contract.commands import Commands  # noqa: E402
from rollmuxd.spi.contract.exchanges import Exchanges  # noqa: E402
from rollmuxd.spi.contract.fabric import FabricContract  # noqa: E402
from rollmuxd.spi.contract.hosts import Hosts  # noqa: E402
from rollmuxd.spi.contract.moves import Moves  # noqa: E402
from rollmuxd.spi.contract.probes import Probes  # noqa: E402
from rollmuxd.spi.contract.processes import Processes  # noqa: E402
from rollmuxd.spi.contract.rig import Rig  # noqa: E402

__all__ = ["BackendContract", "FabricContract", "ResidencyContract", "Rig"]


# pytest goes through the last base first.
class BackendContract(Exchanges, Commands, Processes, Hosts):
    """What every backend must do. Override ``host`` and :meth:`make`; and what else you can bring about."""


class ResidencyContract(Probes, Moves):
    """What every residency driver must do. Override :meth:`make`; and what else you can bring about."""
