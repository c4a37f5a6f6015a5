// The picture: lanes of nodes and jobs over time, on a canvas. Draws what it is told of, and tells where one looks.

import { clock, tickText, ticks } from "./format.js";
import { listen } from "./hands.js";
import { eachBar } from "./lanes.js";

const AXIS = 24;
const HEAD = 22;
const SPAN_LEAST = 200;
const SPAN_MOST = 40 * 86400000;
/** how much of a picture that follows lies in the future, so that what happens is not at its very edge */
const AHEAD = 0.02;

export class Gantt {
  /**
   * ``look``: {marks, now(), colourOf(bar), labelOf(bar), known() -> the time since when facts were read}.
   * ``tell``: {moved(from, to), over(hit | null, x, y), chose(hit | null), opened(hit), fold(row)}.
   */
  constructor(canvas, look, tell) {
    this.canvas = canvas;
    this.look = look;
    this.tell = tell;
    this.context = canvas.getContext("2d", { alpha: false });
    this.rows = [];
    this.rowHeight = 22;
    this.scrolled = 0;
    this.span = 300000;
    this.to = look.now();
    this.follows = true;
    this.chosen = null;
    this.cursor = null;
    this.focused = -1;
    this.drawn = { bars: 0, ms: 0 };
    this._widths = new Map();
    this._queued = false;
    listen(this);
    new ResizeObserver(() => this._resize()).observe(canvas.parentElement);
    this._resize();
  }

  /** How high the axis of time is, and how wide the names of the rows are. */
  get axis() {
    return AXIS;
  }

  get gutter() {
    return this.width < 640 ? 104 : 196;
  }

  get from() {
    return this.to - this.span;
  }

  setRows(rows) {
    this.rows = rows;
    let top = 0;
    for (const row of rows) {
      row.top = top;
      row.height = row.kind === "head" ? Math.min(HEAD, this.rowHeight + 9) : this.rowHeight;
      top += row.height;
    }
    this.total = top;
    this.clampScroll();
    this.request();
  }

  /** Draw soon: once, however often it is asked for. */
  request() {
    if (this._queued) return;
    this._queued = true;
    requestAnimationFrame(() => {
      this._queued = false;
      this.draw();
    });
  }

  // ---- where one looks ---------------------------------------------------------------------------------------------

  show(from, to, { follow = false } = {}) {
    this.span = Math.min(SPAN_MOST, Math.max(SPAN_LEAST, to - from));
    this.to = to;
    this.follows = follow;
    this.changed();
  }

  followNow(span = this.span) {
    this.span = span;
    this.follows = true;
    this.step();
    this.changed();
  }

  /** Time goes on. */
  step() {
    if (this.follows) this.to = this.look.now() + this.span * AHEAD;
  }

  pan(ms) {
    this.to += ms;
    this.follows = ms > 0 && this.to >= this.look.now();
    this.step();
    this.changed();
  }

  /** Make the span so many times as long; ``at`` stays where it is. */
  zoom(factor, at) {
    const span = Math.min(SPAN_MOST, Math.max(SPAN_LEAST, this.span * factor));
    if (this.follows) {
      this.span = span;
      this.step();
    } else {
      const share = (this.to - at) / this.span;
      this.span = span;
      this.to = at + share * span;
    }
    this.changed();
  }

  /** One looks elsewhere: tell of it. */
  changed() {
    this.tell.moved(this.from, this.to);
    this.request();
  }

  scrollTo(y) {
    this.scrolled = y;
    this.clampScroll();
    this.request();
  }

  clampScroll() {
    const room = Math.max(0, (this.total ?? 0) - (this.height - AXIS));
    this.scrolled = Math.round(Math.min(room, Math.max(0, this.scrolled)));
  }

  /** Whether time has gone on by a pixel since it was drawn. */
  get moved() {
    return Math.abs(this.look.now() - (this.now ?? -Infinity)) * (this.width - this.gutter) >= this.span;
  }

  timeAt(x) {
    return this.from + ((x - this.gutter) / (this.width - this.gutter)) * this.span;
  }

  xOf(at) {
    return this.gutter + ((at - this.from) / this.span) * (this.width - this.gutter);
  }

  // ---- drawing -----------------------------------------------------------------------------------------------------

