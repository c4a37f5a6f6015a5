// Cards, lists and notes around the picture.

import { clock, count, dateAndTime, duration, number, percent, seconds } from "./format.js";
import { fill, h, say, show, $ } from "./dom.js";
import { GLYPHS, kindText, statusText } from "./marks.js";
import { statusOf } from "./history.js";
import { buttons } from "./actions.js";

export function glyph(status) {
  const [sign, grade] = GLYPHS[status] ?? ["·", "dim"];
  return h("span", { class: grade, "aria-hidden": "true" }, sign);
}

export const statusCell = (status) => h("span", {}, glyph(status), ` ${status}`);

export const jobLink = (app, id) => h("a", { href: `#/job/${id}` }, app.nameOf(id));

/** Where the line of the SLO stands in every bar: whoever is beyond it is seen at a glance. */
const SLO_AT = 0.72;

/** Slowdown against the promise: a bar from 1, and a line where the SLO is. Without an SLO, a bar from 1 to 4. */
export function slowdownBar(job) {
  if (job.slowdown === null || job.slowdown === undefined) {
    return h("span", { class: "dim" }, job.slo ? `– of ${number(job.slo, 2)}` : "–");
  }
  const over = broken(job);
  const share = job.slo ? (SLO_AT * (job.slowdown - 1)) / (job.slo - 1 || 0.01) : (job.slowdown - 1) / 3;
  const width = `${(100 * Math.min(1, Math.max(0, share))).toFixed(1)}%`;
  const track = h(
    "span",
    { class: over ? "track over" : job.slo && job.iterations >= JUDGED ? "track" : "track free" },
    h("i", { style: { width } }),
  );
  if (job.slo) track.append(h("s", { style: { left: `${100 * SLO_AT}%` } }));
  const text = `${number(job.slowdown, 2)}${job.slo ? ` of ${number(job.slo, 2)}` : ""}`;
  return h(
    "span",
    { class: "slow", title: over ? "beyond its bound" : "" },
    track,
    h("span", { class: over ? "bad" : "" }, over ? `▲ ${text}` : text),
  );
}

/** From this iteration on a slowdown is judged. */
const JUDGED = 8;
/** slots that ended like this hold their GPUs until those were verified clean; what takes longer than this is told */
const RECLAIMED = new Set(["lost", "revoked", "faulted"]);
const RECLAIM_MS = 15000;

/** Whether its bound is broken. */
const broken = (job) => Boolean(job.slo) && job.slowdown !== null && job.slowdown > job.slo && job.iterations >= JUDGED;

export function meter(value, most, left) {
  const share = (amount) => `${(100 * Math.min(1, most ? amount / most : 0)).toFixed(1)}%`;
  return h("span", { class: "meter" }, h("i", { class: left ? "left" : "", style: { width: share(value) } }));
}

// ---- cards ---------------------------------------------------------------------------------------------------------

const PARTS = [
  ["used", "used"],
  ["switching", "switching"],
  ["bubble", "bubble"],
  ["unallocated", "unallocated"],
];

export function poolCard(app, pool, shares) {
  const total = pool.gpus || 1;
  // Others' slots are not shown to everybody: then only what the pool itself tells is known.
  const parts = app.seesAll
    ? PARTS.map(([name, text]) => [name, text, shares?.[name]?.[0] ?? 0])
    : [
        ["used", "held", pool.gpus_held / total],
        ["bubble", "idle", 1 - pool.gpus_held / total],
      ];
  const held =
    app.seesAll && shares ? Math.round((shares.used[0] + shares.switching[0]) * shares.gpus) : pool.gpus_held;
  return h(
    "article",
    { class: "card", data: { pool: pool.pool } },
    h(
      "header",
      {},
      h("h2", {}, pool.pool),
      h("span", { class: "dim small" }, `${count(pool.nodes.length, "node")}, ${number(pool.nodes_free)} free`),
    ),
    h(
      "div",
      { class: "big" },
      `${number(held)} `,
      h("span", { class: "dim small" }, `of ${count(pool.gpus, "GPU")} held`),
    ),
    h(
      "div",
      { class: "stack", "aria-hidden": "true" },
      parts.map(([name, , share]) => h("i", { class: name, style: { width: `${(100 * share).toFixed(2)}%` } })),
    ),
    h(
      "div",
      { class: "parts" },
      parts.map(([name, text, share]) =>
        h("span", {}, h("i", { class: name }), `${text} `, h("b", {}, percent(share))),
      ),
    ),
  );
}

