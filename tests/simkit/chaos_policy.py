"""Policies that only tests run. One moves jobs about for no good reason, and every promise has to hold.

It places as RollMux does, so every place to which it has a job moved keeps its own and the other members' promises.
"""

from collections.abc import Iterator
from random import Random
from typing import Final

from msgspec.structs import replace

from rollmuxd.core.causes import said
from rollmuxd.core.ids import JobId, Millis, NodeId, PoolName
from rollmuxd.core.model import Job, JobStatus, PlannedTurn
from rollmuxd.core.policy import Move, Placed
from rollmuxd.core.spec import Movable
from rollmuxd.core.state import State
from rollmuxd.policies.rollmux import RollMux, usable
from rollmuxd.sim.policies import ROLLMUX, PolicyUnderTest, movable

#: where nodes are of several pools: the share of moves that stay within the job's group
ABOUT: Final = 0.3


class Wanderer(RollMux):
    """RollMux's placements, and now and then another one of a placed job's."""

    name = "restless"

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random, self._dice = Random(f"restless {seed}"), Random(f"restless about {seed}")
        #: of jobs that are started again by a move: the iterations that each had done at its last
        self._done: dict[JobId, int] = {}

    def regroup(self, state: State, now: Millis) -> Iterator[Move | None]:
        """Any placed job, where it would be placed if it came now."""
        del now
        jobs = [job for job in state.jobs.values() if job.status is JobStatus.ADMITTED and job.move is None]
        self._random.shuffle(jobs)
        for job in jobs:
            if job.spec.movable is Movable.NO or self._done.get(job.id) == job.progress.finished:
                continue
            if job.spec.movable is Movable.RELAUNCH:  # else it would begin its first iteration for ever
                self._done[job.id] = job.progress.finished
            two_pools = any(len(node.pools) > 1 for node in state.nodes.values())
            about = two_pools and self._dice.random() < ABOUT
            yield self._about(state, job) if about else self._elsewhere(state, job)

    def _elsewhere(self, state: State, job: Job) -> Move | None:
        others = {name: group for name, group in state.groups.items() if name != job.group}
        placed = self.place(replace(state, groups=others), job)
        return None if placed is None else Move(job.id, placed, said("for no good reason"))

    def _about(self, state: State, job: Job) -> Move | None:
        """Who is alone in his group stays in it, on other nodes or on the same ones for other pools."""
        group = state.groups[job.group or ""]
        if group.jobs != [job.id] or group.coming or job.spec.colocate:
            return None
        ours = [node for node in state.nodes.values() if node.group in (None, group.id) and usable(node)]
        self._dice.shuffle(ours)
        pins: dict[PoolName, tuple[NodeId, ...]] = {}
        for want in job.spec.wants:
            free = [node for node in ours if want.pool in node.pools][: want.nodes]
            if len(free) < want.nodes:
                return None
            pins[want.pool] = tuple(node.id for node in free)
            ours = [node for node in ours if node not in free]
        schedule = tuple(PlannedTurn(turn.job, turn.phase, turn.once) for turn in group.schedule)
        placed = Placed(
            group.id,
            pins,
            schedule,
            job.admission,
            job.status,
            job.promised,
            None,
            0.0,
            group.dispatch,
        )
        return Move(job.id, placed, said("for no good reason"))


def chaos_policy(move_interval_ms: Millis = 20_000) -> PolicyUnderTest:
    """Every job may be moved, and is; again after so long."""
    return PolicyUnderTest(
        "restless",
        "RollMux, and placed jobs are moved about for no good reason",
        lambda seed, _: Wanderer(seed),
        movable,
        move_s=5,  # fetching what is parked on another host takes so long
        move_interval_ms=move_interval_ms,
    )


#: Algorithm 1 that looks at saturated groups, too, as the published artifact does
UNPRUNED: Final = replace(ROLLMUX, make=lambda *_: RollMux())
