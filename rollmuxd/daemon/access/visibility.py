"""What a caller is told: in every sentence, a job that he may not know of is its id.

What is *thought of now* (why something waits, what would let it in) is thought of a state in which such a job is named
by its id: so no rule has to remember that, nor a policy that others have written. What was *written down* (the reasons
in facts, and of nodes and jobs) has names in it; there the places are known in which a sentence names a job.

What people, drivers and backends have written is not to be taken for such a sentence: whoever can write one would be
told whether there is a job of that name. So it comes in by :func:`sanitize`.
"""

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Final, TypeVar, cast

from msgspec.structs import replace

from rollmuxd.core.context import Context
from rollmuxd.core.decision import Reason
from rollmuxd.core.errors import Rejected
from rollmuxd.core.ids import JobId, Millis, NodeId, SessionId, SlotId
from rollmuxd.core.model import Job, Session
from rollmuxd.core.policy import Refusal
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.explain.explainer import Explainer, Story
from rollmuxd.wire import answers as wire

K = TypeVar("K")
V = TypeVar("V")

#: a job's name, and where the core's written reasons and its refusals have one
_NAME: Final = r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,99})"
_PLACES: Final = (
    rf"(?<=\bnot seen clear after ){_NAME}(?= (?:released them|moved away|was to )\b)",
    rf"(?<=\bnot been seen clear of ){_NAME}(?=;|$)",
    rf"(?<=\bphases of ){_NAME}(?= take another time)",
    rf"(?<=\bjob ){_NAME}(?= (?:has joined|is moving)\b)",
    rf"(?<=\bwhether ){_NAME}(?= fits beside )",
    rf"(?<=, and ){_NAME}(?= needs [0-9.e+]+ GB of the GPU)",
)
_NAMED: Final = tuple(re.compile(place) for place in _PLACES)
#: at each of those places there is one of these
_MARKS: Final = re.compile("seen clear|phases of|has joined|is moving|fits beside|GB of")
#: in place of the name of a job that is remembered no more
_ANOTHER: Final = "another owner's"


class OwnersOfJobs:
    """Whose jobs there are, looked at only when a job has come or gone: each call asks, and there are many jobs."""

    def __init__(self) -> None:
        self._jobs: Mapping[JobId, Job] = {}
        self._of: tuple[int, JobId | None] = (0, None)
        self._found: frozenset[str] = frozenset()

    def of(self, jobs: dict[JobId, Job]) -> frozenset[str]:
        """The owners of these."""
        of = (len(jobs), next(reversed(jobs), None))  # no id is given twice: as many, and the same last one, are these
        if jobs is not self._jobs or of != self._of:
            self._jobs, self._of = jobs, of
            self._found = frozenset(job.owner for job in jobs.values())
        return self._found


