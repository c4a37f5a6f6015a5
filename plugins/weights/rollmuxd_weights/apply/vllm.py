"""Into a vLLM server, by its own weight-transfer interface: ``--weight-transfer-config '{"backend": "rollmux"}'``.

vLLM finds :func:`register` by its entry point ``vllm.general_plugins``, and each worker then has an engine that loads
from the mapping (:mod:`rollmuxd_weights.apply.vllm_engine`). vLLM itself maps names to its fused layers, as for every
checkpoint. The calls need ``VLLM_SERVER_DEV_MODE=1``, and are vLLM's: any caller that reaches them may change the
weights.
"""

import contextlib
import os
from pathlib import Path
from typing import Any

import httpx

from rollmuxd_weights.core.fence import parse

BACKEND = "rollmux"


def register() -> None:
    """Make the backend known to this process's vLLM. An older vLLM has no such interface, and gets nothing."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:
        return
    # vLLM calls its plugins once in each process; in a process of tests they may be called twice.
    if BACKEND not in WeightTransferEngineFactory._registry:  # noqa: SLF001
        WeightTransferEngineFactory.register_engine(BACKEND, "rollmuxd_weights.apply.vllm_engine", "RollmuxEngine")


def update(
    url: str, path: str | os.PathLike[str], *, mode: str = "wait", api_key: str | None = None, timeout_s: float = 600.0
) -> None:
    """Load a version (``puller.ready(step)``) into a server on this host. Its requests wait meanwhile; none is lost.

    ``mode``: what becomes of requests under way, as vLLM says: ``wait`` (they end first), ``keep``, ``abort``. The
    server's ``/weight_info`` says the step afterwards.

    Raises RuntimeError with what the server answers. If it failed while weights were written, the server may hold a
    mixture, so it stays paused: update it again, or start it again.
    """
    path = Path(path)
    identity = parse(path.name.removesuffix(".safetensors"))
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    # A proxy of the environment is for the world outside; the engine is on this host, or on one of the job's.
    with httpx.Client(base_url=url, timeout=timeout_s, headers=headers, trust_env=False) as server:

        def call(what: str, body: Any = None, **params: str) -> None:
            try:
                answer = server.post(what, json=body, params=params)
            except httpx.HTTPError as error:
                raise RuntimeError(f"vLLM at {url} does not answer POST {what}: {error!r}.") from error
            if answer.status_code == 404:
                raise RuntimeError(f"vLLM at {url} has no {what}: start it with VLLM_SERVER_DEV_MODE=1")
            if not answer.is_success:
                raise RuntimeError(
                    f"vLLM at {url} answers {answer.status_code} to POST {what}: {answer.text[:300]} (it is to be "
                    f'started with --weight-transfer-config \'{{"backend": "{BACKEND}"}}\').'
                )

        call("/pause", mode=mode)
        try:
            call("/init_weight_transfer_engine", {"init_info": {"folder": str(path.parent)}})
        except BaseException:
            with contextlib.suppress(RuntimeError):  # what failed first is what to mend
                call("/resume")
            raise
        try:
            call("/start_weight_update")
            call("/update_weights", {"update_info": {"id": str(identity)}})
            call("/finish_weight_update", {"weight_version": str(identity.version)})
        except RuntimeError as error:
            raise RuntimeError(
                f"{error} The server may hold a mixture of two versions, so it stays paused: update it again, or start "
                "it again"
            ) from error
        call("/resume")
