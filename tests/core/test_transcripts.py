"""Each file in ``transcripts/`` is a scenario that the core plays through: what came in, what happened, what is to do.

The first line of a file says what is at stake. Then lines of the small language of :class:`Play`, each beginning with
a time in seconds; under each, indented, what followed: ``.`` a fact, ``>`` an effect, ``=`` an answer,
``rejected:`` a refusal. These indented lines are written by the tool and reviewed as a diff of behaviour::

    ROLLMUX_REWRITE=1 .venv/bin/python -m pytest tests/core/test_transcripts.py

An ``expect`` line is written by hand and holds whatever the tool writes: the sentence that the file is about.
After every line, unasked: the invariants hold, a refusal has changed nothing, and the facts so far, encoded, decoded
and replayed into an empty state, give the very bytes that the live state has.

A file with a line ``# bug: ...`` in its head is a promise that the core breaks today; it is expected to fail, and fails
the run once it passes, so that the line goes away with the bug.
"""

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from simkit import invariants

from rollmuxd.core import effects as e
from rollmuxd.core import facts as f
from rollmuxd.core import inputs as i
from rollmuxd.core.apply import apply
from rollmuxd.core.causes import Cause, said
from rollmuxd.core.config import Config, DriverTraits, OwnerLimits
from rollmuxd.core.errors import Rejected
from rollmuxd.core.estimates import phase_ms
from rollmuxd.core.ids import Fence
from rollmuxd.core.model import Dispatch, JobStatus, OrderKind, OrderStatus, PlannedTurn
from rollmuxd.core.policy import Move, Placed
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.core.spec import (
    Asynchronous,
    Filler,
    IfUnmet,
    JobSpec,
    LaunchSpec,
    Movable,
    OnLoss,
    Park,
    PhaseSpec,
    StateSpec,
    Want,
)
from rollmuxd.core.state import State
from rollmuxd.explain.causes import refusal, sentence
from rollmuxd.explain.explainer import Explainer
from rollmuxd.explain.forecast import position, slowdown
from rollmuxd.policies.rollmux import RollMux

FOLDER = Path(__file__).parent / "transcripts"
REWRITE = os.environ.get("ROLLMUX_REWRITE") == "1"

#: inventories that many scenarios share; started and seen at 0, which is not printed
WORLDS = {
    "split": ("node r1 h1/gpu0-1 rollout", "node t1 h1/gpu2-3 train", "0 start", "0 seen"),
    "two-rollout": (
        "node r1 h1/gpu0-1 rollout", "node r2 h1/gpu2-3 rollout", "node t1 h1/gpu4-5 train", "0 start", "0 seen",
    ),
    "shared": ("node n1 h1/gpu0-1 rollout,train", "0 start", "0 seen"),
    "two-pairs": (
        "node r1 h1/gpu0-1 rollout", "node t1 h1/gpu2-3 train", "node r2 h1/gpu4-5 rollout", "node t2 h1/gpu6-7 train",
        "config moves=on move_interval=0", "0 start", "0 seen",
    ),
    "two-hosts": ("node r1 h1/gpu0-1 rollout", "node t1 h2/gpu0-1 train", "0 start", "0 seen h1", "0 seen h2"),
}  # fmt: skip

#: options of ``job`` that are no phases
_JOB_WORDS = {
    "slo", "nodes", "gpus", "named", "ram", "mb", "left", "driver", "park", "on_loss", "colocate", "priority",
    "if_unmet", "key", "replace", "side", "nostate", "owner", "load_s", "park_s", "launch", "movable", "engines",
    "pace", "ahead", "filler",
}  # fmt: skip
_PHASE = re.compile(
    r"(?P<name>\w+)(@(?P<pools>[\w+]+))?(=(?P<s>[\d.]*)(~(?P<gap>[\d.]+))?(/(?P<min>\d+))?(x(?P<every>\d+))?)?"
)


