"""The measuring script counts what it says."""

import importlib.util
import json
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("measure.py")
spec = importlib.util.spec_from_file_location("measure", PROGRAM)
measure = importlib.util.module_from_spec(spec)
spec.loader.exec_module(measure)


def test_a_folder_counts_its_sub_folders_and_no_tests(tmp_path):
    core = tmp_path / "rollmuxd" / "core"
    (core / "steps").mkdir(parents=True)
    (core / "__init__.py").write_text('"""Core."""\n')
    (core / "clean.py").write_text("def is_clean(gpu):\n    return gpu and (gpu.seen or gpu.new)\n")
    (core / "steps" / "dispatch.py").write_text("def dispatch():\n" + "    pass\n" * 60)
    tests = tmp_path / "plugins" / "channel" / "tests"
    tests.mkdir(parents=True)
    (tests / "test_channel.py").write_text("x = 1\n")

    found = measure.measure(tmp_path)

    (tmp_path / "rollmuxd" / "fabric").mkdir()
    (tmp_path / "rollmuxd" / "fabric" / "cost.py").write_text("x = 1\n" * 7)
    (tmp_path / "rollmuxd" / "sim").mkdir()
    (tmp_path / "rollmuxd" / "sim" / "validate.py").write_text("x = 1\n" * 3)
    later = measure.measure(tmp_path)
    assert (later["product_lines"], later["product_lines_without_later"]) == (74, 64)

    totals = {"product_lines", "product_lines_without_later", "reading_path_lines"}
    assert set(found) == {"rollmuxd", "rollmuxd/core", "rollmuxd/core/steps"} | totals
    assert found["product_lines"] == found["product_lines_without_later"] == 64
    assert found["rollmuxd/core"] == {
        "lines": 64, "files": 3, "files_here": 2, "branches_p90": 3, "functions_over_60": 1,
    }  # fmt: skip
    assert found["rollmuxd/core/steps"]["functions_over_60"] == 1
    assert found["reading_path_lines"] == 1 + 2 + 61


def test_each_folder_and_module_that_came_later_is_there():
    assert [name for name in measure.LATER if not (measure.REPOSITORY / name).exists()] == []


def test_this_repository_is_measured_as_one_json_object(monkeypatch, capsys):
    monkeypatch.setattr(measure, "PRODUCT", ("rollmuxd/core", "rollmuxd/fabric"))  # all of it takes seconds
    monkeypatch.setattr(sys, "argv", ["measure.py", "--json"])
    assert measure.main() == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rollmuxd/core"]["lines"] > 1_000
    assert found["rollmuxd"]["files"] > found["rollmuxd/core"]["files"]
    assert found["reading_path_lines"] > 0
