"""Where the core writes a job's name down, another owner's reader finds its id."""

import re
from collections import Counter
from pathlib import Path

import pytest

from rollmuxd.core.config import Config
from rollmuxd.core.model import Job, JobSpec
from rollmuxd.core.observe import Watch
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.core.state import State
from rollmuxd.daemon.told import Told

CORE = Path(__file__).parents[2] / "rollmuxd" / "core"
#: asked of a state in which the names of others' jobs are their ids, and written nowhere; and answers to who acts on a
#: job of his own
LEFT_OUT = {"explain.py", "wishes.py", "placement.py", "loom.py", "lives.py"}
#: how often the other files of the core have a job's name: it is the caller's own, or a key, or the sentence is below
WRITTEN = {
    "drift.py": 1,
    "growing.py": 3,
    "fold/jobs.py": 2,
    "left_overs.py": 1,
    "letting_go.py": 1,
    "moving.py": 3,
    "orders.py": 1,
    "requests.py": 3,
}
SENTENCES = [
    "h1/gpu0, h1/gpu1 not seen clear after {} released them",
    "h1/gpu0 not seen clear after {} moved away; not clear within 60 s: h1/gpu0 has 3 GB, of which 2 GB would be clear",
    "h1/gpu0 not seen clear after {} was to park",
    "slot s1 cannot grow: h1/gpu1 has not been seen clear of {}; it goes on on h1/gpu0",
    "h1/gpu1 has not been seen clear of {}",
    "phases of {} take another time than was planned",
    "its move was abandoned: job {} has joined its group meanwhile",
    "job {} is moving",
    "its train state left 3 GB on h1/gpu0 ... (leftover_gb), and {} needs 70.5 GB of the GPU's 96 GB",
    "... (leftover_gb), and whether {} fits beside that is not known (gpu_gb)",
]


def told(*jobs):
    state = State(jobs={job.id: job for job in jobs})
    return Told(Scheduler(Config(), Watch(), state), lambda job: job.owner == "mine")


def a_job(id, owner, name):
    return Job(id, owner, "ann", JobSpec(name, (), ()), 0)


@pytest.mark.parametrize("sentence", SENTENCES)
@pytest.mark.parametrize("name", ["secret", "a.b-c_1", "job", "GPU"])
def test_in_each_sentence_that_is_written_down_a_foreign_job_is_its_id_and_ones_own_its_name(sentence, name):
    said = sentence.format(name)
    foreign, own = a_job("j7", "theirs", name), a_job("j8", "mine", name)
    assert told(foreign).text(said) == sentence.format("j7")
    assert told(own).text(said) == said
    assert told(own, a_job("j9", "theirs", "other")).text(said) == said
    # of two it is not known which is meant, and of none any more
    for jobs in ([foreign, a_job("j9", "theirs", name)], [a_job("j9", "theirs", "other")]):
        assert told(*jobs).text(said) == sentence.format("another owner's")


def test_a_name_that_both_have_tells_nothing():
    said = "phases of math take another time than was planned"
    assert told(a_job("j1", "theirs", "math"), a_job("j2", "mine", "math")).text(said) == said


def test_no_further_place_of_the_core_writes_the_name_of_a_job():
    """One that does, of a job that need not be the reader's own, needs its sentence here and its place in ``told``."""
    found = Counter(
        {
            str(path.relative_to(CORE)): len(re.findall(r"\bspec\.name\b", path.read_text()))
            for path in CORE.rglob("*.py")
            if path.name not in LEFT_OUT
        }
    )
    assert +found == WRITTEN