export function jobsCard(app, counts) {
  const all = counts.running + counts.queued + counts.between + counts.placement + counts.other || 1;
  const parts = [
    ["used", "in a slot", counts.running],
    ["wait", "await their turn", counts.queued],
    ["bubble", "between phases", counts.between],
    ["unallocated", "await a place", counts.placement],
  ];
  return h(
    "article",
    { class: "card", data: { card: "jobs" } },
    h("header", {}, h("h2", {}, "jobs"), h("span", { class: "dim small" }, `${count(app.groups.length, "group")}`)),
    h(
      "div",
      { class: "big" },
      `${number(counts.live)} `,
      h("span", { class: "dim small" }, `live${counts.other ? `, ${number(counts.other)} paused or in trouble` : ""}`),
    ),
    h(
      "div",
      { class: "stack", "aria-hidden": "true" },
      parts.map(([name, , count]) => h("i", { class: name, style: { width: `${((100 * count) / all).toFixed(2)}%` } })),
    ),
    h(
      "div",
      { class: "parts" },
      parts.map(([name, text, count]) => h("span", {}, h("i", { class: name }), `${text} `, h("b", {}, number(count)))),
    ),
  );
}

export function savingCard(app) {
  const report = app.report;
  const promised = app.jobs.filter(
    (job) => job.slo && job.slowdown !== null && job.iterations >= JUDGED && job.status !== "ended",
  );
  const keeps = promised.filter((job) => !broken(job)).length;
  const head = h("header", {}, h("h2", {}, "sharing"), h("span", { class: "dim small" }, report ? app.spanText() : ""));
  const slo = h(
    "span",
    {},
    "SLO kept by ",
    h(
      "b",
      {},
      promised.length ? `${number(keeps)} of ${number(promised.length)}` : "– (no job has one that is judged yet)",
    ),
  );
  if (!report) {
    const ask =
      app.reckoning || app.reportError
        ? app.reportError
          ? "–"
          : "being computed …"
        : h("button", { onclick: () => app.openTab("report") }, "Reckon what it saves");
    return h(
      "article",
      { class: "card", data: { card: "saving" } },
      head,
      h("div", { class: "dim ask" }, ask),
      h("div", { class: "parts" }, slo),
    );
  }
  const { saving } = report;
  // Of a first minute, in which states are loaded and no iteration is finished, these figures say nothing.
  const early = saving.gpu_hours_alone <= 0.05;
  const share = early ? null : saving.gpu_hours_saved / saving.gpu_hours_alone;
  return h(
    "article",
    { class: "card", data: { card: "saving" }, title: `baseline: ${saving.baseline}` },
    head,
    h(
      "div",
      { class: "big" },
      early ? "– " : `${hours(Math.abs(saving.gpu_hours_saved))} `,
      h(
        "span",
        { class: "dim small" },
        early
          ? "too early to say what it saves"
          : `GPU-h ${saving.gpu_hours_saved < 0 ? "more than alone" : "saved"}, ${percent(Math.abs(share))}`,
      ),
    ),
    h(
      "div",
      { class: "stack", "aria-hidden": "true" },
      early ? null : h("i", { class: "used", style: { width: `${bounded(1 - share)}%` } }),
    ),
    h(
      "div",
      { class: "parts" },
      h("span", {}, "alone ", h("b", {}, hours(saving.gpu_hours_alone))),
      h("span", {}, "shared ", h("b", {}, hours(saving.gpu_hours_charged))),
      slo,
    ),
  );
}

const bounded = (share) => (100 * Math.min(1, Math.max(0, share))).toFixed(2);
const hours = (value) => number(value, Math.abs(value) < 10 ? 2 : Math.abs(value) < 100 ? 1 : 0);

/** What jobs do now. */
export function countJobs(app) {
  const counts = { live: 0, running: 0, queued: 0, between: 0, placement: 0, other: 0 };
  for (const job of app.jobs) {
    if (job.status === "ended") continue;
    counts.live += 1;
    const now = app.nowOf(job);
    if (job.status === "waiting") counts.placement += 1;
    else if (["paused", "quarantined", "lost"].includes(job.status)) counts.other += 1;
    else if (now === "queued") counts.queued += 1;
    else if (now === "running" || now === "tail" || now === "loading") counts.running += 1;
    else counts.between += 1;
  }
  return counts;
}

// ---- notes beside the picture --------------------------------------------------------------------------------------

