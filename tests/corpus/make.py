"""Writes the corpus: small journals of the present format, which every later version of that format must load.

    rm -r tests/corpus/format-1 && .venv/bin/python tests/corpus/make.py format-1

makes ``tests/corpus/format-1/``. Run it when the format (``rollmuxd.daemon.journal.file.FORMAT``) changes. In it:

- ``NAME.journal``, the journal of a scenario of ``tests/core/transcripts``, and ``NAME.json``, the state it comes to;
  ``compacted.journal`` has lost its first days;
- ``facts.jsonl``, one fact of each kind that the scenarios have, in this version's words.
"""

import asyncio
import importlib.util
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

HERE = Path(__file__).parent
TRANSCRIPTS = HERE.parent / "core" / "transcripts"
sys.path.insert(0, str(HERE.parent))
#: a tail and its parts; a lost process; a new incarnation
SCENARIOS = ("shrunk_tail", "session_lost_while_holding", "restart_with_a_new_incarnation")


def play(name: str) -> Any:
    """A scenario, played to its end."""
    spec = importlib.util.spec_from_file_location("transcripts", TRANSCRIPTS.parent / "test_transcripts.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules.get("transcripts") or importlib.util.module_from_spec(spec)
    if "transcripts" not in sys.modules:
        sys.modules["transcripts"] = module
        spec.loader.exec_module(module)
    playing = module.Play()
    for line in (TRANSCRIPTS / f"{name}.txt").read_text().splitlines():
        if line.strip() and not line.startswith(("#", " ")):
            playing.line(line)
    return playing


def said_of(state: Any) -> dict[str, Any]:
    """What a later version must find in a state again, by whatever names it keeps it."""
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


async def write(scenario: str, folder: Path, *, compacted: bool = False) -> None:
    """The journal of a scenario: a snapshot in its middle, and two keys.

    ``compacted``: the seconds of the scenario become half days, and the facts of the first ones are let go of.
    """
    from rollmuxd.core import facts as f
    from rollmuxd.core.apply import apply
    from rollmuxd.core.state import State
    from rollmuxd.daemon.access.keys import ApiKey, Role
    from rollmuxd.daemon.journal.store import Journal
    from rollmuxd.daemon.usage.daily import LiveUsage

    played = play(scenario)
    facts = [f.decode(body) for body in played.journal]
    if compacted:
        facts = [msgspec.structs.replace(fact, at=fact.at * 43_200) for fact in facts]
    middle = len(facts) // 2
    with tempfile.TemporaryDirectory() as name:
        journal = Journal.open(Path(name))
        state = State()
        for number, fact in enumerate(facts, 1):
            await journal.append([(number, fact)])
            apply(state, fact)
            if number == middle:
                await journal.snapshot(number, msgspec.json.encode(state))
        await journal.add_key(ApiKey("0000aaaa", "team", "ann", Role.ADMIN, "0" * 64, 5))
        await journal.add_key(ApiKey("0000bbbb", "team", "bob", Role.USER, "1" * 64, 6))
        await journal.revoke_key("0000bbbb", 7)
        if compacted:

            async def settled() -> tuple[int, int]:
                return state.at, len(facts)

            await LiveUsage(journal, settled, keep_days=1).run_once()
            assert journal.first > middle // 2
            scenario = "compacted"
        await journal.close()
        shutil.copyfile(Path(name) / "journal.sqlite3", folder / f"{scenario}.journal")
    (folder / f"{scenario}.json").write_text(json.dumps(said_of(state), indent=1) + "\n")


def one_of_each() -> list[bytes]:
    """One fact of each kind, by name."""
    found: dict[str, bytes] = {}
    for path in sorted(TRANSCRIPTS.glob("*.txt")):
        if "# bug:" in path.read_text():
            continue
        for body in play(path.stem).journal:
            kind = json.loads(body)["fact"]
            # The longest says the most.
            found[kind] = max(found.get(kind, b""), body, key=len)
    return [found[kind] for kind in sorted(found)]


def main() -> int:
    """Make the folder that is named."""
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    folder = HERE / sys.argv[1]
    if folder.exists():
        print(f"{folder} is there already; remove it first", file=sys.stderr)
        return 1
    folder.mkdir()
    for scenario in SCENARIOS:
        asyncio.run(write(scenario, folder))
    asyncio.run(write("shrunk_tail", folder, compacted=True))
    (folder / "facts.jsonl").write_bytes(b"".join(body + b"\n" for body in one_of_each()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
