"""``SshBackend``: hosts that are reached over SSH, many at a time, each over one kept connection."""

from collections.abc import Mapping
from typing import Any

import anyio

from rollmuxd.spi import ContactLost, Finding, HostId
from rollmuxd_backend_local.agent import AgentConnection, Reached
from rollmuxd_backend_ssh.connection import HostConnection
from rollmuxd_backend_ssh.options import SshOptions


class SshBackend(Reached[SshOptions]):
    """Hosts by SSH. Nothing is installed on them: what is asked there is sent, and goes with the connection."""

    name, kind = "ssh", SshOptions

    async def ask(self, host: HostId, question: Mapping[str, Any], limit_s: float, user: str = "") -> dict[str, Any]:
        """As the login that it is about; where it is about a launch, as each that ``users`` names."""
        users: tuple[str, ...] = (user,)
        if question["ask"] == "start":
            users, order = (question["order"]["user"],), {**question["order"], "user": ""}
            question = {**question, "order": order}
        elif question["ask"] == "kill":
            users = (question["user"],)
        elif question["ask"] in ("stop", "alive", "output"):
            users = tuple(dict.fromkeys(self._of(host).users.values())) or users
        answers = []
        for one in users:
            answers.append(await super().ask(host, question, limit_s, one))
            if question["ask"] == "output" and _tells(answers[-1]):
                break  # what one login has read holds, though another be refused
        return max(answers, key=_tells)

    async def check(self, host: HostId) -> tuple[Finding, ...]:
        """The connection, and what the host says of itself."""
        began = anyio.current_time()
        try:
            await self._line(host).connection()
        except ContactLost as error:
            return (Finding("connection", "bad", str(error)),)
        took_ms = (anyio.current_time() - began) * 1000
        found = Finding("connection", "good", f"by ssh, made in {took_ms:.0f} ms")
        return (found, *await super().check(host))

    def _line(self, host: HostId, user: str = "") -> AgentConnection:
        options = self._of(host)
        if (host, user) not in self._lines:
            self._lines[host, user] = HostConnection(host, options, user)
        return self._lines[host, user]

    def _reach_s(self, host: HostId) -> float:
        return self._of(host).connect_s


def _tells(answer: Mapping[str, Any]) -> int:
    """How much of an answer it is, beside those of other logins: that something is not known counts most."""
    said = answer.get("said")
    return 2 if "said" not in answer else bool(said["data"] if isinstance(said, dict) and "data" in said else said)
