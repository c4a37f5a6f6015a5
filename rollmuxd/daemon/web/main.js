// The dashboard: has what is known of the daemon drawn, and its controls do what they say.

import { clock, count, duration, number, percent } from "./format.js";
import { $, fill, h, say, show } from "./dom.js";
import { Gantt } from "./gantt.js";
import { JobPage } from "./job.js";
import { Known, natural } from "./known.js";
import { Lines } from "./lines.js";
import { GLYPHS, legend, Marks } from "./marks.js";
import { usage } from "./measure.js";
import { toast } from "./actions.js";
import { Table } from "./table.js";
import { reportView } from "./report.js";
import { lists } from "./lists.js";
import {
  chosen,
  countJobs,
  jobsCard,
  poolCard,
  recentEvents,
  savingCard,
  tipOf,
  trouble,
  waitingJobs,
} from "./panels.js";

/** points of the lines over time */
const POINTS = 180;

class App extends Known {
  constructor() {
    super();
    this.marks = new Marks();
    this.rowsBy = "pools";
    this.colourBy = "job";
    this.folded = new Set();
    this.page = null;
    this.tab = "jobs";
  }

  go(hash) {
    location.hash = hash;
  }

  /** What a timeline needs. */
  look() {
    return { marks: this.marks, now: () => this.now(), known: () => this.history.earliest };
  }

  nodeRow(id) {
    const node = this.nodes.get(id);
    const status = node?.status ?? "unknown";
    return {
      kind: "node",
      id,
      label: id,
      note: node?.group ?? "",
      glyph: status === "up" ? undefined : GLYPHS[status],
      lane: () => this.lanes.node(id),
      allocated: () => this.lanes.allocated(id),
    };
  }

  jobRow(job) {
    return {
      kind: "job",
      id: job.job,
      label: job.name,
      note: job.status === "admitted" ? (job.slowdown === null ? "" : `× ${number(job.slowdown, 2)}`) : job.status,
      glyph: GLYPHS[job.status],
      lane: () => this.lanes.job(job.job),
    };
  }

  // ---- the connection, and who one is ------------------------------------------------------------------------------

  /** All that a first picture needs is there. */
  began() {
    const { owner, user, role } = this.me;
    fill($("who"), h("b", {}, owner === user ? user : `${owner}/${user}`), ` ${role}`);
    $("leave").hidden = !this.api.key;
    const { earliest } = this.history;
    if (earliest !== undefined && !this.gantt.looked) {
      // Of a daemon that has just begun, all; else a minute at least, which is read if it has to be.
      const least = this.history.after < this.me.first ? 15000 : 60000;
      this.gantt.span = Math.min(900000, Math.max(least, (this.now() - earliest) * 1.02));
      this._markSpan();
    }
    this.online();
    this.arrange();
    this.drawAll();
    this.wantBack(this.gantt.from);
    if (this.figures.firstPaintMs === null) {
      // The frame after this one has the size that it will have.
      requestAnimationFrame(() => requestAnimationFrame(() => (this.figures.firstPaintMs = performance.now())));
    }
  }

  async listed() {
    this.arrange();
    this.drawAll();
    await this.page?.load();
  }

  reported() {
    this.drawCards();
    if (this.tab === "report") this.drawList();
  }

  /** The span of the report, in words. */
  spanText() {
    return this.reportSpan.text;
  }

  online() {
    if ($("link").dataset.state !== "live") {
      $("link").dataset.state = "live";
      say($("link"), "live");
    }
    $("overview").hidden = this.page !== null;
  }

  lost(error) {
    $("link").dataset.state = "down";
    say(
      $("link"),
      error.status
        ? `the daemon answers ${error.status}: ${error.message}`
        : "the daemon cannot be reached; trying again",
    );
  }

  askForKey(why) {
    this.life?.abort();
    const dialog = $("login");
    say($("login-error"), why);
    $("key").value = "";
    $("link").dataset.state = "wait";
    say($("link"), "not logged in");
    if (!dialog.open) dialog.showModal();
  }

  // ---- drawing -----------------------------------------------------------------------------------------------------

  /** Facts have come: the picture soon, the words around it a little later. */
  news() {
    if (this.lanes.refresh()) this.active?.request();
    this.changed = true;
  }

  get active() {
    return this.page === null ? this.gantt : this.page.gantt;
  }

  /** Twice a second: what changes by itself, and what has changed. */
  tick() {
    if (document.hidden || this.me === null) return;
    say($("clock"), clock(this.now()));
    this._remember();
    // What is the same to the pixel is not drawn again.
    const moved = this.active?.moved ?? false;
    if (moved && this.active.follows) this.active.request();
    if (!this.changed) {
      if (this.page === null && moved) this.drawLines();
      return;
    }
    this.changed = false;
    this.drawAll();
  }

