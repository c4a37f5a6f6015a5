"""Sets a Polatis optical switch over RESTCONF. Entry point ``polatis`` of the group ``rollmuxd.fabric``."""

from rollmuxd_fabric_polatis.controller import PolatisFabric

__all__ = ["PolatisFabric"]
