"""Identifies each caller, and decides what it may do.

A caller is known by an API key (``Authorization: Bearer rmx_...``). On the Unix socket it is known by the uid of the
process at the other end, which the kernel vouches for. The rules:

- an admin may do everything;
- a lead acts on all jobs of the owner, a user on those that the same user registered, a viewer on none;
- everybody reads the jobs of their own owner, and the inventory; of other owners' jobs they do not even learn that
  they exist.
"""

import os
import pwd
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Final, NamedTuple, TypeVar

from msgspec import Struct

from rollmuxd.core.errors import Rejected, UnknownThing
from rollmuxd.core.ids import Millis
from rollmuxd.core.model import Job, Session, Slot
from rollmuxd.core.state import State
from rollmuxd.daemon.access.keys import ApiKey, Role, fits, key_id_of, why_shut
from rollmuxd.daemon.journal.store import Journal

T = TypeVar("T", Slot, Session)

#: where :class:`rollmuxd.daemon.http.peer.PeerHttpToolsProtocol` puts the credentials of the socket's other end
PEER_EXTENSION = "rollmux.peer"
_KEY_ID: Final = re.compile("[0-9a-f]{8}")


class Peer(NamedTuple):
    """The process at the other end of a Unix socket, as the kernel says."""

    pid: int
    uid: int
    gid: int


class Caller(Struct, frozen=True):
    """The caller. ``name`` is what audited facts record."""

    owner: str
    user: str
    role: Role
    name: str
    #: the id of the API key that was sent; "": none was needed
    key: str = ""

    @property
    def admin(self) -> bool:
        """Whether this is an operator."""
        return self.role is Role.ADMIN

    def owns(self, job: Job) -> bool:
        """Whether the caller has registered it: what callers do to their own jobs is not audited."""
        return job.owner == self.owner and job.user == self.user

    def may_read(self, job: Job) -> bool:
        """Whether the job exists for this caller."""
        return self.role is Role.ADMIN or job.owner == self.owner

    def may_act(self, job: Job) -> bool:
        """Whether this caller may do something with the job."""
        match self.role:
            case Role.ADMIN:
                return True
            case Role.LEAD:
                return job.owner == self.owner
            case Role.USER:
                return self.owns(job)
            case _:
                return False


class NotKnown(Exception):
    """The caller is unknown: no key, a wrong one, one that was revoked or has expired.

    ``login``: it was tried, and counts as a failed login. What was sent is kept nowhere, but for the id of a key.
    """

    def __init__(self, detail: str, *, login: bool = False, tried: str = "") -> None:
        super().__init__(detail)
        self.login = login
        #: the id of a key; whatever looks otherwise may be a secret in the wrong place
        self.tried = tried if _KEY_ID.fullmatch(tried) else ""


class Forbidden(Rejected):
    """The caller is known, and may not do this. Only told about things that exist for the caller."""


def find_job(state: State, caller: Caller, ref: str, *, act: bool = False) -> Job:
    """The job of that id, or of that name among the caller's own; an admin's name is looked for everywhere.

    Raises:
        UnknownThing: there is none, or the caller may not know of it. Forbidden: the caller may read it, and wants to
        act.
    """
    job = state.jobs.get(ref)
    if job is None or not caller.may_read(job):
        job = state.job_named(caller.owner, ref)
        if job is None and caller.admin:
            named = [job for job in state.jobs.values() if job.spec.name == ref]
            if len(named) > 1:
                raise Forbidden(
                    f"several owners have a job {ref!r}; name it by its id: "
                    + ", ".join(f"{job.id} ({job.owner})" for job in named)
                )
            job = named[0] if named else None
        if job is None:
            raise UnknownThing("job", ref)
    if act:
        check_act(caller, job)
    return job


