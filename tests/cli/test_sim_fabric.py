"""``rollmuxd sim fabric``: the table, its checks, and what it refuses."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from rollmuxd.cli.main import cli
from rollmuxd.sim import fabric_study


def _run(*args):
    return CliRunner().invoke(cli, ["sim", "fabric", *args], catch_exceptions=False)


def test_the_published_table_is_within_its_bars():
    found = _run("--gpus", "1024,2048", "--t-ocs", "10,20,100", "--generation", "tp8,ep32,afd", "--json")
    result = json.loads(found.stdout)
    assert [check for check in result["checks"] if not check["ok"]] == []
    assert found.exit_code == 0
    judged = " ".join(check["name"] for check in result["checks"])
    for what in ("performance: osub4", "performance: mixnet", "cost: rfabric", "per cost", "reverses", "afd", "2048"):
        assert what in judged
    # TopoOpt is shown with its deviation, and not judged
    assert "performance: topoopt" not in judged
    assert "cost: topoopt" not in judged


def test_a_part_is_judged_by_itself():
    result = json.loads(_run("--topologies", "osub4", "--json").stdout)
    names = [check["name"] for check in result["checks"]]
    assert names == [
        "performance: osub4, 1024 GPUs, 20 ms: settings within 0.70 to 0.75",
        "cost: osub4, its bill at prices of 2025-12",
    ]


def test_the_range_is_judged_and_the_settings_that_meet_every_bar_are_counted(monkeypatch):
    found = json.loads(_run("--json").stdout)
    (meets,) = found["settings_within_bars"]
    assert (meets["settings"], len(meets["within"]) < len(meets["within_in_hundredths"]) < 12) == (12, True)
    assert "settings (" in _run().stdout
    joint = next(check for check in found["checks"] if "every fabric" in check["name"])
    assert (joint["value"], joint["bar"], joint["ok"]) == (len(meets["within"]), [1, 12], True)
    # a bar that no setting meets is a miss, whatever the one in the middle gives
    monkeypatch.setitem(fabric_study.PERFORMANCE, "osub4", (0.85, 0.9))
    missed = _run("--topologies", "osub4", "--json")
    assert missed.exit_code == 1
    assert [check["value"] for check in json.loads(missed.stdout)["checks"] if not check["ok"]] == [0]


def test_one_switching_time_has_nothing_to_be_judged_and_a_model_within_a_host_no_difference():
    result = json.loads(_run("--topologies", "rfabric", "--generation", "tp8", "--json").stdout)
    assert not [check for check in result["checks"] if "moves with" in check["name"]]
    (tp8,) = [check for check in result["checks"] if "tp8" in check["name"]]
    assert (tp8["value"], tp8["bar"], tp8["ok"]) == (0, [0, 0], True)


def test_every_way_to_generate_gains_or_loses_nothing_by_circuits_of_its_own():
    result = json.loads(_run("--topologies", "rfabric", "--generation", "tp16,ep32,ep64,afd", "--json").stdout)
    judged = {check["name"].partition(":")[0]: check for check in result["checks"] if "own" in check["name"]}
    assert {"rfabric, tp16 packed", "rfabric, ep64 packed", "rfabric, ep64 spread", "rfabric, afd packed"} <= {*judged}
    assert all(check["ok"] for check in judged.values())


def test_circuits_that_make_a_decoding_step_slower_are_not_set():
    result = json.loads(_run("--generation", "ep32", "--model", "qwen3-235b-a22b", "--json").stdout)
    rows = {(row["fabric"], row["placement"]): row for row in result["generation"]}
    mixnet, rfabric = rows["mixnet", "spread"], rows["rfabric", "spread"]
    assert mixnet["gated_ms"] == mixnet["training_circuits_ms"] < mixnet["own_circuits_ms"]
    assert rfabric["gated_ms"] == rfabric["own_circuits_ms"] < rfabric["training_circuits_ms"]


def test_your_own_prices_are_shown_and_not_held_to_the_published_costs(tmp_path):
    prices = tmp_path / "prices.toml"
    of = (
        "transceiver = 600\nelectrical_port = 1000\noptical_port = 5000\npatch_port = 100\nsource = 'me'\ndate = '2026'"
    )
    prices.write_text(f'["400g"]\n{of}\n')
    found = _run("--topologies", "rfabric", "--prices", str(prices), "--json")
    assert found.exit_code == 0
    result = json.loads(found.stdout)
    assert result["rows"][0]["cost"]["400g"] > 2
    assert [check["name"] for check in result["checks"] if "cost" in check["name"]] == []


def test_the_prices_that_the_page_shows_are_taken(tmp_path):
    page = Path(__file__).parents[2] / "docs" / "how-to" / "simulate.md"
    prices = tmp_path / "prices.toml"
    prices.write_text(page.read_text().partition("```toml\n")[2].partition("```")[0])
    found = json.loads(_run("--topologies", "rfabric", "--prices", str(prices), "--json").stdout)
    assert list(found["prices"]) == ["400g"]


def test_costs_are_the_bills_times_the_prices_and_both_are_told():
    found = json.loads(_run("--json").stdout)
    price = found["prices"]["400g"]
    assert price["date"] == "2025-12"
    of = {row["fabric"]: row for row in found["rows"]}

    def dollars(bill):
        return (
            bill["electrical_ports"] * price["electrical_port"] + bill["transceivers"] * price["transceiver"]
            + bill["optical_ports"] * price["optical_port"] + bill["patch_ports"] * price["patch_port"]
        )  # fmt: skip

    for row in of.values():
        assert row["cost"]["400g"] == pytest.approx(dollars(row["bill"]) / dollars(of["fat-tree"]["bill"]))
    assert "2.47" in _run().stdout  # optical ports of RFabric, on the terminal too


def test_circuits_of_each_phase_and_the_use_of_links_are_told():
    found = json.loads(_run("--topologies", "fat-tree,osub4,rfabric", "--json").stdout)
    of = {(it["fabric"], it["phase"]): it for it in found["circuits"]}
    assert of["fat-tree", "train"]["circuits"] == of["osub4", "sync"]["circuits"] == []
    # new weights go from each training rack to its like: 31 uplinks, of which 24 reach the core
    assert [0, 32, 24] in of["rfabric", "sync"]["circuits"]
    assert all(a // 32 == b // 32 == 0 for a, b, _ in of["rfabric", "train"]["circuits"])
    for phase in of.values():
        assert max(its["most"] for its in phase["links"].values()) == pytest.approx(1.0)
    assert of["osub4", "train"]["links"]["rack"]["most"] == 1.0
    assert of["osub4", "train"]["links"]["cards of host"]["most"] == pytest.approx(0.25)


def test_another_model_is_shown_and_not_held_to_the_published_table():
    result = json.loads(_run("--model", "qwen2.5-14b", "--topologies", "osub4", "--json").stdout)
    assert [check["name"] for check in result["checks"]] == ["cost: osub4, its bill at prices of 2025-12"]


def test_a_report_shows_both_ranges(tmp_path):
    pytest.importorskip("matplotlib")
    page = tmp_path / "fabric.html"
    assert _run("--html", str(page)).exit_code == 0
    text = page.read_text()
    assert text.count("<svg") == 4
    for what in ("Circuits by phase", "Use of links", "Bill of materials for one GPU", "2025-12"):
        assert what in text
    assert "optimizer steps and micro-batches, which are not published" in text
    assert 'class="mark"' not in text  # those are the colours of policies


def test_a_page_that_cannot_be_written_is_said_before_anything_is_computed(tmp_path):
    pytest.importorskip("matplotlib")
    found = _run("--html", str(tmp_path / "no" / "fabric.html"))
    assert found.exit_code == 1
    assert "cannot be written: there is no folder" in found.stderr


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--gpus", "100"), "100 GPUs: a cluster is made of whole pods of 256"),
        (("--gpus", "many"), "--gpus many: numbers"),
        (("--gpus", "512.5"), "--gpus 512.5: whole numbers"),
        (("--gpus", "inf"), "--gpus inf"),
        (("--t-ocs", "-1"), "--t-ocs -1"),
        (("--t-ocs", "nan"), "--t-ocs nan"),
        (("--topologies", "osub4, torus"), "no fabric is called 'torus'"),
        (("--generation", "pp4"), "--generation pp4: known are tp8, tp16, ep32, ep64, afd"),
        (("--model", "gpt"), "no figures are known for model 'gpt'"),
        (("--model", "qwen3-235b-a22b"), "whose training is not modelled"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(args, says):
    found = _run(*args)
    assert found.exit_code == 1
    assert says in found.stderr


#: all but electrical_port, on five lines
PRICES = 'transceiver = 1\noptical_port = 1\npatch_port = 1\nsource = ""\ndate = ""'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[a", "prices.toml: "),
        ("", "prices.toml: no table is there"),
        ("a = 1", "prices.toml, line 1, key 'a': 1 is there, and a table [a] of prices is needed"),
        ("\n[400g]\ntransceiver = 1", "prices.toml, line 2, key '400g': electrical_port is missing"),
        (f"[100g]\nelectrical_port = 1\n{PRICES}\n[400g]\ntransceiver = 0", "line 9, key '400g.transceiver': 0 is"),
        (f"[400g]\nelectrical_port = 0\n{PRICES}", "line 2, key '400g.electrical_port': 0 is there, and a price"),
        (f"[400g]\n{PRICES}\nelectrical_port = 'dear'", "line 7, key '400g.electrical_port': 'dear' is there"),
        ("[400g]\nfoo = 1", "prices.toml, line 2, key '400g.foo': there is no such key"),
    ],
)  # fmt: skip
def test_a_wrong_price_file_is_refused_by_file_line_and_key(tmp_path, text, says):
    prices = tmp_path / "prices.toml"
    prices.write_text(text)
    found = _run("--prices", str(prices))
    assert found.exit_code == 1
    assert str(prices) in found.stderr
    assert says in found.stderr.replace("\n", " ")


def test_names_may_have_blanks_beside_their_commas():
    spaced = _run("--topologies", "osub4, mixnet", "--generation", "tp8, afd", "--json")
    assert spaced.exit_code == 0
    assert spaced.stdout == _run("--topologies", "osub4,mixnet", "--generation", "tp8,afd", "--json").stdout


def test_without_numpy_it_says_what_brings_it(monkeypatch):
    monkeypatch.setattr("rollmuxd.cli.common.find_spec", lambda name: None)
    found = _run()
    assert found.exit_code == 1
    assert found.stderr == "rollmuxd: the study of fabrics needs numpy: pip install 'rollmuxd[rollout]'\n"
