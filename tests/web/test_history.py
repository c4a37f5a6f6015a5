"""What the dashboard draws is what was: its fold of facts, in JavaScript, is held against the core's own state.

Journals of the corpus, and random histories in which much goes wrong, are replayed fact by fact. Between any two
instants, the picture has to show each node and each job as the state has it: who holds which share of it and how far
that slot is, whose state lies there, whether jobs are placed there, and how it is.
"""

import contextlib
import json
import random
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from patience import PATIENCE_S
from simkit import swarm

from rollmuxd.core import facts as f
from rollmuxd.core.apply import apply
from rollmuxd.core.errors import BrokenInvariant
from rollmuxd.core.model import JobStatus, NodeStatus, SlotStatus, StateStatus
from rollmuxd.core.state import State
from rollmuxd.daemon.clock import iso
from rollmuxd.daemon.journal.store import Journal

HERE = Path(__file__).parent
WEB = HERE.parents[1] / "rollmuxd" / "daemon" / "web"
JOURNALS = sorted((HERE.parent / "corpus").glob("*/*.journal"))
#: how a slot that holds GPUs is drawn
KINDS = {
    SlotStatus.LOADING: "loading",
    SlotStatus.RUNNING: "running",
    SlotStatus.TAIL: "tail",
    SlotStatus.RELEASED: "closing",
    SlotStatus.FAULTED: "reclaiming",
    SlotStatus.LOST: "reclaiming",
    SlotStatus.REVOKED: "reclaiming",
}


@pytest.fixture(scope="session")
def node() -> str:
    """Something that runs JavaScript: the system's node, or the one that playwright brings."""
    if found := shutil.which("node"):
        return found
    driver = pytest.importorskip("playwright._impl._driver", reason="neither node nor playwright is there")
    return str(driver.compute_driver_executable()[0])


