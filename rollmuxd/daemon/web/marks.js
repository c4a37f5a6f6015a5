// Colours and patterns: what each kind of time looks like. Nothing is told by colour alone: each kind has a pattern or
// a shape of its own, and the legend is drawn by what draws the picture.

const STYLES = {
  loading: { pattern: "up", text: "loading (holds its GPUs)" },
  running: { text: "running" },
  lent: { pattern: "hatched", text: "lent to a filler" },
  tail: { pattern: "vertical", text: "tail: goes on on fewer GPUs" },
  closing: { pattern: "thin", text: "given back, not yet free" },
  reclaiming: { pattern: "cross", bad: true, text: "lost, revoked or faulted: held until verified clean" },
  parking: { pattern: "down", text: "parking a state" },
  waiting: { pattern: "outline", text: "waits for its turn" },
};
const STATUSES = {
  occupied: { pattern: "up", colour: "--dim", text: "occupied by a process of no job" },
  quarantined: { pattern: "cross", colour: "--bad", text: "quarantined" },
  lost: { pattern: "crosses", colour: "--bad", text: "lost, cannot be reached" },
  unknown: { pattern: "dots", colour: "--dim", text: "not seen yet" },
  draining: { pattern: "level", colour: "--warn", text: "draining" },
  drained: { pattern: "level", colour: "--dim", text: "drained" },
  waiting: { pattern: "dots", colour: "--warn", text: "waits for a placement" },
  probing: { pattern: "none", colour: "--dim", text: "is being measured" },
  paused: { pattern: "vertical", colour: "--dim", text: "paused" },
  moving: { pattern: "up", colour: "--accent", text: "is being moved" },
  ended: { pattern: "none", colour: "--dim", text: "has ended" },
};
const TILE = 8;
const NAMES = [
  "bg",
  "panel",
  "lane",
  "line",
  "text",
  "dim",
  "faint",
  "accent",
  "ok",
  "warn",
  "bad",
  "onbar",
  "p1",
  "p2",
  "p3",
  "p4",
].map((name) => `--${name}`);

/** How a node or a job is, as a shape, a colour and a word: for lists. */
export const GLYPHS = {
  up: ["●", "ok"],
  admitted: ["●", "ok"],
  probing: ["◐", "ok"],
  moving: ["◑", "ok"],
  waiting: ["○", "warn"],
  paused: ["‖", "dim"],
  unknown: ["?", "dim"],
  occupied: ["◧", "warn"],
  draining: ["▽", "warn"],
  drained: ["▿", "dim"],
  quarantined: ["▲", "bad"],
  lost: ["✕", "bad"],
  ended: ["·", "dim"],
  queued: ["○", "warn"],
  loading: ["◔", "ok"],
  running: ["●", "ok"],
  tail: ["◗", "ok"],
};

export class Marks {
  constructor() {
    this.read();
  }

  /** The theme has changed, or the screen's density. */
  read() {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    this.scale = window.devicePixelRatio || 1;
    this.colours = Object.fromEntries(NAMES.map((name) => [name, colour(name)]));
    this.light = Number(colour("--bar-lightness"));
    this.chroma = Number(colour("--bar-chroma"));
    this.font = style.fontFamily;
    this._patterns = new Map();
    this._hues = new Map();
  }

  get(name) {
    return this.colours[name];
  }

  /** A job's, phase's or owner's colour: the same each time, and neighbours apart. */
  of(what) {
    let found = this._hues.get(what);
    if (found === undefined) {
      const digits = /(\d+)$/.exec(what);
      let number = digits ? Number(digits[1]) : 0;
      if (!digits) for (const letter of what) number = (number * 31 + letter.codePointAt(0)) % 9973;
      // Reds are left to what is wrong.
      const hue = 55 + ((number * 0.61803398875) % 1) * 285;
      found = plain(`oklch(${this.light} ${this.chroma} ${hue.toFixed(1)})`);
      this._hues.set(what, found);
    }
    return found;
  }

  /** A fill for a kind of bar in a colour. */
  bar(context, kind, colour) {
    const { pattern, bad } = STYLES[kind];
    return pattern === undefined ? colour : this.pattern(context, pattern, bad ? this.get("--bad") : colour);
  }

  /** The same for a bar that is too narrow for a pattern: lighter, where it is not in use. */
  narrow(kind, colour) {
    const { pattern, bad } = STYLES[kind];
    return pattern === undefined || kind === "tail" || kind === "lent"
      ? colour
      : `${bad ? this.get("--bad") : colour}${kind === "waiting" ? "2a" : "80"}`;
  }

  status(context, status) {
    const { pattern, colour } = STATUSES[status] ?? STATUSES.unknown;
    return pattern === "none" ? "transparent" : this.pattern(context, pattern, this.get(colour));
  }