class Proposing(RollMux):
    """The paper's policy, and moves that a scenario says are worth doing."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self.moves: list[Move] = []

    def regroup(self, state: State, now: int) -> Iterator[Move | None]:
        while self.moves:
            yield self.moves.pop(0)


def _ms(seconds: str) -> int:
    return round(float(seconds) * 1000)


def _gpus(words: str) -> tuple[str, ...]:
    """``h1/gpu0-3`` is four GPUs."""
    found: list[str] = []
    for word in words.split(","):
        host, _, last = word.rpartition("/gpu")
        low, _, high = last.partition("-")
        found += [f"{host}/gpu{number}" for number in range(int(low), int(high or low) + 1)]
    return tuple(found)


def _per_pool(text: str, pools: list[str]) -> dict[str, str]:
    """``rollout:2,train:1``, or one value for every pool."""
    if ":" not in text:
        return dict.fromkeys(pools, text)
    return dict(part.split(":") for part in text.split(","))


class Play:
    """One scenario, in play: reads a line, hands its input to the core, and gives back what followed.

    ``join`` is ``job`` and ``session``; ``obey`` has every open order done. Before ``start``:
    ``world NAME``, or ``node NAME GPUS POOLS [mb=] [price=]``, ``host NAME ram=GB``, ``driver NAME idempotent probes``,
    ``config KEY=SECONDS ...``, ``owner NAME LIMIT=NUMBER ...``, ``policy KEY=VALUE ...``; they have no time.
    """

    def __init__(self) -> None:
        self.config, self.policy, self.dispatch = Config(grace_ms=5_000), {}, Dispatch.SCHEDULE
        self.hosts: dict[str, i.HostSpec] = {}
        self.nodes: dict[str, i.NodeSpec] = {}
        self.forgotten: dict[str, i.NodeSpec] = {}
        self.core: Scheduler | None = None
        self.journal: list[bytes] = []
        self.now = 0
        self.asked = 0
        self.directed = False
        self.specs: dict[str, JobSpec] = {}
        self.owners: dict[str, str] = {}
        self.keys: dict[str, str] = {}
        self.replayed = State()

    # ---- the world -----------------------------------------------------------------------------------------------

    def do_node(self, name: str, gpus: str, pools: str, *words: str) -> None:
        more = dict(word.split("=") for word in words)
        host = gpus.partition("/")[0]
        self.hosts.setdefault(host, i.HostSpec(host, "mock", 1_000_000))
        self.nodes[name] = i.NodeSpec(
            name, host, _gpus(gpus), tuple(pools.split(",")), gpu_mb=int(more.get("mb", 0)),
            price_per_gpu_hour=float(more.get("price", 1)),
        )  # fmt: skip

    def in_forget(self, node: str) -> i.Input:
        """The daemon starts anew with a configuration that has the node no more."""
        self.forgotten[node] = self.nodes.pop(node)
        return self.in_start()

    def in_remember(self, node: str) -> i.Input:
        """The daemon starts again with a configuration that has the node again."""
        self.nodes[node] = self.forgotten.pop(node)
        return self.in_start()

    def do_host(self, name: str, ram: str) -> None:
        self.hosts[name] = i.HostSpec(name, "mock", round(float(ram.removeprefix("ram=")) * 1000))

    def do_driver(self, name: str, *traits: str) -> None:
        known = {**self.config.drivers, name: DriverTraits(**dict.fromkeys(traits, True))}
        self.config = msgspec.structs.replace(self.config, drivers=known)

    def do_config(self, *words: str) -> None:
        for word in words:
            key, value = word.split("=")
            field = key if key in Config.__struct_fields__ else f"{key}_ms"
            if field == "launch_hosts":
                self.config = msgspec.structs.replace(self.config, launch_hosts=tuple(value.split(",")))
                continue
            given = _ms(value) if field.endswith("_ms") else type(getattr(self.config, field))(value)
            self.config = msgspec.structs.replace(self.config, **{field: given})

    def do_owner(self, name: str, *words: str) -> None:
        """``owner team share=2 max_nodes=3``."""
        limits = OwnerLimits(**{key: int(value) for key, value in (word.split("=") for word in words)})
        self.config = msgspec.structs.replace(self.config, owners={**self.config.owners, name: limits})

    def do_policy(self, *words: str) -> None:
        for word in words:
            key, _, value = word.partition("=")
            if key == "dispatch":
                self.dispatch = Dispatch(value)
            else:
                self.policy[key] = int(value) if value else True

    def _policy(self) -> Proposing:
        policy = Proposing(**self.policy)
        policy.dispatch = self.dispatch
        return policy

    # ---- reading a line ------------------------------------------------------------------------------------------

    def line(self, text: str) -> list[str]:
        """Play one line; what followed, without indentation."""
        words = shlex.split(text)
        if words[0] == "world":
            for given in WORLDS[words[1]]:
                self.line(given)
            return []
        if not re.fullmatch(r"[\d.]+", words[0]):
            assert words[0] in {"node", "host", "driver", "config", "policy", "owner"}, f"no time in {text!r}"
            assert self.core is None or words[0] == "node", f"too late for {text!r}: it has started"
            getattr(self, f"do_{words[0]}")(*words[1:])
            return []
        self.now, verb, args = _ms(words[0]), words[1], words[2:]
        if verb in {"expect", "why", "explain", "place", "due"}:
            return getattr(self, f"look_{verb}")(*args)
        if verb == "join":  # a job and its session
            return self._hand(self.in_job(*args)) + self._hand(self.in_session(args[0]))
        if verb == "obey":
            return self._obey()
        if verb == "restart":
            state = State()
            for row in self.journal:
                apply(state, f.decode(row))
            self.core = Scheduler(self.config, self._policy(), state)
        if self.core is None:
            self.core = Scheduler(self.config, self._policy())
        return self._hand(getattr(self, f"in_{verb}")(*args))

    def _obey(self) -> list[str]:
        """Every driver does what it was told, truthfully, until nothing is left to do."""
        said = []
        while issued := [name for name, told in self.core.state.orders.items() if told.status is OrderStatus.ISSUED]:
            said += self._hand(self.in_done(issued[0]))
        return said

    def _hand(self, given: i.Input) -> list[str]:
        before = msgspec.json.encode(self.core.state)
        due = self.core.deadline()
        try:
            decision = self.core.handle(given, self.now)
        except Rejected as no:
            assert msgspec.json.encode(self.core.state) == before, "a refusal changed something"
            assert self.core.deadline() == due, "a refusal changed what is waited for"
            return [f"rejected: {refusal(no)}"]
        for fact in decision.facts:
            row = f.encode(fact)
            self.journal.append(row)
            apply(self.replayed, f.decode(row))
        live = msgspec.json.encode(self.core.state)
        assert msgspec.json.encode(self.replayed) == live, "replay gives another state"
        assert msgspec.json.encode(msgspec.json.decode(live, type=State)) == live, "a snapshot gives another state"
        invariants.check(self.core.state)
        said = [f". {self._fact(fact)}" for fact in decision.facts]
        said += [f"> {self._effect(effect)}" for effect in decision.effects]
        return said + self._answer(given, decision.answer)

    # ---- saying what followed ------------------------------------------------------------------------------------

    def _named(self, job: str) -> str:
        known = self.core.state.jobs.get(job)
        return known.spec.name if known is not None else job

    def _fact(self, fact: f.Fact) -> str:
        words = [f.name(fact)]
        for field in type(fact).__struct_fields__:
            value = getattr(fact, field)
            if field == "at" or value in (None, "", (), {}, False, 0, Dispatch.SCHEDULE):
                continue
            if isinstance(value, Cause):
                value = sentence(value, self._named)
            elif field == "spec":
                value = value.name
            elif field in ("host", "node") and not isinstance(value, str):
                value = value.id
            elif field == "job":
                value = self._named(value)
            elif field == "schedule":
                value = " ".join(f"{self._named(v.job)}.{v.phase}" for v in value)
            elif field == "pins":
                value = " ".join(f"{pool}:{','.join(nodes)}" for pool, nodes in value.items())
            elif field == "at_risk":
                value = " ".join(self._named(job) for job in value)
            elif isinstance(value, dict):
                value = " ".join(f"{key}:{number:g}" for key, number in value.items())
            elif isinstance(value, Fence):
                value = f"{value.incarnation}.{value.number}"
            elif isinstance(value, tuple):
                value = ",".join(value)
            words.append(f"{field}={value}" if " " not in str(value) else f'{field}="{value}"')
        return " ".join(words)

    def _effect(self, effect: e.Effect) -> str:
        match effect:
            case e.Perform(order, again):
                told = self.core.state.orders.get(order)
                what = f" ({told.kind} {told.pool} of {self._named(told.job)} on {told.node})" if told else ""
                return f"perform {order}{' again' if again else ''}{what}"
            case e.Probe(order):
                return f"probe {order}"
            case e.Observe(host):
                return f"observe {host}"
            case e.Launch(job, launch):
                return f"launch {launch} of {self._named(job)}"
            case e.Kill(job, run, session, launch, host):
                started = f" launch {launch} on {host}" if launch else ""
                return f"kill {self._named(job)} run {run} session {session}{started}"
        raise AssertionError(effect)

    def _answer(self, given: i.Input, answer: object) -> list[str]:
        said = []
        if answer.repeated:
            said.append("repeated")
        if isinstance(given, i.RequestSlot):
            said.append(f"{answer.slot} is {self.core.state.slots[answer.slot].status}")
        if isinstance(given, i.OpenSession):
            said.append(f"session {answer.session}")
        if isinstance(given, i.ReleaseSlot) and answer.next_slot:
            said.append(f"next {answer.next_slot} is {self.core.state.slots[answer.next_slot].status}")
        if answer.next_refused:
            said.append(f"next refused: {sentence(answer.next_refused, self._named)}")
        self.directed = bool(answer.directives)
        for told in answer.directives:
            keep = f" keep {','.join(told.keep)}" if told.keep else f" to {','.join(told.gpus)}" if told.gpus else ""
            said.append(
                f"{told.kind} {told.slot}{keep}{f' ({sentence(told.reason, self._named)})' if told.reason else ''}"
            )
        return [f"= {', '.join(said)}"] if said else []

    # ---- looking (changes nothing) -------------------------------------------------------------------------------

    def look_expect(self, what: str, is_: str, *more: str) -> list[str]:
        """``expect s1 running``, ``expect A admitted``, ``expect r1 up``, ``expect A:rollout parked``.

        ``expect s1 held h1/gpu0``: what it holds. ``expect h1/gpu0 clean``. ``expect A iterations 3``.
        ``expect t1 lent s4``, ``expect F harvested 86``, ``expect A lent 0``: in seconds.
        """
        state = self.core.state
        if ":" in what:
            job, pool = what.split(":")
            found = ",".join(
                dict.fromkeys(k.status for k in state.states.values() if (k.job, k.pool) == (self._job(job), pool))
            )
        elif "/gpu" in what:
            gpu = next(gpu for node in state.nodes.values() for name, gpu in node.gpus.items() if name == what)
            found = (
                f"held {gpu.holder}"
                if gpu.holder
                else f"dirty {self._named(gpu.dirty_by)}"
                if gpu.dirty_by
                else "clean"
            )
        elif what in state.slots:
            slot = state.slots[what]
            found = f"held {','.join(slot.gpus)}" if is_ == "held" else str(slot.status)
        elif what in state.nodes and is_ == "lent":
            found = f"lent {state.nodes[what].loan or 'no'}"
        elif is_ in ("harvested", "lent"):  # of a filler; of a job: what loans have held it up for
            job = state.jobs[self._job(what)]
            found = f"{is_} {(job.harvested_ms if is_ == 'harvested' else job.progress.lent_ms) / 1000:g}"
        elif what in state.nodes:
            found = (
                str(state.nodes[what].status)
                if is_ != "reason"
                else f"reason {sentence(state.nodes[what].reason, self._named)}"
            )
        elif is_ == "unasked":  # no directive to its last heartbeat
            found = "asked" if self.directed else "unasked"
        elif is_ == "in":
            job = state.jobs[self._job(what)]
            nodes = " ".join(f"{pool}:{','.join(names)}" for pool, names in job.pins.items())
            found = f"in {job.group} {nodes}".rstrip()
        elif is_ == "left":
            found = f"left {' '.join(state.jobs[self._job(what)].left) or 'nothing'}"
        elif is_ in ("safe", "at_risk"):
            found = "at_risk" if self._job(what) in state.at_risk else "safe"
        elif is_ == "reckoned":  # what plans reckon with, by phase
            job = state.jobs[self._job(what)]
            found = " ".join(
                (
                    "reckoned",
                    *(f"{it.name}={(phase_ms(job, it) or 0) / 1000:g}" for it in job.spec.timed if phase_ms(job, it)),
                )
            )
        elif is_ == "slowdown":
            found = f"slowdown {slowdown(state.jobs[self._job(what)]) or 0:.2f}"
        elif is_ == "iterations":
            found = f"iterations {state.jobs[self._job(what)].progress.finished}"
        else:
            found = str(state.jobs[self._job(what)].status) if self._job(what) in state.jobs else "unknown"
        wanted = " ".join((is_, *more))
        assert found == wanted, f"at {self.now / 1000:g} s: {what} is to be {wanted!r}, and is {found!r}"
        return []

    def look_why(self, what: str) -> list[str]:
        """Why a slot or a job waits, and what would let it in."""
        if what in self.core.state.slots:
            at = Explainer(self.core.context).slot_position(what, self.now)
            wait = Explainer(self.core.context).expected_wait_ms(what, self.now)
            head = f"= {at} turns before it, about {'?' if wait is None else f'{wait / 1000:g}'} s"
            return [
                head,
                *(
                    f"= {reason.code}: {reason.text}"
                    for reason in Explainer(self.core.context).why_slot_waits(what, self.now)
                ),
            ]
        job = self._job(what)
        said = [f"= position {position(self.core.context, job, self.now)}"]
        said += [
            f"= {reason.code}: {reason.text}"
            for reason in Explainer(self.core.context).why_job_waits(job, self.now).reasons
        ]
        return said + [
            f"= would start with {wish}"
            for wish in Explainer(self.core.context).why_job_waits(job, self.now).would_start_with
        ]

    def look_explain(self, job: str) -> list[str]:
        name, core = self._job(job), self.core
        if core.state.jobs[name].status is JobStatus.WAITING:  # the daemon asks a copy then, as it takes long
            state = msgspec.msgpack.decode(msgspec.msgpack.encode(core.state), type=State)
            core = Scheduler(core.config, self._policy(), state)
        return [f"= {sentence}" for sentence in Explainer(core.context).explain(name, self.now)[1]]

    def look_due(self) -> list[str]:
        due = self.core.deadline()
        return ["= nothing is due" if due is None else f"= due at {due / 1000:g}"]

    # ---- inputs --------------------------------------------------------------------------------------------------

    def _job(self, name: str) -> str:
        return self.core.state.names.get(f"{self.owners.get(name, 'team')}/{name}", name)

    def _session(self, name: str) -> str:
        return name if re.fullmatch(r"e\d+", name) else self.core.state.jobs[self._job(name)].session or "none"

    def _slot(self, name: str) -> str:
        """A slot, or a job's slot that runs (else the one that waits)."""
        if re.fullmatch(r"s\d+", name):
            return name
        job = self.core.state.jobs[self._job(name)]
        return job.slot or job.queued or "none"

    def _sights(self, gpus: tuple[str, ...], words: tuple[str, ...]) -> tuple[i.GpuObservation, ...]:
        """All these GPUs clean, except ``h1/gpu0=5000`` or ``h1/gpu0=5000:pid_4711``."""
        used: dict[str, tuple[int, tuple[str, ...]]] = {}
        for word in words:
            names, _, seen = word.partition("=")
            mb, _, who = seen.partition(":")
            for gpu in _gpus(names):
                used[gpu] = (int(mb), (who.replace("_", " "),) if who else ())
        return tuple(i.GpuObservation(gpu, *used.get(gpu, (0, ()))) for gpu in gpus)

    def in_start(self, incarnation: str = "1", what: str = "") -> i.Input:
        """``restart 2 restored``: from a backup."""
        why = Cause("restored") if what == "restored" else None
        return i.Start(tuple(self.hosts.values()), tuple(self.nodes.values()), int(incarnation), lost=why)

    def in_restart(self, *words: str) -> i.Input:
        """``restart 2 crashed``: the daemon before was killed. ``restart 2 restored``: the journal is a backup.

        ``restart away=40``: for 40 s there was no daemon.
        """
        away = next((_ms(word.removeprefix("away=")) for word in words if word.startswith("away=")), 0)
        start = self.in_start(*[word for word in words if word != "crashed" and not word.startswith("away=")])
        return msgspec.structs.replace(start, crashed="crashed" in words, away_ms=away)

    def in_seen(self, *words: str) -> i.Input:
        """``seen h1 boot=b h1/gpu0=5000 since=9 unread=h1/gpu1``: what a look saw that began at 9 s (else: now)."""
        words_ = list(words)
        host = words_.pop(0) if words_ and words_[0] in self.hosts else next(iter(self.hosts))
        boot = next((word.removeprefix("boot=") for word in words_ if word.startswith("boot=")), "")
        gpus = tuple(gpu for node in self.nodes.values() if node.host == host for gpu in node.gpus)
        since = next((_ms(word.removeprefix("since=")) for word in words_ if word.startswith("since=")), None)
        dark = {gpu: "Xid 79" for w in words_ if w.startswith("unread=") for gpu in _gpus(w.removeprefix("unread="))}
        observations = self._sights(gpus, tuple(w for w in words_ if "/gpu" in w and not w.startswith("unread=")))
        return i.HostObserved(
            host, tuple(it for it in observations if it.gpu not in dark), boot, since=since, unread=dark
        )

    def in_unreachable(self, host: str, *why: str) -> i.Input:
        return i.HostObserved(host, unreachable=said(" ".join(why) or "no route"))

    def in_job(self, name: str, *words: str) -> i.Input:
        """``job A slo=2 rollout=10~1/2 train=5 sync@rollout+train=1``: seconds, ~ own gap, / fewest GPUs.

        ``side=eval@rollout=20x5``: once in five iterations. ``pace=10``: asynchronous; ``pace=``: it is measured.
        ``filler=train,2``: a filler of that pool gives way in 2 s.
        """
        more = {w.partition("=")[0]: w.partition("=")[2] for w in words if w.partition("=")[0] in _JOB_WORDS}
        phases = [self._phase(w) for w in words if w.partition("=")[0] not in _JOB_WORDS]
        if "filler" in more:
            phases = [PhaseSpec("filler", (more["filler"].partition(",")[0],))]
        side = [self._phase(w) for w in more.get("side", "").split(";") if w]
        pools = list(dict.fromkeys(pool for phase in (*phases, *side) for pool in phase.pools))
        nodes, gpus = (_per_pool(more.get(key, d), pools) for key, d in (("nodes", "1"), ("gpus", "0")))
        named = _per_pool(more["named"], pools) if "named" in more else {}
        ram, mb, left = (_per_pool(more.get(key, "0"), pools) for key in ("ram", "mb", "left"))
        engines = _per_pool(more.get("engines", "0"), pools)
        wants = tuple(
            Want(p, int(nodes.get(p, 1)), int(gpus.get(p, 0)), tuple(named[p].split("+")) if p in named else ())
            for p in pools
        )
        states = tuple(
            StateSpec(
                p, int(mb.get(p, 0)), int(left.get(p, 0)), round(float(ram.get(p, 0)) * 1000),
                more.get("driver", "channel"),
                _ms(more.get("load_s", "0")), _ms(more.get("park_s", "0")), int(engines.get(p, 0)),
            )
            for p in pools
        )  # fmt: skip
        spec = JobSpec(
            name=name, phases=tuple(phases), wants=wants, side=tuple(side),
            states=tuple(kept for kept in states if more.get("nostate", "-") not in ("", kept.pool)),
            slo=float(more["slo"]) if "slo" in more else None, priority=int(more.get("priority", 0)),
            on_loss=OnLoss(more.get("on_loss", "hold")), park=Park(more.get("park", "lazy")),
            if_unmet=IfUnmet(more.get("if_unmet", "best_effort")), colocate="colocate" in more,
            movable=Movable(more.get("movable", "no")),
            asynchronous=Asynchronous(_ms(more["pace"]) if more["pace"] else None, int(more.get("ahead", "1")))
            if "pace" in more else None,
            filler=Filler(_ms(more["filler"].partition(",")[2] or "2")) if "filler" in more else None,
            launch=LaunchSpec(tuple(filter(None, more["launch"].split("+")))) if "launch" in more else None,
        )  # fmt: skip
        self.specs[name], self.keys[name] = spec, more.get("key", "")
        self.owners[name] = more.get("owner", "team")
        return i.RegisterJob(self.owners[name], "ann", spec, more.get("key", ""), "replace" in more)

    def _phase(self, word: str) -> PhaseSpec:
        got = _PHASE.fullmatch(word)
        assert got is not None, f"{word!r} is no phase"
        return PhaseSpec(
            got["name"], tuple((got["pools"] or got["name"]).split("+")), _ms(got["s"]) if got["s"] else None,
            _ms(got["gap"] or "0"), int(got["min"] or 0), int(got["every"] or 0),
        )  # fmt: skip

    def in_session(self, name: str, *words: str) -> i.Input:
        more = dict(word.split("=") for word in words)
        known = self.core.state.jobs.get(self._job(name))
        ours = known.idempotency_key if known is not None and known.spec.launch else self.keys.get(name, "")
        key = more.get("key", ours)
        return i.OpenSession(self._job(name), key, int(more.get("pid", 100)), "box", more.get("started", ""))

    def in_close(self, name: str) -> i.Input:
        return i.CloseSession(self._session(name))

    def in_give_back(self, name: str) -> i.Input:
        return i.GiveBack(self._session(name))

    def in_beat(self, name: str, *words: str) -> i.Input:
        """``beat A``; ``beat A 80/100``: how far its slot is; ``beat e1 s1 1/2``."""
        slot = next((word for word in words if re.fullmatch(r"s\d+", word)), None)
        done, _, total = next((word for word in words if "/" in word), "0/0").partition("/")
        if slot is None and int(total) and not name.startswith("e"):
            slot = self._slot(name)
        return i.Heartbeat(self._session(name), slot, int(done), int(total))

    def in_gone(self, name: str, *words: str) -> i.Input:
        """``gone A``: its heartbeat says that its process has ended."""
        more = dict(word.split("=") for word in words)
        return i.ProcessGone(self._session(name), int(more.get("pid", 100)), more.get("started", ""))

    def in_ask(self, name: str, phase: str, *words: str) -> i.Input:
        self.asked += 1
        request = next((word for word in words if "=" not in word), f"{name}-{self.asked}")
        session = next((word.removeprefix("session=") for word in words if word.startswith("session=")), name)
        return i.RequestSlot(self._job(name), self._session(session), phase, request)

    def in_release(self, name: str, *words: str) -> i.Input:
        """``release A``; ``release s1 fence=1.1 next=train:r7``; ``clean``, or what was seen on its GPUs."""
        more = {w.partition("=")[0]: w.partition("=")[2] for w in words if "/gpu" not in w}
        name = self._slot(name)
        slot = self.core.state.slots.get(name)
        fence = (slot.fence if slot else None) or Fence(0, 0)
        if "fence" in more:
            fence = Fence(*map(int, more["fence"].split(".")))
        following = None
        if "next" in more:
            self.asked += 1
            phase, _, request = more["next"].partition(":")
            following = i.NextRequest(phase, request or f"next-{self.asked}")
        observations = tuple(word for word in words if "/gpu" in word)
        seen = self._sights(slot.gpus, observations) if slot and (observations or "clean" in more) else ()
        return i.ReleaseSlot(name, fence, seen, following)

    def in_done(self, order: str, *words: str) -> i.Input:
        """Done, and its GPUs were verified clean; ``unseen``: nobody looked; ``h1/gpu0=5000``: they are not."""
        told = self.core.state.orders.get(order)
        if told is None or "unseen" in words or told.kind is OrderKind.LOAD:
            return i.OrderDone(order)
        return i.OrderDone(order, self._sights(self.nodes[told.node].gpus, words))

    def in_fail(self, order: str, *why: str) -> i.Input:
        return i.OrderFailed(order, said(" ".join(why) or "no"))

    def in_notbegun(self, order: str) -> i.Input:
        return i.OrderNotBegun(order)

    def in_lost(self, order: str, *why: str) -> i.Input:
        return i.OrderLostContact(order, said(" ".join(why) or "timed out"))

    def in_launched(self, launch: str, pid: str) -> i.Input:
        return i.Launched(launch, int(pid), "then")

    def in_launchfail(self, launch: str, *why: str) -> i.Input:
        return i.Launched(launch, error=said(" ".join(why) or "no such program"))

    def in_detach(self, slot: str) -> i.Input:
        return i.DetachSlot(self._slot(slot))

    def in_withdraw(self, slot: str) -> i.Input:
        return i.WithdrawSlot(self._slot(slot))

    def in_shrink(self, name: str, keep: str, *words: str) -> i.Input:
        """``shrink A keep=h1/gpu0 [fence=1.1] [clean | h1/gpu1=500]``."""
        slot = self.core.state.slots[self._slot(name)]
        more = dict(w.split("=") for w in words if w.startswith("fence="))
        fence = Fence(*map(int, more["fence"].split("."))) if more else slot.fence
        kept = _gpus(keep.removeprefix("keep="))
        gone = tuple(gpu for gpu in slot.gpus if gpu not in kept)
        observations = tuple(word for word in words if "/gpu" in word)
        return i.ShrinkSlot(
            slot.id, fence, kept, self._sights(gone, observations) if observations or "clean" in words else ()
        )

    def in_grow(self, name: str, *words: str) -> i.Input:
        """``grow A [fence=1.1]``."""
        slot = self.core.state.slots[self._slot(name)]
        more = dict(w.split("=") for w in words if w.startswith("fence="))
        return i.GrowSlot(slot.id, Fence(*map(int, more["fence"].split("."))) if more else slot.fence)

    def in_revoke(self, slot: str, *why: str) -> i.Input:
        return i.RevokeSlot(self._slot(slot), "ops", " ".join(why))

    def in_end(self, name: str, session: str = "") -> i.Input:
        return i.EndJob(self._job(name), "ann", session=session or None)

    def in_pause(self, name: str) -> i.Input:
        return i.PauseJob(self._job(name), "ann")

    def in_resume(self, name: str) -> i.Input:
        return i.ResumeJob(self._job(name), "ann")

    def in_reinstate(self, name: str) -> i.Input:
        return i.ResumeJob(self._job(name), "ann", quarantined=True)

    def in_drain(self, node: str, *words: str) -> i.Input:
        return i.DrainNode(node, "ops", "evict" in words)

    def in_ends(self, host: str, at: str) -> i.Input:
        return i.HostEnds(host, None if at == "never" else _ms(at))

    def in_undrain(self, node: str) -> i.Input:
        return i.UndrainNode(node, "ops")

    def in_declare(self, node: str) -> i.Input:
        return i.DeclareClean(node, "ops", "I looked")

    def in_better(self, name: str, group: str, *words: str) -> i.Input:
        """``better A g2 rollout:r2 train:t2``: the policy finds that A is better placed there; ``new``: a new group.

        Last in the schedule, or where ``schedule=B.rollout,A.rollout,...`` says. ``unsound``: with no turns at all.
        """
        state = self.core.state
        job = state.jobs[self._job(name)]
        pins = {word.partition(":")[0]: tuple(word.partition(":")[2].split(",")) for word in words if ":" in word}
        known = state.groups.get(group)
        turns = [PlannedTurn(v.job, v.phase, v.once) for v in known.schedule if v.job != job.id] if known else []
        turns += [PlannedTurn(job.id, phase.name) for phase in job.spec.phases]
        given = next((word.removeprefix("schedule=") for word in words if word.startswith("schedule=")), "")
        if given:
            turns = [PlannedTurn(self._job(v.split(".")[0]), v.split(".")[1]) for v in given.split(",")]
        placed = Placed(
            None if group == "new" else group, pins, tuple(turns), "packing", JobStatus.ADMITTED,
            job.spec.slo is not None, 20_000, 0.0, self.dispatch,
        )  # fmt: skip
        self.core.policy.moves.append(Move(job.id, placed, said("it saves a node")))
        self.core.context.timers.at(self.now, "regroup", "")
        return i.Tick()

    def in_tick(self) -> i.Input:
        return i.Tick()

    def in_stalled(self, late: str) -> i.Input:
        return i.Stalled(_ms(late))