  drawAll() {
    this.lanes.refresh();
    const counts = countJobs(this);
    this.counts = counts;
    show(
      $("sums"),
      ["running", "queued", "placement"].map((name) =>
        h(
          "span",
          {},
          h("b", {}, number(counts[name])),
          ` ${{ running: "in a slot", queued: "await their turn", placement: "await a place" }[name]}`,
        ),
      ),
    );
    if (this.page !== null) {
      this.page.draw();
      return;
    }
    this.drawCards();
    this.drawLines();
    trouble(this);
    waitingJobs(this);
    recentEvents(this);
    if (this.tab !== "report") this.drawList();
    if (this.picked) this.choose(this.picked);
    this.gantt.request();
  }

  drawCards() {
    if (this.me === null || this.page !== null) return;
    const at = this.knownUntil();
    const shares = usage(this.lanes, this._pools(), at - 1, at, 1, at);
    show(
      $("pools"),
      this.pools.map((pool) => poolCard(this, pool, shares.get(pool.pool))),
      jobsCard(this, this.counts ?? countJobs(this)),
      savingCard(this),
    );
  }

  _pools() {
    return this.pools.map((pool) => [pool.pool, pool.nodes]);
  }

  drawLines() {
    const { gantt } = this;
    if (!gantt.width || !this.seesAll) return; // of a part of the slots, shares would be wrong
    const width = (gantt.to - gantt.from) / POINTS;
    // Whole stretches, so that a line that moves with time keeps its shape.
    const from = Math.floor(gantt.from / width) * width;
    const shares = usage(this.lanes, this._pools(), from, from + POINTS * width, POINTS, this.now());
    for (const pool of shares.values()) {
      for (let index = 0; index < POINTS; index += 1) {
        if (from + (index + 1) * width < (this.history.earliest ?? 0)) pool.used[index] = pool.bubble[index] = null;
      }
    }
    const times = Array.from({ length: POINTS }, (_, index) => from + (index + 0.5) * width);
    this.shares = { shares, from, width };
    this.lines.draw(shares, times, {
      from: gantt.from,
      to: gantt.to,
      gutter: gantt.gutter,
      width: gantt.width,
      marks: this.marks,
      theme: this.theme,
    });
    this._values();
  }

  /** The figures of the lines: at the cursor, else now. */
  _values() {
    if (!this.shares) return;
    const { shares, from, width } = this.shares;
    const { cursor, gutter } = this.gantt;
    const at =
      cursor !== null && cursor > gutter
        ? this.gantt.timeAt(cursor)
        : Math.min(this.knownUntil(), this.gantt.to) - width;
    const index = Math.floor((at - from) / width);
    show(
      $("values"),
      [...shares].flatMap(([pool, of], index_) => {
        const colour = `var(${this.lines.colour(index_)})`;
        return [
          h("i", { class: "key", style: { background: colour } }),
          `${pool} used `,
          h("b", {}, percent(of.used[index])),
          " ",
          h("i", { class: "key dash", style: { borderColor: colour } }),
          "bubble ",
          h("b", {}, percent(of.bubble[index])),
          index_ + 1 < shares.size ? "    " : "",
        ];
      }),
    );
  }

