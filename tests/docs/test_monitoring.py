"""What is put beside Prometheus and Grafana speaks of figures that the daemon has, in words that they understand."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rollmuxd.core.model import Job, JobStatus, Progress
from rollmuxd.core.spec import JobSpec, PhaseSpec, Want
from rollmuxd.core.state import State
from rollmuxd.daemon.metrics import Metrics, gauges

FOLDER = Path(__file__).parents[2] / "docs" / "monitoring"
NAME = re.compile(r"\brollmux_[a-z_]+")


def exposed(state=None, *, may_read=lambda job: True, now=0, journal=None):
    text = Metrics().expose(gauges(state or State(), now, may_read, journal), "text/plain")[0].decode()
    return {family.name: family for family in text_string_to_metric_families(text)}, text


def names(tmp_path):
    """All series names there are, those without a sample too."""
    (tmp_path / "journal.sqlite3").touch()
    families, _ = exposed(journal=tmp_path / "journal.sqlite3")
    found = set()
    for family in families.values():
        ends = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
        found |= {f"{family.name}{end}" for end in ends}
    return found


def expressions():
    rules = re.findall(r"^\s+expr: (.+)$", (FOLDER / "alerts.yaml").read_text(), re.MULTILINE)
    board = json.loads((FOLDER / "grafana.json").read_text())
    drawn = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    assert len(rules) > 8
    assert len(drawn) > 15
    return rules + drawn


def test_every_alert_and_every_panel_asks_for_series_that_there_are(tmp_path):
    there = names(tmp_path)
    for expression in expressions():
        asked = set(NAME.findall(expression))
        assert asked or "up{" in expression, expression
        assert asked <= there, f"{asked - there} in {expression}"


def test_the_dashboard_is_one_that_grafana_takes():
    board = json.loads((FOLDER / "grafana.json").read_text())
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    assert {"title", "uid", "schemaVersion", "templating", "panels"} <= board.keys()
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}"


promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="no promtool here: it comes with prometheus")


@promtool
def test_the_rules_are_right_and_made_up_series_raise_the_alerts_that_they_should():
    for words in (["check", "rules", "alerts.yaml"], ["test", "rules", "alerts_test.yaml"]):
        ran = subprocess.run(["promtool", *words], cwd=FOLDER, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout + ran.stderr


@promtool
def test_prometheus_finds_nothing_to_say_about_our_names(tmp_path):
    (tmp_path / "journal.sqlite3").touch()
    _, text = exposed(promises(3), journal=tmp_path / "journal.sqlite3")
    ran = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout + ran.stderr) == (0, "")


def test_without_promtool_the_rules_are_read_at_least():
    yaml = pytest.importorskip("yaml", reason="no YAML parser here")
    rules = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"][0]["rules"]
    for rule in rules:
        assert {"alert", "expr", "labels", "annotations"} <= rule.keys()
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert "rollmuxd" in rule["annotations"]["description"] or rule["alert"] in (
            "RollmuxDown",
            "RollmuxParkedRamScarce",
        )


# ---- figures that are new here ---------------------------------------------------------------------------------------


def promises(count):
    """Jobs with a promise of 2: the first has a slowdown of 2.5 and is behind, each next one is a bit better off."""
    state = State()
    for number in range(count):
        spec = JobSpec(
            name=f"job-{number}",
            phases=(PhaseSpec("rollout", ("rollout",)),),
            wants=(Want("rollout"),),
            slo=2.0,
        )
        state.jobs[f"j{number}"] = Job(
            id=f"j{number}",
            owner="vision" if number % 2 else "nlp",
            user="ada",
            spec=spec,
            registered_at=0,
            status=JobStatus.ADMITTED,
            promised=True,
            progress=Progress(finished=10, solo_ms=100_000, elapsed_ms=250_000 - 10 * number),
        )
    return state


def samples(families, name):
    return {tuple(sorted(sample.labels.items())): sample.value for sample in families[name].samples}


def test_jobs_have_series_of_their_own_only_the_hundred_that_are_worst_off():
    families, _ = exposed(promises(250))
    credit = samples(families, "rollmux_job_credit_seconds")
    assert len(credit) == 100
    assert credit[("job", "job-0"), ("owner", "nlp")] == -50.0
    assert (("job", "job-249"), ("owner", "vision")) not in credit
    assert samples(families, "rollmux_job_slowdown_ratio")[("job", "job-0"), ("owner", "nlp")] == 2.5
    assert samples(families, "rollmux_jobs_behind_bound")[(("owner", "nlp"),)] == 125


def test_names_of_jobs_are_told_to_whom_the_jobs_are_shown():
    families, text = exposed(promises(4), may_read=lambda job: job.owner == "vision")
    assert {dict(labels)["owner"] for labels in samples(families, "rollmux_job_credit_seconds")} == {"vision"}
    assert "job-0" not in text
    # How many there are is no secret, whose they are neither.
    assert samples(families, "rollmux_jobs_behind_bound")[(("owner", "nlp"),)] == 2


def test_a_promise_is_judged_from_the_eighth_iteration_on():
    state = promises(1)
    state.jobs["j0"].progress.finished = 7
    families, _ = exposed(state)
    assert samples(families, "rollmux_job_credit_seconds") == {}


def test_the_longest_waits_are_told_by_owner():
    state = promises(2)
    state.jobs["j1"].status = JobStatus.WAITING
    state.jobs["j1"].registered_at = 1_000
    families, _ = exposed(state, now=61_000)
    assert samples(families, "rollmux_placement_wait_longest_seconds")[(("owner", "vision"),)] == 60.0


def test_where_the_journals_disk_cannot_be_asked_the_other_figures_are_told_all_the_same(tmp_path):
    families, _ = exposed(journal=tmp_path / "gone" / "journal.sqlite3")
    assert "rollmux_journal_bytes" not in families
    assert "rollmux_nodes" in families