  _resize() {
    const box = this.canvas.parentElement.getBoundingClientRect();
    const scale = window.devicePixelRatio || 1;
    this.width = Math.max(200, Math.floor(box.width));
    this.height = Math.max(80, Math.floor(box.height));
    this.canvas.width = Math.round(this.width * scale);
    this.canvas.height = Math.round(this.height * scale);
    this.canvas.style.width = `${this.width}px`;
    this.canvas.style.height = `${this.height}px`;
    this.scale = scale;
    this.clampScroll();
    this.request();
  }

  draw() {
    const began = performance.now();
    this.step();
    const { context: to, look } = this;
    const { marks } = look;
    to.setTransform(this.scale, 0, 0, this.scale, 0, 0);
    to.fillStyle = marks.get("--panel");
    to.fillRect(0, 0, this.width, this.height);
    this.now = look.now();
    this._bars = 0;
    to.save();
    to.beginPath();
    to.rect(0, AXIS, this.width, this.height - AXIS);
    to.clip();
    const shown = this._visible();
    for (const row of shown) this._ground(row);
    this._rules();
    for (const row of shown) this._lane(row);
    this._grid();
    for (const row of shown) this._label(row);
    to.restore();
    this._axis();
    this._scrollbar();
    this.drawn = { bars: this._bars, ms: performance.now() - began };
  }

  _visible() {
    const [top, bottom] = [this.scrolled, this.scrolled + this.height - AXIS];
    return this.rows.filter((row) => row.top + row.height > top && row.top < bottom);
  }

  _y(row) {
    return AXIS + row.top - this.scrolled;
  }

  /** What a lane's bars are on. */
  _ground(row) {
    if (row.kind === "head") return;
    const { context: to, gutter, look } = this;
    const { marks } = look;
    const [top, height] = [this._y(row) + 1, row.height - 2];
    const x = (at) => Math.min(this.width, Math.max(gutter, this.xOf(at)));
    to.fillStyle = marks.get("--lane");
    to.fillRect(gutter, top, x(this.now) - gutter, height);
    if (row.allocated !== undefined) {
      // Where no job is placed, the lane is cut out of the picture.
      to.fillStyle = marks.get("--panel");
      const holes = gaps(row.allocated(), this.from, Math.min(this.to, this.now)).filter(([t0, t1]) => x(t1) > x(t0));
      for (const [t0, t1] of holes) to.fillRect(x(t0), top, x(t1) - x(t0), height);
      to.fillStyle = marks.pattern(to, "sparse", marks.get("--faint"));
      for (const [t0, t1] of holes) to.fillRect(x(t0), top, x(t1) - x(t0), height);
    }
  }

  /** A line for each tick of the axis, through all lanes: heads are drawn over it. */
  _rules() {
    const { context: to, gutter } = this;
    const bottom = Math.min(this.height, AXIS + (this.total ?? 0) - this.scrolled);
    to.fillStyle = this.look.marks.get("--line");
    for (const at of this._ticks().at) {
      const x = Math.round(this.xOf(at));
      if (x > gutter) to.fillRect(x, AXIS, 1, bottom - AXIS);
    }
  }

