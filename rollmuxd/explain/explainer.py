"""Why a job or a slot waits, in data and in sentences that name numbers. Reads the state, changes nothing."""

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import islice, takewhile
from math import ceil
from typing import Final, NamedTuple

from rollmuxd.core.causes import Cause
from rollmuxd.core.clean import is_dirty_by, is_given_back, is_tails
from rollmuxd.core.context import PLACED, Context
from rollmuxd.core.decision import Reason
from rollmuxd.core.estimates import (
    ahead_ms,
    by_work_ms,
    credit_ms,
    pace_ms,
    phase_ms,
    quantile_ms,
    rollouts_rest_ms,
    solo_ms,
)
from rollmuxd.core.ids import JobId, Millis, SlotId
from rollmuxd.core.model import (
    Dispatch,
    Group,
    Job,
    JobMove,
    JobStatus,
    Node,
    NodeStatus,
    OrderStatus,
    PhaseTimes,
    ScheduledTurn,
    Slot,
    SlotStatus,
    StateStatus,
    nodes_in,
)
from rollmuxd.core.policy import Refusal, SpendsCredit
from rollmuxd.core.spec import Movable
from rollmuxd.core.steps import drain
from rollmuxd.core.steps.admit import AGAIN_MS, TRIES_A_MINUTE, limits_of, over_its_nodes, waiting_order
from rollmuxd.core.steps.lines import line_of, yields_to
from rollmuxd.core.steps.observe import must_be_cleaned
from rollmuxd.core.steps.reclaim import nodes_of
from rollmuxd.explain import fillers, forecast
from rollmuxd.explain.causes import sentence
from rollmuxd.explain.forecast import estimate_samples, iteration_ms, position, slowdown
from rollmuxd.explain.what_if import WhatIf

#: how a place was found: of those that keep every promise, the cheapest was taken
_ADMITTED = {
    "packing": "packed onto nodes that the group had, which costs nothing more",
    "scaling": "beside the group's training nodes, on rollout nodes of its own",
    "isolated": "on nodes that were free",
}


DAY_MS: Final = 86_400_000
#: for a job without a placement: of how many nodes it hears that nothing is learnt of them
SILENT_TOLD: Final = 3

#: what a state is while it is, or may be, on its node's GPUs by right
ON_GPUS: Final = (StateStatus.LOADING, StateStatus.LOADED, StateStatus.PARKING)

_NO_CALL: Final = Reason("detached", "its process has no open call for it: it is away, or has yet to ask again")


class Story(NamedTuple):
    """A job's story: why it waits as data, all of it in sentences, and what would let it in."""

    reasons: tuple[Reason, ...]
    sentences: tuple[str, ...]
    what_ifs: tuple[Reason, ...] = ()


