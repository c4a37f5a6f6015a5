"""A short fuzzing in the default tests (the long one: ``make -s fuzz``); and the fuzzers, seeing what is wrong."""

import importlib.util
import sys
from pathlib import Path

import pytest

START = 20261121


def loaded(name):
    """A fuzzer; tests are no packages."""
    known = f"rollmuxd_tests_fuzz_{name}"
    if known not in sys.modules:
        spec = importlib.util.spec_from_file_location(known, Path(__file__).with_name(f"{name}.py"))
        sys.modules[known] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[known]


@pytest.mark.e2e
@pytest.mark.slow
def test_whatever_is_called_the_daemon_answers_below_500_and_is_well_afterwards():
    found = loaded("live").fuzz(4, START, least=50)
    assert found.findings == []
    assert found.server_errors == 0
    assert found.answers[200] > 5, "nothing got through to a handler"
    assert found.cases > 50


def test_whatever_comes_over_the_wire_is_decoded_or_refused_in_words():
    found = loaded("offline").fuzz_wire(1, START)
    assert found.findings == []
    assert found.answers["decoded"] > 5


def test_whatever_is_in_the_configuration_is_loaded_or_answered_with_file_and_key():
    found = loaded("offline").fuzz_settings(1, START, least=30)
    assert found.findings == []
    assert min(found.answers["loaded"], found.answers["refused"]) > 2


@pytest.mark.e2e
def test_a_damaged_journal_gives_what_was_written_or_an_error():
    found = loaded("offline").fuzz_journal(1, START, least=20)
    assert found.findings == []
    assert min(found.answers["read"], found.answers["refused"]) > 0


# ---- the fuzzers see what is wrong -----------------------------------------------------------------------------------


def test_a_decoder_that_crashes_is_found(monkeypatch):
    offline = loaded("offline")
    monkeypatch.setattr(offline.routing, "_decode_body", lambda *_, **__: {}["crash"])
    assert "KeyError" in offline.fuzz_wire(0.1, START).findings[0]


def test_a_traceback_of_the_configuration_is_found(monkeypatch):
    offline = loaded("offline")
    monkeypatch.setattr(offline, "load_settings", lambda file: {}["crash"])
    assert "KeyError" in offline.fuzz_settings(0.1, START).findings[0]


def test_an_answer_without_file_and_key_is_found(monkeypatch):
    offline = loaded("offline")

    def load(file):
        raise offline.BadSettings(["something is wrong"])

    monkeypatch.setattr(offline, "load_settings", load)
    assert "neither file nor variable is named" in offline.fuzz_settings(0.1, START).findings[0]


@pytest.mark.e2e
def test_a_journal_that_makes_something_up_is_found(monkeypatch):
    offline = loaded("offline")

    async def read_back(folder):
        return [(2, offline.f.LoopStalled(0, 1))]

    monkeypatch.setattr(offline, "_read_back", read_back)
    assert "gave" in offline.fuzz_journal(0.1, START).findings[0]