export function trouble(app) {
  const found = [];
  for (const node of app.nodes.values()) {
    if (["quarantined", "lost", "occupied", "draining", "drained"].includes(node.status))
      found.push([node.status, node.node, node.reason || statusText(node.status), null]);
  }
  for (const job of app.jobs) {
    if (["quarantined", "lost"].includes(job.status)) found.push([job.status, null, job.reason, job.job]);
    else if (broken(job) && job.status !== "ended") {
      found.push([
        "lost",
        null,
        `slowdown ${number(job.slowdown, 2)}, beyond its bound of ${number(job.slo, 2)}`,
        job.job,
      ]);
    } else if (
      job.slo &&
      job.credit_s !== null &&
      job.credit_s < 0 &&
      job.iterations >= JUDGED &&
      job.status !== "ended"
    ) {
      found.push(["draining", null, `${seconds(-job.credit_s)} behind its bound of ${number(job.slo, 2)}`, job.job]);
    }
  }
  for (const slot of app.history.newestOfJob.values()) {
    if (slot.overran !== undefined && slot.ended === undefined && slot.over === undefined) {
      found.push([
        "draining",
        null,
        `its ${slot.phase} runs for ${duration(app.now() - slot.granted)}, longer than expected`,
        slot.job,
      ]);
    }
  }
  const { gpus, slots, since } = reclaimed(app);
  if (gpus) {
    const whose = `${count(slots.size, "slot")} that ended badly, for up to ${duration(app.now() - since)}`;
    found.push(["occupied", count(gpus, "GPU"), `held until verified clean of ${whose}`, null]);
  }
  say($("trouble-count"), found.length ? number(found.length) : "");
  show(
    $("trouble"),
    found.length
      ? found
          .slice(0, 60)
          .map(([status, node, why, job]) =>
            h(
              "li",
              {},
              glyph(status),
              " ",
              job ? jobLink(app, job) : h("b", {}, node),
              " ",
              h("span", { class: "why" }, why),
            ),
          )
      : h("li", { class: "why" }, "nothing: every node is there to be used, no job is in trouble"),
  );
}

export function waitingJobs(app) {
  const placement = app.jobs.filter((job) => job.status === "waiting");
  const turns = [];
  for (const job of app.jobs) {
    const slot = app.history.newestOfJob.get(job.job);
    if (job.status !== "ended" && job.status !== "waiting" && slot !== undefined && statusOf(slot) === "queued")
      turns.push(slot);
  }
  turns.sort((a, b) => (a.queued ?? 0) - (b.queued ?? 0));
  say($("waiting-count"), `${number(placement.length)} for a place, ${number(turns.length)} for their turn`);
  const items = [
    ...placement
      .slice(0, 40)
      .map((job) =>
        h(
          "li",
          {},
          glyph("waiting"),
          " ",
          jobLink(app, job.job),
          " ",
          h("span", { class: "why" }, job.reason || "no reason was worked out; its page has it"),
        ),
      ),
    ...turns
      .slice(0, 25)
      .map((slot) =>
        h(
          "li",
          {},
          h("span", { class: "dim", "aria-hidden": "true" }, "◷"),
          " ",
          jobLink(app, slot.job),
          h("span", { class: "why" }, ` ${slot.phase}, for ${duration(app.now() - slot.queued)}${behind(app, slot)}`),
        ),
      ),
  ];
  show($("waiting"), items.length ? items : h("li", { class: "why" }, "no job waits"));
}

/** GPUs that are held for longer than a look at them should take, since what ended there may still be on them. */
function reclaimed(app) {
  const found = { gpus: 0, slots: new Set(), since: Infinity };
  for (const node of app.nodes.values()) {
    for (const { holder } of node.gpus) {
      const slot = holder ? app.history.slots.get(holder) : undefined;
      if (!RECLAIMED.has(slot?.how) || slot.over !== undefined || app.now() - slot.ended < RECLAIM_MS) continue;
      found.gpus += 1;
      found.slots.add(holder);
      found.since = Math.min(found.since, slot.ended);
    }
  }
  return found;
}

/** Who has what a queued slot waits for, where that is known. */
function behind(app, slot) {
  const job = app.jobOf(slot.job);
  const nodes = new Set(job === undefined ? [] : (job.pins[slot.phase] ?? Object.values(job.pins).flat()));
  for (const node of nodes) {
    for (const gpu of app.nodes.get(node)?.gpus ?? []) {
      const holder = app.history.slots.get(gpu.holder);
      if (holder !== undefined && holder.job !== slot.job && holder.over === undefined)
        return `: ${app.nameOf(holder.job)} has ${node}`;
    }
  }
  return "";
}

