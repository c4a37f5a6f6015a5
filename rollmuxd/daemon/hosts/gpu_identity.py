"""Which GPU is which. A GPU is its own name (UUID): seen under two ids, it would be given to two jobs at once."""

from collections.abc import Collection

from rollmuxd.core.ids import GpuId, HostId
from rollmuxd.spi import ContactLost, Observation


class GpuIdentities:
    """Of each GPU that is configured, the id under which it was seen first. A second one is refused, never used."""

    def __init__(self) -> None:
        self._names: dict[GpuId, str] = {}
        self._ids: dict[str, GpuId] = {}

    def check(self, host: HostId, observation: Observation, configured: Collection[GpuId]) -> None:
        """Note what an observation says of the configured GPUs among its own.

        Raises:
            ContactLost: one of them is another host's already, so that nothing may be made of this observation.
        """
        for gpu, name in observation.uuids.items():
            if gpu not in configured:
                continue
            before = self._names.get(gpu)
            if before is not None and before != name:  # another GPU was put in
                del self._ids[before], self._names[gpu]
            known = self._ids.setdefault(name, gpu)
            if known != gpu:
                raise ContactLost(
                    f"{gpu} is the same GPU as {known} ({name}): {host} is a second way to the same machine; take one "
                    "of the two out of the configuration"
                )
            self._names[gpu] = name