  /** The rows of the timeline, from what the lists say. */
  arrange() {
    $("partial").hidden = this.seesAll;
    document.querySelector(".lines").hidden = !this.seesAll;
    say(
      $("partial"),
      `You see the jobs of ${this.me.owner}. Of others it is shown that their GPUs are held, not when and by whom.`,
    );
    const rows = [];
    const head = (id, label, note) => {
      const folded = this.folded.has(id);
      rows.push({ kind: "head", id, label, note, folded });
      return folded;
    };
    if (this.rowsBy === "pools") {
      const shared = new Map();
      for (const node of this.nodes.values()) {
        const name = node.pools.join(" + ") || "no pool";
        (shared.get(name) ?? shared.set(name, []).get(name)).push(node);
      }
      for (const [pool, nodes] of [...shared].sort(byKey)) {
        const gpus = nodes.reduce((sum, node) => sum + node.gpus.length, 0);
        if (!head(`pool ${pool}`, pool, `${count(nodes.length, "node")}, ${count(gpus, "GPU")}`)) {
          // Members of a group side by side.
          nodes.sort((a, b) => natural(a.group ?? "zz", b.group ?? "zz") || natural(a.node, b.node));
          rows.push(...nodes.map((node) => this.nodeRow(node.node)));
        }
      }
    } else if (this.rowsBy === "groups") {
      for (const group of this.groups) {
        const names = group.jobs.map((job) => this.nameOf(job)).join(", ");
        if (
          !head(
            `group ${group.group}`,
            group.group,
            `${names}${group.period_s ? `; period ${duration(group.period_s * 1000)}` : ""}`,
          )
        ) {
          rows.push(
            ...group.nodes.map((node) => ({
              ...this.nodeRow(node),
              note: this.nodes.get(node)?.pools.join(" ") ?? "",
            })),
          );
        }
      }
    } else {
      const live = this.jobs.filter((job) => job.status !== "ended" || this.recent(job));
      const by = new Map();
      for (const job of live) {
        const name = job.group
          ? `group ${job.group}`
          : job.status === "waiting"
            ? "await a place"
            : job.status === "ended"
              ? "ended"
              : "without a place";
        (by.get(name) ?? by.set(name, []).get(name)).push(job);
      }
      for (const [name, jobs] of [...by].sort(byKey)) {
        if (!head(`jobs ${name}`, name.replace(/^group /, ""), `${count(jobs.length, "job")}`))
          rows.push(...jobs.map((job) => this.jobRow(job)));
      }
    }
    const dense = $("dense").value;
    const lanes = rows.filter((row) => row.kind !== "head").length;
    // Few lanes share the room that there is; of many, as many as can be told apart.
    const room = Math.min(0.5 * innerHeight, 560) - 26;
    const fits = Math.floor((room - 22 * (rows.length - lanes)) / (lanes || 1));
    this.gantt.rowHeight = dense === "auto" ? Math.min(lanes <= 6 ? 52 : 34, Math.max(13, fits)) : Number(dense);
    this.gantt.setRows(rows);
    const box = $("gantt-box");
    const height = `${Math.max(340, Math.min(room, this.gantt.total) + 26)}px`;
    if (box.style.height !== height) box.style.height = height;
    this.gantt.canvas.setAttribute(
      "aria-label",
      `Timeline of ${number(lanes)} ${this.rowsBy === "jobs" ? "jobs" : "nodes"}; the lists below have the same in words`,
    );
  }

  drawList() {
    const list = this.tables[this.tab];
    if (this.tab === "report") {
      fill($("list"), reportView(this));
      return;
    }
    const what = $("filter").value.trim().toLowerCase();
    list.table.wanted = what ? (item) => list.text(item).toLowerCase().includes(what) : () => true;
    if (list.table.element.parentNode !== $("list")) fill($("list"), list.table.element);
    list.table.set(list.items());
    for (const [id, other] of Object.entries(this.tables)) {
      if (other.items && (id === this.tab || id !== "events"))
        say(other.counter, id === "events" ? "" : number(other.items().length));
    }
  }

  choose(hit) {
    this.picked = hit;
    const focused = $("chosen").contains(document.activeElement) ? document.activeElement.dataset.action : undefined;
    chosen(this, hit, () => {
      this.gantt.choose(null);
      this.choose(null);
    });
    if (focused) $("chosen").querySelector(`[data-action="${focused}"]`)?.focus();
  }

  chooseNode(node) {
    const row = this.gantt.rows.find((one) => one.id === node) ?? this.nodeRow(node);
    this.gantt.choose({ row });
    if (row.top !== undefined) this.gantt.scrollTo(row.top - 60);
    this.choose({ row });
    $("chosen").scrollIntoView({ block: "nearest" });
  }

  showTip(tip, box, hit, x, y) {
    const content = hit === null || hit.row.kind === "head" ? null : tipOf(this, hit);
    tip.hidden = content === null;
    if (content === null) return;
    fill(tip, content);
    const { width, height } = tip.getBoundingClientRect();
    const room = box.getBoundingClientRect();
    tip.style.left = `${Math.max(4, x + 16 + width > room.width ? x - width - 12 : x + 16)}px`;
    tip.style.top = `${Math.max(4, Math.min(y + 14, room.height - height - 6))}px`;
  }

  // ---- setting up --------------------------------------------------------------------------------------------------