export function eventRow(event) {
  const sign = { ok: ["●", "ok"], info: ["·", "dim"], warn: ["▲", "warn"], bad: ["✕", "bad"] }[event.level];
  const words = event.job
    ? h("a", { href: `#/job/${event.job}`, class: event.level === "info" ? "info" : "" }, event.text)
    : h("span", { class: event.level === "info" ? "info" : "" }, event.text);
  return h(
    "li",
    {},
    h("time", { title: dateAndTime(event.at) }, clock(event.at)),
    h("span", { class: sign[1], "aria-hidden": "true" }, sign[0]),
    words,
  );
}

export function recentEvents(app) {
  const found = app.history.events.slice(-60).reverse();
  show(
    $("recent"),
    found.length ? found.map(eventRow) : h("li", { class: "dim" }, h("span", {}, ""), h("span", {}, ""), "nothing yet"),
  );
}

// ---- what is chosen ------------------------------------------------------------------------------------------------

export const pairs = (list) =>
  h(
    "dl",
    { class: "facts" },
    list
      .filter(([, value]) => value !== undefined && value !== null && value !== "")
      .map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]),
  );

/** What a slot did, as names and values. */
export function slotFacts(app, slot) {
  const now = app.now();
  const until = slot.claimed ?? slot.over ?? now;
  const status = statusOf(slot);
  return [
    ["status", `${status}${slot.reason ? `: ${slot.reason}` : ""}`],
    ["asked at", slot.queued && clock(slot.queued, { millis: true })],
    ["waited", slot.queued && duration(until - slot.queued)],
    [
      "switch",
      slot.claimed &&
        (slot.granted
          ? duration(slot.granted - slot.claimed)
          : `${duration((slot.ended ?? now) - slot.claimed)} until now`),
    ],
    ["ran", slot.granted && `${duration((slot.ended ?? now) - slot.granted)}${slot.ended ? "" : " until now"}`],
    ["freed after", slot.ended && slot.over && slot.claimed && duration(slot.over - slot.ended)],
    [
      "tail",
      slot.parts.length
        ? slot.parts.map((part) => `${part.gpus.length} GPUs from ${clock(part.at)}`).join(", ")
        : undefined,
    ],
    ["fence", slot.fence && h("span", { class: "mono" }, slot.fence)],
    ["GPUs", slot.gpus?.length ? `${slot.gpus.length}: ${slot.gpus.join(" ")}` : undefined],
  ];
}

export function tipOf(app, hit) {
  if (hit.bar?.slot !== undefined) {
    const { slot, kind } = hit.bar;
    const phase = slot.phase ? ` · ${slot.phase}` : "";
    return [
      h("b", {}, `${slot.job ? app.nameOf(slot.job) : "a job whose beginning was not read"}${phase}`),
      h("div", { class: "dim" }, `slot ${slot.id}, ${kindText(kind)}`),
      pairs(slotFacts(app, slot).filter(([name]) => name !== "asked at")),
    ];
  }
  if (hit.bar?.order !== undefined) {
    const { order } = hit.bar;
    const what = order.kind === "park" ? "parking" : "discarding";
    return [
      h("b", {}, `${what} ${app.nameOf(order.job)}'s ${order.pool} state`),
      pairs([
        ["order", order.id],
        [
          "took",
          order.ended ? duration(order.ended - order.issued) : `${duration(app.now() - order.issued)} until now`,
        ],
        ["ended", order.how],
        ["error", order.error],
      ]),
    ];
  }
  if (hit.back !== undefined && hit.back !== null) {
    return [
      h("b", {}, hit.row.label),
      h("div", {}, statusText(hit.back.status)),
      hit.back.reason ? h("div", { class: "dim" }, hit.back.reason) : null,
    ];
  }
  if (hit.kept !== undefined) {
    const word =
      hit.kept.status === "loaded" ? "is loaded here; no job holds the GPUs" : "may be here: it has to be looked for";
    return [h("b", {}, `${app.nameOf(hit.kept.job)}'s ${hit.kept.pool} state`), h("div", { class: "dim" }, word)];
  }
  if (hit.at === undefined) return null;
  if (hit.at > app.now()) return null;
  return [
    h("b", {}, hit.row.label),
    h(
      "div",
      { class: "dim" },
      hit.row.kind === "node"
        ? hit.placed
          ? "idle: jobs are placed here, and none holds it"
          : "unallocated: no job is placed here"
        : "in none of its phases",
    ),
  ];
}