  _lane(row) {
    if (row.kind === "head") return;
    const { context: to, gutter, look } = this;
    const { marks } = look;
    const [top, height] = [this._y(row) + 1, row.height - 2];
    const right = this.width;
    const x = (at) => Math.min(right, Math.max(gutter, this.xOf(at)));
    const lane = row.lane();
    for (const back of lane.backs) {
      if (back.t1 <= this.from || back.t0 >= this.to) continue;
      const [left, end] = [x(back.t0), x(Math.min(back.t1, this.now))];
      to.fillStyle = marks.status(to, back.status);
      to.fillRect(left, top, end - left, height);
      if (end - left > 60 && height >= 12) this._text(back.status, left + 5, top, height, end - left - 8, "--dim");
    }
    for (const kept of lane.kept) {
      if (kept.t1 <= this.from || kept.t0 >= this.to) continue;
      to.fillStyle = look.colourOf({ job: kept.job });
      const thick = height > 14 ? 3 : 2;
      const [left, end] = [x(kept.t0), x(Math.min(kept.t1, this.now))];
      if (kept.status === "loaded") to.fillRect(left, top + height - thick, end - left, thick);
      else for (let at = left; at < end; at += 6) to.fillRect(at, top + height - thick, Math.min(3, end - at), thick);
    }
    let painted = -1;
    eachBar(lane, this.from, this.to, (bar) => {
      const [left, end] = [x(bar.t0), x(Math.min(bar.t1, Math.max(this.now, bar.t0)))];
      if (end - left < 1) {
        // Less than a pixel: one of all those that share it.
        if (Math.floor(left) === painted) return;
        painted = Math.floor(left);
        to.fillStyle = look.colourOf(bar);
        to.fillRect(painted, top + bar.top * height, 1, Math.max(1.5, bar.share * height));
        this._bars += 1;
        return;
      }
      this._bar(bar, left, top, end, height);
    });
    for (const back of lane.backs) {
      // Beside what runs there, too.
      if (back.t1 <= this.from || back.t0 >= this.to || row.kind !== "node") continue;
      const [left, end] = [x(back.t0), x(Math.min(back.t1, this.now))];
      const strip = Math.min(5, height / 3);
      to.fillStyle = marks.get("--panel");
      to.fillRect(left, top, end - left, strip);
      to.fillStyle = marks.status(to, back.status);
      to.fillRect(left, top, end - left, strip);
    }
    if (this.chosen?.row.id === row.id && this.chosen.bar !== undefined) this._outline(lane, top, height);
  }

  _bar(bar, left, laneTop, end, laneHeight) {
    const { context: to, look } = this;
    const { marks } = look;
    this._bars += 1;
    const colour = look.colourOf(bar);
    const [top, height] = [laneTop + bar.top * laneHeight, Math.max(2, bar.share * laneHeight)];
    const { slot } = bar;
    const bad = slot?.how !== undefined && slot.how !== "released" && slot.how !== "withdrawn";
    if (end - left < 4 && !bad) {
      to.fillStyle = marks.narrow(bar.kind, colour);
      to.fillRect(left, top, end - left, height);
      return;
    }
    const width = end - left - 0.6;
    to.fillStyle = marks.bar(to, bar.kind, colour);
    to.fillRect(left, top, width, height);
    if ((bar.kind === "loading" || bar.kind === "waiting" || bar.kind === "parking") && height > 6) {
      to.strokeStyle = colour;
      to.lineWidth = 1;
      to.globalAlpha = 0.7;
      to.strokeRect(left + 0.5, top + 0.5, width - 1, height - 1);
      to.globalAlpha = 1;
    }
    if (slot === undefined) return;
    if (bad && bar.t1 === slot.ended && bar.kind !== "waiting") {
      this._cap(end, top, height, slot.how === "revoked" ? "--warn" : "--bad");
    }
    if (slot.overran !== undefined && slot.overran >= bar.t0 && slot.overran <= bar.t1) {
      this._late(this.xOf(slot.overran), top);
    }
    if (width > 34 && height >= 11 && ["running", "lent", "tail"].includes(bar.kind)) {
      this._text(look.labelOf(bar), left + 4, top, height, width - 7, "--onbar");
    }
  }

  /** A bar that ended badly has a cross at its end. */
  _cap(x, top, height, colour) {
    const { context: to } = this;
    const r = Math.min(4, height / 2 - 1);
    const y = top + height / 2;
    to.strokeStyle = this.look.marks.get(colour);
    to.lineWidth = 2;
    to.beginPath();
    to.moveTo(x - 2 * r, y - r);
    to.lineTo(x, y + r);
    to.moveTo(x, y - r);
    to.lineTo(x - 2 * r, y + r);
    to.stroke();
  }

  /** From here on it ran for longer than was expected. */
  _late(x, top) {
    const { context: to } = this;
    to.fillStyle = this.look.marks.get("--warn");
    to.beginPath();
    to.moveTo(x - 4, top);
    to.lineTo(x + 4, top);
    to.lineTo(x, top + 6);
    to.fill();
  }

