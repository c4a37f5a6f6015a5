"""Every noun prints what the daemon answers: as a table for people, as it came for programs."""

import csv
import json
from datetime import UTC, datetime
from urllib.parse import unquote

import pytest
from rich.console import Console

from rollmuxd.cli import common
from rollmuxd.cli.report import hours
from rollmuxd.client.errors import NoDaemon, Unreachable, refused
from rollmuxd.core.model import JobStatus, SlotStatus

NODE = {
    "node": "box/gpu0",
    "host": "box",
    "status": "up",
    "pools": ["rollout"],
    "gpu_type": "H100",
    "price_per_hour": 2.5,
    "gpus": [{"gpu": "box/gpu0", "holder": "s4", "dirty_by": "j1", "used_gb": 61.25}],
    "reason": "",
    "group": "g1",
    "states": {"j1 rollout": "loaded"},
}
HOST = {
    "host": "box",
    "backend": "local",
    "ram_gb": 512.0,
    "ram_reserved_gb": 120.0,
    "nodes": ["box/gpu0", "box/gpu1"],
    "reachable": True,
}
GROUP = {
    "group": "g1",
    "jobs": ["j1", "j2"],
    "nodes": ["box/gpu0"],
    "schedule": [{"job": "j1", "name": "math-7b", "phase": "rollout", "rotation": 7}],
    "period_s": 12.5,
    "cost_per_hour": 5.0,
    "reason": "",
}
SLOT = {"slot": "s4", "job": "j1", "job_name": "math-7b", "phase": "rollout", "status": "queued", "position": 1}


def rows(ran):
    """A table's cells, where no cell has two spaces in a row."""
    return [[cell for cell in line.split("  ") if cell.strip()] for line in ran.lines]


def stripped(ran):
    return [[cell.strip() for cell in row] for row in rows(ran)]


def test_a_list_of_jobs_tells_the_status_of_each_and_why_it_waits(rollmuxd, daemon, a_job):
    reason = "box has 30 GB of RAM left, it needs 80"
    waiting = {"reasons": [{"code": "ram", "text": reason}], "position": 1}
    daemon["GET /v1/jobs"] = {
        "items": [
            a_job(group="g1", phase="train", iterations=12, slowdown=1.254, slo=2.0, promised=True),
            a_job(job="j2", name="code-7b", status="waiting", waiting=waiting, slo=1.5),
        ],
        "next": None,
    }

    ran = rollmuxd("job list")

    assert ran.code == 0
    assert stripped(ran) == [
        ["JOB", "NAME", "OWNER", "STATUS", "GROUP", "PHASE", "ITERATIONS", "SLOWDOWN", "SLO", "WHY"],
        ["j1", "math-7b", "vision", "admitted", "g1", "train", "12", "1.25", "2", "-"],
        ["j2", "code-7b", "vision", "waiting for a place", *"----", "1.5 (not promised)", reason],
    ]


def test_piped_output_has_no_colours_and_breaks_no_line(rollmuxd, daemon, a_job):
    reason = "because " * 40 + "of this"
    daemon["GET /v1/jobs"] = {"items": [a_job(status="quarantined", reason=reason)], "next": None}

    ran = rollmuxd("job list")

    assert "\x1b" not in ran.out
    assert len(ran.lines) == 2
    assert ran.lines[1].endswith(reason)


def test_a_list_tells_apart_a_wait_for_a_place_one_for_a_turn_and_silence(rollmuxd, daemon, a_job):
    turn = {"slot": "s7", "phase": "rollout", "reason": "1 turn comes first: b (rollout)"}
    daemon["GET /v1/jobs"] = {
        "items": [
            a_job(status="waiting"),
            a_job(job="j2", **turn),
            a_job(job="j3", **turn, silent_s=20.0),
            a_job(job="j4", slot="s8", phase="rollout"),
        ],
        "next": None,
    }

    said = [row[3] for row in stripped(rollmuxd("job list"))[1:]]

    assert said == ["waiting for a place", "waiting for its turn", "silent (admitted)", "admitted"]


def test_on_a_narrow_screen_long_reasons_stand_below_the_table(rollmuxd, daemon, a_job, monkeypatch):
    reason = "box has 30 GB of RAM left, and " * 5 + "it needs 80"
    daemon["GET /v1/jobs"] = {"items": [a_job(), a_job(job="j2", status="quarantined", reason=reason)], "next": None}
    monkeypatch.setattr(common, "console", lambda: Console(width=100, highlight=False))

    lines = rollmuxd("job list").lines

    assert lines[0].split()[-1] == "SLO"
    assert [line.split()[0] for line in lines[1:3]] == ["j1", "j2"]
    assert lines[3:5] == ["", "WHY"]
    assert lines[5].startswith("j2  box has 30 GB of RAM left, and box has")
    assert all(len(line) <= 100 for line in lines)


@pytest.mark.parametrize(("noun", "statuses"), [("job", JobStatus), ("slot", SlotStatus)])
def test_a_status_that_is_none_is_answered_with_those_that_there_are(rollmuxd, daemon, noun, statuses):
    ran = rollmuxd(f"{noun} list --status foo")

    assert ran.code == 2
    assert all(f"'{status}'" in ran.err for status in statuses)


