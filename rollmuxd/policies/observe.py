"""The policy of a daemon that only watches (mode ``observe``): each job by itself, on no nodes of ours.

A job has a group of its own and no pins. So no job waits for another, no state is moved and no GPU is held. What is
learnt is when each phase began and ended without sharing. What sharing would have made of it is for the simulator to
say (``rollmuxd report``, ``rollmuxd estimate --observed``).
"""

from collections.abc import Iterator

from rollmuxd.core.decision import Reason
from rollmuxd.core.estimates import solo_ms
from rollmuxd.core.ids import GroupId, Millis
from rollmuxd.core.model import Job, JobStatus, PlannedTurn
from rollmuxd.core.policy import Move, Placed, Refusal, Replan
from rollmuxd.core.state import State


class Watch:
    """Places every job at once, nowhere."""

    name = "observe"

    def place(self, state: State, job: Job) -> Placed | None:
        """A group of its own, without nodes; None for a job whose process the daemon is to start."""
        del state
        if job.spec.launch is not None:
            return None
        return Placed(
            group=None,
            pins={want.pool: () for want in job.spec.wants},
            schedule=tuple(PlannedTurn(job.id, phase.name) for phase in job.spec.phases),
            admission="observed",
            status=JobStatus.ADMITTED,
            promised=False,
            period_ms=solo_ms(job),
            cost_per_hour=0.0,
        )

    def why_not(self, state: State, job: Job) -> Refusal:
        """Why a job is not even watched."""
        del state, job
        text = "this daemon only watches (mode observe), and starts no processes; start it yourself, without launch"
        return Refusal((Reason("observing", text),))

    def judge(self, state: State, job: Job) -> Replan:
        """Nothing is promised to a job that is only watched."""
        del state
        return Replan(solo_ms(job), (job.id,))

    def replan(self, state: State, group: GroupId) -> Replan:
        """No job is promised anything."""
        return Replan(self.period_ms(state, group))

    def regroup(self, state: State, now: Millis) -> Iterator[Move | None]:
        """No job is moved."""
        del state, now
        return iter(())

    def look_again_ms(self, state: State, now: Millis) -> Millis:
        """A day: there is nothing to find."""
        del state, now
        return 86_400_000

    def period_ms(self, state: State, group: GroupId) -> Millis | None:
        """That of its only job, alone."""
        return solo_ms(state.jobs[state.groups[group].jobs[0]])