  _outline(lane, top, height) {
    const { context: to } = this;
    // The lane may have been made anew, and the bar have come to its end.
    const { t0, kind } = this.chosen.bar;
    const bar = lane.bars.find((one) => one.t0 === t0 && one.kind === kind);
    if (bar === undefined) return;
    const [left, end] = [this.xOf(bar.t0), this.xOf(Math.min(bar.t1, this.now))];
    to.strokeStyle = this.look.marks.get("--text");
    to.lineWidth = 1.5;
    to.strokeRect(
      left - 0.5,
      top + bar.top * height - 0.5,
      Math.max(3, end - left) + 1,
      Math.max(3, bar.share * height) + 1,
    );
  }

  _text(text, x, top, height, width, colour) {
    const { context: to } = this;
    const size = height < 15 ? 10 : 11;
    const fits = Math.floor(width / (size * 0.58));
    if (fits < 2 || !text) return;
    to.font = `${size}px ${this.look.marks.font}`;
    to.fillStyle = this.look.marks.get(colour);
    to.textBaseline = "middle";
    to.textAlign = "left";
    to.fillText(text.length > fits ? `${text.slice(0, Math.max(1, fits - 1))}…` : text, x, top + height / 2 + 0.5);
  }

  _grid() {
    const { context: to } = this;
    const { marks } = this.look;
    const bottom = Math.min(this.height, AXIS + (this.total ?? 0) - this.scrolled);
    const known = this.look.known();
    if (known !== undefined && known > this.from) {
      to.fillStyle = marks.get("--bg");
      to.globalAlpha = 0.6;
      to.fillRect(this.gutter, AXIS, Math.min(this.xOf(known), this.width) - this.gutter, bottom - AXIS);
      to.globalAlpha = 1;
    }
    if (this.now <= this.to && this.now >= this.from) {
      to.fillStyle = marks.get("--accent");
      to.fillRect(Math.round(this.xOf(this.now)), AXIS, 1, bottom - AXIS);
    }
    if (this.cursor !== null && this.cursor > this.gutter) {
      to.fillStyle = marks.get("--dim");
      to.globalAlpha = 0.6;
      to.fillRect(Math.round(this.cursor), AXIS, 1, bottom - AXIS);
      to.globalAlpha = 1;
    }
  }

  _ticks() {
    return ticks(this.from, this.to, Math.max(2, (this.width - this.gutter) / 92));
  }

  _label(row) {
    const { context: to, gutter } = this;
    const { marks } = this.look;
    const y = this._y(row);
    const head = row.kind === "head";
    to.fillStyle = marks.get("--panel");
    to.fillRect(0, y, head ? this.width : gutter, row.height);
    if (head) {
      to.fillStyle = marks.get("--line");
      to.fillRect(0, y, this.width, 1);
    }
    to.textBaseline = "middle";
    to.textAlign = "left";
    const middle = y + row.height / 2 + 0.5;
    let left = 8;
    if (this.rows[this.focused] === row) {
      to.fillStyle = marks.get("--accent");
      to.fillRect(0, y + 1, 2, row.height - 2);
    }
    if (head) {
      to.fillStyle = marks.get("--dim");
      to.font = `9px ${marks.font}`;
      to.fillText(row.folded ? "▶" : "▼", left, middle);
      left += 14;
      to.fillStyle = marks.get("--text");
      to.font = `600 ${row.height < 18 ? 11 : 12}px ${marks.font}`;
      to.fillText(row.label, left, middle);
      left += this._width(row.label) + 10;
      to.fillStyle = marks.get("--dim");
      to.font = `11px ${marks.font}`;
      to.fillText(row.note ?? "", left, middle);
      return;
    }
    const size = row.height < 15 ? 10 : 11.5;
    if (row.height < 9) return;
    if (row.glyph !== undefined) {
      to.font = `9px ${marks.font}`;
      to.fillStyle = marks.get(`--${row.glyph[1]}`);
      to.textAlign = "center";
      to.fillText(row.glyph[0], left + 4, middle);
      to.textAlign = "left";
    }
    left += 14;
    const note = gutter > 150 ? (row.note ?? "") : "";
    to.font = `10px ${marks.font}`;
    const noted = note ? this._width(note) + 8 : 0;
    to.fillStyle = marks.get("--dim");
    to.textAlign = "right";
    if (note) to.fillText(note, gutter - 8, middle);
    to.textAlign = "left";
    to.font = `${size}px ${marks.font}`;
    to.fillStyle = marks.get("--text");
    to.fillText(this._shortened(row.label, gutter - left - noted - 8), left, middle);
  }

