"""Into an SGLang server, by its ``POST /update_weights_from_disk``: the disk is this host's memory.

So it runs on the rollout host, beside the server, where the puller's folder is.
"""

import os
from pathlib import Path

import httpx

from rollmuxd_weights.core.fence import parse
from rollmuxd_weights.store import Store


def update(
    url: str,
    path: str | os.PathLike[str],
    model: str | os.PathLike[str],
    *,
    api_key: str | None = None,
    timeout_s: float = 600.0,
) -> None:
    """Load a version (``puller.ready(step)``) into a server on this host.

    ``model``: the model's folder, for its configuration. SGLang loads from a folder, so it gets one that has this
    version in place of the model's weights.

    Raises FileNotFoundError where the version or the model is not on this host, and RuntimeError with what the server
    answers.
    """
    path = Path(path)
    identity = parse(path.name.removesuffix(".safetensors"))
    for found, what in ((path.is_file(), f"version {path}"), (Path(model).is_dir(), f"the model's folder {model}")):
        if not found:
            raise FileNotFoundError(
                f"{what} is not on this host ({os.uname().nodename}): sglang.update runs on the rollout host, beside "
                "the server, because it shows the server a folder of that host"
            )
    with Store(path.parent).shown() as folder:
        for one in Path(model).iterdir():
            if one.suffix not in (".safetensors", ".bin", ".pt", ".pth") and not one.name.endswith(".index.json"):
                (folder / one.name).symlink_to(one.resolve())
        # Not a link: the file stays readable under this name even if the version is dropped meanwhile.
        os.link(path, folder / "model.safetensors")
        body = {"model_path": str(folder), "weight_version": str(identity.version)}
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            # Not through a proxy of the environment: the server is on this host.
            with httpx.Client(headers=headers, timeout=timeout_s, trust_env=False) as server:
                answer = server.post(f"{url}/update_weights_from_disk", json=body)
            told = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise RuntimeError(f"SGLang at {url} does not answer POST /update_weights_from_disk: {error!r}") from error
        if not answer.is_success or not told.get("success"):
            raise RuntimeError(f"SGLang at {url} has not loaded {path.name}: {told.get('message', answer.text)[:300]}")
