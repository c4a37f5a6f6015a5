"""What Slurm's controller is asked: the allocation's state and end, and the commands that make steps."""

import os
import tempfile
from collections.abc import Sequence
from typing import Final

import anyio
from msgspec import Struct

from rollmuxd.spi import ContactLost, HostId
from rollmuxd_backend_slurm.options import SlurmOptions

#: a controller that is not there makes each command wait for about 9 s
_COMMAND_S: Final = 20.0
#: one line for each component; times are seconds since 1970 by ``SLURM_TIME_FORMAT``
_FORMAT: Final = "HetJobOffset:|,State:|,EndTime:|,RestartCnt:|,NodeList:|"
#: what the daemon has for itself, and what a batch script says of its own steps
_NOT_FOR_STEPS: Final = ("SLURM_", "SBATCH_", "SRUN_", "ROLLMUX_", "NOTIFY_SOCKET", "WATCHDOG_")
#: states in which an allocation has its nodes
_THERE: Final = ("RUNNING", "CONFIGURING", "SUSPENDED", "SIGNALING", "STAGE_OUT")


class Node(Struct, frozen=True):
    """A node of an allocation, and the host that it is."""

    host: HostId
    #: as Slurm calls it
    name: str
    allocation: str
    #: None: the allocation is not a heterogeneous one
    component: int | None


class Component(Struct, frozen=True):
    """An allocation, or a component of a heterogeneous one, as the controller has it."""

    #: as Slurm writes it: ``RUNNING``, ``COMPLETING``, ``TIMEOUT``
    state: str
    #: when its time is over, in seconds since 1970; None: it has no limit
    ends_at: float | None
    restarts: int
    #: as Slurm writes them: ``rx[1-2,7]``
    nodes: str = ""

    @property
    def is_there(self) -> bool:
        """Whether it has its nodes, for all that Slurm says."""
        return self.state in _THERE


def environment(conf: str) -> dict[str, str]:
    """For Slurm's commands. The options of a batch script would change our steps, so they are left out."""
    plain = {
        name: value for name, value in os.environ.items() if name == "SLURM_CONF" or not name.startswith(_NOT_FOR_STEPS)
    }
    return {**plain, **({"SLURM_CONF": conf} if conf else {}), "SLURM_TIME_FORMAT": "%s"}


def parse(said: str) -> dict[int, Component]:
    """The components in what ``squeue`` says, by number; an allocation without components is number 0.

    Raises ValueError where a line is not as asked for.
    """
    found = {}
    for line in said.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) != 6:
            raise ValueError(f"squeue says {line!r}, which has not the five fields that it was asked for")
        number, state, ends, restarts, nodes = fields[:5]
        found[int(number) if number.isdecimal() else 0] = Component(
            state=state,
            ends_at=float(ends) if ends.isdecimal() else None,
            restarts=int(restarts) if restarts.isdecimal() else 0,
            nodes=nodes,
        )
    return found


def step(options: SlurmOptions, node: Node, *more: str) -> tuple[str, ...]:
    """``srun`` for one process on one node, beside whatever else runs there."""
    component = () if node.component is None else (f"--het-group={node.component}",)
    return (
        *("srun", f"--jobid={node.allocation}", *component, "--overlap", "--nodes=1", "--ntasks=1"),
        *(f"--nodelist={node.name}", "--mpi=none", *options.srun, *more),
    )


async def components(allocation: str, conf: str) -> dict[int, Component]:
    """An allocation's components. Raises ContactLost: the controller is away, or has no such allocation (any more)."""
    argv = ("squeue", "--noheader", "--states=all", f"--jobs={allocation}", f"--Format={_FORMAT}")
    said = await _said(argv, conf, allocation)
    try:
        found = parse(said)
    except ValueError as error:
        raise ContactLost(str(error)) from error
    if not found:
        raise ContactLost(f"allocation {allocation} is over: Slurm knows it no longer")
    return found


async def names(nodes: str, conf: str) -> list[str]:
    """The nodes in a list of Slurm's, which has a grammar of its own. Raises ContactLost."""
    return (await _said(("scontrol", "show", "hostnames", nodes), conf, "")).split() if nodes else []


async def component(node: Node, conf: str) -> Component:
    """The node's component now. Raises ContactLost: as :func:`components`, or the node's component is not said."""
    allocation, found = node.allocation, await components(node.allocation, conf)
    if len(found) > 1 and node.component is None:
        raise ContactLost(
            f"allocation {allocation} has {len(found)} components; say in options.component which one the node is in"
        )
    if (node.component or 0) not in found:
        raise ContactLost(
            f"allocation {allocation} has no component {node.component}; it has {', '.join(map(str, found))}: set "
            "options.component"
        )
    return found[node.component or 0]


async def _said(argv: Sequence[str], conf: str, allocation: str) -> str:
    named = environment(conf).get("SLURM_CONF", "")
    if named and not await anyio.Path(named).exists():  # Slurm's commands wait for it, for a minute
        raise ContactLost(f"there is no {named}; set options.conf, or SLURM_CONF, to the cluster's slurm.conf")
    with tempfile.TemporaryFile() as printed:  # what a command that is ended has printed is kept too

        def means() -> str:
            printed.seek(0)
            return in_words(printed.read().decode(errors="replace"), Node("", "", allocation, None))

        try:
            with anyio.fail_after(_COMMAND_S):
                ran = await anyio.run_process(argv, check=False, stderr=printed, env=environment(conf))
        except TimeoutError as error:
            if printed.seek(0, os.SEEK_END):
                raise ContactLost(f"{argv[0]} did not end within {_COMMAND_S:g} s: {means()}") from error
            raise ContactLost(f"the Slurm controller did not answer {argv[0]} within {_COMMAND_S:g} s") from error
        except OSError as error:
            raise ContactLost(
                f"{argv[0]} cannot be run ({error}); Slurm's commands must be on the daemon's PATH"
            ) from error
        if ran.returncode != 0:
            raise ContactLost(means())
    return ran.stdout.decode(errors="replace")


def in_words(said: str, node: Node) -> str:
    """What an error of Slurm's means for a node, and what to do."""
    last = said.strip().splitlines()[-1] if said.strip() else "Slurm said nothing"
    # Without a controller srun says that the allocation is invalid too: that must not be read as an end.
    if "Unable to contact slurm controller" in said:
        return f"the Slurm controller cannot be reached ({last}); what runs continues, and new steps wait for it"
    if any(sign in said for sign in ("Invalid job id", "Expired or invalid job", "already completing")):
        return f"allocation {node.allocation} is over, or is another user's ({last})"
    if "Step limit reached" in said:
        return (
            f"allocation {node.allocation} has had as many steps as the site allows (MaxStepCount); no job can be "
            f"started there, and no lost node reached again: start another allocation ({last})"
        )
    if "Requested node configuration is not available" in said:
        return (
            f"node {node.name} is not in allocation {node.allocation}, or has failed: a failed node does not come "
            f"back to its allocation ({last})"
        )
    if "hetjob component" in said or "het-group" in said or "eterogeneous" in said:
        return (
            f"options.component does not fit allocation {node.allocation}: set it on every host of a heterogeneous "
            f"allocation, and nowhere else ({last})"
        )
    return last