@pytest.mark.parametrize("noun", ["job", "slot"])
def test_a_caller_without_rights_hears_that_other_owners_are_not_shown(rollmuxd, daemon, noun):
    daemon[f"GET /v1/{noun}s"] = {"items": [], "next": None}
    daemon["GET /v1/me"] = {"owner": "vision", "user": "ada", "role": "viewer"}

    said = "of owner vision: you are vision/ada, role viewer, and other owners' are not shown"
    assert rollmuxd(f"{noun} list").out == f"no {noun}s {said}\n"


def test_a_list_is_read_to_its_last_page(rollmuxd, daemon, a_job):
    pages = {
        None: {"items": [a_job()], "next": "j1"},
        "j1": {"items": [a_job(job="j2")], "next": None},
    }
    daemon["GET /v1/jobs"] = lambda params: pages[params.get("after")]

    assert [job["job"] for job in rollmuxd("job list --json").json["items"]] == ["j1", "j2"]


def test_jobs_that_are_over_are_listed_only_if_asked_for(rollmuxd, daemon, a_job):
    daemon["GET /v1/jobs"] = lambda asked: {"items": [a_job(status="ended")] * ("over" not in asked), "next": None}

    assert rollmuxd("job list").out == "no jobs\n"
    assert daemon.asked[0] == ("GET", "/v1/jobs", {"over": "false"})
    assert "ended" in rollmuxd("job list --all").out
    assert "ended" in rollmuxd("job list --status ended").out


def test_filters_are_passed_on_and_those_not_given_are_left_out(rollmuxd, daemon):
    daemon["GET /v1/jobs"] = {"items": [], "next": None}

    rollmuxd("job list --owner vision --pool train --json")

    assert daemon.asked == [("GET", "/v1/jobs", {"owner": "vision", "pool": "train", "over": "false"})]


def test_a_job_is_shown_with_its_promise_and_its_measured_times(rollmuxd, daemon, a_job):
    daemon["GET /v1/jobs/j1"] = a_job(
        slo=2.0,
        promised=True,
        credit_s=30.25,
        pins={"rollout": ["box/gpu0"]},
        estimates={
            "rollout": {
                "planned_s": None,
                "count": 9,
                "mean_s": 4.5,
                "p50_s": 4.0,
                "p95_s": 6.125,
                "estimate_s": 4.75,
                "estimate_samples": 8,
            },
            "train": {
                "planned_s": 2.0,
                "count": 0,
                "mean_s": None,
                "p50_s": None,
                "p95_s": None,
                "estimate_s": 2.0,
                "estimate_samples": 0,
            },
        },
    )

    ran = rollmuxd("job show j1")

    assert ["bound", "2, promised"] in stripped(ran)
    assert ["credit", "30.25 s"] in stripped(ran)
    assert ["nodes", "rollout: box/gpu0"] in stripped(ran)
    assert ["rollout", "-", "4.75", "8 times", "4.5", "4", "6.12", "9"] in stripped(ran)
    assert ["train", "2", "2", "as stated", "-", "-", "-", "0"] in stripped(ran)


def test_a_promise_at_risk_is_shown_as_such(rollmuxd, daemon, a_job):
    daemon["GET /v1/jobs/j1"] = a_job(slo=2.0, promised=True, at_risk=True)

    assert "at risk" in rollmuxd("job show j1").out


def test_a_promise_that_is_not_kept_is_shown_with_what_would_help(rollmuxd, daemon, a_job):
    daemon["GET /v1/jobs/j1"] = a_job(slo=2.0, unmet="it asked for slo=2. What would help: slo=3")

    assert "What would help: slo=3" in rollmuxd("job show j1").out


@pytest.mark.parametrize(
    ("command", "call"),
    [
        ("job resume j1", ("POST", "/v1/jobs/j1/resume", {})),
        ("job reinstate j1", ("POST", "/v1/jobs/j1/reinstate", {})),
        ("job end j1 --reason enough", ("DELETE", "/v1/jobs/j1", {"reason": "enough"})),
    ],
)
def test_a_verb_on_a_job_is_one_call_and_its_answer_is_told(rollmuxd, daemon, a_job, command, call):
    daemon[f"{call[0]} {call[1]}"] = a_job(status="waiting")

    ran = rollmuxd(command)

    assert daemon.asked[-1] == call
    assert ran.out.endswith("it is waiting\n")


def test_explaining_prints_the_sentences_which_say_what_would_help(rollmuxd, daemon):
    daemon["GET /v1/jobs/j1/explain"] = {
        "job": "j1",
        "status": "waiting",
        "reasons": [],
        "sentences": ["It waits for one train node.", "It would start now with slo=2.0 (0.50 looser)."],
        "would_start_with": ["slo=2.0 (0.50 looser)"],
    }

    assert rollmuxd("job explain j1").lines == [
        "It waits for one train node.",
        "It would start now with slo=2.0 (0.50 looser).",
    ]


def test_waiting_for_a_job_ends_well_when_it_has_ended(rollmuxd, daemon, a_job, monkeypatch):
    views = iter([a_job(), a_job(), a_job(status="ended", finished=True)])
    daemon["GET /v1/jobs/j1"] = lambda _: next(views)
    monkeypatch.setattr("time.sleep", lambda _: None)

    ran = rollmuxd("job wait j1")

    assert (ran.code, ran.out) == (0, "math-7b (j1): ended\n")


