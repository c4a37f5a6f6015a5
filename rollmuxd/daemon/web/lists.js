// The lists below the picture: their columns, and what one may filter for.

import { dateAndTime, number, seconds } from "./format.js";
import { h } from "./dom.js";
import { eventRow, jobLink, meter, slowdownBar, statusCell } from "./panels.js";

/** The lists below the picture: by tab, {label, items(app), columns, key, open, text}. */
export function lists(app) {
  const text = (id, head, width, of, more = {}) => ({
    id,
    head,
    width,
    cell: (item) => String(of(item) ?? ""),
    sort: of,
    ...more,
  });
  return {
    jobs: {
      label: "Jobs",
      items: () => app.jobs.filter((job) => job.status !== "ended" || app.recent(job)),
      key: (job) => job.job,
      open: (job) => app.go(`#/job/${job.job}`),
      text: (job) => `${job.name} ${job.job} ${job.owner} ${job.user} ${job.status} ${job.group ?? ""} ${job.reason}`,
      empty: () =>
        app.me?.role === "admin"
          ? "no job has registered; the tutorial in the docs starts the first"
          : `no job of owner ${app.me?.owner}; with the role ${app.me?.role} you do not see other owners' jobs`,
      columns: [
        {
          id: "name",
          head: "job",
          width: "minmax(150px, 1.4fr)",
          cell: (job) => h("a", { href: `#/job/${job.job}` }, job.name),
          sort: (job) => job.name,
        },
        text("id", "id", "58px", (job) => job.job),
        text("owner", "owner", "minmax(90px, 0.8fr)", (job) => `${job.owner}/${job.user}`),
        {
          id: "status",
          head: "status",
          width: "112px",
          cell: (job) => statusCell(job.status),
          sort: (job) => job.status,
        },
        text("group", "group", "64px", (job) => job.group),
        {
          id: "now",
          head: "now",
          width: "minmax(150px, 1fr)",
          cell: (job) => app.doing(job),
          sort: (job) => app.doing(job),
        },
        text("iterations", "iter.", "64px", (job) => job.iterations, {
          num: true,
          cell: (job) => number(job.iterations),
        }),
        {
          id: "slowdown",
          head: "slowdown of SLO",
          width: "216px",
          cell: (job) => slowdownBar(job),
          sort: (job) => job.slowdown,
        },
        {
          id: "credit",
          head: "credit",
          width: "80px",
          num: true,
          cell: (job) =>
            job.credit_s !== null && job.credit_s < 0
              ? h("span", { class: "bad" }, seconds(job.credit_s))
              : seconds(job.credit_s),
          sort: (job) => job.credit_s,
        },
        text("priority", "prio.", "54px", (job) => job.priority, { num: true }),
        text("reason", "why", "minmax(160px, 2fr)", (job) => job.reason),
      ],
    },
    groups: {
      label: "Groups",
      items: () => app.groups,
      key: (group) => group.group,
      text: (group) => `${group.group} ${group.jobs.map((job) => app.nameOf(job)).join(" ")} ${group.nodes.join(" ")}`,
      empty: "no job is placed",
      columns: [
        text("group", "group", "70px", (group) => group.group),
        {
          id: "members",
          head: "members",
          width: "minmax(220px, 1.5fr)",
          cell: (group) => h("span", {}, group.jobs.map((job, index) => [index ? ", " : "", jobLink(app, job)]).flat()),
          sort: (group) => group.jobs.length,
        },
        {
          id: "schedule",
          head: "schedule",
          width: "minmax(240px, 2fr)",
          cell: (group) => schedule(app, group),
          title: (group) => group.schedule.map((turn) => `${turn.name || turn.job} ${turn.phase}`).join(" → "),
        },
        text("nodes", "nodes", "minmax(180px, 1.2fr)", (group) => group.nodes.join(" ")),
        text("period", "period", "90px", (group) => group.period_s, {
          num: true,
          cell: (group) => seconds(group.period_s),
        }),
        text("cost", "an hour", "84px", (group) => group.cost_per_hour, {
          num: true,
          cell: (group) => number(group.cost_per_hour, 2),
        }),
        text("reason", "held up by", "minmax(140px, 1fr)", (group) => group.reason),
      ],
    },
    nodes: {
      label: "Nodes",
      items: () => [...app.nodes.values()],
      key: (node) => node.node,
      text: (node) =>
        `${node.node} ${node.status} ${node.pools.join(" ")} ${node.gpu_type} ${node.group ?? ""} ${node.reason}`,
      open: (node) => app.chooseNode(node.node),
      empty: "no node is configured",
      columns: [
        text("node", "node", "minmax(120px, 1fr)", (node) => node.node),
        {
          id: "status",
          head: "status",
          width: "120px",
          cell: (node) => statusCell(node.status),
          sort: (node) => node.status,
        },
        text("pools", "pools", "120px", (node) => node.pools.join(" ")),
        text("type", "GPUs", "110px", (node) => `${node.gpus.length} ${node.gpu_type}`),
        {
          id: "holder",
          head: "held by",
          width: "minmax(140px, 1fr)",
          cell: (node) => app.holderOf(node),
          sort: (node) => app.holderOf(node),
        },
        text("group", "group", "64px", (node) => node.group),
        text("placed", "placed", "64px", (node) => node.jobs.length, { num: true }),
        {
          id: "memory",
          head: "GPU memory seen",
          width: "206px",
          cell: (node) => memory(node),
          sort: (node) => usedGb(node),
        },
        {
          id: "left",
          head: "residual",
          width: "84px",
          num: true,
          cell: (node) => (node.residual_gb ? `${number(node.residual_gb, 1)} GB` : "–"),
          sort: (node) => node.residual_gb,
        },
        text("reason", "why", "minmax(140px, 1.4fr)", (node) => node.reason),
      ],
    },
    hosts: {
      label: "Hosts",
      items: () => app.hosts,
      key: (host) => host.host,
      text: (host) => `${host.host} ${host.backend} ${host.nodes.join(" ")}`,
      empty: "no host is configured",
      columns: [
        text("host", "host", "minmax(110px, 1fr)", (host) => host.host),
        {
          id: "reach",
          head: "reachable",
          width: "100px",
          cell: (host) => statusCell(host.reachable ? "up" : "lost"),
          sort: (host) => Number(host.reachable),
        },
        text("backend", "backend", "90px", (host) => host.backend),
        text("nodes", "nodes", "70px", (host) => host.nodes.length, { num: true }),
        text("jobs", "jobs", "64px", (host) => host.jobs.length, { num: true }),
        {
          id: "ram",
          head: "RAM for parked states",
          width: "260px",
          cell: (host) =>
            h(
              "span",
              {},
              meter(host.ram_reserved_gb, host.ram_gb),
              ` ${number(host.ram_reserved_gb)} of ${number(host.ram_gb)} GB reserved`,
            ),
          sort: (host) => host.ram_reserved_gb / (host.ram_gb || 1),
        },
        {
          id: "left",
          head: "residual on GPUs",
          width: "minmax(220px, 1fr)",
          cell: (host) => leftOver(app, host),
          sort: (host) => leftOf(app, host)[0],
        },
      ],
    },
    events: {
      label: "Events",
      items: () => [...app.history.events].reverse(),
      key: (event) => event.seq,
      text: (event) => `${event.text} ${event.kind} ${event.node ?? ""}`,
      open: (event) => event.job && app.go(`#/job/${event.job}`),
      empty: "nothing was read yet",
      columns: [
        text("seq", "no.", "90px", (event) => event.seq, { num: true, cell: (event) => number(event.seq) }),
        text("at", "at", "150px", (event) => event.at, { cell: (event) => dateAndTime(event.at) }),
        {
          id: "level",
          head: "",
          width: "34px",
          cell: (event) => eventRow(event).children[1],
          sort: (event) => event.level,
        },
        text("kind", "kind", "160px", (event) => event.kind),
        text("text", "what", "minmax(300px, 3fr)", (event) => event.text),
      ],
      sort: { by: "seq", down: true },
    },
  };
}