def play(text: str) -> str:
    """The whole file anew: its own lines, and under each what followed."""
    it, written = Play(), []
    for line in text.splitlines():
        if line.startswith("    "):
            continue
        written.append(line.rstrip())
        if line.strip() and not line.startswith("#"):
            try:
                written += [f"    {said}" for said in it.line(line)]
            except Exception as error:
                error.add_note("\n".join(written[-12:]))
                raise
    return "\n".join(written).rstrip() + "\n"


def _files() -> list[object]:
    found = []
    for path in sorted(FOLDER.glob("*.txt")):
        bug = next((line for line in path.read_text().splitlines() if line.startswith("# bug:")), None)
        marks = [pytest.mark.xfail(reason=bug.removeprefix("# bug: "), strict=not REWRITE)] if bug else []
        found.append(pytest.param(path, id=path.stem, marks=marks))
    return found


@pytest.mark.parametrize("path", _files())
def test_the_core_does_what_the_transcript_says(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("# "), f"{path.name} does not say what is at stake"
    assert re.search(r"^[\d.]+ expect ", text, re.MULTILINE), f"{path.name} has no line that says what is right"
    played = play(text)
    if REWRITE:
        played = re.sub(r"^# bug:.*\n", "", played, flags=re.MULTILINE)
        path.write_text(played)
    if "\n# bug:" in text:  # the hand-written lines decide; what follows is written once they hold
        return
    assert text == played or REWRITE, _diff(text, played)


def _diff(old: str, new: str) -> str:
    import difflib

    return "\n" + "\n".join(
        difflib.unified_diff(old.splitlines(), new.splitlines(), "written", "played", lineterm="", n=4)
    )


def test_every_input_of_the_core_is_in_some_transcript() -> None:
    verbs = {
        word for path in FOLDER.glob("*.txt") for word in re.findall(r"^[\d.]+ (\w+)", path.read_text(), re.MULTILINE)
    }
    missing = {name for name in vars(Play) if name.startswith("in_")} - {f"in_{verb}" for verb in verbs}
    assert not missing


def test_every_fact_of_part_one_is_in_some_transcript() -> None:
    told = {
        word for path in FOLDER.glob("*.txt") for word in re.findall(r"^    \. (\w+)", path.read_text(), re.MULTILINE)
    }
    everything = {str(kind.__struct_config__.tag) for kind in f.KINDS}
    #: a host has no word of its own in this language; what is audited the daemon says
    assert everything - told == {"host_removed", "audited"}
