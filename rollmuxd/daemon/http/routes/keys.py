"""API keys."""

from rollmuxd.daemon.access.keys import ApiKey, Role, new_key, why_shut
from rollmuxd.daemon.clock import iso
from rollmuxd.daemon.http import views
from rollmuxd.daemon.http.routing import Call, PageQuery, Routes, find
from rollmuxd.wire.answers import KeyView, Page
from rollmuxd.wire.requests import KeyBody

routes = Routes("keys")


@routes.post("/v1/keys", needs=Role.ADMIN, status=201)
async def add_key(call: Call, body: KeyBody) -> KeyView:
    """Make a key. Its secret is in this answer and nowhere else."""
    now = call.services.clock.now()
    expires_at = None if body.expires_s is None else now + round(body.expires_s * 1000)
    key, secret = new_key(body.owner, body.user, Role(body.role), now, expires_at=expires_at)
    # Written down first: no key may exist whose maker is unknown.
    until = "" if expires_at is None else f", until {iso(expires_at)}"
    await call.services.writer.submit(call.noted(key.id, "", f"{key.role} {key.owner}/{key.user}{until}"))
    await call.services.journal.add_key(key)
    await call.shared.gate.load()
    return _view(call, key, secret)


@routes.get("/v1/keys", needs=Role.ADMIN, problems=(429,))
async def list_keys(call: Call, query: PageQuery) -> Page[KeyView]:
    """All keys, revoked ones too, without their secrets."""
    known = {key.id: key for key in await call.services.journal.list_keys()}
    return await call.page(query, lambda state: known, lambda visibility, it, now: _view(call, it))


@routes.delete("/v1/keys/{key}", needs=Role.ADMIN)
async def revoke_key(call: Call, key: str) -> KeyView:
    """From now on this key opens nothing."""
    now = call.services.clock.now()
    before = why_shut(await _find(call, key), now) or "good"
    # First the revocation: were the journal to lose it, the fact would be lost with it, and that is noticed.
    await call.services.journal.revoke_key(key, now)
    await call.services.writer.submit(call.noted(key, before, "revoked"))
    await call.shared.gate.load()
    return _view(call, await _find(call, key))


async def _find(call: Call, key_id: str) -> ApiKey:
    return find("key", {key.id: key for key in await call.services.journal.list_keys()}, key_id)


def _view(call: Call, key: ApiKey, secret: str | None = None) -> KeyView:
    return KeyView(
        key=key.id,
        owner=key.owner,
        user=key.user,
        role=str(key.role),
        created_at=iso(key.created_at),
        revoked=key.revoked_at is not None,
        expires_at=views.maybe_iso(key.expires_at),
        expired=key.expires_at is not None and key.expires_at <= call.services.clock.now(),
        secret=secret,
    )