def test_waiting_says_what_it_cannot_see(rollmuxd):
    """A process knows at its exit of an error that nobody has caught, and not of its own exit status."""
    assert "sys.exit(1) outside" in rollmuxd("job wait --help").out


def test_waiting_for_a_job_fails_when_it_was_lost_and_says_why(rollmuxd, daemon, a_job):
    daemon["GET /v1/jobs/j1"] = a_job(status="lost", reason="no heartbeat for 60 s")

    ran = rollmuxd("job wait j1")

    assert (ran.code, ran.err) == (1, "rollmuxd: math-7b is lost: no heartbeat for 60 s\n")


@pytest.mark.parametrize(("finished", "code"), [(True, 0), (False, 1)])
def test_waiting_ends_well_only_if_the_loop_came_to_its_end(rollmuxd, daemon, a_job, finished, code):
    daemon["GET /v1/jobs/j1"] = a_job(status="ended", reason="finished with it", finished=finished)

    ran = rollmuxd("job wait j1")

    assert (ran.code, ran.out) == (code, "math-7b (j1): ended\n")
    assert ran.err == ("rollmuxd: math-7b ended: finished with it\n" if code else "")


def test_waiting_gives_up_after_its_time_and_says_how_things_stand(rollmuxd, daemon, a_job):
    daemon["GET /v1/jobs/j1"] = a_job(status="waiting")

    ran = rollmuxd("job wait j1 --for placed --timeout 0")

    assert (ran.code, ran.err) == (1, "rollmuxd: math-7b is still waiting after 0 s\n")


def test_a_wait_for_some_seconds_ends_with_how_things_stand(rollmuxd, daemon, a_job, slept):
    daemon["GET /v1/jobs/j1"] = a_job()

    ran = rollmuxd("job wait j1 --timeout 2.5")

    assert (ran.code, ran.err) == (1, "rollmuxd: math-7b is still admitted after 2.5 s\n")
    assert sum(slept) == pytest.approx(2.5)


def test_nodes_are_listed_with_who_holds_them(rollmuxd, daemon):
    node = {**NODE, "jobs": [{"job": "j1", "name": "math-7b"}]}
    daemon["GET /v1/nodes"] = {"items": [node], "next": None}

    row = ["box/gpu0", "rollout", "up", "g1", "1 H100", "math-7b (j1)", "math-7b", "math-7b rollout: loaded", "-"]
    assert stripped(rollmuxd("node list"))[1] == row
    node["jobs"] = [{"job": "j1", "name": ""}]
    assert "j1" in stripped(rollmuxd("node list"))[1][6]


def test_a_nodes_slash_stays_within_one_part_of_the_path(rollmuxd, daemon):
    daemon["POST /v1/nodes/box%2Fgpu0/drain"] = {**NODE, "status": "draining"}

    ran = rollmuxd("node drain box/gpu0 --evict")

    assert ran.out == "box/gpu0: draining\n"
    assert daemon.asked[-1][2] == {"evict": True}
    assert unquote(daemon.asked[-1][1]) == "/v1/nodes/box/gpu0/drain"


def test_a_drain_names_who_stays_and_waits(rollmuxd, daemon):
    stay = [{"job": "j1", "name": "math-7b"}, {"job": "j9", "name": ""}]
    daemon["POST /v1/nodes/box%2Fgpu0/drain"] = {**NODE, "status": "draining", "jobs": stay}
    daemon["POST /v1/hosts/box/drain"] = {**HOST, "jobs": stay}
    lines = [
        "placed there: math-7b (j1), j9",
        "movable jobs go where there is room, the others wait until it is undrained (--evict ends them)",
    ]

    assert rollmuxd("node drain box/gpu0").lines == ["box/gpu0: draining", *lines]
    assert rollmuxd("host drain box").lines[-2:] == lines
    assert rollmuxd("host drain box --evict").lines[-1] == "ending: math-7b (j1), j9"


def test_an_undrained_node_is_used_again_once_it_was_looked_at(rollmuxd, daemon):
    daemon["POST /v1/nodes/box%2Fgpu0/undrain"] = {**NODE, "status": "unknown"}

    assert rollmuxd("node undrain box/gpu0").out == "box/gpu0: undrained; it is used again once it was looked at\n"
    daemon["POST /v1/nodes/box%2Fgpu0/undrain"] = {**NODE, "status": "unknown", "reason": "it is gone"}
    assert rollmuxd("node undrain box/gpu0").out == "box/gpu0: unknown (it is gone)\n"


def test_a_node_is_shown_with_the_processes_that_were_seen_there(rollmuxd, daemon):
    gpu = {**NODE["gpus"][0], "processes": ["pid 7 python"], "observed_at": "2025-06-01T12:00:00.000Z"}
    daemon["GET /v1/nodes/box%2Fgpu0"] = {**NODE, "gpus": [gpu]}

    ran = rollmuxd("node show box/gpu0")

    assert stripped(ran)[-1] == ["box/gpu0", "s4", "j1", "61.25", "pid 7 python", "2025-06-01T12:00:00.000Z"]


