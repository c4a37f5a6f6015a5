"""A journal without a disk, for tests of what stands above it."""

import asyncio
import secrets
from collections.abc import Callable, Generator, Iterable, Sequence

import msgspec

from rollmuxd.core import facts as core_facts
from rollmuxd.core.facts import Fact
from rollmuxd.core.ids import Millis
from rollmuxd.daemon.access.keys import ApiKey
from rollmuxd.daemon.journal.file import JournalFailed, Notes, Unreadable
from rollmuxd.daemon.journal.store import SNAPSHOTS_KEPT, Past, until_large


class MemoryJournal:
    """The contract of :class:`~rollmuxd.daemon.journal.store.Journal` without a disk; one suite tests both.

    ``failing``, while set, is what every commit fails with.
    """

    def __init__(self, *, incarnation: int = 1) -> None:
        self.id = secrets.token_hex(16)
        self.incarnation = incarnation
        self.notes = Notes(self.id, incarnation)
        self.away_ms = 0
        self.first = 1
        self.tight = False
        self.failing: JournalFailed | None = None
        self._failed: JournalFailed | None = None
        self._bodies: list[tuple[int, bytes]] = []
        self._snapshots: dict[int, bytes] = {}
        self._keys: dict[str, ApiKey] = {}
        self._usage: dict[int, bytes] = {}
        self._states: dict[int, tuple[int, bytes]] = {}

    @property
    def last_seq(self) -> int:
        return self._bodies[-1][0] if self._bodies else 0

    def append(self, facts: Sequence[tuple[int, Fact]]) -> "asyncio.Future[None]":
        # Encoded although nobody asked: what cannot be journalled must fail here too.
        rows = [(seq, core_facts.encode(fact)) for seq, fact in facts]
        return self._commit(lambda: self._bodies.extend(rows))

    def touch(self) -> None:
        pass

    async def snapshot(self, seq: int, body: bytes) -> None:
        def write() -> None:
            self._snapshots[seq] = body
            for old in sorted(self._snapshots)[:-SNAPSHOTS_KEPT]:
                del self._snapshots[old]

        await self._commit(write)

    async def add_key(self, key: ApiKey) -> None:
        if key.id in self._keys:
            raise ValueError(f"there is an API key {key.id!r} already")
        await self._commit(lambda: self._keys.update({key.id: key}))

    async def list_keys(self) -> list[ApiKey]:
        return [self._keys[key] for key in sorted(self._keys)]

    async def revoke_key(self, key_id: str, now: Millis) -> bool:
        key = self._keys.get(key_id)
        if key is None:
            return False
        if key.revoked_at is None:
            revoked = msgspec.structs.replace(key, revoked_at=now)
            await self._commit(lambda: self._keys.update({key_id: revoked}))
        return True

    async def note_left_alone(self, switch: str, reason: str) -> None:
        noted = self.notes.left_alone | {switch: reason}
        await self._commit(lambda: None)
        noted = {name: why for name, why in noted.items() if why}
        self.notes = msgspec.structs.replace(self.notes, left_alone=noted)

    async def recover(self) -> None:
        await asyncio.sleep(0)  # as with the thread: whoever waits for an earlier commit hears of it first
        if self.failing is not None:
            raise self.failing
        self._failed = None

    async def make_reserve(self) -> None:
        self.tight = False

    async def audited(self, after: int, limit: int) -> list[tuple[int, Fact | Unreadable]]:
        return []

    async def days(self) -> list[int]:
        return sorted(self._usage)

    async def usage_of(self, day: int) -> bytes:
        return self._usage[day]

    async def state_before(self, day: int) -> tuple[int, int, bytes] | None:
        found = [(seq, of, state) for of, (seq, state) in sorted(self._states.items()) if of <= day]
        return found[-1] if found else None

    async def close_day(self, day: int, usage: bytes, seq: int, state: bytes) -> None:
        self._usage[day], self._states[day + 1] = usage, (seq, state)

    async def cut(self, seq: int, day: int) -> None:
        self.first = seq + 1

    async def sweep(self, audit_from: int) -> int:
        return 0

    async def close(self) -> None:
        pass

    async def read(self, after: int, limit: int) -> list[tuple[int, Fact | Unreadable]]:
        start = self._index(after)
        return list(self._decoded(until_large(self._bodies[start : start + limit])))

    def load(self) -> Past:
        seq = max(self._snapshots, default=0)
        return Past(seq, self._snapshots.get(seq), self._decoded(self._bodies[self._index(seq) :]))

    def facts(self) -> Generator[tuple[int, Fact]]:
        """All of them, for tests to look at."""
        return self._decoded(self._bodies)

    def _index(self, after: int) -> int:
        # Numbers have no holes, so that the place follows from the first one.
        return max(0, after - self._bodies[0][0] + 1) if self._bodies else 0

    @staticmethod
    def _decoded(rows: Iterable[tuple[int, bytes]]) -> Generator[tuple[int, Fact]]:
        return ((seq, core_facts.decode(body)) for seq, body in rows)

    def _commit(self, write: Callable[[], object]) -> "asyncio.Future[None]":
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._failed = self._failed or self.failing
        if self._failed is not None:
            future.set_exception(self._failed)
        else:
            write()
            future.set_result(None)
        return future