  /** How wide a text is in the font at hand: measured once. */
  _width(text) {
    const key = `${this.context.font} ${text}`;
    let width = this._widths.get(key);
    if (width === undefined) {
      if (this._widths.size > 5000) this._widths.clear();
      this._widths.set(key, (width = this.context.measureText(text).width));
    }
    return width;
  }

  _shortened(text, room) {
    if (this._width(text) <= room) return text;
    let length = Math.floor((text.length * room) / this._width(text));
    while (length > 1 && this._width(`${text.slice(0, length)}…`) > room) length -= 1;
    return `${text.slice(0, Math.max(1, length))}…`;
  }

  _axis() {
    const { context: to, gutter } = this;
    const { marks } = this.look;
    to.fillStyle = marks.get("--panel");
    to.fillRect(0, 0, this.width, AXIS);
    to.fillStyle = marks.get("--line");
    to.fillRect(0, AXIS - 1, this.width, 1);
    to.font = `11px ${marks.font}`;
    to.textBaseline = "middle";
    to.fillStyle = marks.get("--dim");
    const { at, step } = this._ticks();
    to.textAlign = "center";
    for (const tick of at) {
      const x = this.xOf(tick);
      if (x > gutter + 18 && x < this.width - 24) to.fillText(tickText(tick, step), x, AXIS / 2);
      if (x >= gutter) to.fillRect(Math.round(x), AXIS - 5, 1, 4);
    }
    if (this.cursor !== null && this.cursor > gutter) {
      const text = clock(this.timeAt(this.cursor), { millis: this.span < 60000 });
      const width = to.measureText(text).width + 10;
      const x = Math.min(this.width - width / 2, Math.max(gutter + width / 2, this.cursor));
      to.fillStyle = marks.get("--text");
      to.fillRect(x - width / 2, 3, width, AXIS - 7);
      to.fillStyle = marks.get("--panel");
      to.fillText(text, x, AXIS / 2);
    }
    to.textAlign = "left";
  }

  _scrollbar() {
    const room = this.height - AXIS;
    if (!this.total || this.total <= room) return;
    const { context: to } = this;
    const height = Math.max(24, (room * room) / this.total);
    const top = AXIS + (this.scrolled / (this.total - room)) * (room - height);
    to.fillStyle = this.look.marks.get("--dim");
    to.globalAlpha = 0.45;
    to.fillRect(this.width - 6, top, 4, height);
    to.globalAlpha = 1;
  }

  // ---- pointing ----------------------------------------------------------------------------------------------------

  /** What is at a point: {row, bar | kept | back | nothing, at}. */
  hit(x, y) {
    if (y < AXIS) return null;
    const row = this.rows.find((one) => y >= this._y(one) && y < this._y(one) + one.height);
    if (row === undefined) return null;
    if (row.kind === "head" || x < this.gutter) return { row };
    const at = this.timeAt(x);
    if (at > this.now) return { row, at };
    const share = (y - this._y(row) - 1) / (row.height - 2);
    const near = (1.5 * this.span) / (this.width - this.gutter);
    let [found, close] = [undefined, undefined];
    eachBar(row.lane(), at - near, at + near, (bar) => {
      const inside = share >= bar.top - 0.01 && share <= bar.top + bar.share + 0.01;
      if (!inside) return;
      if (at >= bar.t0 && at < bar.t1) found = bar;
      else close ??= bar;
    });
    const bar = found ?? close;
    if (bar !== undefined) return { row, bar, at };
    const covers = (stretch) => at >= stretch.t0 && at < stretch.t1;
    const lane = row.lane();
    return {
      row,
      at,
      back: lane.backs.find(covers),
      kept: lane.kept.find(covers),
      placed: row.allocated === undefined || row.allocated().some(covers),
    };
  }

  choose(hit) {
    this.chosen = hit;
    this.request();
  }
}

/** What stretches in order leave of a span. */
function gaps(stretches, from, to) {
  const found = [];
  let at = from;
  for (const { t0, t1 } of stretches) {
    if (t0 > to) break;
    if (t0 > at) found.push([at, t0]);
    at = Math.max(at, t1);
  }
  if (at < to) found.push([at, to]);
  return found;
}
