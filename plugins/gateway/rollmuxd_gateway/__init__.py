"""The rollout gateway: in front of a job's engines, it moves responses between them token by token.

:func:`attach` joins it to the slot of a phase, :func:`hooks` lets it move the engines' memory for the job. To read the
code, begin with ``app``, then ``core``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollmuxd.client.job import Job, Slot
    from rollmuxd_gateway.link.loop import Attached

__all__ = ["attach", "hooks"]


def attach(slot: Slot, url: str, *, total: int = 0, key: str = "") -> Attached:
    """Join the gateway at ``url`` to a slot, for the time of a ``with`` block inside the phase.

    Progress goes to the daemon. Where the daemon asks to shrink, the tail is gathered, and GPUs are given back as their
    replicas are parked. ``total`` says how many responses the rollout has; without it the gateway uses its
    configuration, or the rollouts before. ``key`` is one for control, where the gateway asks for keys.

    Raises httpx.HTTPError where the gateway does not answer at the beginning.
    """
    from rollmuxd_gateway.link.loop import Attached

    return Attached(slot, url, total=total, key=key)


def hooks(job: Job, url: str, *, pool: str = "rollout", key: str = "") -> None:
    """Let the gateway wake and park the job's engines, as the job's hooks (driver ``channel``) of a pool.

    A load wakes the engines that lie within the order's GPUs, a park puts all to sleep.
    """
    import httpx

    from rollmuxd_gateway.link.loop import no_gateway

    headers = {"Authorization": f"Bearer {key}"} if key else {}

    def call(path: str, body: dict[str, Any]) -> None:
        try:
            answer = httpx.post(f"{url.rstrip('/')}{path}", json=body, headers=headers, timeout=600)
        except httpx.TransportError as error:
            raise RuntimeError(no_gateway(url, error)) from error
        if answer.status_code != httpx.codes.OK:
            raise RuntimeError(f"the gateway at {url} answered {path} with {answer.status_code}: {answer.text[:500]}")

    job.on_load(lambda order: call("/rollmux/wake", {"gpus": list(order.gpus)}), pool=pool)
    job.on_park(lambda _: call("/rollmux/park", {}), pool=pool)
    job.on_discard(lambda _: call("/rollmux/park", {}), pool=pool)