  build() {
    const colours = {
      job: (bar) => this.marks.of(bar.job ?? "?"),
      phase: (bar) => this.marks.of(bar.slot?.phase ?? bar.order?.pool ?? "?"),
      owner: (bar) => this.marks.of(this.jobOf(bar.job)?.owner ?? "?"),
    };
    this.gantt = new Gantt(
      $("gantt"),
      {
        ...this.look(),
        colourOf: (bar) => colours[this.colourBy](bar),
        labelOf: (bar) => (this.rowsBy === "jobs" ? (bar.slot.phase ?? "") : this.nameOf(bar.job)),
      },
      {
        moved: (from) => {
          this.gantt.looked = true;
          this._markSpan();
          if (this.me !== null) {
            this.wantBack(from);
            if (!this._lining) {
              this._lining = true;
              requestAnimationFrame(() => {
                this._lining = false;
                this.drawLines();
              });
            }
          }
        },
        over: (hit, x, y) => {
          this.showTip($("tip"), $("gantt-box"), hit, x, y);
          this._values();
        },
        chose: (hit) => this.choose(hit),
        opened: (hit) => hit.row.kind === "job" && this.go(`#/job/${hit.row.id}`),
        fold: (row) => {
          if (!this.folded.delete(row.id)) this.folded.add(row.id);
          this.arrange();
        },
      },
    );
    this.lines = new Lines($("lines"));
    this.tables = lists(this);
    this.tables.report = { label: "Savings" };
    for (const [id, list] of Object.entries(this.tables)) {
      list.counter = h("span", { class: "count" });
      list.button = h(
        "button",
        {
          role: "tab",
          id: `tab-${id}`,
          "aria-controls": "list",
          "aria-selected": "false",
          tabindex: -1,
          onclick: () => this.openTab(id),
        },
        list.label,
        " ",
        list.counter,
      );
      $("tabs").append(list.button);
      if (list.columns) list.table = new Table({ ...list, sort: list.sort });
    }
    $("tabs").addEventListener("keydown", (event) => {
      const ids = Object.keys(this.tables);
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      this.openTab(ids[(ids.indexOf(this.tab) + step + ids.length) % ids.length]);
      this.tables[this.tab].button.focus();
    });
    this._controls();
    this._theme();
    addEventListener("hashchange", () => this.route());
    document.addEventListener("visibilitychange", () => this.tick());
    setInterval(() => this.tick(), 500);
    const asked = new URLSearchParams(location.hash.split("?")[1] ?? "");
    this._recall(asked);
    this.openTab(asked.get("tab") in this.tables ? asked.get("tab") : "jobs");
    this.route();
  }