def test_a_waiting_job_of_which_the_list_has_no_reason_says_where_to_ask(rollmuxd, daemon, a_job):
    daemon["GET /v1/jobs"] = {
        "items": [a_job(status="waiting"), a_job(status="waiting", reason="no room")],
        "next": None,
    }

    assert [row[-1] for row in stripped(rollmuxd("job list"))[1:]] == ["rollmuxd job explain j1", "no room"]


def test_declaring_a_node_clear_asks_first(rollmuxd, daemon):
    daemon["POST /v1/nodes/box%2Fgpu0/declare-clean"] = NODE

    refused = rollmuxd("node declare-clean box/gpu0", input="n\n")
    nobody = rollmuxd("node declare-clean box/gpu0", input="")
    asked_before = list(daemon.asked)
    agreed = rollmuxd("node declare-clean box/gpu0 --yes --reason 'nvidia-smi is empty'")

    assert refused.code == 1
    assert (nobody.code, nobody.err.splitlines()[-1]) == (
        1, "rollmuxd: no answer came; without a terminal give --yes"
    )  # fmt: skip
    assert asked_before == []
    assert agreed.out == "box/gpu0: up\n"
    assert daemon.asked[-1][2] == {"reason": "nvidia-smi is empty"}


def test_hosts_are_listed_with_their_reserved_ram(rollmuxd, daemon):
    daemon["GET /v1/hosts"] = {"items": [HOST], "next": None}

    assert stripped(rollmuxd("host list"))[1] == ["box", "local", "yes", "120 of 512", "box/gpu0, box/gpu1"]


def test_a_host_is_drained_with_one_call(rollmuxd, daemon):
    daemon["POST /v1/hosts/box/drain"] = HOST

    assert rollmuxd("host drain box").out == "box: draining box/gpu0, box/gpu1\n"


def test_a_group_is_shown_with_its_members_against_their_bounds_and_its_schedule(rollmuxd, daemon, a_job):
    daemon["GET /v1/groups/g1"] = GROUP
    pins = {"rollout": ["box/gpu0"], "train": ["box/gpu0"]}
    member = a_job(pins=pins, iterations=9, slowdown=1.2, slo=2.0, promised=True, credit_s=12.0)
    daemon["GET /v1/jobs"] = {"items": [member], "next": None}

    ran = rollmuxd("group show g1")

    assert ["period s", "12.5"] in stripped(ran)
    assert ["math-7b", "vision", "admitted", "box/gpu0", "9", "1.2", "-", "2", "yes", "12"] in stripped(ran)
    assert ["j2", *["-"] * 9] in stripped(ran)  # another owner's
    assert stripped(ran)[-1] == ["math-7b", "rollout", "7"]


def test_groups_are_listed_by_the_names_of_their_jobs(rollmuxd, daemon):
    daemon["GET /v1/groups"] = {"items": [GROUP], "next": None}

    assert stripped(rollmuxd("group list"))[1] == ["g1", "math-7b, j2", "box/gpu0", "12.5", "5", "-"]


def test_slots_that_have_ended_are_listed_only_if_asked_for(rollmuxd, daemon):
    over = {**SLOT, "status": "over"}
    daemon["GET /v1/slots"] = lambda asked: {"items": [over] * ("which" not in asked), "next": None}

    assert rollmuxd("slot list").out == "no slots\n"
    assert daemon.asked[0] == ("GET", "/v1/slots", {"which": "open"})
    assert "over" in rollmuxd("slot list --all").out


def test_slots_are_listed_and_revoked(rollmuxd, daemon):
    daemon["GET /v1/slots"] = {"items": [SLOT], "next": None}
    daemon["POST /v1/slots/s4/revoke"] = {**SLOT, "status": "revoked"}

    assert stripped(rollmuxd("slot list"))[1][:4] == ["s4", "math-7b", "rollout", "queued"]
    assert rollmuxd("slot revoke s4 --reason stuck").out == "s4: revoked\n"
    assert daemon.asked[-1] == ("POST", "/v1/slots/s4/revoke", {"reason": "stuck"})


def test_a_new_keys_secret_is_alone_on_stdout_so_that_it_can_be_piped(rollmuxd, daemon):
    daemon["POST /v1/keys"] = {"key": "k1", "owner": "vision", "user": "ada", "role": "lead", "secret": "rmx_s3cret"}

    ran = rollmuxd("key add vision ada --role lead")

    assert ran.out == "rmx_s3cret\n"
    assert "rmx_s3cret" not in ran.err
    assert daemon.asked == [("POST", "/v1/keys", {"owner": "vision", "user": "ada", "role": "lead"})]


def test_a_key_may_be_made_for_a_time(rollmuxd, daemon):
    made = {
        "key": "k1",
        "owner": "vision",
        "user": "ada",
        "role": "user",
        "secret": "rmx_s",
        "expires_at": "2027-01-01",
    }
    daemon["POST /v1/keys"] = made

    ran = rollmuxd("key add vision ada --expires 30d")

    assert daemon.asked == [
        ("POST", "/v1/keys", {"owner": "vision", "user": "ada", "role": "user", "expires_s": 30 * 86_400})
    ]
    assert ran.out == "rmx_s\n"
    assert "expires 2027-01-01" in ran.err


