// The page of one job: what it is, why it waits or where it sits, its times, its history.

import { clock, dateAndTime, duration, number, seconds } from "./format.js";
import { fill, h, show } from "./dom.js";
import { Gantt } from "./gantt.js";
import { statusOf } from "./history.js";
import { Output } from "./output.js";
import { buttons } from "./actions.js";
import { Table } from "./table.js";
import { eventRow, glyph, pairs, slowdownBar } from "./panels.js";

export class JobPage {
  constructor(app, id, host) {
    this.app = app;
    this.id = id;
    this.host = host;
    this.job = null;
    this.why = null;
    this.error = "";
    this.head = h("div", { class: "jobhead" });
    this.because = h("div", { class: "pad" }, "…");
    this.times = h("div", { class: "pad" });
    this.figures = h("div", { class: "pad" });
    this.events = h("ol", { class: "events" });
    const canvas = h("canvas", {
      tabindex: 0,
      role: "application",
      "aria-label": "Timeline of this job and its nodes",
      id: "job-gantt",
    });
    this.tip = h("div", { class: "tip", hidden: true });
    this.box = h("div", { class: "canvas", style: { height: "170px" } }, canvas, this.tip);
    this.slots = this._slotTable();
    fill(
      host,
      this.head,
      h(
        "div",
        { class: "cols" },
        panel("Why", this.because),
        panel("Slowdown", this.figures),
        panel("Times of its phases", this.times),
      ),
      h("section", { class: "panel" }, h("h2", {}, "Timeline, with its nodes"), this.box),
      h("div", { class: "cols" }, panel("Slots", this.slots.element), panel("Events", this.events)),
      panel("Output", new Output(app.api, id).element),
    );
    this.gantt = new Gantt(
      canvas,
      {
        ...app.look(),
        labelOf: (bar) => (bar.job === id ? (bar.slot?.phase ?? "") : app.nameOf(bar.job)),
        colourOf: (bar) => (bar.job === id ? app.marks.of(id) : app.marks.get("--faint")),
      },
      {
        moved: (from) => app.wantBack(from),
        over: (hit, x, y) => app.showTip(this.tip, this.box, hit, x, y),
        chose: () => {},
        opened: () => {},
        fold: () => {},
      },
    );
    this.gantt.span = app.gantt.span;
    this.load();
  }

  async load() {
    const path = `/v1/jobs/${encodeURIComponent(this.id)}`;
    try {
      [this.job, this.why] = await Promise.all([this.app.api.get(path), this.app.api.get(`${path}/explain`)]);
      this.id = this.job.job;
      this.error = "";
    } catch (error) {
      this.error = error.message;
    }
    this.draw();
  }

  /** Time has gone on, or there is news. */
  draw({ news = true } = {}) {
    if (this.error && !this.job) {
      fill(
        this.head,
        h("a", { href: "#/" }, "← Overview"),
        h("h1", {}, this.id),
        h("span", { class: "bad" }, this.error),
      );
      return;
    }
    if (!this.job) return;
    if (news) {
      this._head();
      this._why();
      this._figures();
      this._times();
      this._rows();
      this._history();
    }
    this.gantt.request();
  }

  _head() {
    const { app, job } = this;
    const chip = (name, value) =>
      value === "" || value === null || value === undefined
        ? null
        : h("span", { class: "chip" }, `${name} `, h("b", {}, String(value)));
    const status = h(
      "span",
      { class: "chip" },
      glyph(job.status),
      " ",
      h("b", {}, job.status),
      job.admission ? `, ${job.admission}` : "",
    );
    const focused = document.activeElement?.dataset?.action;
    show(
      this.head,
      h("a", { href: "#/" }, "← Overview"),
      h("h1", {}, job.name),
      status,
      chip("id", job.job),
      chip("of", `${job.owner}/${job.user}`),
      chip("run", job.run),
      chip("group", job.group),
      chip("priority", job.priority || ""),
      chip("now", app.doing(job)),
      h("span", { class: "grow" }),
      buttons(app, ["pause", "resume", "reinstate", "end"], job, () => this._acted()),
    );
    if (focused) this.head.querySelector(`[data-action="${focused}"]`)?.focus();
  }

  async _acted() {
    await Promise.all([this.load(), this.app.refresh()]);
  }

  _why() {
    const { job, why } = this;
    const sentences = why?.sentences ?? [];
    fill(
      this.because,
      h(
        "ul",
        { class: "sentences" },
        sentences.length
          ? sentences.map((text) => h("li", {}, text))
          : h("li", { class: "dim" }, job.reason || "nothing to be said"),
      ),
    );
  }

