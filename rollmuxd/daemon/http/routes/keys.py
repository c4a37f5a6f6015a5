"""API keys."""

from rollmuxd.core.errors import UnknownThing
from rollmuxd.daemon.http import views
from rollmuxd.daemon.http.glue import Call, Routes
from rollmuxd.daemon.http.routes._query import BODY
from rollmuxd.daemon.http.routes.inventory import PageQuery
from rollmuxd.daemon.keys import ApiKey, Role, new_key
from rollmuxd.wire.answers import KeyPage, KeyView
from rollmuxd.wire.requests import KeyBody

routes = Routes("keys")


@routes.post("/v1/keys", needs=Role.ADMIN, status=201, problems=BODY)
async def add_key(call: Call, body: KeyBody) -> KeyView:
    """Make a key. Its secret is in this answer and nowhere else."""
    key, secret = new_key(body.owner, body.user, Role(body.role), call.services.clock.now())
    await call.services.journal.add_key(key)
    await call.shared.gate.load()
    return _view(key, secret)


@routes.get("/v1/keys", needs=Role.ADMIN)
async def list_keys(call: Call, query: PageQuery) -> KeyPage:
    """All keys, revoked ones too, without their secrets."""
    keys = await call.services.journal.list_keys()
    found, following = views.page(keys, lambda key: key.id, query.limit, query.after)
    return KeyPage(items=[_view(key) for key in found], next=following)


@routes.delete("/v1/keys/{key}", needs=Role.ADMIN, problems=(404,))
async def revoke_key(call: Call, key: str) -> KeyView:
    """From now on this key opens nothing."""
    revoked = await call.services.journal.revoke_key(key, call.services.clock.now())
    await call.shared.gate.load()
    if not revoked:
        raise UnknownThing("key", key)
    return next(_view(found) for found in await call.services.journal.list_keys() if found.id == key)


def _view(key: ApiKey, secret: str | None = None) -> KeyView:
    return KeyView(
        key=key.id,
        owner=key.owner,
        user=key.user,
        role=str(key.role),
        created_at=views.iso(key.created_at),
        revoked=key.revoked_at is not None,
        secret=secret,
    )
