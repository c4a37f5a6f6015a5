"""What a process that the daemon starts inherits: what it needs, and no secret."""

import pytest

from rollmuxd.spi.environment import inherit, inherited


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AWS_SECRET_ACCESS_KEY", "s"),
        ("NVIDIA_API_KEY", "s"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "s"),
        ("HF_TOKEN", "s"),
        ("SLURM_JWT", "s"),
        ("http_proxy", "http://user:s@proxy:3128"),
        ("HTTPS_PROXY", "user:s@proxy:3128"),
    ],
)
def test_a_secret_is_not_inherited(name, value):
    assert inherited({name: value}) == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PATH", "/bin"),
        ("LC_ALL", "C"),
        ("NVIDIA_VISIBLE_DEVICES", "0"),
        ("http_proxy", "proxy:3128"),
        ("PYTHONPATH", "/lib"),
        ("HF_HOME", "/hf"),
        ("SLURM_JOB_ID", "7"),
    ],
)
def test_what_a_process_needs_is_inherited(name, value):
    assert inherited({name: value}) == {name: value}


def test_what_the_configuration_names_is_inherited_too():
    environ = {"WANDB_PROJECT": "math", "WANDB_MODE": "offline", "AWS_SECRET_ACCESS_KEY": "s"}
    inherit(["WANDB_*"])
    try:
        assert inherited(environ) == {"WANDB_PROJECT": "math", "WANDB_MODE": "offline"}
    finally:
        inherit([])
    assert inherited(environ) == {}