def fold(node: str, **given: Any) -> Any:
    told = {"slots": [], "usage": None, **given}
    ended = subprocess.run(
        [node, HERE / "fold.mjs", WEB], input=json.dumps(told), capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def kind_of(state: State, name: str) -> str:
    slot = state.slots[name]
    lent = slot.status is SlotStatus.RUNNING and state.jobs[slot.job].spec.filler is not None
    return "lent" if lent else KINDS[slot.status]


def seen_in(state: State) -> dict[str, Any]:
    """What a picture of this state has to show."""
    nodes = {}
    for one in state.nodes.values():
        held: dict[str, int] = {}
        for gpu in one.gpus.values():
            if gpu.holder is not None:
                held[gpu.holder] = held.get(gpu.holder, 0) + 1
        kept = [state.states[key] for key in one.states]
        on = [one for one in kept if one.status in (StateStatus.LOADED, StateStatus.UNKNOWN)]
        nodes[one.id] = {
            "held": sorted([slot, kind_of(state, slot), n / len(one.gpus)] for slot, n in held.items()),
            "status": [] if one.status is NodeStatus.UP else [str(one.status)],
            "kept": sorted(f"{one.job} {one.pool} {one.status}" for one in on),
            "placed": int(bool(one.pinned)),
        }
    jobs = {job.id: [] if job.status is JobStatus.ADMITTED else [str(job.status)] for job in state.jobs.values()}
    return {"nodes": nodes, "jobs": jobs}


class Story:
    """Facts with numbers, and the state between any two instants."""

    def __init__(self, facts: list[tuple[int, f.Fact]], state: State | None = None) -> None:
        self.state = State() if state is None else state
        self.facts = [{"seq": seq, **msgspec.to_builtins(fact)} for seq, fact in facts]
        self.moments: list[tuple[float, int, dict[str, Any]]] = []
        for index, (_, fact) in enumerate(facts):
            apply(self.state, fact)
            if index + 1 == len(facts) or facts[index + 1][1].at > fact.at:
                self.moments.append((fact.at + 0.5, index, seen_in(self.state)))

    def told(self) -> dict[str, Any]:
        """What the lists say at its end."""
        state = self.state
        nodes = [
            {"node": one.id, "gpus": list(one.gpus), "status": str(one.status), "jobs": list(one.pinned)}
            for one in state.nodes.values()
        ]
        jobs = [
            {"job": job.id, "status": str(job.status), "filler": job.spec.filler is not None}
            for job in state.jobs.values()
        ]
        return {"nodes": nodes, "jobs": jobs}

    def slots(self) -> list[dict[str, Any]]:
        """The open ones, as their list shows them."""
        return [
            {
                "slot": slot.id,
                "job": slot.job,
                "phase": slot.phase,
                "status": str(slot.status),
                "gpus": list(slot.gpus),
                "fence": None,
                "reason": str(slot.reason or ""),
                "queued_at": iso(slot.queued_at),
                **{
                    f"{name}_at": None if at is None else iso(at)
                    for name, at in (
                        ("claimed", slot.claimed_at),
                        ("granted", slot.granted_at),
                        ("ended", slot.ended_at),
                    )
                },
            }
            for slot in self.state.slots.values()
            if slot.status not in (SlotStatus.OVER, SlotStatus.WITHDRAWN)
        ]


def compare(wanted: dict[str, Any], found: dict[str, Any], facts: list[dict[str, Any]], index: int) -> None:
    lately = "\n".join(json.dumps(fact)[:200] for fact in facts[max(0, index - 6) : index + 1])
    for node, view in wanted["nodes"].items():
        drawn = found["nodes"][node]
        drawn["held"] = [[slot, kind, pytest.approx(share)] for slot, kind, share in drawn["held"]]
        assert view == drawn, f"{node} after\n{lately}"
    for job, status in wanted["jobs"].items():
        assert status == found["jobs"][job], f"{job} after\n{lately}"


def facts_of(seed: int) -> list[tuple[int, f.Fact]]:
    """Of a random history; whether its promises were kept is for the tests of the swarm."""
    heard: list[f.Fact] = []
    with contextlib.suppress(BrokenInvariant):
        swarm.run(swarm.draw(seed), heard.append)
    assert len(heard) > 30
    return list(enumerate(heard, 1))


def of_a_seed(seed: int) -> Story:
    return Story(facts_of(seed))


def pages(facts: list[dict[str, Any]], size: int) -> Iterator[list[dict[str, Any]]]:
    for start in range(0, len(facts), size):
        yield facts[start : start + size]


#: among them tails, moves, restarts, and nodes that are lost, drained and quarantined
@pytest.mark.parametrize("seed", [0, 2, 3, 5, 7, 11, 12, 46, 51])
def test_a_history_with_faults_is_drawn_as_it_was(node: str, seed: int) -> None:
    story = of_a_seed(seed)
    found = fold(node, pages=list(pages(story.facts, 1000)), at=[at for at, *_ in story.moments], **story.told())
    for (_, index, wanted), drawn in zip(story.moments, found["found"], strict=True):
        compare(wanted, drawn, story.facts, index)


@pytest.mark.asyncio
@pytest.mark.parametrize("path", JOURNALS, ids=lambda path: f"{path.parent.name}/{path.stem}")
async def test_a_journal_of_any_version_is_drawn_as_it_was(node: str, path: Path, tmp_path: Path) -> None:
    shutil.copyfile(path, tmp_path / "journal.sqlite3")
    journal = Journal.open(tmp_path)
    await journal.operate(
        lambda writer: writer.execute("DELETE FROM snapshots WHERE seq >= (SELECT min(seq) FROM facts)")
    )
    past = journal.load()
    before = None if past.snapshot is None else msgspec.json.decode(past.snapshot, type=State)
    known = set() if before is None else {slot.id for slot in before.slots.values()}
    story = Story(list(past.facts), before)
    await journal.close()
    found = fold(node, pages=[story.facts], at=[at for at, *_ in story.moments], slots=story.slots(), **story.told())
    assert found["events"] > 0
    for (_, index, wanted), drawn in zip(story.moments, found["found"], strict=True):
        if not known:  # of a compacted journal, what was before is not there to be drawn
            compare(wanted, drawn, story.facts, index)


def test_facts_may_come_in_any_order_and_more_than_once(node: str) -> None:
    """Older pages come after newer ones, while the newest go on coming; and some are read twice."""
    for seed in (3, 5, 12):
        story = of_a_seed(seed)
        at = [moment for moment, *_ in story.moments]
        in_order = fold(node, pages=list(pages(story.facts, 1000)), at=at, **story.told())
        mixed = list(pages(story.facts, 37))
        mixed += random.Random(seed).sample(mixed, len(mixed) // 3)
        random.Random(seed).shuffle(mixed)
        assert fold(node, pages=mixed, at=at, **story.told()) == in_order


def test_what_is_forgotten_changes_nothing_of_what_came_after(node: str) -> None:
    for seed in (2, 46):
        story = of_a_seed(seed)
        half = story.moments[len(story.moments) // 2][0]
        at = [moment for moment, *_ in story.moments if moment >= half]
        whole = fold(node, pages=[story.facts], at=at, **story.told())
        later = fold(node, pages=[story.facts], at=at, forget=half, **story.told())
        assert later["found"] == whole["found"]
        assert later["slots"] < whole["slots"]
        assert later["marks"] < whole["marks"]
        assert later["events"] < whole["events"]


@pytest.mark.parametrize("seed", range(105, 108))
def test_who_begins_with_the_newest_facts_sees_the_present_as_it_is(node: str, seed: int) -> None:
    """Of the past no more is read than a picture needs; what is open is known from the lists."""
    facts = facts_of(seed)
    for share in (0.3, 0.55, 0.8):
        story = Story(facts[: int(share * len(facts))])
        at, index, wanted = story.moments[-1]
        newest = story.facts[-max(1, len(story.facts) // 5) :]
        drawn = fold(node, pages=[newest], slots=story.slots(), at=[at], **story.told())["found"][0]
        for view in (*wanted["nodes"].values(), *drawn["nodes"].values()):
            view["kept"] = []  # a state that nobody has touched lately is not known to be there
        compare(wanted, drawn, story.facts, index)


ENDS = {"move_ended": {"old": 0, "both": 1, "new": 1}, "move_abandoned": {"old": 1, "both": 1, "new": 0}}


@pytest.mark.parametrize("ends", ENDS)
def test_who_moves_has_both_places_until_it_has_moved_or_has_not(node: str, ends: str) -> None:
    then = ENDS[ends]
    here, there = {"p": ["old", "both"]}, {"p": ["both", "new"]}
    facts = [
        {"fact": "job_placed", "at": 0, "job": "j1", "group": "g1", "pins": here, "status": "admitted"},
        {"fact": "move_planned", "at": 10, "job": "j1", "group": "g2", "pins": there, "why": "it saves"},
        {"fact": "move_began", "at": 20, "job": "j1"},
        {"fact": ends, "at": 30, "job": "j1"},
        {"fact": "placement_ended", "at": 40, "job": "j1"},
    ]
    page = [{"seq": number, **fact} for number, fact in enumerate(facts, 1)]
    nodes = [{"node": name, "gpus": [f"{name}/gpu0"], "status": "up", "jobs": []} for name in then]
    jobs = [{"job": "j1", "status": "admitted"}]
    found = fold(node, nodes=nodes, jobs=jobs, pages=[page], at=[5, 15, 25, 35, 45])["found"]
    placed = [{name: view["placed"] for name, view in moment["nodes"].items()} for moment in found]
    first, both, none = {"old": 1, "both": 1, "new": 0}, dict.fromkeys(then, 1), dict.fromkeys(then, 0)
    assert placed == [first, both, both, then, none]
    assert [moment["jobs"]["j1"] for moment in found] == [[], [], ["moving"], [], []]


def test_every_fact_is_known_to_the_dashboard_or_is_known_to_say_nothing_to_it() -> None:
    """A new fact that moves a slot, a node or a job has to be drawn: this test asks whoever adds one."""
    text = (WEB / "history.js").read_text()
    silent = {
        "host_added", "host_removed", "node_removed",
        "process_launched", "process_started", "process_over",
        "session_opened", "session_lost", "session_closed", "turn_added", "turn_skipped",
        "yield_asked", "loan_ended",
    }  # fmt: skip
    tags = {str(kind.__struct_config__.tag) for kind in f.KINDS}
    known = {tag for tag in tags if re.search(rf"\b{tag}\b", text)}
    assert tags - known == silent & tags


def test_the_shares_of_a_pool_are_those_of_its_gpus_and_add_up(node: str) -> None:
    """One node of two GPUs over ten seconds: placed for eight of them, loaded for one, run on for four, half of that
    on one GPU only."""
    gpus = ["h/gpu0", "h/gpu1"]
    facts = [
        {"fact": "job_registered", "at": 0, "job": "j1", "owner": "o", "user": "u", "run": 1, "spec": {"name": "a"}},
        {"fact": "job_placed", "at": 1000, "job": "j1", "group": "g1", "pins": {"p": ["n"]}, "status": "admitted"},
        {"fact": "slot_queued", "at": 2000, "slot": "s1", "job": "j1", "phase": "p", "request_id": "r"},
        {"fact": "slot_claimed", "at": 2000, "slot": "s1", "gpus": gpus, "turn": 0},
        {"fact": "slot_granted", "at": 3000, "slot": "s1", "fence": [1, 1]},
        {"fact": "slot_resized", "at": 5000, "slot": "s1", "gpus": gpus[:1], "tail": True},
        {"fact": "slot_released", "at": 7000, "slot": "s1"},
        {"fact": "slot_over", "at": 7000, "slot": "s1"},
        {"fact": "placement_ended", "at": 9000, "job": "j1"},
    ]
    page = [{"seq": number, "admission": "", **fact} for number, fact in enumerate(facts, 1)]
    told = {"nodes": [{"node": "n", "gpus": gpus, "status": "up", "jobs": []}], "jobs": []}
    told |= {"pages": [page], "at": []}
    usage = {"pools": [["p", ["n"]]], "from": 0, "to": 10_000, "count": 1}
    shares = fold(node, usage=usage, **told)["shares"]["p"]
    assert shares["switching"] == pytest.approx([0.1])
    assert shares["used"] == pytest.approx([0.2 + 0.1])
    assert shares["bubble"] == pytest.approx([0.8 - 0.4])
    assert shares["unallocated"] == pytest.approx([0.2])
    second = fold(node, usage={**usage, "count": 10}, **told)["shares"]["p"]
    assert second["used"] == pytest.approx([0, 0, 0, 1, 1, 0.5, 0.5, 0, 0, 0])
    assert second["switching"] == pytest.approx([0, 0, 1, 0, 0, 0, 0, 0, 0, 0])
    assert second["unallocated"] == pytest.approx([1, 0, 0, 0, 0, 0, 0, 0, 0, 1])
    part = fold(node, usage={**usage, "from": 4_500, "to": 6_500, "count": 2}, **told)["shares"]["p"]
    assert part["used"] == pytest.approx([0.75, 0.5])
