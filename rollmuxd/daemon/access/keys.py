"""API keys: made, hashed, checked.

A secret reads ``rmx_<id>_<random>``. The prefix lets scanners find a leaked one, the id says which key it is, and the
rest is 256 bits from the operating system. Only a SHA-256 of it is kept. A slow hash (bcrypt, argon2) protects short
passwords from guessing. 256 random bits cannot be guessed, and a slow hash would slow every request.
"""

import hashlib
import hmac
import secrets
from enum import StrEnum
from typing import Final

from msgspec import Struct

from rollmuxd.core.ids import Millis

PREFIX = "rmx"


class Role(StrEnum):
    """What a caller may do; each may do what those before it may."""

    VIEWER = "viewer"
    USER = "user"
    LEAD = "lead"
    ADMIN = "admin"

    def covers(self, other: "Role") -> bool:
        """Whether this role may do what the other may."""
        return _RANK[self] >= _RANK[other]


_RANK: Final = {role: rank for rank, role in enumerate(Role)}


class ApiKey(Struct, frozen=True):
    """A key as the journal keeps it. ``hashed`` is all that is kept of the secret."""

    id: str
    owner: str
    user: str
    role: Role
    hashed: str
    created_at: Millis
    revoked_at: Millis | None = None
    #: from then on it opens nothing; None: it does not expire
    expires_at: Millis | None = None


def new_key(owner: str, user: str, role: Role, now: Millis, *, expires_at: Millis | None = None) -> tuple[ApiKey, str]:
    """A key, and its secret, which is shown once and kept nowhere."""
    key_id = secrets.token_hex(4)
    secret = f"{PREFIX}_{key_id}_{secrets.token_urlsafe(32)}"
    key = ApiKey(
        id=key_id, owner=owner, user=user, role=role, hashed=digest(secret), created_at=now, expires_at=expires_at
    )
    return key, secret


def digest(secret: str) -> str:
    """What is kept of a secret."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def key_id_of(secret: str) -> str | None:
    """The id within a secret; None if it does not look like one of ours."""
    prefix, _, rest = secret.partition("_")
    key_id, _, random = rest.partition("_")
    return key_id if prefix == PREFIX and key_id and random else None


def fits(key: ApiKey, secret: str) -> bool:
    """Whether this is the key's secret. Takes the same time wherever the two differ."""
    return hmac.compare_digest(key.hashed, digest(secret))


def why_shut(key: ApiKey, now: Millis) -> str:
    """Why the key opens nothing any more; "": it does."""
    if key.revoked_at is not None:
        return "was revoked"
    return "has expired" if key.expires_at is not None and key.expires_at <= now else ""
