"""A report stands alone, and is the same whoever makes it.

- One file that fetches nothing; pictures in it, each with words for who cannot see it.
- Equal results give equal bytes.
- A policy has its colour whoever else ran, and it can be seen on white and on black.
"""

import re
import subprocess
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest

from rollmuxd.sim import report
from rollmuxd.sim.report import colours, page
from rollmuxd.sim.rollouts.study import POLICIES

VOID = {"meta", "br"}


def drawn(number):
    from rollmuxd.sim.report import pictures  # here and not above: each of pytest's workers would import matplotlib

    @pictures.in_style
    def draw():
        figure, (axes,) = pictures.axes_of(1, 4.0, 3.0)
        axes.plot([1, 2, 3], [1, 4, 9], color=colours.of_policy("rollmux").colour, label="rollmux")
        axes.fill_between([1, 2, 3], [1, 2, 3], facecolor="none", edgecolor=pictures.INK, hatch="////")
        axes.set(xlabel="seconds", ylabel="dollars per hour")
        axes.legend()
        return pictures.as_svg(figure, number, "Cost & time", "What it cost, in dollars per hour.")

    return draw()


def made():
    rows = [["rollmux", "2.5", "a < b"], ["solo", "4", "b"]]
    shown = page.table("What it cost", (["POLICY", "#$/h", "WHY"], rows))
    return page.document("tiny <b>", f"{shown}{drawn(1)}{drawn(2)}")


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
    return made()


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


def test_its_table_says_what_it_was_given(two):
    document = Document(two)
    assert document.tables == [[["POLICY", "$/h", "WHY"], ["rollmux", "2.5", "a < b"], ["solo", "4", "b"]]]
    assert "tiny &lt;b&gt;" in two


def test_pictures_have_words_for_who_cannot_see_them(two):
    svgs = re.findall(r"<svg.*?</svg>", two, re.DOTALL)
    assert len(svgs) == 2
    for number, svg in enumerate(svgs, 1):
        root = ET.fromstring(svg)
        assert root.get("role") == "img"
        assert root.get("aria-labelledby") == f"p{number}-title p{number}-desc"
        title, desc = root.find("{*}title"), root.find("{*}desc")
        assert (title.get("id"), desc.get("id")) == (f"p{number}-title", f"p{number}-desc")
        assert title.text
        assert desc.text
    assert "dollars per hour</text>" in svgs[0], "letters, not shapes of letters"


def test_pictures_take_the_pages_colours_so_that_they_can_be_read_in_the_dark(two):
    from rollmuxd.sim.report import pictures

    for svg in re.findall(r"<svg.*?</svg>", two, re.DOTALL):
        assert "currentColor" in svg
        assert "var(--rule)" in svg
        assert pictures.INK not in svg
        assert not re.search(r"#000000|#ffffff", svg)
    assert "prefers-color-scheme: dark" in two
    assert "@media print" in two


def test_equal_results_give_equal_bytes_in_another_process_too(tmp_path):
    code = (
        "import importlib.util, sys; "
        f"spec = importlib.util.spec_from_file_location('t', {__file__!r}); t = importlib.util.module_from_spec(spec); "
        "spec.loader.exec_module(t); sys.stdout.buffer.write(t.made().encode())"
    )
    env = {"PYTHONHASHSEED": "1", "MPLCONFIGDIR": str(tmp_path), "PATH": "/usr/bin:/bin"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, env=env, check=True)
    assert ran.stdout.decode() == made()


def test_somebodys_own_matplotlib_settings_change_nothing(two):
    import matplotlib as mpl

    with mpl.rc_context({"font.size": 30, "axes.labelpad": 20, "svg.fonttype": "path"}):
        assert made() == two


def test_a_policy_has_its_colour_whoever_else_ran(two):
    marks = dict(re.findall(r'class="mark" style="background:(#\w+)"></span>([\w-]+)', two))
    assert {colours.of_policy(name).colour: name for name in ("rollmux", "solo")} == marks


@pytest.mark.parametrize("background", ["#ffffff", "#14171b"])
def test_colours_can_be_seen_on_white_and_on_black(background):
    """WCAG 2.1, 1.4.11: three to one for what is drawn."""
    every = [colours.of_policy(f"policy-{n}").colour for n in range(200)]
    assert f"--page: {background}" in page._CSS
    for colour in every:
        lighter, darker = sorted((luminance(colour), luminance(background)), reverse=True)
        assert (lighter + 0.05) / (darker + 0.05) >= 3, colour


def luminance(colour):
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_no_two_policies_look_alike():
    assert len({colours.of_policy(name) for name in POLICIES}) == len(POLICIES)


def test_without_matplotlib_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    with pytest.raises(report.Unavailable, match=re.escape("pip install 'rollmuxd[sim]'")):
        report.check()


def test_matplotlib_is_imported_for_pictures_only():
    code = (
        "import sys, rollmuxd.sim.report, rollmuxd.sim.tables, rollmuxd.sim.perfetto, rollmuxd.cli.main; "
        "print('matplotlib' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"
