"""A real browser before a live daemon: the picture moves, every control does what it says, nothing else is asked.

Pictures are kept where ``ROLLMUX_SCREENSHOTS`` says, for people to look at.
"""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

WIDE = {"width": 1600, "height": 1000}
NARROW = {"width": 420, "height": 900}


class Screen:
    """One tab, and what it was seen to do."""

    def __init__(self, browser: Any, url: str, key: str, *, size: Any = None, scheme: str = "dark") -> None:
        self.url = url
        self.context = browser.new_context(viewport=size or WIDE, color_scheme=scheme)
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda line: self.said.append(f"{line.type}: {line.text}"))
        self.page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        self.page.on("request", lambda request: self.asked.append(request.url))
        if key:
            self.page.add_init_script(f"sessionStorage.setItem('rollmux.key', {key!r})")
        self.page.goto(f"{url}/")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.page, name)

    def until(self, what: str, true: str, within_ms: int = 600_000) -> Any:
        """Poll from here: the page's own policy lets nobody evaluate strings in it."""
        for _ in range(within_ms // 100):
            if found := self.page.evaluate(true):
                return found
            self.page.wait_for_timeout(100)
        pytest.fail(f"still not: {what}; the page said {self.said}")

    def drawn(self) -> None:
        self.until("the first picture", "window.rollmux && rollmux.figures.firstPaintMs !== null")
        self.until("bars in it", "rollmux.gantt.drawn.bars > 0")

    def picture(self) -> str:
        """The timeline as it is now, pixel by pixel."""
        return str(self.page.evaluate("(rollmux.gantt.draw(), document.getElementById('gantt').toDataURL())"))

    def keep(self, name: str) -> None:
        if folder := os.environ.get("ROLLMUX_SCREENSHOTS"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=Path(folder) / f"{name}.png")

    def text(self, selector: str) -> str:
        return str(self.page.locator(selector).inner_text())

    def check(self, *expected: str) -> None:
        """No error on the console, and nobody else was asked anything."""
        wrong = [line for line in self.said if not any(re.search(known, line) for known in expected)]
        assert wrong == []
        assert [url for url in self.asked if not url.startswith(self.url)] == []


@pytest.fixture
def screen(browser: Any, cluster: Any) -> Iterator[Screen]:
    """The dashboard, as an admin sees it."""
    made = Screen(browser, cluster.url, cluster.key())
    made.drawn()
    yield made
    made.check()
    made.context.close()


def test_the_picture_moves_while_jobs_take_turns(screen: Screen, cluster: Any) -> None:
    before, facts = screen.picture(), screen.evaluate("rollmux.history.last")
    screen.until("facts that came by themselves", f"rollmux.history.last > {facts} + 20")
    assert screen.picture() != before
    assert screen.text("#link") == "live"
    jobs = cluster.get("/v1/jobs", limit=1000)["items"]
    assert len(jobs) == 12
    for pool in ("rollout", "train"):
        card = screen.text(f"[data-pool={pool}]")
        assert "of 8 GPUs held" in card
        parts = [int(part) for part in re.findall(r"(\d+) %", card)]
        assert len(parts) == 4
        assert 98 <= sum(parts) <= 102
    assert screen.locator("#list .body .row").count() == 12
    assert screen.text("#recent")
    screen.keep("overview-dark")


#: a redraw, with every call on the canvas counted
COUNTED = """() => {
    const calls = { draws: 0, texts: 0 };
    const to = rollmux.gantt.context;
    const names = { fillRect: "draws", strokeRect: "draws", fillText: "texts", stroke: "draws", measureText: "texts" };
    for (const [name, kind] of Object.entries(names)) {
        to[name] = (...given) => {
            calls[kind] += 1;
            return CanvasRenderingContext2D.prototype[name].apply(to, given);
        };
    }
    rollmux.gantt.draw();
    for (const name of Object.keys(names)) delete to[name];
    return { ...calls, bars: rollmux.gantt.drawn.bars, rows: rollmux.gantt.rows.length };
}"""
#: what changes in the page when it is drawn once more, and nothing has happened
CHANGES = """() => {
    const now = rollmux.now();
    rollmux.now = () => now;
    rollmux.drawAll();
    const seen = new MutationObserver(() => {});
    seen.observe(document.body, { subtree: true, childList: true, attributes: true, characterData: true });
    rollmux.drawAll();
    delete rollmux.now;
    return seen.takeRecords().map(({ type, target, attributeName }) =>
        `${type} ${attributeName ?? ""} of ${(target.closest ?? target.parentNode.closest).call(target, "[id]")?.id}`);
}"""


def test_a_redraw_makes_no_more_strokes_than_there_is_to_see(screen: Screen) -> None:
    """However fast the machine: a bar is a fill and a frame, a row its ground, its name and its note."""
    screen.evaluate("rollmux.gantt.show(rollmux.history.earliest, rollmux.now())")
    counted = screen.evaluate(COUNTED)
    assert counted["bars"] > 20
    ticks = 20
    assert counted["draws"] <= 2 * counted["bars"] + 6 * counted["rows"] + 2 * ticks
    assert counted["texts"] <= counted["bars"] + 2 * counted["rows"] + ticks


def test_what_has_not_changed_is_left_alone(screen: Screen) -> None:
    for tab in ("jobs", "nodes", "groups", "hosts"):
        screen.click(f"#tab-{tab}")
        assert screen.evaluate(CHANGES) == []


def test_an_idle_page_asks_for_nothing_but_news(screen: Screen, cluster: Any) -> None:
    """Lists are asked for with what is known of them, and the answer is that nothing is new."""
    asked = screen.evaluate(
        """async () => {
            const said = [];
            const get = rollmux.api.get;
            rollmux.api.get = async (path, query, signal) => {
                const answer = await get.call(rollmux.api, path, query, signal);
                if (path === "/v1/overview") said.push([query.since === answer.tag, answer.lists === null]);
                return answer;
            };
            for (let times = 0; times < 20; times += 1) await rollmux.refresh();
            delete rollmux.api.get;
            return said;
        }"""
    )
    assert len(asked) == 20
    assert all(same == left_out for same, left_out in asked)
    lists = screen.evaluate("rollmux.figures.lists")
    assert lists >= 1 + sum(not left_out for _, left_out in asked)


def test_what_is_drawn_is_what_the_daemon_says(screen: Screen, cluster: Any) -> None:
    """Slots that ended while the page was open have the times that the journal has."""
    screen.until("a slot that came and went", "[...rollmux.history.slots.values()].some((slot) => slot.over)")
    drawn = screen.evaluate(
        """[...rollmux.history.slots.values()].filter((slot) => slot.over && slot.queued && slot.how === 'released')
        .map(({ id, job, phase, queued, claimed, granted, ended, over, fence, gpus }) =>
             ({ id, job, phase, queued, claimed, granted, ended, over, fence, gpus }))"""
    )
    facts: dict[str, dict[str, Any]] = {}
    for fact in cluster.facts():
        if "slot" in fact:
            facts.setdefault(fact["slot"], {})[fact["fact"]] = fact
    assert drawn
    for slot in drawn:
        mine = facts[slot["id"]]
        assert mine["slot_queued"]["job"] == slot["job"]
        assert mine["slot_claimed"]["gpus"] == slot["gpus"]
        assert ".".join(map(str, mine["slot_granted"]["fence"])) == slot["fence"]
        for name in ("queued", "claimed", "granted", "over"):
            assert mine[f"slot_{name}"]["at"] == slot[name]
        assert mine["slot_released"]["at"] == slot["ended"]


def test_the_timeline_is_zoomed_moved_and_followed(screen: Screen) -> None:
    span = screen.evaluate("rollmux.gantt.span")
    screen.click("#in")
    assert screen.evaluate("rollmux.gantt.span") < span
    screen.click("#out")
    screen.click("[data-span='300']")
    assert screen.evaluate("rollmux.gantt.span") == 300_000
    assert screen.get_attribute("[data-span='300']", "aria-pressed") == "true"
    box = screen.locator("#gantt").bounding_box()
    middle = box["x"] + box["width"] * 0.6, box["y"] + box["height"] * 0.4
    screen.mouse.move(*middle)
    screen.mouse.down()
    screen.mouse.move(middle[0] + 200, middle[1], steps=4)
    screen.mouse.up()
    assert screen.evaluate("rollmux.gantt.follows") is False
    assert screen.get_attribute("#live", "aria-pressed") == "false"
    stays = screen.evaluate("rollmux.gantt.to")
    screen.wait_for_timeout(700)
    assert screen.evaluate("rollmux.gantt.to") == stays
    screen.keyboard.down("Control")
    screen.mouse.wheel(0, -200)
    screen.keyboard.up("Control")
    screen.until("zoomed by the wheel", "rollmux.gantt.span < 300000")
    screen.click("#live")
    assert screen.evaluate("rollmux.gantt.follows") is True
    for name in ("jobs", "groups", "pools"):
        screen.click(f"[data-rows={name}]")
        kinds = screen.evaluate("[...new Set(rollmux.gantt.rows.map((row) => row.kind))].sort()")
        assert kinds == ["head", "job" if name == "jobs" else "node"]
        screen.keep(f"rows-{name}")
    for colour in ("phase", "owner", "job"):
        before = screen.picture()
        screen.select_option("#colour", colour)
        assert screen.picture() != before
    screen.select_option("#dense", "5")
    assert screen.evaluate("rollmux.gantt.rowHeight") == 5
    screen.select_option("#dense", "auto")
    screen.click("#legend-button")
    assert "reclaiming" not in screen.text("#legend")  # words of people, not of the code
    assert "held until verified clean" in screen.text("#legend")
    screen.keep("legend")


def test_a_slot_is_told_of_under_the_mouse_and_when_it_is_chosen(screen: Screen) -> None:
    point = screen.until(
        "a bar to point at",
        """(() => {
            const { gantt } = rollmux;
            gantt.show(rollmux.now() - 20000, rollmux.now());
            gantt.draw();
            for (const row of gantt.rows.filter((one) => one.kind === 'node')) {
                const bars = row.lane().bars.filter((bar) => bar.kind === 'running' && bar.t0 > gantt.from + 1000
                    && bar.t1 < gantt.now && bar.t1 - bar.t0 > 300);
                if (!bars.length) continue;
                const box = gantt.canvas.getBoundingClientRect();
                return { x: box.left + gantt.xOf((bars[0].t0 + bars[0].t1) / 2),
                         y: box.top + gantt._y(row) + row.height / 2, slot: bars[0].slot.id };
            }
        })()""",
    )
    screen.mouse.move(point["x"], point["y"])
    tip = screen.text("#tip")
    for word in (point["slot"], "waited", "switch", "ran", "fence"):
        assert word in tip
    screen.mouse.click(point["x"], point["y"])
    chosen = screen.text("#chosen")
    assert point["slot"] in chosen
    assert "Revoke" in chosen
    assert screen.locator("[data-action=revoke]").is_disabled()  # it has ended
    screen.keep("chosen")


def test_all_of_it_goes_without_a_mouse(screen: Screen) -> None:
    screen.keyboard.press("g")
    assert screen.evaluate("document.activeElement.id") == "gantt"
    span = screen.evaluate("rollmux.gantt.span")
    screen.keyboard.press("+")
    assert screen.evaluate("rollmux.gantt.span") < span
    assert screen.evaluate("rollmux.gantt.follows") is True
    screen.keyboard.press("ArrowLeft")
    to = screen.evaluate("rollmux.gantt.to")
    assert to < screen.evaluate("rollmux.now()")
    assert screen.evaluate("rollmux.gantt.follows") is False
    screen.keyboard.press("ArrowRight")
    assert screen.evaluate("rollmux.gantt.to") > to
    screen.keyboard.press("End")
    assert screen.evaluate("rollmux.gantt.follows") is True
    screen.keyboard.press("ArrowDown")
    assert screen.locator("#chosen").is_visible()
    first = screen.text("#chosen h2") + screen.text("#chosen .facts")
    screen.keyboard.press("[")
    assert screen.text("#chosen h2") + screen.text("#chosen .facts") != first
    screen.keyboard.press("Escape")
    assert screen.locator("#chosen").is_hidden()
    screen.evaluate("document.activeElement.blur()")
    screen.keyboard.press("/")
    assert screen.evaluate("document.activeElement.id") == "filter"
    screen.keyboard.type("math")
    assert 0 < screen.locator("#list .body .row").count() < 12
    screen.fill("#filter", "no such job")
    assert "nothing fits" in screen.text("#list")
    screen.fill("#filter", "")
    screen.focus("#tab-jobs")
    seen = []
    for _ in range(5):
        screen.keyboard.press("ArrowRight")
        seen.append(screen.evaluate("document.activeElement.id"))
        assert screen.get_attribute(f"#{seen[-1]}", "aria-selected") == "true"
        assert screen.text("#list").strip()
        screen.keep(seen[-1])
    assert seen == ["tab-groups", "tab-nodes", "tab-hosts", "tab-events", "tab-report"]
    screen.until("the usage is added up", "document.querySelector('#list .figure') !== null")
    screen.evaluate("document.activeElement.blur()")
    screen.keyboard.press("?")
    assert screen.locator("#keys").is_visible()
    screen.keyboard.press("Escape")
    unnamed = screen.evaluate(
        """[...document.querySelectorAll('button, input, select, canvas[tabindex], a')]
            .filter((one) => one.offsetParent)
            .filter((one) => !one.getAttribute('aria-label') && !one.textContent.trim() && !one.labels?.length)
            .map((one) => one.outerHTML)"""
    )
    assert unnamed == []


def test_tab_and_range_are_in_the_address_and_a_link_shows_the_same(browser: Any, cluster: Any, screen: Screen) -> None:
    screen.evaluate("rollmux.openTab('nodes')")
    screen.evaluate("rollmux.gantt.followNow(120000)")
    screen.until("the address names them", "location.hash === '#/?tab=nodes&span=120'")
    end = int(screen.evaluate("Math.round(rollmux.now())"))
    screen.evaluate(f"rollmux.gantt.show({end - 60000}, {end})")
    screen.until("a range that stays", f"location.hash === '#/?tab=nodes&from={end - 60000}&to={end}'")

    screen.page.reload()
    screen.drawn()
    seen = screen.evaluate("[rollmux.tab, rollmux.gantt.from, rollmux.gantt.to, rollmux.gantt.follows]")
    assert seen == ["nodes", end - 60000, end, False]


def test_a_link_logs_in_and_the_key_does_not_stay_in_the_address(browser: Any, cluster: Any) -> None:
    seen = Screen(browser, cluster.url, "")
    seen.page.goto("about:blank")
    seen.page.goto(f"{cluster.url}/#key={cluster.key()}")
    seen.drawn()
    assert "key" not in str(seen.evaluate("location.href"))
    seen.check("401")
    seen.context.close()


def test_lists_are_sorted_by_their_heads(screen: Screen) -> None:
    heads = screen.locator("#list .headers button")
    heads.get_by_text("iter.").click()
    heads.get_by_text("iter.").click()
    shown = [
        int(cell.replace(",", "")) for cell in screen.locator("#list .body .row > :nth-child(7)").all_inner_texts()
    ]
    tops = screen.evaluate("[...document.querySelectorAll('#list .body .row')].map((row) => parseInt(row.style.top))")
    assert tops == sorted(tops)
    assert shown == sorted(shown, reverse=True)
    assert screen.locator("#list [aria-sort=descending]").count() == 1


def test_events_name_jobs_whose_registration_was_not_read(screen: Screen, cluster: Any) -> None:
    job = cluster.get("/v1/jobs", limit=1)["items"][0]
    # Something of today: when it was placed may lie further back than a page begins with.
    for change in ("pause", "resume"):
        assert cluster.call("POST", f"/v1/jobs/{job['job']}/{change}").status_code == 200
    said = screen.evaluate(
        """async () => {
            const get = rollmux.api.get;
            rollmux.api.get = async (path, query, signal) => {
                const answer = await get.call(rollmux.api, path, query, signal);
                // As if so much had happened since that the page does not begin with it.
                if (path === "/v1/facts") answer.facts = answer.facts.filter(({ fact }) => fact !== "job_registered");
                return answer;
            };
            await rollmux.start();
            rollmux.drawAll();
            delete rollmux.api.get;
            return rollmux.history.events.map((event) => event.text).join("; ");
        }"""
    )
    assert f"{job['name']} was paused" in said
    assert f"{job['job']} was paused" not in said


def test_gpus_that_are_long_in_becoming_clean_want_attention(screen: Screen) -> None:
    """They are held, and nobody uses them: of all that the cards can say that would be called switching."""
    said = screen.evaluate(
        """() => {
            const [node] = [...rollmux.nodes.values()];
            const slot = { job: "j1", ended: rollmux.now() - 20000, how: "lost", gpus: [], tries: [], parts: [] };
            const gpus = node.gpus.map((gpu) => ({ ...gpu, holder: "made-up" }));
            rollmux.history.slots.set("made-up", slot);
            rollmux.nodes.set(node.node, { ...node, gpus });
            const found = [];
            for (const ended of [20000, 5000]) {
                slot.ended = rollmux.now() - ended;
                rollmux.drawAll();
                found.push(document.getElementById("trouble").textContent);
            }
            rollmux.history.slots.delete("made-up");
            rollmux.nodes.set(node.node, node);
            return found;
        }"""
    )
    assert "2 GPUs held until verified clean of 1 slot that ended badly, for up to 20" in said[0]
    assert "held until verified clean" not in said[1]


def test_light_and_dark_are_chosen_and_kept(browser: Any, cluster: Any) -> None:
    for scheme in ("dark", "light"):
        screen = Screen(browser, cluster.url, cluster.key(), scheme=scheme)
        screen.drawn()
        ground = "getComputedStyle(document.body).backgroundColor"
        by_system = screen.evaluate(ground)
        screen.keep(f"system-{scheme}")
        seen = [by_system]
        for _ in range(2):
            screen.keyboard.press("t")
            seen.append(screen.evaluate(ground))
        assert len(set(seen)) == 2
        screen.reload()
        screen.drawn()
        assert screen.evaluate(ground) == seen[-1]  # dark: it is kept
        screen.keyboard.press("t")
        assert screen.evaluate(ground) == by_system
        screen.check()
        screen.context.close()


def test_a_job_has_a_page_with_its_times_its_history_and_why(screen: Screen, cluster: Any) -> None:
    job = cluster.until(
        "somebody has gone round",
        lambda: next((job for job in cluster.get("/v1/jobs", limit=100)["items"] if job["iterations"] > 1), None),
    )
    screen.locator("#list .body a", has_text=job["name"]).first.click()
    screen.until("its page", "rollmux.page?.job && rollmux.page.gantt.drawn.bars > 0")
    assert screen.text("h1") == job["name"]
    sentences = cluster.get(f"/v1/jobs/{job['job']}/explain")["sentences"]
    assert sentences[0] in screen.text("#page")
    for word in ("rollout", "train", "planned", "median", "warm", job["owner"]):
        assert word in screen.text("#page")
    screen.until("its slots", "rollmux.page.slots.shown.length > 1")
    assert screen.title().startswith(job["name"])
    screen.keep("job")
    screen.keyboard.press("Escape")
    screen.until("the overview", "!document.getElementById('overview').hidden")


def test_the_page_of_a_job_shows_the_end_of_its_output_and_what_is_printed_meanwhile(
    screen: Screen, cluster: Any
) -> None:
    job = cluster.get("/v1/jobs", limit=100)["items"][0]["job"]
    asked: list[str] = []
    piece = {"job": job, "launch": "l1", "over": False}
    answers = [
        {**piece, "text": "step 7\n<b>step</b> 8\n", "next": 70_020},
        {**piece, "text": "", "next": 70_020},
        {**piece, "text": "step 9\n", "next": 70_027},
        {**piece, "text": "", "next": 70_027, "over": True},
    ]

    def answer(route: Any) -> None:
        asked.append(route.request.url.partition("?")[2])
        route.fulfill(json=answers[min(len(asked), len(answers)) - 1])

    screen.page.route("**/logs?*", answer)
    screen.evaluate(f"location.hash = '#/job/{job}'")
    screen.locator("#page button", has_text="Show").click()
    screen.until("its end", "document.querySelector('#page').textContent.includes('its process is over')")

    assert screen.locator(".output").text_content() == "step 7\n<b>step</b> 8\nstep 9\n"
    assert asked[:2] == ["after=-65536&limit=65536", "after=70020&limit=65536"]
    assert len(asked) == 4


def test_where_no_output_is_kept_the_page_says_so(screen: Screen, cluster: Any) -> None:
    job = cluster.get("/v1/jobs", limit=100)["items"][0]["job"]
    screen.evaluate(f"location.hash = '#/job/{job}'")
    screen.locator("#page button", has_text="Show").click()
    screen.until(
        "a reason", "document.querySelector('#page').textContent.includes('the daemon keeps no output of this job')"
    )
    screen.check("404")
    screen.said.clear()


def test_a_button_stays_under_the_pointer_while_news_come(screen: Screen, cluster: Any) -> None:
    job = max(cluster.get("/v1/jobs", limit=100)["items"], key=lambda one: one["iterations"])
    screen.goto(f"{cluster.url}/#/job/{job['job']}")
    screen.until("its page", "rollmux.page?.job?.iterations")
    screen.evaluate("window.kept = document.querySelector('[data-action=pause]')")
    begun = screen.evaluate("rollmux.page.job.iterations")
    screen.until("it has gone round", f"rollmux.page.job.iterations > {begun}")
    assert screen.evaluate("window.kept.isConnected")

    screen.goto(f"{cluster.url}/#/")
    screen.evaluate("rollmux.chooseNode(rollmux.gantt.rows.find((one) => one.kind === 'node').id)")
    screen.evaluate("window.kept = document.querySelector('[data-action=drain]')")
    screen.evaluate("window.facts = document.querySelector('#chosen .body')")
    screen.until("the node has other news", "!window.facts.isConnected")
    assert screen.evaluate("window.kept.isConnected")


def test_a_job_is_paused_and_resumed_and_a_slot_revoked_after_a_question(screen: Screen, cluster: Any) -> None:
    from playwright.sync_api import TimeoutError as TooLate

    job = cluster.get("/v1/jobs", limit=100)["items"][0]
    screen.goto(f"{cluster.url}/#/job/{job['job']}")
    screen.until("its page", "rollmux.page?.job")
    assert screen.locator("[data-action=resume]").is_disabled()
    screen.click("[data-action=pause]")
    assert "gets no other" in screen.text("#confirm")
    screen.click("#confirm-no")
    assert cluster.get(f"/v1/jobs/{job['job']}")["status"] == "admitted"
    screen.click("[data-action=pause]")
    screen.click("#confirm-yes")
    cluster.until("it is paused", lambda: cluster.get(f"/v1/jobs/{job['job']}")["status"] == "paused")
    screen.until("that shows", "document.querySelector('.jobhead').innerText.includes('paused')")
    screen.keep("paused")
    screen.click("[data-action=resume]")
    screen.click("#confirm-yes")
    cluster.until("it goes on", lambda: cluster.get(f"/v1/jobs/{job['job']}")["status"] == "admitted")

    screen.goto(f"{cluster.url}/#/")
    slot = None
    while slot is None:
        chosen = screen.until(
            "a slot that runs",
            """(() => {
                for (const row of rollmux.gantt.rows.filter((one) => one.kind === 'node')) {
                    const bar = row.lane().bars.findLast((one) => one.kind === 'running' && one.t1 === Infinity);
                    if (bar) { rollmux.gantt.choose({ row, bar }); rollmux.choose({ row, bar }); return bar.slot.id; }
                }
            })()""",
        )
        with suppress(TooLate):  # its phase has ended, and the button with it
            screen.click(f"[data-action=revoke][data-of={chosen}]", timeout=5_000)
            slot = chosen
    screen.fill("#reason", "to see what happens")
    before = len([fact for fact in cluster.facts() if fact["fact"] == "audited"])
    screen.click("#confirm-yes")
    screen.until(
        "it was done, or came to its end before",
        "!document.getElementById('confirm').open || document.getElementById('confirm-error').innerText",
    )
    audited = [fact for fact in cluster.facts() if fact["fact"] == "audited"]
    if not screen.evaluate("document.getElementById('confirm').open"):
        assert len(audited) > before
        assert (audited[-1]["action"], audited[-1]["about"]) == ("revoke_slot", slot)
        assert audited[-1]["reason"] == "to see what happens"
        screen.until("its end shows", f"rollmux.history.slots.get('{slot}').how === 'revoked'")
    screen.said = [line for line in screen.said if "409" not in line]  # it may have ended while one was asked


def test_a_node_is_drained_and_used_again_and_looks_like_it(screen: Screen, cluster: Any) -> None:
    node = cluster.get("/v1/nodes", limit=100)["items"][-1]["node"]
    screen.click("#tab-nodes")
    screen.locator("#list .body .row", has_text=node).click()
    screen.click("[data-action=drain]")
    assert "end the jobs" in screen.text("#confirm")
    screen.click("#confirm-yes")
    cluster.until("it drains", lambda: cluster.get(f"/v1/nodes/{node}")["status"] in ("draining", "drained"))
    lane = f"rollmux.lanes.node('{node}').backs.map((back) => back.status)"
    screen.until("that is drawn", f"['draining', 'drained'].includes({lane}.at(-1))")
    screen.until("its word in the list", "document.querySelector('#list').innerText.includes('drain')")
    screen.wait_for_timeout(400)
    screen.keep("drained")
    screen.click("[data-action=undrain]")
    screen.click("#confirm-yes")
    cluster.until("it is used again", lambda: cluster.get(f"/v1/nodes/{node}")["status"] == "up")
    screen.until("that is drawn, too", f"rollmux.lanes.node('{node}').backs.every((back) => back.t1 !== Infinity)")


def test_without_a_key_nothing_is_shown_and_a_wrong_one_is_told(browser: Any, cluster: Any) -> None:
    screen = Screen(browser, cluster.url, "")
    screen.wait_for_selector("#login[open]")
    assert screen.locator("#overview").is_hidden()
    screen.keyboard.press("Escape")
    assert screen.locator("#login").is_visible()
    screen.fill("#key", "rmx_00000000_nonsense")
    screen.keyboard.press("Enter")
    screen.until("the refusal", "document.getElementById('login-error').innerText.includes('not known')")
    key = cluster.key("viewer", owner="others")
    screen.fill("#key", key)
    screen.keyboard.press("Enter")
    screen.until("the page", "!document.getElementById('overview').hidden")
    assert not any(key in url for url in screen.asked)
    assert "others" in screen.text("#partial")
    # Of other owners' jobs a viewer sees that GPUs are held, and no more.
    assert screen.evaluate("rollmux.jobs.length") == 0
    assert screen.evaluate("rollmux.history.slots.size") == 0
    cluster.until("GPUs are held", lambda: any(pool["gpus_held"] for pool in cluster.get("/v1/pools")["items"]))
    screen.click("#tab-nodes")
    screen.locator("#list .body .row").first.click()
    for action in ("drain", "undrain", "clean"):
        button = screen.locator(f"[data-action={action}]")
        assert button.is_disabled()
        assert "only admins" in button.get_attribute("title")
    screen.keep("viewer")
    screen.click("#leave")
    assert screen.locator("#login").is_visible()
    assert screen.evaluate("sessionStorage.length") == 0
    screen.check("401")
    screen.context.close()


def test_on_a_forwarded_socket_no_key_is_needed_and_no_other_sites_page_is_heard(browser: Any, cluster: Any) -> None:
    job = cluster.get("/v1/jobs", limit=100)["items"][-1]["job"]
    with cluster.forwarded() as port:
        screen = Screen(browser, f"http://localhost:{port}", "")
        screen.drawn()
        assert screen.locator("#login").is_hidden()
        assert screen.locator("#leave").is_hidden()
        me = cluster.get("/v1/me")
        assert me["user"] in screen.text("#who")
        assert "admin" in screen.text("#who")
        screen.check()
        # Another site's page, here the daemon's own port under another name: it can send what needs no answer read.
        stranger = screen.context.new_page()
        stranger.goto(f"{cluster.url}/v1/openapi.json")
        target = f"http://localhost:{port}/v1/jobs/{job}/pause"
        sent = stranger.evaluate(
            "(url) => fetch(url, {method: 'POST', mode: 'no-cors'}).then((it) => it.type, (it) => String(it))", target
        )
        assert sent == "opaque", "it was not sent at all, so nothing was tried"
        assert cluster.get(f"/v1/jobs/{job}")["status"] != "paused"
        screen.context.close()


@pytest.mark.parametrize("part", ["lists.js", "style.css"])
def test_a_page_of_which_a_part_did_not_come_loads_itself_again(browser: Any, cluster: Any, part: str) -> None:
    screen = Screen(browser, cluster.url, cluster.key())
    screen.drawn()
    screen.route(f"**/{part}", lambda route: route.abort(), times=1)
    loads: list[Any] = []
    with screen.expect_event("load", lambda page: loads.append(page) or len(loads) == 2):
        screen.reload()
    screen.drawn()
    assert screen.evaluate("sessionStorage.getItem('rollmux.loads')") is None
    screen.check("ERR_FAILED")
    screen.context.close()


def test_a_page_of_which_a_part_never_comes_says_so_and_is_left_as_it_is(browser: Any, cluster: Any) -> None:
    screen = Screen(browser, cluster.url, cluster.key())
    screen.drawn()
    screen.evaluate("sessionStorage.setItem('rollmux.loads', 5)")  # as often as it has been tried by now
    screen.route(
        "**/lists.js", lambda route: route.fulfill(body="", content_type="text/javascript")
    )  # another version's
    screen.reload()
    assert screen.text("#link") == "a part of this page did not come"
    screen.context.close()


def test_a_narrow_screen_has_all_of_it(browser: Any, cluster: Any) -> None:
    screen = Screen(browser, cluster.url, cluster.key(), size=NARROW)
    screen.drawn()
    assert screen.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]
    screen.keep("narrow")
    screen.check()
    screen.context.close()


def test_a_page_outlives_its_daemon_and_a_job_named_like_markup(browser: Any, cluster: Any) -> None:
    """The last of this module: the daemon is killed under the page."""
    name = "<img src=x onerror=alert(1)>"
    phases = [{"name": "rollout", "pools": ["rollout"], "seconds": 10}]
    told = cluster.call("POST", "/v1/jobs", {"name": "plain", "phases": phases, "wants": {"rollout": {}}}).json()
    refused = cluster.call("POST", "/v1/jobs", {"name": name, "phases": phases, "wants": {"rollout": {}}})
    screen = Screen(browser, cluster.url, cluster.key())
    screen.drawn()
    screen.until("its row", "document.getElementById('list').innerText.includes('plain')")
    if refused.status_code == 201:
        assert screen.locator("#list img").count() == 0
    last = screen.evaluate("rollmux.history.last")
    cluster.restart()
    screen.until("it goes on by itself", f"rollmux.history.last > {last} && rollmux.me !== null")
    screen.until("it says so", "document.getElementById('link').dataset.state === 'live'")
    screen.until("the start shows", "document.getElementById('recent').innerText.includes('the daemon started')")
    assert told["job"]
    screen.check("ERR_", "503", "Failed to load resource")
    screen.context.close()