@pytest.mark.parametrize("given", ["30", "d", "-1d", "0d", "1.d", "0.5s", "30 days", "9999999999d"])
def test_a_time_that_is_none_is_answered_with_one_that_is(rollmuxd, daemon, given):
    ran = rollmuxd(f"key add vision ada --expires '{given}'")

    assert ran.code == 2
    assert "write 30d" in ran.err
    assert daemon.asked == []


def test_the_list_of_keys_says_which_still_open_something(rollmuxd, daemon):
    common = {"owner": "vision", "user": "ada", "role": "user", "created_at": "2026-11-01"}
    daemon["GET /v1/keys"] = {
        "items": [
            {"key": "k1", "revoked": False, **common},
            {"key": "k2", "revoked": True, **common},
            {"key": "k3", "revoked": False, "expired": True, "expires_at": "2026-11-02", **common},
        ],
        "next": None,
    }

    said = [line.split() for line in rollmuxd("key list").lines[1:]]

    assert [(line[0], line[4]) for line in said] == [("k1", "good"), ("k2", "revoked"), ("k3", "expired")]
    assert said[2][-1] == "2026-11-02"


def test_a_key_is_revoked_by_its_id(rollmuxd, daemon):
    daemon["DELETE /v1/keys/k1"] = {"key": "k1", "owner": "vision", "user": "ada", "role": "lead", "created_at": ""}

    assert rollmuxd("key revoke k1").out == "k1: revoked\n"


FACTS = [
    {"seq": 1, "fact": "job_registered", "at": 1_750_000_000_000, "job": "j1", "spec": {"name": "math-7b", "x": 1}},
    {"seq": 2, "fact": "slot_granted", "at": 1_750_000_000_250, "slot": "s1", "fence": [1, 9]},
    {"seq": 3, "fact": "node_lost", "at": 1_750_000_000_500, "node": "box/gpu0", "reason": "no answer"},
]


def test_facts_are_read_from_a_number_on_until_there_are_no_more(rollmuxd, daemon):
    # Fact 4 is about somebody else's job: it counts, and is not shown.
    pages = {1: {"facts": [FACTS[1]], "last": 2}, 2: {"facts": [FACTS[2]], "last": 3}, 3: {"facts": [], "last": 4}}
    daemon["GET /v1/facts"] = lambda sent: pages.get(sent["after"], {"facts": [], "last": 4})

    ran = rollmuxd("facts --after 1 --json")

    assert [json.loads(line)["seq"] for line in ran.lines] == [2, 3]
    assert [(sent["after"], sent["wait_ms"]) for _, _, sent in daemon.asked] == [(1, 0), (2, 0), (3, 0), (4, 0)]


def test_a_fact_is_one_line_that_people_can_read(rollmuxd, daemon):
    daemon["GET /v1/facts"] = lambda sent: {"facts": FACTS if sent["after"] == 0 else [], "last": 3}

    said = [line.split("  ", 1)[1].split("  ", 1)[1] for line in (text.strip() for text in rollmuxd("facts").lines)]

    assert said == [
        "job_registered  job=j1 spec=math-7b",
        "slot_granted  slot=s1 fence=1.9",
        'node_lost  node=box/gpu0 reason="no answer"',
    ]


def test_what_is_audited_is_asked_for_by_itself_and_shown_with_its_day(rollmuxd, daemon):
    fact = {"seq": 7, "fact": "audited", "at": 1_750_000_000_000, "action": "drain_node", "who": "ops/op", "about": "n"}
    daemon["GET /v1/facts"] = lambda sent: {"facts": [fact] if sent["after"] == 0 else [], "last": 7}

    said = rollmuxd("facts --audit").lines

    assert daemon.asked[0][2]["audit"] == "true"
    assert said[0].split()[1].startswith("2025-06-15")
    assert said[0].endswith("audited  action=drain_node who=ops/op about=n")


def test_what_somebody_wrote_does_not_reach_the_terminal_as_a_command(rollmuxd, daemon):
    fact = {"seq": 1, "fact": "job_ended", "at": 0, "reason": "\x1b[2Jgone", "by": "a\nb\u202e"}
    daemon["GET /v1/facts"] = lambda sent: {"facts": [fact] if sent["after"] == 0 else [], "last": 1}

    (line,) = rollmuxd("facts").lines

    assert line.isprintable()
    assert "\\x1b[2Jgone" in line


@pytest.mark.parametrize("noun", ["node drain box", "host drain box"])
def test_why_a_node_is_drained_is_kept(rollmuxd, daemon, noun):
    what = noun.split()[0]
    daemon[f"POST /v1/{what}s/box/drain"] = {
        "node": "box",
        "host": "box",
        "nodes": [],
        "jobs": [],
        "status": "draining",
    }

    rollmuxd(f"{noun} --reason 'new fans'")

    assert daemon.asked[0][2] == {"evict": False, "reason": "new fans"}


def test_following_waits_for_new_facts_once_it_has_caught_up(rollmuxd, daemon):
    def answer(sent):
        if len(daemon.asked) == 3:
            raise KeyboardInterrupt
        return {"facts": FACTS if sent["after"] == 0 else [], "last": 3}

    daemon["GET /v1/facts"] = answer

    ran = rollmuxd("facts --follow")

    assert ran.code == 0
    assert [sent["wait_ms"] > 1000 for _, _, sent in daemon.asked] == [False, False, True]