  /** The range that the address names, and the login of `rollmuxd dashboard`, which does not stay in it. */
  _recall(asked) {
    const key = location.hash.match(/^#key=(\S+)$/)?.[1];
    if (key) {
      this.api.use(decodeURIComponent(key));
      history.replaceState(null, "", "#/");
    }
    const [span, from, to] = ["span", "from", "to"].map((name) => Number(asked.get(name)) || 0);
    if (!span && to <= from) return;
    this.gantt.looked = true;
    if (span) this.gantt.followNow(1000 * span);
    else this.gantt.show(from, to);
  }

  /** Tab and range into the address, so that a link or a reload shows the same. */
  _remember() {
    if (this.page !== null || location.hash.startsWith("#/job/")) return;
    const { follows, span, from, to } = this.gantt;
    const range = follows ? `span=${Math.round(span / 1000)}` : `from=${Math.round(from)}&to=${Math.round(to)}`;
    const hash = `#/?tab=${this.tab}&${range}`;
    if (location.hash !== hash) history.replaceState(null, "", hash);
  }

  openTab(id) {
    this.tab = id;
    for (const [other, list] of Object.entries(this.tables)) {
      list.button.setAttribute("aria-selected", String(other === id));
      list.button.tabIndex = other === id ? 0 : -1;
    }
    $("list").setAttribute("aria-labelledby", `tab-${id}`);
    if (id === "report" && this.me !== null && !this.report && !this.reportError) this.askReport(this.reportSpan);
    this.drawList();
  }

  _controls() {
    const press = (host, chosen_) => {
      for (const button of host.querySelectorAll("button"))
        button.setAttribute("aria-pressed", String(button === chosen_));
    };
    $("rows").addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (button === null) return;
      this.rowsBy = button.dataset.rows;
      press($("rows"), button);
      this.gantt.scrolled = 0;
      this.arrange();
    });
    $("spans").addEventListener("click", (event) => {
      const span = event.target.dataset.span;
      if (span) this.gantt.followNow(Number(span) * 1000);
    });
    $("colour").addEventListener("change", (event) => {
      this.colourBy = event.target.value;
      this.gantt.request();
    });
    $("dense").addEventListener("change", () => this.arrange());
    const middle = () => this.gantt.from + this.gantt.span / 2;
    $("in").addEventListener("click", () => this.gantt.zoom(1 / 1.6, middle()));
    $("out").addEventListener("click", () => this.gantt.zoom(1.6, middle()));
    $("live").addEventListener("click", () => this.gantt.followNow());
    $("legend-button").addEventListener("click", () => {
      const open = $("legend").hidden;
      $("legend").hidden = !open;
      $("legend-button").setAttribute("aria-expanded", String(open));
      if (open) this._legend();
    });
    $("filter").addEventListener("input", () => this.tab !== "report" && this.drawList());
    $("help").addEventListener("click", () => $("keys").showModal());
    $("theme").addEventListener("click", () => this.turnTheme());
    $("leave").addEventListener("click", () => {
      this.api.use("");
      location.hash = "#/";
      this.askForKey("");
      $("overview").hidden = true;
    });
    $("login").addEventListener("cancel", (event) => event.preventDefault());
    $("login-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.api.use($("key").value.trim());
      $("key").value = "";
      $("login").close();
      this.start();
    });
    document.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.("input, select, dialog")) return;
      const keys = {
        "/": () => (location.hash.startsWith("#/job/") ? null : $("filter").focus()),
        t: () => this.turnTheme(),
        l: () => this.active.followNow(),
        g: () => this.active.canvas.focus(),
        "?": () => $("keys").showModal(),
        Escape: () => (this.page === null ? this.choose(null) : this.go("#/")),
      };
      if (keys[event.key] === undefined) return;
      event.preventDefault();
      keys[event.key]();
    });
  }

  _markSpan() {
    const span = this.gantt.span / 1000;
    for (const button of $("spans").children)
      button.setAttribute("aria-pressed", String(Math.abs(Number(button.dataset.span) - span) < 0.02 * span));
    $("live").setAttribute("aria-pressed", String(this.gantt.follows));
  }

  // ---- light and dark ----------------------------------------------------------------------------------------------

  turnTheme() {
    const order = ["system", "light", "dark"];
    const next = order[(order.indexOf(localStorage.getItem("rollmux.theme") ?? "system") + 1) % 3];
    if (next === "system") {
      localStorage.removeItem("rollmux.theme");
      delete document.documentElement.dataset.theme;
    } else {
      localStorage.setItem("rollmux.theme", next);
      document.documentElement.dataset.theme = next;
    }
    this._theme();
    toast(next === "system" ? "as the system says" : next);
  }

  _theme() {
    this.theme = `${document.documentElement.dataset.theme ?? "system"} ${matchMedia("(prefers-color-scheme: light)").matches}`;
    if (!this._watched) {
      this._watched = true;
      matchMedia("(prefers-color-scheme: light)").addEventListener("change", () => this._theme());
    }
    this.marks.read();
    if (!$("legend").hidden) this._legend();
    if (this.me !== null) this.drawAll();
    this.active?.request();
  }

  _legend() {
    fill(
      $("legend"),
      legend(this.marks).map(([text, draw]) => {
        const swatch = h("canvas", {
          width: 34 * this.marks.scale,
          height: 14 * this.marks.scale,
          style: { width: "34px", height: "14px" },
          "aria-hidden": "true",
        });
        const to = swatch.getContext("2d");
        to.scale(this.marks.scale, this.marks.scale);
        draw(to, 0, 0, 34, 14);
        return h("div", {}, swatch, text);
      }),
      h(
        "div",
        {},
        h("span", { class: "bad", "aria-hidden": "true" }, "✕"),
        "a slot that was lost, revoked (amber) or faulted ends here",
      ),
      h(
        "div",
        {},
        h("span", { class: "warn", "aria-hidden": "true" }, "▼"),
        "from here on it ran longer than was expected",
      ),
    );
  }

  // ---- pages -------------------------------------------------------------------------------------------------------

  route() {
    const [, kind, id] = location.hash.split("/");
    if (kind === "job" && id) {
      if (this.me === null) return;
      this.page = new JobPage(this, decodeURIComponent(id), $("page"));
      $("overview").hidden = true;
      $("page").hidden = false;
      scrollTo(0, 0);
      document.title = `${this.nameOf(decodeURIComponent(id))} · rollmuxd`;
    } else {
      this.page = null;
      fill($("page"));
      $("page").hidden = true;
      $("overview").hidden = this.me === null;
      document.title = "rollmuxd";
      if (this.me !== null) this.drawAll();
    }
  }
}

const byKey = ([a], [b]) => natural(a, b);

const app = new App();
app.build();
app.start().then(() => location.hash.startsWith("#/job/") && app.page === null && app.route());
window.rollmux = app; // for whoever looks into it: a test, or a person with the console
