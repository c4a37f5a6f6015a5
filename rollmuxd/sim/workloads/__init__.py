"""The workloads that ``rollmuxd sim`` knows, by name.

The simulator's own is ``journal``. Packages add others by entry point: the group ``rollmuxd.sim_workloads`` names dicts
like :data:`_OURS`.

A recipe is read once, from data and options, and drawn again for each seed: equal seeds give equal workloads, in every
process. Randomness is one ``random.Random`` per purpose and seed, seeded with a string of both.

Errors: ``Malformed`` names file, line and column. ``FileNotFoundError`` says which data set is missing and how to get
it. ``ValueError`` says which option makes no sense.
"""

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from rollmuxd.sim.workload import Options, Recipe
from rollmuxd.sim.workloads.journal import Journal
from rollmuxd.sim.workloads.options import nearest
from rollmuxd.spi import discovery

#: name: (one line, what makes it)
Catalogue: TypeAlias = Mapping[str, tuple[str, Callable[[str, Options], Recipe]]]

_OURS: Final[Catalogue] = {
    "journal": ("a daemon's own journal (file=PATH): its jobs, each step as it was recorded, on its nodes", Journal),
}


def catalogue() -> Catalogue:
    """Ours, then those of installed packages."""
    return {**_OURS, **discovery.added("rollmuxd.sim_workloads")}


def read(name: str, options: Options | None = None) -> Recipe:
    """The workload of this name.

    Raises:
        ValueError: there is none of this name, or an option makes no sense (``Malformed``: a file cannot be read).
        FileNotFoundError: its data is not there.
    """
    known = catalogue()
    if name not in known:
        raise ValueError(f"there is no workload {name!r}{nearest(name, list(known))} ({', '.join(known)})")
    _, make = known[name]
    return make(name, options or Options())