function schedule(app, group) {
  const least = Math.min(...group.schedule.map((turn) => turn.rotation));
  const next = group.schedule.findIndex((turn) => turn.rotation === least);
  return h(
    "span",
    { class: "schedule" },
    group.schedule.slice(0, 12).map((turn, index) =>
      h(
        "span",
        {
          class: index === next ? "on" : "",
          style: { background: app.marks.of(turn.job) },
          title: `${turn.name || turn.job} ${turn.phase}${index === next ? " (next)" : ""}`,
        },
        `${(turn.name || turn.job).slice(0, 6)}·${turn.phase.slice(0, 1)}`,
      ),
    ),
  );
}

const usedGb = (node) => Math.max(0, ...node.gpus.map((gpu) => gpu.used_gb ?? 0));

function memory(node) {
  const seen = node.gpus.filter((gpu) => gpu.used_gb !== null && gpu.used_gb !== undefined);
  if (!seen.length) return h("span", { class: "dim" }, "not seen yet");
  const used = seen.reduce((sum, gpu) => sum + gpu.used_gb, 0);
  const all = node.gpu_gb * node.gpus.length;
  return h("span", {}, meter(used, all), ` ${number(used)}${all ? ` of ${number(all)}` : ""} GB`);
}

function leftOf(app, host) {
  const nodes = host.nodes.map((node) => app.nodes.get(node)).filter((node) => node !== undefined);
  const left = nodes.reduce((sum, node) => sum + node.residual_gb * node.gpus.length, 0);
  return [left, nodes.reduce((sum, node) => sum + node.gpu_gb * node.gpus.length, 0)];
}

function leftOver(app, host) {
  const [left, all] = leftOf(app, host);
  return h("span", {}, meter(left, all, true), ` ${number(left, 1)}${all ? ` of ${number(all)}` : ""} GB may stay`);
}
