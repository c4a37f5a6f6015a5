"""What ``import rollmuxd`` promises: light, complete, sorted."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import rollmuxd

ROOT = Path(__file__).parents[2]


def modules_after(statement):
    code = f"{statement}\nimport sys, json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(json.loads(done.stdout))


def test_names_are_sorted_and_all_there():
    assert rollmuxd.__all__ == sorted(rollmuxd.__all__)
    for name in rollmuxd.__all__:
        assert getattr(rollmuxd, name) is not None
    assert set(rollmuxd.__all__) <= set(dir(rollmuxd))


def test_a_name_that_is_not_there_is_an_attribute_error():
    assert not hasattr(rollmuxd, "jbo")


def test_the_version_is_the_one_of_the_project():
    assert rollmuxd.__version__ == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_importing_the_client_imports_no_http_stack_and_no_event_loop():
    loaded = modules_after("import rollmuxd; rollmuxd.job, rollmuxd.SlotLost")

    assert "msgspec" in loaded
    for heavy in ("httpx", "asyncio", "http.client", "ssl", "subprocess", "rich", "click", "anyio"):
        assert heavy not in loaded


def test_of_ours_only_the_client_and_the_wire():
    loaded = modules_after("import rollmuxd.client.transport, rollmuxd.client.aio, rollmuxd; rollmuxd.job")

    assert {name.split(".")[1] for name in loaded if name.startswith("rollmuxd.")} == {"client", "wire"}


def test_the_first_call_imports_no_command_line_of_its_http_stack_where_what_that_needs_is_installed():
    """Half of what httpx takes to import, in each trainer and command."""
    loaded = modules_after("import rollmuxd.client.transport")

    assert "httpx" in loaded
    assert {"httpx._main", "rich", "click", "pygments"} & loaded == set()


def test_a_type_checker_sees_the_names_too():
    source = (ROOT / "rollmuxd/__init__.py").read_text()
    checked = source[source.index("if TYPE_CHECKING") : source.index("__all__")]
    for name in rollmuxd.__all__:
        assert name in checked or name == "__version__"


def test_httpx_is_imported_in_one_module():
    texts = {path.name: path.read_text() for path in (ROOT / "rollmuxd").glob("client/*.py")}
    texts["testing.py"] = (ROOT / "rollmuxd/testing.py").read_text()

    assert [name for name, text in texts.items() if "import httpx" in text] == ["transport.py"]
