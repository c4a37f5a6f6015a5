"""A report stands alone, says what it shows, and is the same whoever makes it.

- One file that fetches nothing; pictures in it, each with words for who cannot see it.
- Both accountings, what they mean, and what made it, are always there.
- Its numbers are those of the tables; equal outcomes give equal bytes.
- A policy has its colour whoever else ran, and it can be seen on white and on black.
"""

import re
import subprocess
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest

from rollmuxd.sim import report, tables
from rollmuxd.sim.outcome import JobOutcome, Outcome, PoolOutcome
from rollmuxd.sim.report import colours, page, pictures

HOUR = 3_600_000
VOID = {"meta", "br"}


def outcome(policy="rollmux", seed=0, accounting="paper", slo=1.5, cost=1.0, **more):
    jobs = [
        JobOutcome(
            *(f"j{n}", "7B_8k", slo, n * HOUR),
            placed_ms=n * HOUR,
            ended_ms=(n + 5) * HOUR,
            admission="packing" if n % 2 else "isolated",
            iterations=20.0,
            elapsed_ms=20_000 * (1 + cost * n / 10),
            solo_ms=20_000,
            warm=4,
        )
        for n in range(6)
    ]
    pools = [
        PoolOutcome("rollout", "H20", 8, 1.76, 32, 40 * cost * HOUR, 20.0 * HOUR),
        PoolOutcome("train", "H800", 8, 5.28, 16, 0.0, 0.0),
    ]
    curve = [(0, 0.0), (HOUR, 100.0 * cost), (6 * HOUR, 200.0 * cost + seed), (10 * HOUR, 0.0)]
    return Outcome(
        *(policy, "tiny & small", seed, "phase", accounting, 10 * HOUR),
        jobs=jobs,
        pools=pools,
        cost_curve=curve,
        decision_us=[900.0],
        **more,
    )


def comparison(*policies, seeds=(0, 1), **more):
    return [
        outcome(policy, seed, accounting, cost=1 + place / 2, **more)
        for seed in seeds
        for place, policy in enumerate(policies)
        for accounting in ("paper", "work")
    ]


def no_picture(*args):
    return None


def made(outcomes):
    return page.made(outcomes, title="tiny <b>", command='rollmuxd sim compare --slo "1:2" > x & y')


