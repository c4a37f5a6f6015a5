"""What a process that the daemon starts has of the daemon's own: few variables, and not its place when memory is short.

A daemon may have secrets in its environment (of a cloud, of a collector of spans), and ``OOMScoreAdjust`` in its unit.
Neither is for jobs, engines and commands.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

#: the variables that are handed on, as patterns: by them a process finds programs, files, the network and GPUs
INHERITED: Final = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "LC_*", "TZ", "TMPDIR", "XDG_*"),
    *("LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "TORCH_HOME"),  # not HF_*: HF_TOKEN is a secret
    *("CUDA_*", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_*"),
    *("NCCL_*", "UCX_*", "FI_*", "GLOO_*", "OMP_*"),
    *("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
    # not SLURM_*: SLURM_JWT is a secret, and SLURM_PROCID is the daemon's own
    *("SLURM_CONF", "SLURM_CLUSTER_NAME", "SLURM_JOB_*", "SLURM_JOBID", "SLURM_NODELIST", "SLURM_NNODES"),
)
#: what the configuration names besides (``daemon.inherit``)
_also: list[str] = []
_SCORE: Final = Path("/proc/self/oom_score_adj")
#: for ``sh -c``: takes the score of any process, and becomes the command that follows
_RESET: Final = 'echo 0 2>/dev/null >/proc/self/oom_score_adj; exec "$@"'


def inherit(patterns: Sequence[str]) -> None:
    """Hand these variables on, too, from now on."""
    _also[:] = patterns


def patterns() -> tuple[str, ...]:
    """All variables that are handed on."""
    return (*INHERITED, *_also)


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """Of an environment, what a process of a job may have. No URL with a password is."""
    return {
        name: value
        for name, value in environ.items()
        if any(fnmatchcase(name, pattern) for pattern in patterns())
        and not ("@" in value and ("://" in value or name.lower().endswith("_proxy")))
    }


def with_score_reset(argv: Sequence[str]) -> tuple[str, ...]:
    """The command, so that it begins with an OOM score of 0, whatever this process has."""
    try:
        is_reset = int(_SCORE.read_text()) == 0
    except (OSError, ValueError):
        is_reset = True
    return tuple(argv) if is_reset else ("sh", "-c", _RESET, "sh", *argv)
