"""Several policies on the same workloads: which runs there are, and one of them, with its history where asked."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from rollmuxd.core import facts as f
from rollmuxd.sim import perfetto
from rollmuxd.sim.execution import Durations
from rollmuxd.sim.fluid import Fluid
from rollmuxd.sim.outcome import PAPER, WORK, Outcome
from rollmuxd.sim.policies import MAX_GROUP, bound, policy_under_test
from rollmuxd.sim.workload import Options, Workload
from rollmuxd.sim.workloads import read
from rollmuxd.sim.world import World

FIDELITIES: Final = ("cost", "phase", "engine", "network")
ACCOUNTINGS: Final = (PAPER, WORK)


class Task(Struct, frozen=True):
    """One run, in words that another process understands."""

    workload: str
    options: Options
    policy: str
    fidelity: str
    accounting: str
    seed: int
    #: jobs in a group at most
    max_group: int = MAX_GROUP
    #: what a move takes; None: as the policy has it
    move_s: float | None = None


def tasks(
    workload: str,
    options: Options,
    names: Sequence[str],
    fidelity: str,
    seeds: Sequence[int],
    max_group: int = MAX_GROUP,
    move_s: float | None = None,
) -> list[Task]:
    """Every run of a comparison, both accountings.

    Raises:
        ValueError: there is no such policy or fidelity, or a policy has no run of this fidelity.
    """
    if fidelity not in FIDELITIES:
        raise ValueError(f"fidelity is {fidelity!r}, and it is one of {', '.join(FIDELITIES)}")
    for name in names:
        if bound(name) is None:
            policy_under_test(name)
        elif fidelity != "cost":
            raise ValueError(f"{name} is computed beside the scheduler, and has no phases to run; use cost")
    return [
        Task(workload, options, name, fidelity, accounting, seed, max_group, move_s)
        for seed in seeds
        for name in dict.fromkeys(names)
        for accounting in ACCOUNTINGS
    ]


def check(some: Sequence[Task]) -> None:
    """Raise ``Impossible`` for what no run could do, before any run has begun."""
    seeds = list(dict.fromkeys(task.seed for task in some))
    for seed in seeds[:2]:  # what these can do the others can: they differ in numbers only
        mine = {task.policy: task for task in some if task.seed == seed}
        drawn = draw(next(iter(mine.values())))
        drawn.check()
        for policy in mine:
            if bound(policy) is None:
                adapted = tuple(policy_under_test(policy).adapt(job) for job in drawn.jobs)
                replace(drawn, jobs=adapted).check()


def draw(task: Task) -> Workload:
    """The workload of a task."""
    options = task.options
    drawn = replace(read(task.workload, options).draw(task.seed), fillers=options.fillers)
    if not options.gpus:
        return drawn
    from rollmuxd.sim import other_gpus  # needs numpy

    return other_gpus.on(drawn, options.gpus, options.prices)


def perform(
    task: Task,
    drawn: Workload | None = None,
    *,
    hear: Callable[[f.Fact], None] | None = None,
    progress: Callable[[int], None] | None = None,
    make: Callable[..., World] = World,
    lit: Callable[[Sequence[Any]], None] | None = None,
) -> Outcome:
    """One run. ``hear`` gets every fact (a bound has none), ``progress`` the number of jobs that have ended.

    ``make`` makes the world of all fidelities but ``cost``. ``lit`` gets the circuits of fidelity ``network``, when the
    run has ended.
    """
    drawn = drawn or draw(task)
    if (least := bound(task.policy)) is not None:
        return least.run(drawn, seed=task.seed, accounting=task.accounting, max_group=task.max_group)
    found = policy_under_test(task.policy).where(max_group=task.max_group, move_s=task.move_s)
    if task.fidelity == "cost":
        return Fluid(drawn, found, task.seed, task.accounting, hear, progress).run()
    network: Any = None
    executions: Durations | None = None
    if task.fidelity == "engine":
        from rollmuxd.sim.executions.engines import Engines  # needs numpy, which cost and phase do not

        executions = Engines()
    if task.fidelity == "network":
        from rollmuxd.sim.executions.network import Networks

        executions = network = Networks(task.options.topology, task.options.t_ocs_ms)
    outcome = make(drawn, found, task.seed, task.accounting, hear, progress, executions).run()
    outcome.fidelity = task.fidelity
    if network is not None:
        of = network.network
        outcome.network = {
            "phases": of.phases, "between_racks": of.between_racks, "circuits_changed": of.changed,
            "circuits_kept": of.kept,
        }  # fmt: skip
        if lit is not None:
            lit(of.history)
    return outcome


def recorded(
    task: Task,
    drawn: Workload,
    *,
    facts: Path | None = None,
    trace: Path | None = None,
    progress: Callable[[int], None] | None = None,
) -> Outcome:
    """One run with its history: every fact to a file as it happens, so that it is never in memory; and a trace."""
    if facts is None and trace is None:
        return perform(task, drawn, progress=progress)
    with tempfile.TemporaryDirectory() as folder:
        written = facts or Path(folder) / "facts.jsonl"
        lit: list[Any] = []
        with written.open("wb") as out:

            def hear(fact: f.Fact) -> None:
                out.write(f.encode(fact) + b"\n")

            outcome = perform(task, drawn, hear=hear, progress=progress, lit=lit.extend)
        if trace is not None:
            with written.open("rb") as lines:
                perfetto.write(trace, map(f.decode, lines), lit=lit)
    return outcome


def in_order(some: Sequence[Task], found: Sequence[tuple[Task, Outcome]]) -> list[Outcome]:
    """The outcomes, in the order of the tasks."""
    of = {(task.policy, task.accounting, task.seed): outcome for task, outcome in found}
    return [of[task.policy, task.accounting, task.seed] for task in some]