def test_following_survives_a_restart_of_the_daemon(rollmuxd, daemon, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    down = [Unreachable("no socket"), Unreachable("the daemon does not answer"), refused(503, "it is being stopped")]
    answers = [{"facts": FACTS[:1], "last": 1}, *down, {"facts": FACTS[1:], "last": 3}]

    def answer(sent):
        if not answers:
            raise KeyboardInterrupt
        return answers.pop(0)

    daemon["GET /v1/facts"] = answer
    ran = rollmuxd("facts --follow --json")

    assert ran.code == 0
    assert [json.loads(line)["seq"] for line in ran.lines] == [1, 2, 3]
    assert ran.err.splitlines() == [
        "rollmuxd: the daemon does not answer; trying again",
        "rollmuxd: the daemon answers again, after 0 s",
    ]
    assert [sent["after"] for _, _, sent in daemon.asked] == [0, 1, 1, 1, 1, 3]


@pytest.mark.parametrize(("wished_s", "slept_s"), [(7.0, 7.0), (604_800.0, 60.0)])
def test_following_waits_for_as_long_as_the_daemon_asks_while_a_limit_is_reached(
    rollmuxd, daemon, slept, wished_s, slept_s
):
    full = refused(429, "100 calls of owner alice wait for facts", retry_after_s=wished_s)
    goes_wrong(daemon, "/v1/facts", [{"facts": FACTS[:1], "last": 1}, full, {"facts": FACTS[1:], "last": 3}])

    ran = rollmuxd("facts --follow --json")

    assert (ran.code, len(ran.lines)) == (0, 3)
    assert slept == [slept_s]


#: what may be over a moment later
PASSING = [
    Unreachable("the daemon does not answer"),
    refused(408, "a call has to arrive within 30 s"),
    refused(429, "too many calls a second"),
    refused(503, "it is being stopped"),
]


def goes_wrong(daemon, path, answers):
    """Answer with these, then as a user who has seen enough."""

    def answer(_):
        if not answers:
            raise KeyboardInterrupt
        return answers.pop(0)

    daemon[f"GET {path}"] = answer


@pytest.fixture
def slept(monkeypatch):
    """What was slept; nobody waits for it, but time goes on."""
    slept = []
    monkeypatch.setattr("time.sleep", slept.append)
    monkeypatch.setattr("time.monotonic", lambda: 1000.0 + sum(slept))
    return slept


@pytest.mark.parametrize("trouble", PASSING, ids=str)
def test_what_passes_ends_no_wait_for_a_job(rollmuxd, daemon, a_job, slept, trouble):
    goes_wrong(
        daemon, "/v1/jobs/j1", [a_job(), trouble, trouble, a_job(status="ended", reason="finished", finished=True)]
    )

    ran = rollmuxd("job wait j1")

    assert (ran.code, ran.out) == (0, "math-7b (j1): ended\n")
    assert ran.err.splitlines()[0].startswith(f"rollmuxd: {trouble}; trying again")


@pytest.mark.parametrize("trouble", PASSING, ids=str)
def test_a_wait_is_no_longer_than_was_said_whoever_is_away(rollmuxd, daemon, a_job, slept, trouble):
    goes_wrong(daemon, "/v1/jobs/j1", [a_job()] + [trouble] * 20)

    ran = rollmuxd("job wait j1 --timeout 12")

    assert ran.code == 1
    assert str(trouble) in ran.err.splitlines()[-1]
    assert sum(slept) == pytest.approx(12)


@pytest.mark.parametrize("trouble", PASSING, ids=str)
def test_what_passes_ends_no_logs_that_are_followed(rollmuxd, daemon, slept, trouble, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    daemon["GET /v1/jobs/j1"] = {"name": "math-7b"}
    pages = [("one\n", 4, False), trouble, ("two\n", 8, False), trouble, ("", 8, True)]
    pages = [page if page is trouble else dict(zip(("text", "next", "over"), page, strict=True)) for page in pages]
    goes_wrong(daemon, "/v1/jobs/j1/logs", pages)

    ran = rollmuxd("job logs -f j1")

    assert (ran.code, ran.out) == (0, "one\ntwo\n")
    assert [sent["after"] for _, path, sent in daemon.asked if path.endswith("logs")] == [0, 4, 4, 8, 8]


@pytest.mark.parametrize(
    ("terminal", "shown"), [(True, "50%\r100% \\x1b]0;mine\\x07\n"), (False, "50%\r100% \x1b]0;mine\x07\n")]
)
def test_what_a_job_prints_moves_no_terminal_and_reaches_a_file_as_it_is(
    rollmuxd, daemon, terminal, shown, monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(common, "_to_terminal", lambda: terminal)
    daemon["GET /v1/jobs/j1"] = {"name": "math-7b"}
    printed = {"text": "50%\r100% \x1b]0;mine\x07\n", "next": 4, "over": True}
    goes_wrong(daemon, "/v1/jobs/j1/logs", [printed, {**printed, "text": ""}])

    assert rollmuxd("job logs j1").out == shown


@pytest.mark.parametrize("command", ["facts --follow", "job wait j1", "job logs -f j1"])
def test_where_there_is_no_daemon_to_begin_with_following_fails_at_once(rollmuxd, daemon, command):
    daemon.down = NoDaemon("no daemon")

    assert rollmuxd(command).code == 3


@pytest.mark.parametrize("command", ["facts", "job logs j1"])
def test_what_follows_nothing_fails_at_once(rollmuxd, daemon, slept, command, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    daemon["GET /v1/jobs/j1"] = {"name": "math-7b"}
    goes_wrong(daemon, "/v1/jobs/j1/logs", [{"text": "one\n", "next": 4, "over": False}, PASSING[0]])
    goes_wrong(daemon, "/v1/facts", [{"facts": FACTS[:1], "last": 1}, PASSING[0]])

    assert rollmuxd(command).code == 3
    assert slept == []


def test_the_facts_about_one_job_are_asked_of_the_daemon(rollmuxd, daemon):
    daemon["GET /v1/facts"] = {"facts": [], "last": 0}

    rollmuxd("facts --job math-7b")

    assert daemon.asked == [("GET", "/v1/facts", {"after": 0, "wait_ms": 0, "job": "math-7b"})]


REPORT = {
    "since": "2025-06-01T00:00:00Z",
    "until": "2025-06-02T00:00:00Z",
    "by": "job",
    "work": [
        {
            "name": "math-7b",
            "owner": "vision",
            "job": "j1",
            "gpu_hours_held": 10.0,
            "gpu_hours_used": 9.0,
            "gpu_hours_alone": 20.0,
            "iterations": 40,
            "slowdown": 1.1,
            "wait_turn_hours": 0.5,
            "gpu_hours_charged": 12.0,
            "cost_charged": 36.0,
            "gpu_hours_switching": 0.25,
            "loads_warm": 3,
            "loads_cold": 1,
            "parks": 4,
            "slo": 2.0,
            "slo_judged": 1,
            "slo_kept": 1,
        }
    ],
    "pools": [
        {
            "pool": "train",
            "gpus": 8,
            "gpu_hours_capacity": 192.0,
            "gpu_hours_held": 10.0,
            "gpu_hours_used": 9.0,
            "gpu_hours_switching": 1.0,
            "gpu_hours_idle": 2.0,
            "gpu_hours_unallocated": 180.0,
            "utilisation": 0.046875,
            "cost_capacity": 576.0,
        }
    ],
    "bill": {
        "gpu_hours_charged": 12.0,
        "gpu_hours_others": 0.0,
        "gpu_hours_unallocated": 180.0,
        "gpu_hours_capacity": 192.0,
        "cost_charged": 36.0,
        "cost_others": 0.0,
        "cost_unallocated": 540.0,
        "cost_capacity": 576.0,
    },
    "saving": {
        "baseline": "each job alone on the same nodes",
        "gpu_hours_alone": 20.0,
        "gpu_hours_charged": 12.0,
        "gpu_hours_saved": 8.0,
        "cost_saved": 20.0,
    },
}


#: a report waits for others of its owner, and for the facts of a day that are read once more
PATIENT_S = 120.0


def test_the_report_ends_with_what_was_saved_and_against_what(rollmuxd, daemon):
    daemon["GET /v1/report"] = REPORT

    ran = rollmuxd("report --since 2025-06-01 --by job")

    assert ran.lines[-1] == "saved 8 GPU-hours: 12 charged, against 20 for each job alone on the same nodes"
    assert ["train", "8", "192", "9", "1", "2", "180", "5%"] in stripped(ran)
    assert daemon.asked == [("GET", "/v1/report", {"since": "2025-06-01", "by": "job", "timeout_s": PATIENT_S})]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0"),
        (0.000417, "0.000417"),
        (0.0312, "0.0312"),
        (0.5, "0.5"),
        (12.345, "12.3"),
        (180.0, "180"),
        (-2.5, "-2.5"),
    ],
)
def test_hours_have_three_digits_that_say_something(value, shown):
    assert hours(value) == shown


@pytest.mark.parametrize(
    ("saving", "line"),
    [
        (
            (0.02, 0.05),
            "not saved, but used on top: 0.03 GPU-hours: 0.05 charged, against 0.02 for b (iterations that",
        ),
        ((0.0, 0.05), "nothing to compare yet, since no iteration has finished: 0.05 charged, against 0 for b"),
    ],
)
def test_a_saving_on_a_short_span_reads_sensibly(rollmuxd, daemon, saving, line):
    alone, charged = saving
    figures = {"gpu_hours_alone": alone, "gpu_hours_charged": charged, "gpu_hours_saved": alone - charged}
    daemon["GET /v1/report"] = {**REPORT, "saving": {"baseline": "b", "cost_saved": 0.0, **figures}}

    assert rollmuxd("report").lines[-1].startswith(line)


def test_a_job_of_which_no_heartbeat_comes_is_shown_as_silent(rollmuxd, daemon, a_job):
    daemon["GET /v1/jobs"] = {"items": [a_job(silent_s=34.2)], "next": None}
    daemon["GET /v1/jobs/j1"] = a_job(silent_s=34.2)

    assert rollmuxd("job list").lines[-1].endswith("silent for 34 s")
    assert "silent for 34 s" in rollmuxd("job show j1").out


def test_a_silent_job_still_says_why_it_is_quarantined(rollmuxd, daemon, a_job):
    reason = "its GPU memory was not freed"
    daemon["GET /v1/jobs"] = {"items": [a_job(status="quarantined", reason=reason, silent_s=32.4)], "next": None}

    assert stripped(rollmuxd("job list"))[1][-1] == f"{reason}; silent for 32 s"


def test_the_report_names_facts_that_are_damaged(rollmuxd, daemon):
    daemon["GET /v1/report"] = {**REPORT, "unreadable": [17, 18]}

    said = "not exact: 2 damaged facts (number 17, 18) and what follows from them are left out"
    assert said in rollmuxd("report").err


def test_facts_name_those_that_are_damaged_beside_the_others(rollmuxd, daemon):
    fact = {"fact": "daemon_started", "seq": 1, "at": 0, "incarnation": 1}
    pages = {0: {"facts": [fact], "last": 2, "unreadable": [{"seq": 2, "reason": "it is damaged"}]}}
    daemon["GET /v1/facts"] = lambda sent: pages.get(sent["after"], {"facts": [], "last": sent["after"]})

    ran = rollmuxd("facts --json")

    assert json.loads(ran.out)["seq"] == 1
    assert "rollmuxd: fact 2 cannot be read: it is damaged; the rest is here" in ran.err


def test_the_report_tells_who_is_charged_with_what_and_that_it_adds_up(rollmuxd, daemon):
    daemon["GET /v1/report"] = REPORT

    ran = rollmuxd("report")

    row = ["math-7b", "vision", "12", "9", "20", "36", "40", "1.1", "2 kept", "3 warm, 1 cold, 4 parks", "0.25", "0.5"]
    assert stripped(ran)[3] == row
    assert ran.lines[-2] == ("12 GPU-hours charged + 180 unallocated = 192 of the inventory; in money 36 of 576")


def test_so_long_ago_is_a_time_too(rollmuxd, daemon):
    daemon["GET /v1/report"] = REPORT

    before = datetime.now(UTC)
    rollmuxd("report --since 36h --until 2025-06-02")

    ((_, _, asked),) = daemon.asked
    ago = before - datetime.fromisoformat(asked["since"])
    assert abs(ago.total_seconds() - 36 * 3600) < 60
    assert asked["until"] == "2025-06-02"


def test_part_of_an_hour_ago_is_a_time_and_a_time_before_the_calendar_is_refused(rollmuxd, daemon):
    daemon["GET /v1/report"] = REPORT

    before = datetime.now(UTC)
    rollmuxd("report --since 1.5h")
    refused = rollmuxd("report --since 999999d")

    ((_, _, asked),) = daemon.asked
    assert abs((before - datetime.fromisoformat(asked["since"])).total_seconds() - 90 * 60) < 60
    assert refused.code == 2
    assert "999999d ago is before the calendar's first year" in refused.err


def test_csv_has_a_line_of_heads_and_one_per_row_and_starts_no_formula(rollmuxd, daemon):
    rows = [{"name": "math-7b", "owner": "alice", "slo": None}, {"name": "=1+1", "owner": "bob", "slo": 2.0, "new": 1}]
    daemon["GET /v1/report"] = {**REPORT, "work": rows, "pools": [{"pool": "rollout", "gpus": 8}]}

    def of(command):
        return list(csv.DictReader(rollmuxd(command).lines))

    assert [(row["name"], row["owner"], row["slo"]) for row in of("report --csv")] == [
        ("math-7b", "alice", ""),
        ("'=1+1", "bob", "2.0"),
    ]
    assert [(row["pool"], row["gpus"]) for row in of("report --csv --by pool")] == [("rollout", "8")]
    heads = rollmuxd("report --csv").lines[0]
    daemon["GET /v1/report"] = {**REPORT, "work": []}
    assert rollmuxd("report --csv").lines == [heads]  # what reads it finds its columns in a month without a job, too


@pytest.mark.parametrize(
    ("command", "path", "answer"),
    [
        ("node show box/gpu0", "/v1/nodes/box%2Fgpu0", NODE),
        ("host show box", "/v1/hosts/box", HOST),
        ("group show g1", "/v1/groups/g1", GROUP),
        ("report", "/v1/report", REPORT),
    ],
)
def test_json_is_the_daemons_answer_on_one_line(rollmuxd, daemon, command, path, answer):
    daemon[f"GET {path}"] = answer

    ran = rollmuxd(f"{command} --json")

    assert ran.json == answer
    assert len(ran.lines) == 1


def test_a_host_that_goes_away_shows_when(rollmuxd, daemon):
    daemon["GET /v1/hosts/box"] = {**HOST, "ends_at": "2027-01-15T08:00:00.000Z"}
    assert "2027-01-15T08:00:00.000Z" in rollmuxd("host show box").out
    daemon["GET /v1/hosts/box"] = {**HOST, "ends_at": None}
    assert "ends" not in rollmuxd("host show box").out


@pytest.mark.parametrize("command", ["node show box/gpu0", "host show box", "group list", "key list", "slot list"])
def test_what_is_empty_says_so_or_is_shown_without_failing(rollmuxd, daemon, command):
    daemon["GET /v1/nodes/box%2Fgpu0"] = NODE
    daemon["GET /v1/hosts/box"] = HOST
    for path in ("groups", "keys", "slots"):
        daemon[f"GET /v1/{path}"] = {"items": [], "next": None}

    ran = rollmuxd(command)

    assert ran.code == 0
    assert ran.out.strip()
