// Hands on the timeline: mouse, wheel and keys.

import { eachBar } from "./lanes.js";

export function listen(gantt) {
  const { canvas } = gantt;
  let drag = null;
  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    const [x, y] = place(event);
    drag = { x, y, to: gantt.to, scrolled: gantt.scrolled, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = place(event);
    if (drag !== null) {
      drag.moved ||= Math.abs(x - drag.x) + Math.abs(y - drag.y) > 4;
      if (!drag.moved) return;
      canvas.classList.add("dragged");
      gantt.follows = false;
      gantt.to = drag.to - ((x - drag.x) / (gantt.width - gantt.gutter)) * gantt.span;
      gantt.scrolled = drag.scrolled - (y - drag.y);
      gantt.clampScroll();
      gantt.tell.over(null, x, y);
      gantt.changed();
      return;
    }
    gantt.cursor = x;
    gantt.tell.over(gantt.hit(x, y), x, y);
    gantt.request();
  });
  const up = (event) => {
    canvas.classList.remove("dragged");
    const dragged = drag?.moved ?? true;
    drag = null;
    if (dragged || event.type === "pointercancel") return;
    const hit = gantt.hit(...place(event));
    if (hit?.row.kind === "head") gantt.tell.fold(hit.row);
    else {
      gantt.focused = hit === null ? -1 : gantt.rows.indexOf(hit.row);
      gantt.chosen = hit;
      gantt.tell.chose(hit);
    }
    gantt.request();
  };
  canvas.addEventListener("pointerup", up);
  canvas.addEventListener("pointercancel", up);
  canvas.addEventListener("pointerleave", () => {
    gantt.cursor = null;
    gantt.tell.over(null);
    gantt.request();
  });
  canvas.addEventListener("dblclick", (event) => {
    const hit = gantt.hit(...place(event));
    if (hit?.bar !== undefined) {
      const end = Math.min(hit.bar.t1, gantt.now);
      const room = Math.max(100, end - hit.bar.t0);
      gantt.show(hit.bar.t0 - room / 2, end + room / 2);
    } else if (hit?.row !== undefined && hit.at === undefined) gantt.tell.opened(hit);
  });
  canvas.addEventListener(
    "wheel",
    (event) => {
      event.preventDefault();
      const [x, y] = place(event);
      const unit = event.deltaMode === 1 ? 16 : 1;
      const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
      const fits = (gantt.total ?? 0) <= gantt.height - gantt.axis;
      if (event.ctrlKey || event.metaKey || y < gantt.axis || (fits && !sideways)) {
        gantt.zoom(Math.exp(event.deltaY * unit * 0.0022), gantt.timeAt(Math.max(gantt.gutter, x)));
      } else if (sideways) {
        gantt.pan((sideways * unit * gantt.span) / (gantt.width - gantt.gutter));
      } else {
        gantt.scrollTo(gantt.scrolled + event.deltaY * unit);
      }
    },
    { passive: false },
  );
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const middle = gantt.from + gantt.span / 2;
    const keys = {
      ArrowLeft: () => gantt.pan(-gantt.span / 6),
      ArrowRight: () => gantt.pan(gantt.span / 6),
      "+": () => gantt.zoom(1 / 1.6, middle),
      "=": () => gantt.zoom(1 / 1.6, middle),
      "-": () => gantt.zoom(1.6, middle),
      ArrowUp: () => focusRow(gantt, -1),
      ArrowDown: () => focusRow(gantt, 1),
      PageUp: () => gantt.scrollTo(gantt.scrolled - gantt.height + 60),
      PageDown: () => gantt.scrollTo(gantt.scrolled + gantt.height - 60),
      Home: () => gantt.show(gantt.look.known() ?? gantt.from, (gantt.look.known() ?? gantt.from) + gantt.span),
      End: () => gantt.followNow(),
      Enter: () => chooseLast(gantt),
      "[": () => chooseNext(gantt, -1),
      "]": () => chooseNext(gantt, 1),
      Escape: () => {
        gantt.chosen = null;
        gantt.tell.chose(null);
        gantt.request();
      },
    };
    if (keys[event.key] === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    keys[event.key]();
  });
}

function focusRow(gantt, step) {
  let index = gantt.focused;
  do index += step;
  while (gantt.rows[index]?.kind === "head");
  if (gantt.rows[index] === undefined) return;
  gantt.focused = index;
  const row = gantt.rows[index];
  if (row.top < gantt.scrolled) gantt.scrolled = row.top;
  if (row.top + row.height > gantt.scrolled + gantt.height - gantt.axis)
    gantt.scrolled = row.top + row.height - gantt.height + gantt.axis;
  gantt.clampScroll();
  chooseLast(gantt);
}

/** Choose the last bar of the focused row that is in the picture. */
function chooseLast(gantt) {
  const row = gantt.rows[gantt.focused];
  if (row === undefined || row.kind === "head") return;
  let last;
  eachBar(row.lane(), gantt.from, Math.min(gantt.to, gantt.now), (bar) => {
    if (last === undefined || bar.t0 > last.t0) last = bar;
  });
  gantt.chosen = { row, bar: last, at: last?.t0 };
  gantt.tell.chose(gantt.chosen);
  gantt.request();
}

/** Choose the bar before, or after, the one that is chosen. */
function chooseNext(gantt, by) {
  if (gantt.chosen?.bar === undefined) return chooseLast(gantt);
  const { bars } = gantt.chosen.row.lane();
  const { t0, kind } = gantt.chosen.bar;
  let index = bars.findIndex((bar) => bar.t0 === t0 && bar.kind === kind);
  if (index < 0) index = bars.findLastIndex((bar) => bar.t0 <= t0); // it has become another meanwhile
  const bar = bars[index + by];
  if (bar === undefined) return;
  gantt.chosen = { row: gantt.chosen.row, bar, at: bar.t0 };
  if (bar.t0 < gantt.from || bar.t0 > gantt.to) gantt.show(bar.t0 - gantt.span / 2, bar.t0 + gantt.span / 2);
  gantt.tell.chose(gantt.chosen);
  gantt.request();
}
