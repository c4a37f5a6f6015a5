// What sharing saved, and what the GPU-hours went to.

import { dateAndTime, number, percent, duration } from "./format.js";
import { h } from "./dom.js";
import { SPANS } from "./known.js";

export function reportView(app) {
  const choice = h(
    "div",
    { class: "choice", role: "group", "aria-label": "Span of the report" },
    Object.values(SPANS).map((span) =>
      h(
        "button",
        {
          "aria-pressed": String(app.reportSpan === span),
          data: { report: span.id },
          onclick: () => app.askReport(span),
        },
        span.text,
      ),
    ),
  );
  const again = h("button", { onclick: () => app.askReport(app.reportSpan) }, "Again");
  const head = h("div", { class: "buttons" }, choice, again);
  const report = app.report;
  if (app.reportError) return h("div", { class: "report" }, head, h("p", { class: "bad" }, app.reportError));
  if (!report) return h("div", { class: "report" }, head, h("p", { class: "dim" }, "the usage is being added up …"));
  const { saving } = report;
  const share = saving.gpu_hours_alone ? saving.gpu_hours_saved / saving.gpu_hours_alone : null;
  const sentence = saving.gpu_hours_saved >= 0 ? "GPU-hours saved" : "GPU-hours lost to sharing";
  return h(
    "div",
    { class: "report" },
    head,
    h(
      "div",
      {},
      h("span", { class: "figure" }, number(Math.abs(saving.gpu_hours_saved), 2)),
      ` ${sentence}${share === null ? "" : ` (${percent(Math.abs(share), 1)})`}${saving.cost_saved ? `, ${number(saving.cost_saved, 2)} in money` : ""}. `,
      h(
        "span",
        { class: "dim" },
        `Against: ${saving.baseline}. ${since(report)} to ${dateAndTime(Date.parse(report.until))}.`,
      ),
    ),
    billLine(report.bill),
    h(
      "div",
      {},
      report.pools.map((pool) => poolBar(pool)),
    ),
    workTable(app, report.work),
  );
}

const since = (report) => (Date.parse(report.since) ? dateAndTime(Date.parse(report.since)) : "From the beginning");

/** All hours of the inventory, and who pays for them. */
function billLine(bill) {
  const money = bill.cost_capacity > 0;
  const part = (name, hours, cost) => [
    `${name} `,
    h("b", {}, `${number(hours, 2)} h`),
    money ? ` (${number(cost, 2)})` : "",
  ];
  return h(
    "p",
    {},
    h("span", { class: "dim" }, "The bill: "),
    part("charged to jobs", bill.gpu_hours_charged, bill.cost_charged),
    bill.gpu_hours_others ? [" + ", part("to others' jobs", bill.gpu_hours_others, bill.cost_others)] : null,
    " + ",
    part("unallocated", bill.gpu_hours_unallocated, bill.cost_unallocated),
    " = ",
    part("all GPUs", bill.gpu_hours_capacity, bill.cost_capacity),
  );
}

function poolBar(pool) {
  const whole = pool.gpu_hours_capacity || 1;
  const parts = [
    ["used", "used"],
    ["switching", "switching"],
    ["bubble", "idle"],
    ["unallocated", "unallocated"],
  ];
  const of = (name) => pool[`gpu_hours_${name}`] ?? 0;
  return h(
    "div",
    { class: "pad" },
    h("b", {}, pool.pool),
    h("span", { class: "dim" }, ` ${number(pool.gpus)} GPUs, ${number(pool.gpu_hours_capacity, 2)} GPU-hours`),
    h(
      "div",
      { class: "stack", "aria-hidden": "true" },
      parts.map(([shade, name]) =>
        h("i", { class: shade, style: { width: `${((100 * of(name)) / whole).toFixed(2)}%` } }),
      ),
    ),
    h(
      "div",
      { class: "small" },
      parts
        .map(([shade, name]) => [
          h("i", { class: `key ${shade}` }),
          `${name} ${number(of(name), 2)} h, ${percent(of(name) / whole, 1)}   `,
        ])
        .flat(),
    ),
  );
}

function workTable(app, work) {
  const rows = [...work].sort((a, b) => b.gpu_hours_held - a.gpu_hours_held).slice(0, 200);
  if (!rows.length) return h("p", { class: "dim" }, "no job has used anything in this span");
  const heads = [
    "job",
    "owner",
    "held",
    "used",
    "charged",
    "cost",
    "alone",
    "slowdown",
    "SLO",
    "iterations",
    "switching",
    "waited for its turn",
  ];
  const cell = (value, digits = 3) => h("td", { class: "num" }, number(value, digits));
  return h(
    "table",
    { class: "plain" },
    h("caption", { class: "hidden" }, "GPU-hours by job"),
    h(
      "thead",
      {},
      h(
        "tr",
        {},
        heads.map((head, index) => h("th", { class: index > 1 ? "num" : "", scope: "col" }, head)),
      ),
    ),
    h(
      "tbody",
      {},
      rows.map((row) =>
        h(
          "tr",
          {},
          h("td", {}, row.job ? h("a", { href: `#/job/${row.job}` }, row.name) : row.name),
          h("td", {}, row.owner),
          cell(row.gpu_hours_held),
          cell(row.gpu_hours_used),
          cell(row.gpu_hours_charged),
          cell(row.cost_charged, 2),
          cell(row.gpu_hours_alone),
          cell(row.slowdown, 2),
          cell(row.slo, 2),
          cell(row.iterations, 0),
          cell(row.gpu_hours_switching),
          h("td", { class: "num" }, duration(row.wait_turn_hours * 3600000)),
        ),
      ),
    ),
  );
}
