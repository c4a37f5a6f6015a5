"""The picture of a demo: a lane per GPU, a bar per stretch of a response, coloured by job; arrows are moves."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rollmuxd_gateway.demo import Part

WIDTH: Final = 1400
LANE: Final = 90
LEFT: Final = 110
COLOURS: Final = ("#2563eb", "#ea580c")
FAINT: Final = ("#bfdbfe", "#fed7aa")


def picture(part: Part) -> str:
    """One HTML page with an SVG, of a run that is over."""
    bars = [(job, bar) for job, name in enumerate(part.rollouts) for bar in part.bars[name]["bars"]]
    begin = min(bar["from"] for _, bar in bars)
    end = max(bar["to"] for _, bar in bars)
    gpus = sorted({gpu for _, bar in bars for gpu in bar["gpus"]})

    def x(at: float) -> float:
        return float(LEFT + (WIDTH - LEFT - 10) * (at - begin) / (end - begin))

    shapes = [_slots(part, gpus, x), *_bars(bars, gpus, x), _marks(part, gpus, x), _labels(part, gpus)]
    height = len(gpus) * LANE + 70
    return (
        "<!doctype html><meta charset=utf-8><title>rollouts through a gateway</title>"
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
        'font-size="12"><defs><marker id="a" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="5" markerHeight="5" '
        'orient="auto"><path d="M0 0L6 3L0 6z" fill="#111"/></marker></defs>'
        + "".join(shapes)
        + "</svg>"
        + "<p style='font-family:sans-serif'>A bar is a stretch of a response on an engine. The band below a "
        "lane shows which job's slot had the GPU. Dashed lines: four fifths of a rollout are done. Arrows: responses "
        "that moved.</p>"
    )


def _bars(bars: list[tuple[int, dict[str, Any]]], gpus: list[str], x: Any) -> list[str]:
    """Bars of a lane are packed into rows, the first row that is free."""
    rows: dict[str, list[float]] = {gpu: [] for gpu in gpus}
    places: dict[tuple[int, str], list[tuple[float, float, float, str]]] = {}
    for job, bar in sorted(bars, key=lambda pair: float(pair[1]["from"])):
        gpu = bar["gpus"][0]
        free = next((row for row, until in enumerate(rows[gpu]) if until <= bar["from"]), len(rows[gpu]))
        rows[gpu][free : free + 1] = [bar["to"]]
        places.setdefault((job, bar["request"]), []).append((bar["from"], bar["to"], free, gpu))
    thick = {gpu: (LANE - 22) / max(1, len(own)) for gpu, own in rows.items()}
    found, arrows = [], []
    for (job, _), stretches in places.items():
        last: tuple[float, float] | None = None
        for start, end, row, gpu in stretches:
            top = 30 + gpus.index(gpu) * LANE + row * thick[gpu]
            width = max(0.5, x(end) - x(start))
            shape = f'<rect x="{x(start):.1f}" y="{top:.1f}" width="{width:.1f}" height="{thick[gpu] * 0.8:.1f}"'
            found.append(f'{shape} fill="{COLOURS[job]}"/>')
            if last is not None:
                line = f'<path d="M{last[0]:.1f} {last[1]:.1f}L{x(start):.1f} {top:.1f}"'
                arrows.append(f'{line} stroke="#111" fill="none" stroke-width=".7" marker-end="url(#a)"/>')
            last = (x(end), top)
    return found + arrows


def _slots(part: Part, gpus: list[str], x: Any) -> str:
    """From the daemon's facts: which job held each GPU when."""
    names = list(part.rollouts)
    jobs = {fact["job"]: names.index(fact["spec"]["name"]) for fact in part.facts if fact["fact"] == "job_registered"}
    owners: dict[str, tuple[int, float]] = {}
    slots: dict[str, int] = {}
    held: dict[str, tuple[str, ...]] = {}
    found = []

    def give_back(names_: tuple[str, ...], at: float) -> None:
        for gpu in names_:
            if gpu in owners:
                job, since = owners.pop(gpu)
                top = 30 + gpus.index(gpu) * LANE + LANE - 18
                left, right = max(LEFT, x(since)), x(at)
                shape = f'<rect x="{left:.1f}" y="{top}" width="{max(0.0, right - left):.1f}" height="8"'
                found.append(f'{shape} fill="{FAINT[job]}"/>')

    for fact in part.facts:
        at, kind, slot = fact["at"] / 1000, fact["fact"], fact.get("slot", "")
        if kind == "slot_queued":
            slots[slot] = jobs[fact["job"]]
        elif kind in ("slot_claimed", "slot_resized"):
            mine = tuple(gpu for gpu in fact["gpus"] if gpu in gpus)
            give_back(tuple(gpu for gpu in held.get(slot, ()) if gpu not in mine), at)
            for gpu in mine:
                owners.setdefault(gpu, (slots[slot], at))
            held[slot] = mine
        elif kind in ("slot_released", "slot_taken_away", "slot_over"):
            give_back(held.pop(slot, ()), at)
    return "".join(found)


def _marks(part: Part, gpus: list[str], x: Any) -> str:
    """Where four fifths of each rollout were done."""
    low = 30 + len(gpus) * LANE
    return "".join(
        f'<path d="M{x(it["crossed_at"]):.1f} 24V{low}" stroke="{COLOURS[job]}" stroke-dasharray="4 3"/>'
        for job, name in enumerate(part.rollouts)
        for it in part.rollouts[name]
        if "crossed_at" in it
    )


def _labels(part: Part, gpus: list[str]) -> str:
    found = [
        f'<text x="4" y="{30 + number * LANE + LANE / 2:.0f}">{html.escape(gpu)}</text>'
        for number, gpu in enumerate(gpus)
    ]
    for job, name in enumerate(part.rollouts):
        place = LEFT + 120 * job
        found.append(f'<rect x="{place}" y="6" width="12" height="12" fill="{COLOURS[job]}"/>')
        found.append(f'<text x="{place + 18}" y="16">{html.escape(name)}</text>')
    return "".join(found)
