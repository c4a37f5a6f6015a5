"""A journal of this format, written by an earlier commit, loads and comes to the state that it came to then.

What lies in the folder was written with make.py.
"""

import json
import shutil
from pathlib import Path
from zlib import decompress

import msgspec
import pytest
from simkit import invariants

from rollmuxd.core import facts as f
from rollmuxd.core.apply import apply
from rollmuxd.core.state import State
from rollmuxd.daemon.journal.file import FORMAT
from rollmuxd.daemon.journal.store import Journal
from rollmuxd.daemon.usage.ledger import DailyUsage

HERE = Path(__file__).parent
JOURNALS = sorted(HERE.glob("*/*.journal"))
BODIES = sorted(HERE.glob("*/facts.jsonl"))


def said_of(state):
    """As make.py has written it."""
    return {
        "incarnation": state.incarnation,
        "fence_number": state.fence_number,
        "at": state.at,
        "minted": dict(state.minted),
        "nodes": {node.id: [str(node.status), node.group, *node.pinned] for node in state.nodes.values()},
        "jobs": {job.id: [job.owner, job.spec.name, str(job.status), job.run] for job in state.jobs.values()},
        "slots": {
            slot.id: [slot.job, str(slot.status), list(slot.gpus), list(slot.fence) if slot.fence else None]
            for slot in state.slots.values()
        },
        "holders": {gpu: of.holder for node in state.nodes.values() for gpu, of in node.gpus.items()},
    }


def replayed(past):
    state = State() if past.snapshot is None else msgspec.json.decode(past.snapshot, type=State)
    for _, fact in past.facts:
        apply(state, fact)
    return state


def test_there_is_a_corpus_of_this_format():
    assert (HERE / f"format-{FORMAT}").is_dir(), f"run: python tests/corpus/make.py format-{FORMAT}"


@pytest.mark.asyncio
@pytest.mark.parametrize("path", JOURNALS, ids=lambda path: f"{path.parent.name}/{path.stem}")
async def test_a_journal_of_then_comes_to_the_state_of_then(path, tmp_path):
    shutil.copyfile(path, tmp_path / "journal.sqlite3")
    wanted = json.loads(path.with_suffix(".json").read_text())
    journal = Journal.open(tmp_path)
    for _ in ("from the newest snapshot", "from the first fact"):
        state = replayed(journal.load())
        assert said_of(state) == wanted
        apply(state, f.DaemonStarted(state.at, state.incarnation))
        invariants.check(state)
        await journal.operate(lambda writer: writer.execute("DELETE FROM snapshots WHERE day IS NULL"))
    assert [(key.id, key.revoked_at) for key in await journal.list_keys()] == [("0000aaaa", None), ("0000bbbb", 7)]
    await journal.close()


@pytest.mark.parametrize("path", BODIES, ids=lambda path: path.parent.name)
def test_every_fact_of_then_is_read_and_says_what_it_said(path):
    for line in path.read_bytes().splitlines():
        again = json.loads(f.encode(f.decode(line)))
        assert json.loads(line).items() <= again.items()


def is_still_said(then, now):
    """Whether all that was said is said, in the same words. More may be."""
    if isinstance(then, dict):
        return all(name in now and is_still_said(was, now[name]) for name, was in then.items())
    return then == now


@pytest.mark.asyncio
@pytest.mark.parametrize("path", sorted(HERE.glob("*/compacted.journal")), ids=lambda path: path.parent.name)
async def test_the_usage_of_a_day_of_then_says_what_it_said(path, tmp_path):
    """The facts of such a day may be gone: a figure under another name would be zero in every report."""
    shutil.copyfile(path, tmp_path / "journal.sqlite3")
    journal = Journal.open(tmp_path)
    days = await journal.days()
    for day in days:
        body = decompress(await journal.usage_of(day))
        usage = msgspec.json.decode(body, type=DailyUsage)
        assert usage.work
        assert is_still_said(json.loads(body), json.loads(msgspec.json.encode(usage)))
    await journal.close()
    assert len(days) > 1