  _figures() {
    const { job } = this;
    fill(
      this.figures,
      pairs([
        ["slowdown", slowdownBar(job)],
        [
          "promise",
          job.promised
            ? `kept at ${number(job.slo, 2)}`
            : job.slo
              ? `asked for ${number(job.slo, 2)}, not promised`
              : "none: best effort",
        ],
        ["planned", job.planned_slowdown === null ? undefined : number(job.planned_slowdown, 2)],
        [
          "credit",
          job.credit_s === null || !job.iterations
            ? undefined
            : h(
                "span",
                { class: job.credit_s < 0 ? "bad" : "" },
                `${seconds(job.credit_s)} ${job.credit_s < 0 ? "behind" : "ahead of"} its bound`,
              ),
        ],
        ["iterations", `${number(job.iterations)}${job.iterations < 8 ? " (judged from the eighth on)" : ""}`],
        ["starts", `${number(job.loads_warm)} warm, ${number(job.loads_cold)} cold, parked ${number(job.parks)} times`],
        [
          "nodes",
          job.group && Object.entries(job.pins).map(([pool, nodes]) => h("div", {}, `${pool}: ${nodes.join(" ")}`)),
        ],
        ["registered", dateAndTime(Date.parse(job.registered_at))],
      ]),
    );
  }

  _times() {
    const { app, job } = this;
    const rows = Object.entries(job.estimates);
    const waits = new Map();
    for (const slot of app.history.slotsOfJob.get(this.id) ?? []) {
      if (slot.queued !== undefined && slot.claimed !== undefined) {
        const list = waits.get(slot.phase) ?? waits.set(slot.phase, []).get(slot.phase);
        list.push([slot.claimed - slot.queued, (slot.granted ?? slot.claimed) - slot.claimed]);
      }
    }
    const mean = (phase, index) => {
      const list = waits.get(phase);
      return list ? duration(list.reduce((sum, pair) => sum + pair[index], 0) / list.length) : "–";
    };
    const cell = (text) => h("td", { class: "num" }, text);
    fill(
      this.times,
      h(
        "table",
        { class: "plain" },
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            ["phase", "planned", "mean", "median", "95 %", "seen", "wait", "switch"].map((head, index) =>
              h("th", { scope: "col", class: index ? "num" : "" }, head),
            ),
          ),
        ),
        h(
          "tbody",
          {},
          rows.map(([phase, time]) =>
            h(
              "tr",
              {},
              h("td", {}, phase),
              cell(seconds(time.planned_s)),
              cell(seconds(time.mean_s)),
              cell(seconds(time.p50_s)),
              cell(seconds(time.p95_s)),
              cell(number(time.count)),
              cell(mean(phase, 0)),
              cell(mean(phase, 1)),
            ),
          ),
        ),
      ),
    );
  }

  _rows() {
    const { app, job } = this;
    const nodes = [...new Set(Object.values(job.pins).flat())];
    const rows = [
      { kind: "job", id: this.id, label: job.name, lane: () => app.lanes.job(this.id), glyph: ["●", "accent"] },
      ...nodes.map((node) => app.nodeRow(node)),
    ];
    this.gantt.rowHeight = 26;
    const height = `${Math.min(420, 26 + rows.length * 26 + 2)}px`;
    if (this.box.style.height !== height) this.box.style.height = height;
    this.gantt.setRows(rows);
  }

  _history() {
    const { app } = this;
    this.slots.set([...(app.history.slotsOfJob.get(this.id) ?? [])]);
    const found = app.history.events
      .filter((event) => event.job === this.id)
      .slice(-80)
      .reverse();
    fill(
      this.events,
      found.length
        ? found.map(eventRow)
        : h(
            "li",
            { class: "dim" },
            h("span", {}),
            h("span", {}),
            "none in the facts that were read; the timeline reads older ones",
          ),
    );
  }

  _slotTable() {
    const { app } = this;
    const span = (from, to) => (from === undefined ? undefined : (to ?? app.now()) - from);
    const time = (id, head, of) => ({
      id,
      head,
      width: "84px",
      num: true,
      cell: (slot) => duration(of(slot)),
      sort: of,
    });
    return new Table({
      label: "Slots of this job",
      key: (slot) => slot.id,
      empty: "it has asked for none in the facts that were read",
      sort: { by: "id", down: true },
      columns: [
        { id: "id", head: "slot", width: "80px", cell: (slot) => slot.id, sort: (slot) => Number(slot.id.slice(1)) },
        {
          id: "phase",
          head: "phase",
          width: "minmax(70px, 1fr)",
          cell: (slot) => slot.phase ?? "",
          sort: (slot) => slot.phase,
        },
        {
          id: "queued",
          head: "asked",
          width: "80px",
          cell: (slot) => (slot.queued ? clock(slot.queued) : "–"),
          sort: (slot) => slot.queued,
        },
        time("wait", "waited", (slot) => span(slot.queued, slot.claimed ?? slot.over)),
        time("switch", "switch", (slot) => span(slot.claimed, slot.granted ?? slot.ended)),
        time("ran", "ran", (slot) => span(slot.granted, slot.ended)),
        { id: "how", head: "ended", width: "94px", cell: (slot) => statusOf(slot), sort: (slot) => statusOf(slot) },
        { id: "fence", head: "fence", width: "80px", cell: (slot) => slot.fence ?? "–", sort: (slot) => slot.granted },
      ],
    });
  }
}

const panel = (title, body) => h("section", { class: "panel" }, h("h2", {}, title), body);