class Visibility:
    """What one caller may be told of the scheduler's state, at this moment."""

    def __init__(
        self,
        core: Scheduler,
        may_read_of: Callable[[str], bool],
        configured: Container[NodeId] | None = None,
        owners: OwnersOfJobs | None = None,
    ) -> None:
        """``may_read_of``: of which owners' jobs the caller may know; ``configured``: which nodes the configuration
        has; ``owners``: remembers between calls whose jobs there are.
        """
        self.core, self._may_read_of, self._configured = core, may_read_of, configured
        self._owners = owners or OwnersOfJobs()

    def may_read(self, job: Job) -> bool:
        """Whether the caller may know of it."""
        return self._may_read_of(job.owner)

    # ---- thought of now --------------------------------------------------------------------------------------------

    def why_job_waits(self, job: JobId, now: Millis) -> Refusal:
        """As :meth:`Explainer.why_job_waits`."""
        return self._explainer.why_job_waits(job, now)

    def why_slot_waits(self, slot: SlotId, now: Millis) -> tuple[Reason, ...]:
        """As :meth:`Explainer.why_slot_waits`; and first, if the nodes have gone for which it waits."""
        job = self.core.state.jobs[self.core.state.slot(slot).job]
        return (*self.gone(job), *self._explainer.why_slot_waits(slot, now))

    def slot_position(self, slot: SlotId) -> int:
        """As :meth:`Explainer.slot_position`, with every job counted."""
        return self._of_all.slot_position(slot)

    def expected_wait_ms(self, slot: SlotId, now: Millis) -> Millis | None:
        """As :meth:`Explainer.expected_wait_ms`, with every job counted."""
        return self._of_all.expected_wait_ms(slot, now)

    def unmet(self, job: JobId) -> str:
        """As :meth:`Explainer.unmet`, in words that the caller may read."""
        return self.text(self._of_all.unmet(job))

    def explain(self, job: JobId, now: Millis) -> Story:
        """As :meth:`Explainer.explain`; and that its nodes have gone, if they have."""
        story = self._explainer.explain(job, now)
        gone = self.gone(self.core.state.job(job))
        sentences = (f"{reason.text[0].upper()}{reason.text[1:]}." for reason in gone)
        return story._replace(reasons=(*gone, *story.reasons), sentences=(*story.sentences, *sentences))

    def gone(self, job: Job) -> tuple[Reason, ...]:
        """That nodes which the job has, and still waits for, are not in the configuration any more."""
        if self._configured is None or not job.has_place:
            return ()
        nodes = gone_from(self._configured, job)
        if not nodes:
            return ()
        which = f"its node{'s' if len(nodes) > 1 else ''} {', '.join(nodes)}"
        text = (
            f"{which} {'are' if len(nodes) > 1 else 'is'} no longer in the configuration, so it is granted nothing "
            f"there: put {'them' if len(nodes) > 1 else 'it'} back, or end the job (rollmuxd job end {job.id}) and "
            "start it again"
        )
        return (Reason("node_gone", text, {"nodes": nodes}),)

    def wishes(self, job: JobId) -> tuple[Reason, ...]:
        """As :meth:`Explainer.wishes`."""
        return self._explainer.wishes(job)

    @cached_property
    def hides(self) -> bool:
        """Whether there is a job that the caller may not know of."""
        return not all(map(self._may_read_of, self._owners.of(self.core.state.jobs)))

    @property
    def _of_all(self) -> Explainer:
        return Explainer(self.core.context)

    @cached_property
    def _explainer(self) -> Explainer:
        if not self.hides:
            return self._of_all
        core, state = self.core, self.core.state
        jobs = cast("dict[JobId, Job]", _Shown(state.jobs, self._shown))
        sessions = cast("dict[SessionId, Session]", _Shown(state.sessions, self._shown_session))
        cycle = Context(core.config, core.policy, replace(state, jobs=jobs, sessions=sessions))
        cycle.timers = core.timers
        return Explainer(cycle)

    def _shown(self, job: Job) -> Job:
        return job if self.may_read(job) else replace(job, spec=replace(job.spec, name=job.id))

    def _shown_session(self, session: Session) -> Session:
        mine = self.may_read(self.core.state.jobs[session.job])
        return session if mine else replace(session, pid=0, host="", started="")

    # ---- written down ----------------------------------------------------------------------------------------------

    def text(self, text: str, *, quotes: bool = False) -> str:
        """A sentence that the core has written: jobs that the caller may not know of are named by their ids.

        ``quotes``: it may quote what the caller has written as if it were the core's. Such jobs are then named in the
        same words as jobs that there are not.
        """
        if not _MARKS.search(text) or self._knows_all:
            return text
        for place in _NAMED:
            text = place.sub(lambda found: self._instead_of(found["name"], quotes=quotes), text)
        return text

    def reasons(self, given: Iterable[Reason]) -> list[wire.Reason]:
        """Why something waits."""
        return [wire.Reason(code=reason.code, text=self.text(reason.text), data=reason.data) for reason in given]

    def refusal(self, refused: Rejected, given: object = "") -> None:
        """Have what the core refuses with name no job that the caller may not know of; ``given``: what he has sent."""
        quotes = _MARKS.search(str(given)) is not None
        refused.args = tuple(self.text(part, quotes=quotes) if isinstance(part, str) else part for part in refused.args)
        for name, value in vars(refused).items():
            if isinstance(value, str):
                setattr(refused, name, self.text(value, quotes=quotes))

    def _instead_of(self, name: str, *, quotes: bool) -> str:
        named = self._called.get(name, [])
        if any(self.may_read(job) for job in named):
            return name
        return named[0].id if len(named) == 1 and not quotes else _ANOTHER

    @cached_property
    def _knows_all(self) -> bool:
        """Whether he may know of every job that a sentence can name: the owners of those that are forgotten are not."""
        return not self.hides and all(map(self._may_read_of, self.core.state.owners))

    @cached_property
    def _called(self) -> dict[str, list[Job]]:
        """Jobs by what a sentence may name them."""
        named: dict[str, list[Job]] = {}
        for job in self.core.state.jobs.values():
            for name in {job.spec.name, job.id}:
                named.setdefault(name, []).append(job)
        return named


def sanitize(text: str) -> str:
    """What others than the core have written, so that it is not taken for the core's: with a space more, if need be."""
    return _MARKS.sub(lambda found: found[0].replace(" ", "  "), text)


def gone_from(configured: Container[NodeId], job: Job) -> list[NodeId]:
    """The nodes that a job has and the configuration has not."""
    nodes = dict.fromkeys(node for nodes in job.pins.values() for node in nodes)
    return [node for node in nodes if node not in configured]


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
