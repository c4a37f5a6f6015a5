"""What a caller may see: in every sentence, a job that the caller may not know of is its id.

What is *derived now* (why something waits, what would let it in) is derived from a state that names such a job by its
id. So no rule has to remember that, nor a policy from elsewhere. What was *written down* (the causes in facts, and of
nodes and jobs) has ids, and its sentence is made here, for this caller. Refusals name other jobs by their ids. What
people, drivers and backends wrote is shown as it is.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import TypeVar, cast

from msgspec.structs import replace

from rollmuxd.core.causes import Cause
from rollmuxd.core.context import Context
from rollmuxd.core.decision import Reason
from rollmuxd.core.ids import GroupId, JobId, Millis, SessionId
from rollmuxd.core.model import Job, Node, Session
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.daemon.access.gate import Caller
from rollmuxd.explain.causes import sentence
from rollmuxd.explain.explainer import Explainer
from rollmuxd.wire import answers as wire

K = TypeVar("K")
V = TypeVar("V")


class Visibility:
    """What one caller may see of the scheduler's state, at this moment."""

    def __init__(self, core: Scheduler, caller: Caller) -> None:
        self.core, self.caller = core, caller
        self._periods: dict[GroupId, Millis | None] = {}

    def period_ms(self, group: GroupId) -> Millis | None:
        """The planned period of a group as it is now. It is the same for all members, and takes some thought."""
        if group not in self._periods:
            self._periods[group] = self.core.policy.period_ms(self.core.state, group)
        return self._periods[group]

    # ---- thought of now --------------------------------------------------------------------------------------------

    def of_node(self, node: Node) -> str:
        """Why a node is not used: before all else, that it is not in the configuration any more."""
        if not node.unconfigured:
            return self.sentence(node.reason)
        if any(self.core.state.jobs[name].live for name in (*node.pinned, *node.fillers)):
            do = "put it back, or end the jobs that are placed there"
        elif node.pinned or node.states or not node.empty:
            do = f"put it back; or, if nothing of any job is left there, rollmuxd node declare-clean {node.id}"
        else:
            do = "it goes when the daemon starts again"
        return f"it is no longer in the configuration: {do}"

    @property
    def figures(self) -> Explainer:
        """What explains by the names of all jobs: for figures, and for what names no other job."""
        return Explainer(self.core.context)

    @cached_property
    def explainer(self) -> Explainer:
        """What explains by the names that the caller may know."""
        if self.caller.admin:
            return self.figures
        core, state = self.core, self.core.state
        jobs = cast("dict[JobId, Job]", _Shown(state.jobs, self._shown))
        sessions = cast("dict[SessionId, Session]", _Shown(state.sessions, self._shown_session))
        cycle = Context(core.config, core.policy, replace(state, jobs=jobs, sessions=sessions))
        cycle.timers = core.context.timers
        return Explainer(cycle)

    def _shown(self, job: Job) -> Job:
        return job if self.caller.may_read(job) else replace(job, spec=replace(job.spec, name=job.id))

    def _shown_session(self, session: Session) -> Session:
        mine = self.caller.may_read(self.core.state.jobs[session.job])
        return session if mine else replace(session, pid=0, host="", started="")

    # ---- written down ----------------------------------------------------------------------------------------------

    def sentence(self, cause: Cause | None) -> str:
        """A cause in words: a job that the caller may not know of is its id."""
        return sentence(cause, lambda job: self.name_of(job) or job)

    def name_of(self, job: JobId) -> str:
        """A job's name; empty: the caller may not know it, or it is forgotten."""
        known = self.core.state.jobs.get(job)
        return known.spec.name if known is not None and self.caller.may_read(known) else ""

    def reasons(self, given: Iterable[Reason]) -> list[wire.Reason]:
        """Why something waits."""
        return [wire.Reason(code=reason.code, text=reason.text, data=reason.data) for reason in given]


class _Shown(Mapping[K, V]):
    """A table with something else in some places; each is made when it is looked at, and then stays the same."""

    def __init__(self, table: Mapping[K, V], show: Callable[[V], V]) -> None:
        self._table, self._show = table, show
        self._made: dict[K, V] = {}

    def __getitem__(self, key: K) -> V:
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = self._show(self._table[key])
        return made

    def __iter__(self) -> Iterator[K]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)