class Document(HTMLParser):
    """Strict about what a browser forgives: every element closed where it was opened, no id twice."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.ids, self.links, self.tables, self.text = [], [], [], [], ""
        self.feed(text)
        self.close()
        assert self.open == []
        assert len(self.ids) == len(set(self.ids))

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)
        values = dict(attrs)
        if "id" in values:
            self.ids.append(values["id"])
        self.links += [values[name] for name in ("href", "src", "xlink:href") if name in values]
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_data(self, data):
        self.text += data
        if self.open and self.open[-1] in ("td", "th", "span") and "table" in self.open:
            self.tables[-1][-1][-1] += data


@pytest.fixture(scope="module")
def two():
    return made(comparison("rollmux", "solo"))


def test_it_is_one_file_that_fetches_nothing(two):
    document = Document(two)
    assert all(link.startswith("#") for link in document.links)
    assert {link[1:] for link in document.links} <= set(document.ids)
    assert set(re.findall(r"https?://[^\s\"'<>]+", two)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert "<script" not in two
    assert "@import" not in two
    used = set(re.findall(r"url\(([^)]*)\)", two))
    assert used
    assert used <= {f"#{id_}" for id_ in document.ids}


def test_it_says_what_made_it_and_of_what(two):
    document = Document(two)
    assert 'rollmuxd sim compare --slo "1:2" > x & y' in document.text
    assert "&gt; x &amp; y" in two
    assert "tiny <b>" in document.text
    assert "tiny & small" in document.text
    assert "rollout: nodes of 8 H20, 1.76 $/GPU-hour" in document.text


def test_both_accountings_are_shown_and_explained(two):
    document = Document(two)
    for accounting in ("paper", "work"):
        assert f"Accounting: {accounting}" in document.text
        assert tables.MEANING[accounting] in document.text
    words = document.text.partition("What the words mean")[2]
    for meaning in (*tables.MEANING.values(), tables.UTILISATION, tables.BUBBLE):
        assert meaning in words


def test_an_accounting_that_did_not_run_is_said_not_to_have_run():
    document = Document(made([outcome()]))
    assert "Accounting: work" in document.text
    assert "It was not run." in document.text


def test_its_numbers_are_those_of_the_terminal(two):
    figures, how = Document(two).tables[:2]
    assert figures[0][:4] == ["POLICY", "$/h", "TOTAL $", "x SOLO"]
    assert figures[1] == ["rollmux", "56.32", "563.2", "0.667", "32 H20, 16 H800", "1.25", "1.5", "100%", "5", "0"]
    assert how[1] == ["rollmux", "50%", "-", "3 isolated, 3 packing", "24/0/0", "0.9", "0.9"]


def test_differences_are_shown_against_the_first(two):
    rows = Document(two).tables[4]
    assert rows[0][:3] == ["POLICY", "ACCOUNTING", "$/h"]
    assert [row[:3] for row in rows[1:]] == [["solo", "paper", "+28.16"], ["solo", "work", "+28.16"]]


def test_who_was_never_placed_is_told_of():
    left_out = outcome()
    left_out.jobs[0].placed_ms = None
    assert "jobs were never placed" in Document(made([left_out])).text


def test_pictures_have_words_for_who_cannot_see_them(two):
    drawn = re.findall(r"<svg.*?</svg>", two, re.DOTALL)
    assert len(drawn) == 3
    for number, svg in enumerate(drawn, 1):
        root = ET.fromstring(svg)
        assert root.get("role") == "img"
        assert root.get("aria-labelledby") == f"p{number}-title p{number}-desc"
        title, desc = root.find("{*}title"), root.find("{*}desc")
        assert (title.get("id"), desc.get("id")) == (f"p{number}-title", f"p{number}-desc")
        assert title.text
        assert len(desc.text) > 40
    assert "rollmux rollout paper 50%" in drawn[2]
    assert "dollars per hour</text>" in drawn[0], "letters, not shapes of letters"
    assert "Lines are means over the seeds" in two


def test_pictures_take_the_pages_colours_so_that_they_can_be_read_in_the_dark(two):
    for svg in re.findall(r"<svg.*?</svg>", two, re.DOTALL):
        assert "currentColor" in svg
        assert "var(--rule)" in svg
        assert pictures.INK not in svg
        assert not re.search(r"#000000|#ffffff", svg)
    assert "prefers-color-scheme: dark" in two
    assert "@media print" in two


def test_equal_outcomes_give_equal_bytes_in_another_process_too(tmp_path):
    code = (
        "import importlib.util, sys; "
        f"spec = importlib.util.spec_from_file_location('t', {__file__!r}); t = importlib.util.module_from_spec(spec); "
        "spec.loader.exec_module(t); sys.stdout.buffer.write(t.made(t.comparison('rollmux', 'mine')).encode())"
    )
    env = {"PYTHONHASHSEED": "1", "MPLCONFIGDIR": str(tmp_path), "PATH": "/usr/bin:/bin"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, env=env, check=True)
    assert ran.stdout.decode() == made(comparison("rollmux", "mine"))


def test_somebodys_own_matplotlib_settings_change_nothing(two):
    import matplotlib as mpl

    with mpl.rc_context({"font.size": 30, "axes.labelpad": 20, "svg.fonttype": "path"}):
        assert made(comparison("rollmux", "solo")) == two


def test_a_policy_has_its_colour_whoever_else_ran(two):
    marks = dict(re.findall(r'class="mark" style="background:(#\w+)"></span>([\w-]+)', two))
    assert marks == {"#2f7fd6": "rollmux", "#7f858c": "solo"}
    assert {colours.of_policy(name).colour: name for name in ("rollmux", "solo")} == marks


@pytest.mark.parametrize("background", ["#ffffff", "#14171b"])
def test_colours_can_be_seen_on_white_and_on_black(background):
    """WCAG 2.1, 1.4.11: three to one for what is drawn."""
    every = [look.colour for look in colours.POLICIES.values()]
    every += [colours.of_policy(f"policy-{n}").colour for n in range(200)]
    assert f"--page: {background}" in page._CSS
    for colour in every:
        lighter, darker = sorted((luminance(colour), luminance(background)), reverse=True)
        assert (lighter + 0.05) / (darker + 0.05) >= 3, colour


def luminance(colour):
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_no_two_policies_look_alike():
    assert len(set(colours.POLICIES.values())) == len({look.colour for look in colours.POLICIES.values()}) == 9


def test_without_bounds_slowdowns_are_shown_themselves():
    text = made(comparison("rollmux", "solo", slo=None))
    assert "slowdown (mean iteration / solo iteration)" in text
    assert "each job's slowdown (1: as alone)" in Document(text).text


def test_one_policy_and_one_seed_make_a_report():
    document = Document(made([outcome()]))
    assert "Lines are means" not in document.text
    assert "Differences from" not in document.text


def test_an_optimum_that_was_not_proved_is_not_called_one(monkeypatch):
    for name in ("cost", "slowdowns", "utilisation"):
        monkeypatch.setattr(pictures, name, no_picture)
    document = Document(made([outcome("optimal", exact=False)]))
    assert document.tables[0][1][0] == "optimal (best found)"


def test_runs_without_jobs_or_curves_make_a_report_without_those_pictures():
    empty = Outcome("rollmux", "none", 0, "cost", "paper")
    text = made([empty])
    Document(text)
    assert "<svg" not in text


def test_nothing_is_nothing_to_report():
    with pytest.raises(ValueError, match="nothing ran"):
        made([])


def test_a_trace_that_begins_late_is_drawn_from_its_beginning():
    late = outcome()
    late.cost_curve = [(at + 1000 * HOUR, level) for at, level in late.cost_curve]
    svg = pictures.cost([late], 1).svg
    assert len(re.findall(r">1\d{3}</text>", svg)) > 3
    assert "hours of the trace" in svg


def test_it_is_written_where_it_was_asked_for(tmp_path, two):
    path = tmp_path / "r.html"
    report.write(
        path, comparison("rollmux", "solo"), title="tiny <b>", command='rollmuxd sim compare --slo "1:2" > x & y'
    )
    assert path.read_text() == two


def test_without_matplotlib_it_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    with pytest.raises(report.Unavailable, match=re.escape("pip install '.[sim]'")):
        report.write(tmp_path / "r.html", comparison("rollmux"), title="t", command="c")
    assert list(tmp_path.iterdir()) == []


def test_matplotlib_is_imported_for_pictures_only():
    code = (
        "import sys, rollmuxd.sim.report, rollmuxd.sim.tables, rollmuxd.sim.perfetto, rollmuxd.cli.main; "
        "print('matplotlib' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"
