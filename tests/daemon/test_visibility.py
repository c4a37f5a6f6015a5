"""Where the core writes a job's name down, another owner's reader finds its id."""

import re
from collections import Counter
from pathlib import Path

import pytest

from rollmuxd.core.config import Config
from rollmuxd.core.errors import UnknownThing
from rollmuxd.core.model import Job, Owner
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.core.spec import JobSpec
from rollmuxd.core.state import State
from rollmuxd.daemon.access.visibility import OwnersOfJobs, Visibility, sanitize
from rollmuxd.daemon.hosts.plugin_calls import said
from rollmuxd.policies.observe import Watch
from rollmuxd.spi import NotDone

CORE = Path(__file__).parents[2] / "rollmuxd" / "core"
#: where the names of jobs are in answers to a caller that acts on a job of its own
LEFT_OUT = {"handlers/jobs.py"}
#: how often the other files of the core have a job's name: it is the caller's own, or a key, or the sentence is below
WRITTEN = {
    "apply/jobs.py": 2,
    "handlers/orders.py": 1,
    "handlers/resize.py": 3,
    "handlers/slots.py": 3,
    "steps/move.py": 3,
    "steps/reclaim.py": 1,
    "steps/replan.py": 1,
    "steps/residual_memory.py": 1,
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
    return Visibility(Scheduler(Config(), Watch(), state), lambda owner: owner == "mine")


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


@pytest.mark.parametrize("sentence", SENTENCES)
def test_what_others_than_the_core_write_is_shown_as_it_is_whatever_jobs_there_are(sentence):
    """Else whoever writes such a sentence would be told whether there is a job of that name."""
    written = sanitize(sentence.format("secret"))
    assert " ".join(written.split()) == sentence.format("secret")
    for end in range(len(written) + 1):  # the core cuts what is long
        shown = f"revoked by ann: {written[:end]}; ended"
        for jobs in ([a_job("j7", "theirs", "secret")], [a_job("j9", "theirs", "other")]):
            assert told(*jobs).text(shown) == shown
    assert sanitize("it is lost, as ever") == "it is lost, as ever"


def test_what_a_driver_or_a_backend_says_is_its_own_words():
    """A job's options and its ranks' errors are in it."""
    assert said(NotDone("phases of x take another time")) == "phases  of x take another time"
    assert said(ValueError("job x is moving")) == "ValueError: job x is  moving"


@pytest.mark.parametrize("sentence", SENTENCES)
def test_a_refusal_that_may_quote_the_caller_tells_not_whether_there_is_a_job_of_that_name(sentence):
    asked = sentence.format("secret")
    answers = []
    for name in ("secret", "other"):
        refused = UnknownThing("job", asked)
        told(a_job("j7", "theirs", name)).refusal(refused, {"job": asked})
        answers.append((str(refused), refused.name))
    assert answers[0] == answers[1]
    own = UnknownThing("job", asked)
    told(a_job("j7", "mine", "secret"), a_job("j8", "theirs", "other")).refusal(own, {"job": asked})
    assert own.name == asked


def test_for_all_the_names_in_what_is_shown_the_jobs_are_looked_through_twice_at_most():
    """A page of a thousand jobs may have thirty names in each of its reasons."""
    looked = 0

    class Jobs(dict):
        def values(self):
            nonlocal looked
            looked += 1
            return super().values()

    jobs = [a_job(f"j{number}", "theirs", f"n{number}") for number in range(5)]
    view = Visibility(
        Scheduler(Config(), Watch(), State(jobs=Jobs({job.id: job for job in jobs}))), lambda owner: False
    )
    looked = 0
    for number in range(100):
        view.text("phases of n1 take another time " * 30 + str(number))
    assert looked <= 2


def test_a_job_of_anothers_is_not_named_either_when_it_is_forgotten_and_no_other_is_there():
    sentence = "h1/gpu0 not seen clear after secret-run released them"
    state = State(jobs={"j1": a_job("j1", "mine", "math")}, owners={"mine": Owner()})
    core = Scheduler(Config(), Watch(), state)
    alone = Visibility(core, lambda owner: owner == "mine").text(sentence)
    state.owners["theirs"] = Owner()
    beside = Visibility(core, lambda owner: owner == "mine").text(sentence)
    assert (alone, beside) == (sentence, "h1/gpu0 not seen clear after another owner's released them")
    assert Visibility(core, lambda owner: True).text(sentence) == sentence


def test_no_further_place_of_the_core_writes_the_name_of_a_job():
    """One that does, of a job that need not be the reader's own, needs its sentence here and its place in ``told``."""
    found = Counter(
        {
            name: len(re.findall(r"\bspec\.name\b", path.read_text()))
            for path in CORE.rglob("*.py")
            if (name := str(path.relative_to(CORE))) not in LEFT_OUT
        }
    )
    assert +found == WRITTEN


def test_whose_jobs_there_are_is_looked_for_only_when_one_has_come_or_gone():
    walks = []

    class Jobs(dict):
        def values(self):
            walks.append(len(self))
            return super().values()

    jobs = Jobs({f"j{number}": a_job(f"j{number}", "mine", f"n{number}") for number in range(1_000)})
    core, owners = Scheduler(Config(), Watch(), State(jobs=jobs)), OwnersOfJobs()
    walks.clear()

    def hides():
        return Visibility(core, lambda owner: owner == "mine", owners=owners).hides

    assert [hides() for _ in range(10)] == [False] * 10
    assert walks == [1_000]
    jobs["j1000"] = a_job("j1000", "theirs", "secret")
    assert hides()
    del jobs["j1000"]
    assert not hides()
    jobs["j1001"] = a_job("j1001", "theirs", "secret")
    del jobs["j0"]  # as many as before
    assert hides()
    again = {name: a_job(name, "mine", name) for name in jobs}  # as after a failed commit
    core = Scheduler(Config(), Watch(), State(jobs=again))
    assert not hides()
    again["j1002"], again["j1003"] = a_job("j1002", "theirs", "secret"), a_job("j1003", "mine", "own")
    assert hides()
    del again["j1002"]
    assert not hides()