class Explainer:
    """Answers for people, from the scheduler's state."""

    def __init__(self, cycle: Context) -> None:
        self._c = cycle

    # ---- jobs ------------------------------------------------------------------------------------------------------

    def why_job_waits(self, job: JobId, now: Millis) -> Refusal:
        """Why a job has no placement, and what would let it in."""
        state = self._c.state
        known = state.job(job)
        if known.status is not JobStatus.WAITING:
            return Refusal(())
        if known.pins:
            nodes = sorted({name for names in known.pins.values() for name in names})
            dirty = any(gpu.dirty_by == job for name in nodes for gpu in state.nodes[name].gpus.values())
            what = "GPUs of its run before are not verified clean yet" if dirty else "its state is not discarded yet"
            text = f"{what} ({', '.join(nodes)})"
            silent = self._no_word(nodes_of(self._c, known), known, now)
            return Refusal((Reason("old_run", text, {"nodes": nodes}), *silent))
        if known.spec.filler is not None:
            return Refusal(tuple(fillers.why_no_home(self._c, known)))
        if limits_of(self._c, known.owner).max_nodes:
            placed = self._c.policy.place(state, known)
            over = "" if placed is None else over_its_nodes(self._c, known, placed)
            if over:
                return Refusal((Reason("owner_nodes", over, {"owner": known.owner}),))
        unseen = [node.id for node in state.nodes.values() if node.status is NodeStatus.UNKNOWN]
        refusal = self._c.policy.why_not(state, known)
        pools = {want.pool for want in known.spec.wants}
        wanted = (node for node in state.nodes.values() if not pools.isdisjoint(node.pools))
        reasons = (*refusal.reasons, *islice(self._no_word(wanted, known, now), SILENT_TOLD))
        if unseen:
            text = f"{len(unseen)} of {len(state.nodes)} nodes have not been seen yet"
            reasons = (Reason("unseen", text, {"nodes": unseen[:20]}), *reasons)
        return Refusal(reasons, refusal.would_start_with)

    def explain(self, job: JobId, now: Millis) -> Story:
        """Reasons as data, and the whole story in sentences."""
        state = self._c.state
        known = state.job(job)
        name = known.spec.name
        if known.status is JobStatus.WAITING:
            return self._waits(known, now)
        sentences = [f"Job {name} is {known.status}{f': {self._words(known.reason)}' if known.reason else ''}."]
        if not known.has_place:
            sentences += [_sentence(reason.text) for reason in self._no_word(nodes_of(self._c, known), known, now)]
        if known.relaunch_at is not None:
            often = f"lost {len(known.losses)} times recently"
            sentences.append(f"It is started again in {max(0, known.relaunch_at - now) // 1000} s ({often}).")
        if known.group is not None:
            sentences += self._seat(known, now)
        if known.spec.filler is not None and known.pins:
            (node,) = {name for names in known.pins.values() for name in names}
            sentences.append(f"It is a filler: it works on {node} while no other job is due there.")
        if known.move is not None:
            sentences.append(_on_the_move(known, known.move, self._words(known.move.why)))
        sentences += self._drained(known)
        if known.guarded:
            sentences.append(_guarded(state.groups.get(known.group or "")))
        reasons = self._gone(known)
        if known.queued is None:
            sentences += [_sentence(reason.text) for reason in reasons]
        else:
            reasons = self.why_slot_waits(known.queued, now)
            phase = state.slots[known.queued].phase
            sentences.append(f"It waits for {phase}: {'; '.join(reason.text for reason in reasons)}.")
            wait = self.expected_wait_ms(known.queued, now)
            if wait and known.status in PLACED:  # none is left: what holds its GPUs is late
                sentences.append(f"Its {phase} is likely to begin in {_span(wait)}.")
        if known.queued is None and known.slot is not None:
            slot = state.slots[known.slot]
            where = f" on {', '.join(slot.gpus)}" if slot.gpus else ""
            sentences.append(f"Its {slot.phase} slot {slot.id} is {slot.status}{where}.")
            sentences += self._how_long(slot, now)
            lost = (node for node in nodes_of(self._c, known) if node.status is NodeStatus.LOST)
            sentences += [_sentence(reason.text) for node in lost for reason in self._node_in_the_way(node, known)]
            sentences += [_sentence(reason.text) for reason in _overrun(slot, now)]
        return Story(reasons, tuple(sentences))

    def _waits(self, job: Job, now: Millis) -> Story:
        """The story of a job without a placement."""
        refusal = self.why_job_waits(job.id, now)
        if job.spec.filler is not None:
            sentences = [f"Filler {job.spec.name} has no node yet."]
            return Story(refusal.reasons, (*sentences, *(_sentence(reason.text) for reason in refusal.reasons)))
        order = waiting_order(self._c, now)
        position = order.index(job.id) + 1
        name, waited = job.spec.name, now - job.registered_at
        ahead = "" if position == 1 else f", behind {_names(self._c, order[: position - 1])}"
        sentences = [f"Job {name} has waited {waited // 1000} s for a placement, at position {position}{ahead}."]
        sentences += [_sentence(reason.text) for reason in refusal.reasons]
        what_ifs = self.what_ifs(job.id)
        for what_if in what_ifs:
            if what_if.code == "departure":
                sentences.append(f"It would start once {what_if.text} has ended and its GPUs are clean.")
            else:
                sentences.append(f"It would start now with {what_if.text}.")
        if len(order) > TRIES_A_MINUTE:
            within = _span(AGAIN_MS * (1 + len(order) // TRIES_A_MINUTE))
            sentences.append(f"As {len(order)} jobs wait, it is tried every {within} where nothing makes room.")
        bounded = self._c.config.bounded_wait_ms
        if waited < bounded:
            sentences.append(f"No job overtakes it once it has waited {_span(bounded)}.")
        else:
            sentences.append(f"It has waited for more than {_span(bounded)}, and no job overtakes it.")
        return Story(refusal.reasons, tuple(sentences), what_ifs)

    def what_ifs(self, job: JobId) -> tuple[Reason, ...]:
        """What would let a waiting job in, tried on the policy itself; of one that its own past keeps out, nothing."""
        state = self._c.state
        known = state.job(job)
        if known.status is not JobStatus.WAITING or known.spec.filler is not None or known.pins:
            return ()  # with pins it waits for its own nodes: what would do is no matter of how many
        return WhatIf(self._c.policy, state, known).all()

    def _how_long(self, slot: Slot, now: Millis) -> list[str]:
        """How long a slot has run, and may run yet."""
        if slot.granted_at is None:
            return []
        ran, left = now - slot.granted_at, forecast.left_ms(self._c.state, slot, now)
        if left is None or slot.overrun_at is not None:
            return []
        return [f"It has run for {_span(ran)}, and usually needs {_span(ran + left)}."] if left else []

    def _seat(self, job: Job, now: Millis) -> list[str]:
        """Where it sits and why."""
        state = self._c.state
        group = state.groups[job.group or ""]
        others = [state.jobs[name].spec.name for name in group.jobs if name != job.id]
        nodes = "; ".join(f"{pool}: {', '.join(names)}" for pool, names in job.pins.items() if names)
        company = f"with {', '.join(others)}" if others else "alone"
        where = f", on {nodes}" if nodes else ""  # of a job that is only watched it is not known
        sentences = [f"It sits in group {group.id} {company}{where} ({_ADMITTED.get(job.admission, job.admission)})."]
        sentences += [*self._turns(job, group, now), *_reckoned(job)]
        slower, credit = slowdown(job), credit_ms(job)
        if slower is not None:
            ahead = (
                ""
                if credit is None
                else f", {abs(credit) / 1000:.1f} s {'ahead of' if credit >= 0 else 'behind'} its bound"
            )
            sentences.append(f"Over {job.progress.finished} iterations its slowdown is {slower:.2f}{ahead}.")
        return sentences

    def unmet(self, name: JobId) -> str:
        """Why a placed job goes without the promise that it asked for, and what would help; empty: it does not.

        A job that was measured in its place learns then whether its SLO holds there. A promise is at risk where phases
        take longer than they did.
        """
        job = self._c.state.jobs[name]
        group = self._c.state.groups.get(job.group or "")
        status = job.resume_to if job.status is JobStatus.PAUSED else job.status
        if job.spec.slo is None or group is None or status is JobStatus.PROBING or len(group.jobs) < 2:
            return ""
        if not job.pins or (job.promised and job.id not in self._c.state.at_risk):
            return ""
        has = "its promise is at risk" if job.promised else "it is promised nothing"
        helps = ["more nodes"]
        if job.spec.movable is Movable.NO:
            helps.append('movable="warm", with which it can move to nodes that become free')
        why, solo, period = "", solo_ms(job), self._c.policy.period_ms(self._c.state, group.id)
        if solo and period:
            took = iteration_ms(period, group, job)
            if took <= job.spec.slo * solo and job.promised:
                return ""
            others = "another job" if len(group.jobs) == 2 else f"{len(group.jobs) - 1} other jobs"
            times = f"{took / solo:.2f} times the {_s(solo)} s that it takes alone"
            why = f": beside {others} of group {group.id} its iteration takes {times}"
            if took > job.spec.slo * solo:
                helps.insert(0, f"slo={ceil(100 * took / solo) / 100:g}")
        return f"it asked for slo={job.spec.slo:g}, and {has}{why}. What would help: {', or '.join(helps)}"

    def _drained(self, job: Job) -> list[str]:
        """Why it stays where nodes are drained."""
        nodes = drain.drained(self._c, job)
        if not nodes or job.move is not None:
            return []
        why, moving = drain.way_out(self._c, job), len(self._c.state.moving)
        if not isinstance(why, str):
            why = f"it will be moved within {drain.AGAIN_MS // 1000} s"
            if moving >= self._c.config.max_concurrent_moves:
                some = "1 job is" if moving == 1 else f"{moving} jobs are"
                why = f"{some} moving, as many as may at a time"
        what = f"Node {nodes[0]} is" if len(nodes) == 1 else f"Nodes {', '.join(nodes)} are"
        gone = all(self._c.state.nodes[node].unconfigured for node in nodes)
        return [f"{what} {'not in the configuration' if gone else 'drained'}, and it stays there: {why}."]

    def _turns(self, job: Job, group: Group, now: Millis) -> list[str]:
        """What its iteration takes in the group, against what it takes alone, and what it was promised."""
        period, solo = self._c.policy.period_ms(self._c.state, group.id), solo_ms(job)
        if period is None:
            return ["The group's period is not planned yet: a member's times are still being measured."]
        if not period:  # no member is left that takes a turn
            return []
        took = iteration_ms(period, group, job)
        often = "" if took in (0, period) else f", and it goes round {period // took} times in that"
        said = [f"A rotation of the group takes {_s(period)} s{often}."]
        if pace := pace_ms(job):
            said.append(f"It is asynchronous: its rollouts need {_s(pace)} s for a batch, {_slack(job)}.")
        if solo:
            said.append(f"So its iteration takes {took / solo:.2f} times the {_s(solo)} s that it takes alone.")
        if unmet := self.unmet(job.id):
            return [*said, f"{unmet[0].upper()}{unmet[1:]}."]
        if job.spec.slo is None or not job.promised:
            return [*said, "It is promised nothing (best effort)."]
        if not solo:
            return [*said, f"It is promised {job.spec.slo:g} times what it takes alone."]
        bound, policy = int(job.spec.slo * solo), self._c.policy
        lasts = policy.lasts_ms(job, took, now) if isinstance(policy, SpendsCredit) else None
        if lasts:
            until = datetime.fromtimestamp((now + lasts) / 1000, UTC)
            clock = f"{until:%H:%M}" if lasts < DAY_MS else f"{until:%d %B, %H:%M}"
            ahead = f"{_span(ahead_ms(job, job.spec.slo, now))} ahead of its promise of {job.spec.slo:g}"
            slower = f"It runs {took / solo:.2g} times slower than alone until about {clock} UTC"
            return [*said, f"{slower}, because it is {ahead}."]
        if took > bound and job.id not in self._c.state.at_risk and group.dispatch is Dispatch.CREDIT:
            yields = "jobs that were promised nothing, or are ahead, leave it the nodes where it is short of that"
            return [*said, f"It is promised {job.spec.slo:g} times, {_s(bound)} s: {yields}."]
        spare = f"{_s(abs(bound - took))} s {'to spare' if bound >= took else 'too little'}"
        return [*said, f"It is promised {job.spec.slo:g} times, {_s(bound)} s: {spare}."]

    # ---- slots -----------------------------------------------------------------------------------------------------

    def why_slot_waits(self, slot: SlotId, now: Millis) -> tuple[Reason, ...]:
        """Everything that stands between a request and its grant."""
        state = self._c.state
        known = state.slot(slot)
        job = state.jobs[known.job]
        detached = (_NO_CALL,) if slot in self._c.timers.detached else ()
        if known.status is SlotStatus.LOADING:
            return (Reason("loading", "its state is being loaded"), *detached)
        if known.status is not SlotStatus.QUEUED:
            return _overrun(known, now)
        if job.status is JobStatus.WAITING:
            refusal = self.why_job_waits(job.id, now)
            return (Reason("no_placement", "its job has no placement yet"), *refusal.reasons)
        if job.status is JobStatus.PAUSED:
            return (Reason("paused", f"its job is {self._words(job.reason)}"),)
        if job.spec.filler is not None:
            return (*detached, *fillers.why_not_lent(self._c, job))
        group = state.groups.get(job.group or "")
        if group is None:
            return (Reason("no_placement", "its job has no placement"),)
        reasons = [*self._gone(job), *detached, *self._turns_before(group, known)]
        if (yields := yields_to(self._c, group, known)) is not None:
            other = yields[0].spec.name
            why = "is ahead of its own" if job.promised else "was promised nothing"
            text = f"job {other} is short of its promise, and this one {why}: it begins no iteration yet"
            reasons.append(Reason("yields", text, {"job": yields[0].id}))
        for name in self._c.rotation.nodes_of(state, group, job.id, known.phase):
            node = state.nodes[name]
            reasons += [*self._node_in_the_way(node, job), *self._no_word([node], job, now)]
        return tuple(reasons) or (Reason("next", "it is next"),)

    def _gone(self, job: Job) -> tuple[Reason, ...]:
        """That nodes which the job has, and still waits for, are not in the configuration any more."""
        nodes = [node for node in nodes_in(job.pins) if self._c.state.nodes[node].unconfigured]
        if not nodes or not job.has_place:
            return ()
        text = (
            f"the configuration no longer has its nodes {', '.join(nodes)}, so it is granted nothing there: put them "
            f"back, or end the job (rollmuxd job end {job.id}) and start it again"
        )
        return (Reason("node_gone", text, {"nodes": nodes}),)

    def _turns_before(self, group: Group, slot: Slot) -> list[Reason]:
        state = self._c.state
        names = [f"{state.jobs[v.job].spec.name} ({v.phase})" for v in self._before(group, slot)]
        if not names:
            return []
        count = "1 turn comes" if len(names) == 1 else f"{len(names)} turns come"
        return [Reason("turn", f"{count} first: {', '.join(names)}", {"before": names})]

    def _before(self, group: Group, slot: Slot) -> list[ScheduledTurn | Slot]:
        """What comes before a queued request on its nodes: turns of the schedule, or requests that came earlier."""
        state, rotation = self._c.state, self._c.rotation
        if group.dispatch is not Dispatch.SCHEDULE:
            mine = set(rotation.nodes_of(state, group, slot.job, slot.phase))
            ahead = takewhile(lambda other: other.id != slot.id, line_of(self._c, group))
            return [it for it in ahead if not mine.isdisjoint(rotation.nodes_of(state, group, it.job, it.phase))]
        index = rotation.turn_of(state, group, slot.job, slot.phase)
        if index is None:
            return []
        schedule, on = group.schedule, rotation.projection(state, group).on
        claims = rotation.nodes_of(state, group, slot.job, slot.phase)
        earlier = dict.fromkeys(
            at for node in claims for at in on[node] if (schedule[at].rotation, at) < (schedule[index].rotation, index)
        )
        # not those of jobs that are still to move here
        return [schedule[at] for at in earlier if state.jobs[schedule[at].job].group == group.id]

    def _words(self, cause: Cause | None) -> str:
        return sentence(cause, lambda job: self._c.state.jobs[job].spec.name if job in self._c.state.jobs else job)

    def _node_in_the_way(self, node: Node, job: Job) -> list[Reason]:
        state = self._c.state
        if node.status is not NodeStatus.UP:
            text = f"node {node.id} is {node.status}{f' ({self._words(node.reason)})' if node.reason else ''}"
            return [Reason("node", text, {"node": node.id, "status": str(node.status)})]
        for gpu, it in node.gpus.items():
            if it.holder is not None:
                return [self._held(gpu, state.slots[it.holder])]
        for key in node.states:
            kept = state.states[key]
            if kept.status is StateStatus.PARKING or (kept.job != job.id and kept.status is StateStatus.LOADED):
                whose = "its own" if kept.job == job.id else state.jobs[kept.job].spec.name
                name = f"{whose} ({kept.pool})"
                return [Reason("parking", f"the state of {name} is {kept.status} on {node.id}", {"node": node.id})]
        for gpu, it in node.gpus.items():
            if it.dirty_by is not None and it.dirty_by != job.id:
                name = state.jobs[it.dirty_by].spec.name
                return [
                    Reason(
                        "not_clean", f"{gpu} has not been verified clean of {name}", {"gpu": gpu, "job": it.dirty_by}
                    )
                ]
        for key in job.states:
            kept = state.states[key]
            if kept.node == node.id and kept.status in (StateStatus.DISCARDING, StateStatus.UNKNOWN):
                text = f"its {kept.pool} state on {node.id} is {kept.status}: it is loaded again when that has gone"
                return [Reason("own_state", text, {"node": node.id})]
        return []

    def _no_word(self, nodes: Iterable[Node], job: Job, now: Millis) -> Iterator[Reason]:
        """Since when nothing was learnt of what keeps nodes from a job, and what an operator can do about it."""
        state = self._c.state
        silent = {order.node for order in state.orders.values() if order.status is OrderStatus.LOST_CONTACT}
        for node in nodes:
            if node.status is not NodeStatus.LOST and node.id not in silent:
                continue
            # what others have had there is in no job's way once the GPUs were verified clean of it
            kept = [it for key in node.states if (it := state.states[key]).job == job.id or is_dirty_by(node, it.job)]
            orders = [state.orders.get(it.order or "") for it in kept]
            lost = next((it for it in orders if it is not None and it.status is OrderStatus.LOST_CONTACT), None)
            if lost is not None:
                theirs = f"{state.jobs[lost.job].spec.name}'s"
                whose = "its" if lost.job == job.id else theirs
                what = f"the {lost.kind} of {whose} {lost.pool} state on {node.id} since it was sent"
                otherwise = f"the first look at it after {theirs} process has ended settles it"
                yield self._silent(node, what, now - lost.issued_at, otherwise)
            elif node.status is NodeStatus.LOST and must_be_cleaned(self._c, node):
                what = f"what should be gone from the GPUs of {node.id} since that node was lost"
                silent_ms = None if node.lost_at is None else now - node.lost_at
                yield self._silent(node, what, silent_ms, "it has to be seen again")

    def _silent(self, node: Node, what: str, silent_ms: Millis | None, otherwise: str) -> Reason:
        """That nothing is learnt of something on a node any more, for how long if that is known, and what ends it.

        An operator's word can stand for it. It covers all that is there, so it is not asked for where a job uses the
        node by right. ``otherwise`` says what else ends it.
        """
        ago = "" if silent_ms is None else f", {_span(silent_ms)} ago"
        data = {"node": node.id} | ({} if silent_ms is None else {"silent_s": silent_ms // 1000})
        command, user = f"rollmuxd node declare-clean {node.id}", self._user(node)
        ends = f"an operator who knows that nothing is left there can say so ({command})"
        if user is not None:
            ends = f"{node.id} is not to be declared clean while {user} runs or is loaded there; {otherwise}"
        return Reason("no_word", f"there has been no word of {what}{ago}: {ends}", data)

    def _user(self, node: Node) -> str | None:
        """The name of a job that runs or has a state on a node's GPUs by right, if any."""
        state = self._c.state
        for gpu in node.gpus.values():
            if gpu.holder is not None and not is_given_back(self._c.state, gpu):
                return state.jobs[state.slots[gpu.holder].job].spec.name
        for key in node.states:
            kept = state.states[key]
            if kept.status in ON_GPUS and not is_tails(self._c.state, kept):
                return state.jobs[kept.job].spec.name
        return None

    def _held(self, gpu: str, slot: Slot) -> Reason:
        state = self._c.state
        holder = state.jobs[slot.job]
        data = {"gpu": gpu, "slot": slot.id, "job": holder.id}
        if slot.status in (SlotStatus.FAULTED, SlotStatus.LOST, SlotStatus.REVOKED):
            session = state.sessions.get(slot.session)
            pid = session.pid if session is not None else 0
            what = "lost" if holder.status is JobStatus.LOST else str(holder.status)
            which = f", pid {pid}" if pid else ""
            text = f"{gpu} is held by {what} job {holder.spec.name}{which}, until it was verified clean"
            return Reason("held_by_lost", text, {**data, "pid": pid} if pid else data)
        late = ", for longer than it should" if slot.overrun_at is not None else ""
        return Reason("held", f"{gpu} is held by {holder.spec.name} ({slot.phase}, {slot.status}{late})", data)

    def slot_position(self, slot: SlotId, now: Millis) -> int:
        """How many come before it: turns on its nodes; without a placement, waiting jobs. 0: it is next."""
        state = self._c.state
        known = state.slot(slot)
        job = state.jobs[known.job]
        group = state.groups.get(job.group or "")
        if known.status is not SlotStatus.QUEUED:
            return 0
        if job.spec.filler is not None:
            return fillers.fillers_before(self._c, job, known)
        if group is None:
            return max(0, position(self._c, job.id, now) - 1)
        return len(self._before(group, known))

    def expected_wait_ms(self, slot: SlotId, now: Millis) -> Millis | None:
        """How long until it is likely granted; None where a time is not known.

        In a schedule's order that is played on from now; in a line the requests before it are added up. Of a node that
        is not in service, or of which there is no word, it is not known when it is back. The same holds for a paused
        job, and for the credit that a job yields to.
        """
        state, rotation = self._c.state, self._c.rotation
        known = state.slot(slot)
        job = state.jobs[known.job]
        group = state.groups.get(job.group or "")
        if group is None or known.status is not SlotStatus.QUEUED or job.status is JobStatus.PAUSED:
            return None
        nodes = [state.nodes[name] for name in rotation.nodes_of(state, group, job.id, known.phase)]
        if any(node.status is not NodeStatus.UP for node in nodes) or any(self._no_word(nodes, job, now)):
            return None
        if yields_to(self._c, group, known) is not None:
            return None
        if group.dispatch is Dispatch.SCHEDULE:
            return forecast.wait_ms(state, rotation, group, known, now)
        total = 0
        for turn in self._before(group, known):
            job = state.jobs[turn.job]
            took = forecast.likely_ms(job, job.spec.phase(turn.phase))
            if took is None:
                return None
            total += took
        holders = {gpu.holder for node in nodes for gpu in node.gpus.values() if gpu.holder is not None}
        left = [forecast.left_ms(state, state.slots[holder], now) for holder in sorted(holders)]
        known_left = [ms for ms in left if ms is not None]
        return total + max(known_left, default=0) if len(known_left) == len(left) else None


def _slack(job: Job) -> str:
    """What a wait costs an asynchronous job."""
    if job.spec.asynchronous is not None and not job.spec.asynchronous.ahead:
        return "and begin the next when its slot is granted, so each wait delays them"
    return f"so a wait of {_s(rollouts_rest_ms(job))} s in each iteration costs it nothing"


def _reckoned(job: Job) -> list[str]:
    """Which times plans reckon with, by phase, and what they were made of."""
    said = []
    for phase in job.spec.timed:
        times, took = job.times.get(phase.name, PhaseTimes()), phase_ms(job, phase)
        if took is None:
            continue
        count = estimate_samples(job, phase)
        stated = "" if phase.planned_ms is None else f"; {_s(phase.planned_ms)} s were stated"
        whence = f"the mean of {count} observations{stated}" if count else "as stated"
        text = f"Plans use {_s(took)} s for its {phase.name}, {whence}."
        if times.recent_ms:
            middle, late = quantile_ms(times.recent_ms, 0.5), quantile_ms(times.recent_ms, 0.95)
            text += f" Half of the last {len(times.recent_ms)} took {_s(middle)} s at most, 95 % {_s(late)} s."
        likely = by_work_ms(job, phase)
        if likely is not None:
            text += f" For the work that it has reported, {job.work:g}, it is likely to take {_s(likely)} s."
        said.append(text)
    return said


def _guarded(group: Group | None) -> str:
    """That it is short of credit, and what is done about it."""
    alone = group is not None and len(group.jobs) + len(group.coming) < 2
    how = "has nodes of its own" if alone else "goes before all others"
    return f"It ran short of credit, and {how} until it has earned some."


def _on_the_move(job: Job, move: JobMove, why: str) -> str:
    """From where to where, why, and what it waits for."""
    placed = [dict.fromkeys(name for names in pins.values() for name in names) for pins in (job.pins, move.pins)]
    here, there = map(", ".join, placed)
    waits = (
        "at the end of its iteration"
        if job.status is not JobStatus.MOVING
        else "as soon as what it has loaded is parked"
    )
    return f"It moves from {here} to {there} (group {move.group}), {waits}: {why}."


def _overrun(slot: Slot, now: Millis) -> tuple[Reason, ...]:
    """That a slot runs for longer than it should, if it does."""
    if slot.overrun_at is None or slot.ended is not None or slot.granted_at is None:
        return ()
    ran = (now - slot.granted_at) // 1000
    text = f"it has run for {ran} s, far longer than its phase takes; look whether it hangs, or revoke it"
    return (Reason("overran", text, {"ran_s": ran, "slot": slot.id}),)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _names(c: Context, jobs: Sequence[JobId]) -> str:
    """The last few of these jobs by their names: ``a, b and 12 more``."""
    named = [c.state.jobs[job].spec.name for job in jobs]
    few = named[-3:]
    return ", ".join(few) + (f" and {len(named) - len(few)} more" if len(named) > len(few) else "")


def _s(ms: Millis) -> str:
    """Seconds, to a tenth; short ones to a hundredth, or two of them might look alike."""
    return f"{ms / 1000:.1f}" if ms >= 10_000 or ms % 100 == 0 else f"{ms / 1000:.2f}"


def _span(ms: Millis) -> str:
    """A time as people say it: ``40 s``, ``3 min``, ``6 h``."""
    if ms < 10_000:
        return f"{ms / 1000:.1f} s"
    if ms < 120_000:
        return f"{round(ms / 1000)} s"
    return f"{round(ms / 60_000)} min" if ms < 7_200_000 else f"{ms / 3_600_000:.3g} h"