/** The panel of what was chosen in the picture. */
export function chosen(app, hit, close) {
  const panel = $("chosen");
  panel.hidden = hit === null || hit.row.kind === "head";
  const words = panel.hidden
    ? ""
    : [
        hit.row.label,
        hit.bar?.slot &&
          `slot ${hit.bar.slot.id}, ${app.nameOf(hit.bar.slot.job)} ${hit.bar.slot.phase}, ${statusOf(hit.bar.slot)}`,
      ];
  say($("chosen-said"), [words].flat().filter(Boolean).join(": "));
  if (panel.hidden) return;
  const shut = h("button", { class: "quiet icon", "aria-label": "Choose nothing", onclick: close }, "✕");
  const slot = hit.bar?.slot;
  if (slot !== undefined) {
    const job = app.jobOf(slot.job);
    const thing = { id: slot.id, name: app.nameOf(slot.job), status: statusOf(slot) };
    show(
      panel,
      h("div", { class: "head" }, h("h2", {}, `${app.nameOf(slot.job)} · ${slot.phase ?? ""}`), shut),
      h(
        "div",
        { class: "body" },
        pairs([
          ["slot", h("span", { class: "mono" }, slot.id)],
          ...slotFacts(app, slot),
          ["owner", job && `${job.owner}/${job.user}`],
          ["group", job?.group],
          ["slowdown", job && slowdownBar(job)],
        ]),
      ),
      h(
        "div",
        { class: "buttons" },
        h("a", { href: `#/job/${slot.job}` }, "Job page"),
        buttons(app, ["revoke"], thing, () => app.refresh()),
      ),
    );
    return;
  }
  const node = app.nodes.get(hit.row.id);
  if (node !== undefined) {
    show(
      panel,
      h("div", { class: "head" }, glyph(node.status), h("h2", {}, node.node), shut),
      h("div", { class: "body" }, nodeFacts(app, node)),
      buttons(app, ["drain", "undrain", "clean"], node, () => app.refresh()),
    );
    return;
  }
  const job = app.jobOf(hit.row.id);
  if (job !== undefined) {
    show(
      panel,
      h("div", { class: "head" }, glyph(job.status), h("h2", {}, job.name), shut),
      h(
        "div",
        { class: "body" },
        pairs([
          ["status", job.status],
          ["why", job.reason],
          ["owner", `${job.owner}/${job.user}`],
          ["group", job.group],
          ["slowdown", slowdownBar(job)],
        ]),
        h("a", { href: `#/job/${job.job}` }, "Job page"),
      ),
    );
  } else panel.hidden = true;
}

function nodeFacts(app, node) {
  const gpus = node.gpus.map((gpu) => {
    const holder = gpu.holder ? app.history.slots.get(gpu.holder) : undefined;
    const who = gpu.holder
      ? holder?.job
        ? app.nameOf(holder.job)
        : gpu.holder
      : gpu.dirty_by
        ? `bytes of ${app.nameOf(gpu.dirty_by)}`
        : "free";
    return `${gpu.gpu.split("/")[1]} ${who}${gpu.used_gb === null ? "" : ` ${number(gpu.used_gb, 1)} GB`}`;
  });
  return pairs([
    ["status", `${node.status}${node.reason ? `: ${node.reason}` : ""}`],
    ["pools", node.pools.join(", ")],
    ["group", node.group],
    ["kind", [node.gpu_type, node.gpu_gb ? `${number(node.gpu_gb)} GB` : ""].filter(Boolean).join(", ")],
    ["price", node.price_per_hour ? `${number(node.price_per_hour, 2)} an hour` : undefined],
    [
      "GPUs",
      h(
        "span",
        {},
        gpus.map((text) => h("div", {}, text)),
      ),
    ],
    [
      "states",
      Object.entries(node.states).map(([key, status]) =>
        h("div", {}, `${app.nameOf(key.split(" ")[0])} ${key.split(" ").slice(1).join(" ")}: ${status}`),
      ),
    ],
    ["residual", node.residual_gb ? `${number(node.residual_gb, 1)} GB on each GPU` : undefined],
    [
      "placed",
      h(
        "span",
        {},
        node.jobs.map((one) => h("div", {}, jobLink(app, one.job))),
      ),
    ],
  ]);
}