  pattern(context, kind, colour) {
    const key = `${kind} ${colour}`;
    let found = this._patterns.get(key);
    if (found === undefined) {
      const tile = document.createElement("canvas");
      tile.width = tile.height = Math.round(TILE * this.scale);
      const to = tile.getContext("2d");
      to.scale(tile.width / TILE, tile.height / TILE);
      paint(to, kind, colour);
      found = context.createPattern(tile, "repeat");
      found.setTransform(new DOMMatrix().scale(TILE / tile.width));
      this._patterns.set(key, found);
    }
    return found;
  }
}

const scratch = document.createElement("canvas").getContext("2d", { willReadFrequently: true });

/** The same colour in the form that a canvas reads fastest. */
function plain(colour) {
  scratch.fillStyle = colour;
  scratch.fillRect(0, 0, 1, 1);
  const [red, green, blue] = scratch.getImageData(0, 0, 1, 1).data;
  return `#${((1 << 24) | (red << 16) | (green << 8) | blue).toString(16).slice(1)}`;
}

function paint(to, kind, colour) {
  to.strokeStyle = to.fillStyle = colour;
  const lines = (width, ...list) => {
    to.lineWidth = width;
    to.beginPath();
    for (const [x0, y0, x1, y1] of list) {
      to.moveTo(x0, y0);
      to.lineTo(x1, y1);
    }
    to.stroke();
  };
  const tint = (share) => {
    to.globalAlpha = share;
    to.fillRect(0, 0, TILE, TILE);
    to.globalAlpha = 1;
  };
  const up = [
    [-2, 10, 10, -2],
    [-6, 6, 6, -6],
    [2, 14, 14, 2],
  ];
  const down = [
    [-2, -2, 10, 10],
    [-6, 2, 6, 14],
    [2, -6, 14, 6],
  ];
  switch (kind) {
    case "up":
      tint(0.22);
      lines(2, ...up);
      break;
    case "down":
      tint(0.12);
      lines(1.6, ...down);
      break;
    case "hatched":
      tint(0.5);
      lines(2.4, ...down);
      break;
    case "thin":
      tint(0.3);
      break;
    case "cross":
      tint(0.14);
      lines(1.1, ...up, ...down);
      break;
    case "vertical":
      tint(0.62);
      lines(2, [2, 0, 2, 8], [6, 0, 6, 8]);
      break;
    case "level":
      tint(0.06);
      lines(1, [0, 2, 8, 2], [0, 6, 8, 6]);
      break;
    case "dots":
      to.globalAlpha = 0.75;
      to.fillRect(1, 1, 1.4, 1.4);
      to.fillRect(5, 5, 1.4, 1.4);
      break;
    case "sparse":
      to.globalAlpha = 0.8;
      to.fillRect(3, 3, 1.2, 1.2);
      break;
    case "crosses":
      tint(0.08);
      lines(1.2, [2, 2, 6, 6], [6, 2, 2, 6]);
      break;
    case "outline":
      tint(0.1);
      break;
    default:
      throw new Error(`no pattern ${kind}`);
  }
}

/** What the legend shows: [words, draw(context, x, y, width, height)]. */
export function legend(marks) {
  const job = marks.of("j1");
  const entries = Object.entries(STYLES).map(([kind, { text }]) => [
    text,
    (to, x, y, w, h) => {
      const height = kind === "tail" ? h / 2 : h;
      to.fillStyle = marks.bar(to, kind, job);
      to.fillRect(x, y, w, height);
      if (kind === "waiting") {
        to.strokeStyle = job;
        to.strokeRect(x + 0.5, y + 0.5, w - 1, h - 1);
      }
    },
  ]);
  entries.push([
    "a state is on the GPUs, no job holds them",
    (to, x, y, w, h) => {
      to.fillStyle = job;
      to.fillRect(x, y + h - 3, w, 3);
    },
  ]);
  entries.push([
    "placed, idle: a bubble",
    (to, x, y, w, h) => {
      to.fillStyle = marks.get("--lane");
      to.fillRect(x, y, w, h);
    },
  ]);
  entries.push([
    "unallocated: no job is placed there",
    (to, x, y, w, h) => {
      to.fillStyle = marks.pattern(to, "sparse", marks.get("--faint"));
      to.fillRect(x, y, w, h);
    },
  ]);
  for (const [status, { text }] of Object.entries(STATUSES)) {
    if (STATUSES[status].pattern === "none") continue;
    entries.push([
      text,
      (to, x, y, w, h) => {
        to.fillStyle = marks.status(to, status);
        to.fillRect(x, y, w, h);
      },
    ]);
  }
  return entries;
}

export const kindText = (kind) => STYLES[kind]?.text ?? kind;
export const statusText = (status) => STATUSES[status]?.text ?? status;
