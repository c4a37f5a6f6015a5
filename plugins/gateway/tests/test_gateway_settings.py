"""``gateway.toml``: the sample of the docs is one, and what cannot be is refused with what would do."""

import re
import tomllib
from pathlib import Path

import pytest

from rollmuxd.cli.common import Failed
from rollmuxd_gateway.command import demo, run
from rollmuxd_gateway.settings import Settings, Wrong, load, read

HOW_TO = Path(__file__).parents[3] / "docs" / "how-to" / "gateway.md"


def test_the_sample_of_the_how_to_has_every_key_with_its_default():
    block = next(text for text in re.findall(r"```toml\n(.*?)```", HOW_TO.read_text(), re.DOTALL) if "listen" in text)
    told = tomllib.loads(block)
    settings = read(told)
    assert set(told) | {"keys", "job", "estimate", "rebalance", "rungs"} == set(Settings.__struct_fields__)
    for name in set(told) - {"replica", "requests_per_rollout", "allow_hosts"}:
        assert getattr(settings, name) == getattr(Settings(), name), name


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"lisen": "x"}, "did you mean listen"),
        ({"replica": [{"url": "http://127.0.0.1:1", "gpu": []}]}, "did you mean replica.gpus"),
        ({"keys": {"date": "x"}}, "did you mean keys.data"),
        ({"listen": "0.0.0.0:8400"}, "name files in [keys]"),
        ({"listen": "8400"}, "it needs HOST:PORT"),
        ({"allow_hosts": ["10.0.0.0/99"]}, "it needs networks"),
        ({"replica": [{"url": "http://10.0.0.5:8000"}]}, "not in allow_hosts"),
        ({"replica": [{"url": "http://127.0.0.1:8000/v1"}]}, "has a path"),
        ({"replica": [{"url": "ftp://127.0.0.1"}]}, "no address of an engine"),
        ({"replica": [{"url": "http://127.0.0.1:1"}] * 2}, "name each engine once"),
        ({"estimate": {"gpus": "h100"}}, "did you mean estimate.gpu"),
        ({"rungs": {"planer": "lengths"}}, "did you mean rungs.planner"),
        ({"rungs": {}, "replica": [{"url": "http://127.0.0.1:8000"}]}, "needs the gpus of each"),
        ({"link": "own"}, "name it in [job]"),
        ({"stall_s": "soon"}, "stall_s is 'soon': expected `float`"),
        ({"attempts": 0}, "attempts is 0: expected `int` >= 1"),
        ({"tail": "relese"}, 'tail is \'relese\': it is "release" or "keep"'),
        ({"dialects": ["opnai"]}, 'dialects[0] is \'opnai\': it is "openai" or "vllm" or "sglang"'),
        (
            {"replica": [{"url": "http://127.0.0.1:1", "engine": "vlm"}]},
            "replica[0].engine is 'vlm': it is \"vllm\" or",
        ),
        ({"replica": [{"url": "http://127.0.0.1:1", "park": {"levl": 1}}]}, "did you mean replica.park.level"),
        ({"rungs": {"planner": "length"}}, 'rungs.planner is \'length\': it is "lengths" or "preemptions"'),
        ({"rebalance": {"per_s": 0}}, "rebalance.per_s is 0: expected `float` > 0"),
        ({"replica": [{"engine": "vllm"}]}, "replica[0]: object missing required field `url`"),
        (
            {"replica": [{"url": "http://127.0.0.1:1", "tp": 4, "gpus": ["a", "b"]}]},
            "[[replica]] http://127.0.0.1:1 has tp = 4 and 2 gpus (a, b): name each GPU of the engine, or lower tp",
        ),
        ({"replica": {"url": "http://127.0.0.1:1"}}, "write [[replica]], in two brackets"),
        ({"allow_hosts": ["10.0.0"]}, "it needs networks"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_with_what_would_do(told, says):
    with pytest.raises(Wrong, match=re.escape(says)):
        read(told)


def test_a_file_and_the_environment(tmp_path):
    file = tmp_path / "gateway.toml"
    file.write_text('stall_s = 5\nattempts = 3\n[[replica]]\nurl = "http://127.0.0.1:8000"\n')
    settings = load(file, {"ROLLMUX_GATEWAY_STALL_S": "7", "ROLLMUX_GATEWAY_TAIL": "keep", "HOME": "/"})
    assert (settings.stall_s, settings.attempts, settings.tail) == (7, 3, "keep")
    with pytest.raises(Wrong, match="cannot be read"):
        load(tmp_path / "missing.toml", {})


def test_what_cannot_be_is_said_with_the_file_or_the_variable_that_has_it(tmp_path):
    file = tmp_path / "gateway.toml"
    file.write_text('tail = "relese"\n')
    with pytest.raises(Wrong, match=rf"^{file}: tail is 'relese'"):
        load(file, {})
    with pytest.raises(Wrong, match=r"^environment: ROLLMUX_GATEWAY_STAL_S: stal_s is no setting"):
        load(None, {"ROLLMUX_GATEWAY_STAL_S": "7"})


def test_a_file_of_keys_that_is_missing_is_said_in_a_line(tmp_path):
    file = tmp_path / "gateway.toml"
    file.write_text(f'[keys]\ndata = "{tmp_path}/missing"\n')
    with pytest.raises(Failed, match="missing cannot be read"):
        run.callback(file, None, ())


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ('link = "own"\n[job]\nname = "a b"\n', r"\[job\]: the job's name is 'a b'"),
        ('link = "own"\n[job]\nname = "a"\nslow = 2\n', r"\[job\]: .*did you mean slo=?"),
        ('[estimate]\ngpu = "h1000"\n[rebalance]\n', r"\[estimate\]: .*known are h20"),
    ],
)
def test_a_job_or_an_estimate_that_cannot_be_is_said_in_a_line(tmp_path, told, says):
    file = tmp_path / "gateway.toml"
    file.write_text(told)
    with pytest.raises(Failed, match=says):
        run.callback(file, None, ())


@pytest.mark.parametrize("where", ["html", "keep"])
def test_a_demo_that_cannot_write_its_files_does_not_begin(where):
    asked = {"as_json": False, "link": "loop", "iterations": 2, "requests": 8, "html": None, "keep": None}
    with pytest.raises(Failed, match=r"/dev/null/there"):
        demo.callback(**asked | {where: Path("/dev/null/there")})
