"""What the core writes down names jobs by id, and its sentence has the names that this reader may see."""

import ast
import re
from collections import Counter
from pathlib import Path
from string import Formatter

import pytest

from rollmuxd.core.causes import Cause, said
from rollmuxd.core.config import Config
from rollmuxd.core.model import Job
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.core.spec import JobSpec
from rollmuxd.core.state import State
from rollmuxd.daemon.access.gate import Caller
from rollmuxd.daemon.access.keys import Role
from rollmuxd.daemon.access.visibility import Visibility
from rollmuxd.explain.causes import SENTENCES
from rollmuxd.policies.observe import Watch

CORE = Path(__file__).parents[2] / "rollmuxd" / "core"
#: where the names of jobs are in answers to a caller that acts on a job of its own
LEFT_OUT = {"handlers/jobs.py"}
#: how often the other files of the core have a job's name: it is the caller's own, or a key, or said only now
WRITTEN = {"apply/jobs.py": 2, "handlers/slots.py": 2, "steps/move.py": 1}


def told(*jobs):
    state = State(jobs={job.id: job for job in jobs})
    return Visibility(Scheduler(Config(), Watch(), state), Caller("mine", "ann", Role.USER, "mine/ann"))


def a_job(id, owner, name):
    return Job(id, owner, "ann", JobSpec(name, (), ()), 0)


#: causes whose sentences name a job
NAMING = [code for code, sentence in SENTENCES.items() if "{job}" in sentence]


def test_no_cause_knows_a_name_and_each_sentence_has_its_parts():
    """Whatever the core writes down has ids: a name is put in for each reader."""
    parts = {code: {part for _, part, _, _ in Formatter().parse(text) if part} for code, text in SENTENCES.items()}
    assert NAMING
    for path in CORE.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(call, ast.Call) and getattr(call.func, "id", "") == "Cause"):
                continue
            codes = [it.value for it in ast.walk(call.args[0]) if isinstance(it, ast.Constant)]
            assert all(code in SENTENCES for code in codes if isinstance(code, str)), f"{path.name}:{call.lineno}"
            data = call.args[1] if len(call.args) > 1 else ast.Dict([], [])
            if codes and isinstance(data, ast.Dict) and all(data.keys):
                given = {key.value for key in data.keys}
                assert given == parts[codes[0]] - {"cause"}, f"{path.name}:{call.lineno}"


@pytest.mark.parametrize("code", NAMING)
def test_a_foreign_job_is_its_id_and_ones_own_its_name(code):
    parts = dict.fromkeys(("kind", "gpu", "node", "status", "phase", "phases"), "x")
    parts |= {"needed_gb": 1, "gpu_gb": 2, "job": "j7"}
    cause = Cause("move_abandoned", cause=Cause(code, parts))
    for owner, name in (("theirs", "j7"), ("mine", "secret")):
        said = told(a_job("j7", owner, "secret")).sentence(cause)
        assert name in said.replace(",", " ").split()
        assert ("secret" in said) is (owner == "mine")
    assert "j7" in told().sentence(cause), "it is forgotten"


def test_what_people_wrote_is_shown_as_it_is_whatever_jobs_there_are():
    """Else whoever writes such a sentence would be told whether there is a job of that name."""
    for text in ("job secret is moving", "{job} {0} {text}", ""):
        for jobs in ([a_job("j7", "theirs", "secret")], []):
            assert told(*jobs).sentence(said(text)) == text


def test_no_further_place_of_the_core_writes_the_name_of_a_job():
    """What is written down has ids: see :mod:`rollmuxd.core.causes`."""
    found = Counter(
        {
            name: len(re.findall(r"\bspec\.name\b", path.read_text()))
            for path in CORE.rglob("*.py")
            if (name := str(path.relative_to(CORE))) not in LEFT_OUT
        }
    )
    assert +found == WRITTEN
