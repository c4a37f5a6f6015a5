"""The dashboard: how soon its first picture is there, how long a redraw takes, and what it costs the daemon.

A real browser (Chromium, by playwright) before real daemons. *The picture*: a journal of 1,000 jobs in 250 groups with
50,000 slots behind them, made by the very scheduler; the first picture, the reading of all that history while somebody
zooms out, and redraws with 1,600 bars in sight and with all of them. *The price*: 1,000 jobs that take turns on 250
nodes; processor time of the daemon without the page, and with it.
"""

import asyncio
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from figures import Json, at_most, many_files, median, quantile, say, short
from live import Daemon, Line, Member, daemon, new_key, processor_s
from world import World, inventory, job_spec

from rollmuxd.core.facts import Fact
from rollmuxd.core.spec import Want
from rollmuxd.daemon.journal.store import Journal

T = TypeVar("T")
MEMBERS: Final = 4
BROWSERS: Final = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
REDRAWS: Final = 60
#: how long a slot of the live part is held
HOLD_S: Final = 8.0
#: each in a frame of its own: what was drawn is else kept by the browser until it paints all of it within some redraw
REDRAW: Final = """async (times) => {
    const took = [];
    for (let round = 0; round < times; round += 1) {
        await new Promise((next) => requestAnimationFrame(next));
        rollmux.gantt.draw();
        took.push(rollmux.gantt.drawn.ms);
    }
    return { took, bars: rollmux.gantt.drawn.bars };
}"""


def run(budget_s: float, *, small: bool = False) -> Json:
    """The picture, then the price."""
    many_files()
    groups, slots, span_s = (4, 400, 1.0) if small else (250, 50_000, 20.0)
    with tempfile.TemporaryDirectory(prefix="rollmuxd-bench-") as folder, browser() as chromium:
        found = _picture(Path(folder) / "picture", chromium, groups, slots)
        found |= _price(Path(folder) / "price", chromium, groups, span_s)
    found["targets"] = {
        "redraw_p50_ms": at_most(found["redraw_p50_ms"], 16),
        "daemon_core_share": at_most(found["daemon_core_share"], 0.05),
    }
    return found


def _apart(work: Coroutine[Any, Any, T]) -> T:
    """Run it in a loop of its own: this thread's is playwright's."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


@contextmanager
def browser() -> Iterator[Any]:
    """A Chromium without a window."""
    from playwright.sync_api import sync_playwright

    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        raise RuntimeError("no Chromium is there: apt-get install chromium")
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield made
        made.close()


@contextmanager
def opened(chromium: Any, made: Daemon) -> Iterator[Any]:
    """The dashboard of a daemon, with an admin's key; the first picture is there."""
    key = _apart(new_key(made, "admin"))
    context = chromium.new_context(viewport={"width": 1600, "height": 1000})
    page = context.new_page()
    page.add_init_script(f"sessionStorage.setItem('rollmux.key', {key!r})")
    page.goto(f"http://127.0.0.1:{made.port}/")
    _until(page, "window.rollmux && rollmux.figures.firstPaintMs !== null", 60)
    yield page
    context.close()


def _until(page: Any, true: str, within_s: float) -> None:
    """Poll from here: the page's own policy lets nobody evaluate strings in it."""
    give_up = time.monotonic() + within_s
    while not page.evaluate(true):
        if time.monotonic() > give_up:
            raise TimeoutError(f"after {within_s:g} s still not: {true}")
        page.wait_for_timeout(20)


# ---- the picture -----------------------------------------------------------------------------------------------------


def _picture(folder: Path, chromium: Any, groups: int, slots: int) -> Json:
    began = time.monotonic()
    facts = _apart(_write(folder / "state", groups, slots))
    say(f"web: {facts} facts of {slots} slots are written ({time.monotonic() - began:.0f} s)")
    hosts = [(node.host, node.pools[0], node.price_per_gpu_hour) for node in inventory(groups, groups).nodes]
    with daemon(folder, hosts) as made, opened(chromium, made) as page:
        first = page.evaluate("rollmux.figures.firstPaintMs")
        say(f"web: the first picture after {first:.0f} ms")
        page.wait_for_timeout(1_000)
        lately = _redrawn(page)
        began = time.monotonic()
        page.evaluate("rollmux.gantt.show(rollmux.now() - 6 * 3600e3, rollmux.now())")
        _until(page, f"!rollmux.back.reading && rollmux.history.slots.size >= {slots}", 300)
        read_s = time.monotonic() - began
        count = page.evaluate("rollmux.history.slots.size")
        say(f"web: {count} slots are read after {read_s:.1f} s")
        page.evaluate("document.getElementById('dense').value = '5'; rollmux.arrange()")
        page.evaluate("rollmux.gantt.show(rollmux.history.earliest, rollmux.now())")
        page.wait_for_timeout(300)
        whole = _redrawn(page)
        bars = _redrawn(page, about=1_600)
        heap = page.evaluate("performance.memory.usedJSHeapSize / 1e6")
        lines = page.evaluate(
            "(() => { const began = performance.now(); rollmux.drawLines(); return performance.now() - began; })()"
        )
    return {
        "jobs": groups * MEMBERS,
        "slots": count,
        "first_picture_ms": short(first),
        "read_all_s": short(read_s),
        "redraw_bars": bars["bars"],
        "redraw_p50_ms": short(median(bars["took"])),
        "redraw_p99_ms": short(quantile(bars["took"], 0.99)),
        "redraw_lately": {"bars": lately["bars"], "p50_ms": short(median(lately["took"]))},
        "redraw_all": {"bars": whole["bars"], "p50_ms": short(median(whole["took"]))},
        "lines_ms": short(lines),
        "heap_mb": short(heap),
    }


