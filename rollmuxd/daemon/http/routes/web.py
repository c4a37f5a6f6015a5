"""The dashboard: one page, and what it is made of. Its data comes from the other routes, with the caller's own key."""

from importlib.metadata import version
from pathlib import Path
from typing import Final

from rollmuxd.daemon.clock import iso
from rollmuxd.daemon.http.routing import Call, Plain, Routes, find
from rollmuxd.wire.answers import MeView

routes = Routes("dashboard")

MEDIA: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
#: The page talks to this daemon only, runs what lies beside it and nothing more, and is put in no frame.
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS: Final = (
    ("content-security-policy", POLICY),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
)


FOLDER: Final = Path(__file__).parents[2] / "web"
#: some two hundred KB, which are never read again
FILES: Final = {
    path.relative_to(FOLDER).as_posix(): Plain(path.read_bytes(), MEDIA[path.suffix], HEADERS)
    for path in FOLDER.rglob("*")
    if path.suffix in MEDIA
}


@routes.get("/", needs=None, produces=("text/html",))
async def dashboard(call: Call) -> Plain:
    """The dashboard, for people with a browser."""
    return FILES["index.html"]


@routes.get("/web/{file:path}", needs=None, produces=("text/javascript", "text/css", "image/svg+xml"))
async def dashboard_file(call: Call, file: str) -> Plain:
    """A part of the dashboard: styles, modules, the picture in the tab."""
    return find("file", FILES, file)


@routes.get("/v1/me", problems=(503,))
async def whoami(call: Call) -> MeView:
    """The caller and its role; what this daemon is, its clock, and the last fact there is."""
    services, caller = call.services, call.caller
    now, last = await call.read(lambda core, now: (now, services.writer.durable_seq))
    return MeView(
        owner=caller.owner,
        user=caller.user,
        role=str(caller.role),
        key=caller.key,
        version=version("rollmuxd"),
        mode=services.settings.daemon.mode,
        now=iso(now),
        first=services.journal.first,
        last=last,
    )
