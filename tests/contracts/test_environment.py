"""What a process that the daemon starts inherits: what it needs, and no secret."""

import pytest

from rollmuxd.spi.environment import inherited


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AWS_SECRET_ACCESS_KEY", "s"),
        ("NVIDIA_API_KEY", "s"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "s"),
        ("http_proxy", "http://user:s@proxy:3128"),
        ("HTTPS_PROXY", "user:s@proxy:3128"),
    ],
)
def test_a_secret_is_not_inherited(name, value):
    assert inherited({name: value}) == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [("PATH", "/bin"), ("LC_ALL", "C"), ("NVIDIA_VISIBLE_DEVICES", "0"), ("http_proxy", "proxy:3128")],
)
def test_what_a_process_needs_is_inherited(name, value):
    assert inherited({name: value}) == {name: value}