def _redrawn(page: Any, about: int | None = None) -> Json:
    """Times of redraws, as the page measures them; ``about``: zoomed until so many bars, or more, are in sight."""
    if about is not None:
        page.evaluate(
            """(about) => {
                const { gantt } = rollmux;
                const end = rollmux.history.latest;
                let [best, most] = [1000, 0];
                for (let span = 1000; most < about && span < 1e7; span *= 1.15) {
                    gantt.show(end - span, end);
                    gantt.draw();
                    if (gantt.drawn.bars > most) [best, most] = [span, gantt.drawn.bars];
                }
                gantt.show(end - best, end);
            }""",
            about,
        )
    found: Json = page.evaluate(REDRAW, REDRAWS)
    return found


async def _write(folder: Path, groups: int, slots: int) -> int:
    """A journal that ends a few seconds ago."""
    start = inventory(groups, groups)
    heard: list[Fact] = []
    world = World(start, heard.extend)
    dice = random.Random(1)
    for number in range(groups * MEMBERS):
        spec = job_spec(f"job{number}", (8_000, 8_000))
        named = {"rollout": start.nodes[number // MEMBERS], "train": start.nodes[groups + number // MEMBERS]}
        wants = tuple(Want(pool, named=(node.id,)) for pool, node in named.items())
        world.register(msgspec.structs.replace(spec, wants=wants))
    world.begin()
    granted = beaten = 0
    while granted < slots:
        before = len(heard)
        if world.now - beaten > 15_000:
            beaten = world.now
            world.beat_all()
        for given in world.batch(12, 0):
            world.take(given, world.core.handle(given, world.now))
        world.tick(dice.randrange(60, 400))
        granted += sum(type(fact).__name__ == "SlotGranted" for fact in heard[before:])
    shift = int(time.time() * 1000) - 4_000 - heard[-1].at
    facts = [msgspec.structs.replace(fact, at=fact.at + shift) for fact in heard]
    journal = Journal.open(folder)
    for begin in range(0, len(facts), 2_000):
        await journal.append(list(enumerate(facts[begin : begin + 2_000], begin + 1)))
    await journal.close()
    return len(facts)


# ---- the price -------------------------------------------------------------------------------------------------------


def _price(folder: Path, chromium: Any, groups: int, span_s: float) -> Json:
    hosts = [(f"h{number}", "rollout", 1.85) for number in range(groups)]
    with daemon(folder, hosts) as made, _busy(made, [host for host, *_ in hosts]):
        without = [_share(made.pid, span_s)]
        seq = made.last_seq()
        with opened(chromium, made) as page:
            page.wait_for_timeout(2_000)
            began = processor_s(made.pid), time.monotonic()
            page.wait_for_timeout(1_000 * span_s)
            watched = (processor_s(made.pid) - began[0]) / (time.monotonic() - began[1])
            calls = page.evaluate("rollmux.api.calls")
        facts = (made.last_seq() - seq) / (time.monotonic() - began[1] + 2)
        without.append(_share(made.pid, span_s))
    say(f"web: the daemon's share of a core is {watched:.3f} with the page, {without[0]:.3f}, {without[1]:.3f} without")
    return {
        "facts_per_s": short(facts),
        "calls": calls,
        "core_share_without": short(sum(without) / 2),
        "core_share_with": short(watched),
        "daemon_core_share": short(max(0.0, watched - sum(without) / 2)),
    }


def _share(pid: int, seconds: float) -> float:
    used, began = processor_s(pid), time.monotonic()
    time.sleep(seconds)
    return (processor_s(pid) - used) / (time.monotonic() - began)


@contextmanager
def _busy(made: Daemon, hosts: list[str]) -> Iterator[None]:
    """Four jobs on each host that take turns, in a thread with a loop of its own."""
    ready, stop = threading.Event(), threading.Event()
    failed: list[BaseException] = []

    async def turns(member: Member) -> None:
        while True:
            member.granted(await member.ask())
            await asyncio.sleep(HOLD_S * random.uniform(0.5, 1.5))
            (await member.release()).json()

    async def main() -> None:
        key = await new_key(made)
        tasks = []
        for host in hosts:
            for number in range(MEMBERS):
                line = await Line.tcp(made.port)
                member = await Member.join(line, key, f"{host}-{number}", f"{host}/gpu0-7", states=True)
                tasks.append(asyncio.create_task(turns(member)))
        say(f"web: {len(tasks)} jobs take turns")
        ready.set()
        while not stop.is_set():
            await asyncio.sleep(0.1)
        for task in tasks:
            assert not task.done(), task.exception()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def work() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            failed.append(error)
            ready.set()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        ready.wait()
        if not failed:
            yield
    finally:
        stop.set()
        thread.join()
    if failed:
        raise failed[0]