def check_act(caller: Caller, job: Job) -> None:
    """Refuse a caller that may see the job but not act on it."""
    if not caller.may_act(job):
        raise Forbidden(
            f"job {job.id} is {job.owner}/{job.user}'s, and {caller.name} has the role {caller.role}: "
            "it takes the user who registered it, a lead of its owner, or an admin"
        )


def find_slot(state: State, caller: Caller, slot_id: str, *, act: bool = False) -> tuple[Slot, Job]:
    """The slot and its job. Raises as :func:`find_job` does."""
    return _with_job(state, caller, "slot", slot_id, state.slots.get(slot_id), act=act)


def find_session(state: State, caller: Caller, session_id: str, *, act: bool = False) -> tuple[Session, Job]:
    """The session and its job. Raises as :func:`find_job` does."""
    return _with_job(state, caller, "session", session_id, state.sessions.get(session_id), act=act)


def _with_job(state: State, caller: Caller, noun: str, name: str, found: T | None, *, act: bool) -> tuple[T, Job]:
    job = None if found is None else state.jobs.get(found.job)
    if found is None or job is None or not caller.may_read(job):
        raise UnknownThing(noun, name)
    if act:
        check_act(caller, job)
    return found, job


class Gate:
    """Tells callers apart. Holds all keys in memory, so that a request costs one hash and no disk.

    ``require_keys=False`` (setting ``access.require_keys``) makes every caller on the TCP port an operator.
    """

    def __init__(self, journal: Journal, now: Callable[[], Millis], *, require_keys: bool = True) -> None:
        self._journal = journal
        self._now = now
        self._require_keys = require_keys
        self._keys: dict[str, tuple[ApiKey, Caller]] | None = None
        self._own_uid = os.getuid()
        #: asking the system for a user's name can take long
        self._by_uid = cache(self._named)

    async def load(self) -> None:
        """Read the keys: before the first is asked for, and whenever they have changed."""
        self._keys = {
            key.id: (key, Caller(key.owner, key.user, key.role, f"{key.owner}/{key.user}", key.id))
            for key in await self._journal.list_keys()
        }

    async def who(self, authorization: str | None, peer: Peer | None) -> Caller:
        """The caller. A key that is sent counts, on the Unix socket too.

        Raises:
            NotKnown: with a sentence that says what to do, and nothing about which keys there are.
        """
        if authorization is not None:
            if self._keys is None:
                await self.load()
            return self._by_key(authorization, self._keys or {}, self._now())
        if peer is not None:
            return self._by_uid(peer.uid)
        if not self._require_keys:
            return self._by_uid(self._own_uid)
        raise NotKnown(
            "no API key was sent: set ROLLMUX_API_KEY, or send the header 'Authorization: Bearer rmx_...'; "
            "the operator makes one (rollmuxd key add)"
        )

    @staticmethod
    def _by_key(authorization: str, keys: Mapping[str, tuple[ApiKey, Caller]], now: Millis) -> Caller:
        scheme, _, secret = authorization.partition(" ")
        if scheme.lower() != "bearer":
            raise NotKnown("the Authorization header is not of the form 'Bearer rmx_...'", login=True)
        secret = secret.strip()
        key_id = key_id_of(secret) or ""
        key, caller = keys.get(key_id, (None, None))
        if key is None or caller is None or not fits(key, secret):
            raise NotKnown("this API key is not known here", login=True, tried=key_id)
        # Only a caller with the whole secret comes here, and learns just that the key is no longer valid.
        if shut := why_shut(key, now):
            raise NotKnown(f"this API key {shut}; have another made (rollmuxd key add)", login=True, tried=key_id)
        return caller

    def _named(self, uid: int) -> Caller:
        try:
            name = pwd.getpwuid(uid).pw_name
        except KeyError:
            name = f"uid{uid}"
        # Root, and a user that could send the daemon signals and read its files, is its operator anyway.
        role = Role.ADMIN if uid in {0, self._own_uid} else Role.USER
        return Caller(owner=name, user=name, role=role, name=name)
