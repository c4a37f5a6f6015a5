// From history to what is drawn: of each node, and of each job, stretches of time and what they were. Pure.
//
// A bar is {t0, t1, kind, share, top, job, slot | order}; t1 is Infinity where it lasts. ``share`` is how much of the
// lane's GPUs it has, and ``top`` how many of them come before. Kinds of bars:
//   loading     it holds the GPUs, and its state is being loaded        claimed -> granted
//   running     the GPUs are the job's                                  granted -> ended
//   lent        the same, of a filler
//   tail        the same, on fewer GPUs than it began with              shrunk  -> grown or ended
//   closing     given back, and not yet free                       released -> over
//   reclaiming  lost, revoked or faulted: held until verified clean         ended   -> over
//   parking     a state is being moved out, or dropped                  an order's time
//   waiting     (lanes of jobs) it has asked for its turn               queued  -> claimed or withdrawn

const HELD_AFTER = { released: "closing", faulted: "reclaiming", lost: "reclaiming", revoked: "reclaiming" };

/**
 * The bars of one slot, from when it held its GPUs. ``runs``: the kind of what runs. ``part``: of GPUs, their share of
 * the lane, and what comes before.
 */
function barsOfSlot(slot, runs, part, into) {
  const bar = (t0, t1, kind, gpus) => {
    const { share, top } = part(gpus);
    if (share > 0 && t1 > t0) into.push({ t0, t1, kind, share, top, job: slot.job, slot });
  };
  for (const [index, { at, gpus }] of slot.tries.entries()) {
    const next = slot.tries[index + 1];
    if (gpus !== undefined && next !== undefined) bar(at, next.at, "loading", gpus); // in vain
  }
  if (slot.claimed === undefined || slot.gpus === undefined) return;
  const until = slot.ended ?? slot.over ?? Infinity;
  const granted = slot.granted ?? Infinity;
  bar(slot.claimed, Math.min(granted, until), "loading", slot.gpus);
  let [since, gpus] = [granted, slot.gpus];
  let kind = slot.tail && !slot.parts.length ? "tail" : runs;
  for (const change of slot.parts) {
    bar(since, change.at, kind, gpus);
    [since, gpus] = [change.at, change.gpus];
    kind = change.tail ? "tail" : runs;
  }
  bar(since, until, kind, gpus);
  if (slot.ended !== undefined && slot.how !== "withdrawn") {
    const held = HELD_AFTER[slot.how] ?? "closing";
    bar(slot.ended, slot.over ?? Infinity, held, gpus);
  }
}

const runsAs = (history, job) => (history.fillers.has(job) ? "lent" : "running");

const inOrder = (a, b) => a.t0 - b.t0;

/** What is drawn of a node: bars, how it was (``backs``), and since when a state has lain on its GPUs (``kept``). */
export function nodeLane(history, node, gpus, present) {
  const bars = [];
  const here = (names) => {
    const mine = names.filter((gpu) => history.nodeOf.get(gpu) === node);
    return { share: mine.length / gpus, top: Math.min(...mine.map((gpu) => history.indexOf.get(gpu))) / gpus };
  };
  for (const slot of history.slotsOfNode.get(node) ?? []) barsOfSlot(slot, runsAs(history, slot.job), here, bars);
  for (const order of history.ordersOfNode.get(node) ?? []) {
    if (order.kind === "load") continue; // it is within the slot that it is for
    bars.push({
      t0: order.issued,
      t1: order.ended ?? Infinity,
      kind: "parking",
      share: 1,
      top: 0,
      job: order.job,
      order,
    });
  }
  bars.sort(inOrder);
  return {
    bars,
    backs: stretches(marksOf(history, node), present, "up"),
    kept: kept(history, node),
    widest: widest(bars),
  };
}

/** A node's marks, with the daemon's starts since it is known. */
function marksOf(history, node) {
  const marks = history.nodes.get(node);
  return marks === undefined
    ? undefined
    : merged(
        marks,
        history.starts.filter((start) => start.seq > marks[0].seq),
      );
}

/** What is drawn of a job: bars, and how it was. */
export function jobLane(history, job, present) {
  const bars = [];
  for (const slot of history.slotsOfJob.get(job) ?? []) {
    const waits = (t0, t1) => {
      if (t1 > t0) bars.push({ t0, t1, kind: "waiting", share: 1, top: 0, job, slot });
    };
    const claims = [...slot.tries.filter((one) => one.gpus !== undefined).map((one) => one.at), slot.claimed];
    const after = (at) => claims.find((one) => one >= at) ?? slot.over ?? slot.ended ?? Infinity;
    if (slot.queued !== undefined) waits(slot.queued, after(slot.queued));
    for (const { at, gpus } of slot.tries) if (gpus === undefined) waits(at, after(at));
    const part = (names) => ({ share: names.length / (slot.gpus ?? names).length, top: 0 });
    barsOfSlot(slot, runsAs(history, job), part, bars);
  }
  bars.sort(inOrder);
  return { bars, backs: stretches(history.jobs.get(job), present, "admitted"), kept: [], widest: widest(bars) };
}

/** The longest bar that has ended: how far back one has to look for what reaches into a picture. */
function widest(bars) {
  let longest = 0;
  for (const bar of bars) if (bar.t1 !== Infinity && bar.t1 - bar.t0 > longest) longest = bar.t1 - bar.t0;
  return longest;
}

/** Marks as stretches of time. Without any, it has been as it is now; the ordinary status is no stretch. */
function stretches(marks, present, ordinary) {
  if (!marks?.length) return present && present !== ordinary ? [{ t0: -Infinity, t1: Infinity, status: present }] : [];
  const found = [];
  let [status, before] = [ordinary, ordinary];
  for (const [index, mark] of marks.entries()) {
    if (mark.kind === "daemon_started" && !SEEN_AGAIN.has(status)) continue;
    if (status === "paused" && mark.kind === "job_unplaced") {
      before = mark.status; // it will wait when it is resumed
      continue;
    }
    if (mark.status === "paused") before = status;
    if (mark.status === "quarantined") before = "waiting";
    status = mark.status || before;
    const t1 = until(marks, index, status);
    if (status !== ordinary && t1 > mark.at) found.push({ t0: mark.at, t1, status, reason: mark.reason });
  }
  return found;
}

/** What is not known any more when the daemon starts. */
const SEEN_AGAIN = new Set(["up", "occupied", "unknown"]);

/** When the mark after this one counts. */
function until(marks, index, status) {
  const next = marks.slice(index + 1).find((mark) => {
    if (mark.kind === "daemon_started") return SEEN_AGAIN.has(status);
    return !(status === "paused" && mark.kind === "job_unplaced");
  });
  return next?.at ?? Infinity;
}

/** Two lists of marks, in order. */
const merged = (some, others) => (others?.length ? [...(some ?? []), ...others].sort((a, b) => a.seq - b.seq) : some);

/** When states lay on a node's GPUs, or may have: from loaded to parked or gone. */
function kept(history, node) {
  const found = [];
  for (const key of history.statesOfNode.get(node) ?? []) {
    const [job, pool] = key.split(" ");
    let open;
    const gone = (history.placements.get(job) ?? []).filter(
      ({ kind, node: left }) => kind === "placement_ended" || (kind === "node_left" && left === node),
    );
    for (const mark of merged(history.states.get(key), gone)) {
      const on = mark.status === "loaded" || mark.status === "unknown";
      if (open !== undefined && (!on || mark.status !== open.status)) {
        found.push({ ...open, t1: mark.at });
        open = undefined;
      }
      if (on && open === undefined) open = { t0: mark.at, job, pool, status: mark.status };
    }
    if (open !== undefined) found.push({ ...open, t1: Infinity });
  }
  return found.sort(inOrder);
}

/** By node: when jobs were placed on it. ``pinned``: by node, the jobs that are now. */
export function allocations(history, pinned) {
  const found = new Map();
  const open = new Set();
  const add = (node, t0, t1) => {
    let list = found.get(node);
    if (list === undefined) found.set(node, (list = []));
    list.push({ t0, t1 });
  };
  for (const [job, marks] of history.placements) {
    if (history.fillers.has(job)) continue;
    // By node, since when it is the job's; and those that it has, and is to move to.
    const since = new Map();
    let [mine, coming] = [[], []];
    const take = (nodes, at) => {
      for (const node of nodes) if (!since.has(node)) since.set(node, at);
    };
    const leave = (nodes, at) => {
      for (const node of nodes) {
        if (since.has(node)) add(node, since.get(node), at);
        since.delete(node);
      }
    };
    // Placed before the facts that were read: on the nodes where it had slots.
    if (marks[0].kind !== "job_placed") take((mine = nodesOf(history, job, marks[0].at)), -Infinity);
    for (const { kind, at, nodes } of marks) {
      if (kind === "job_placed") take((mine = nodes), at);
      else if (kind === "move_planned") take((coming = nodes), at);
      else if (kind === "move_ended") {
        const there = coming;
        leave(
          mine.filter((node) => !there.includes(node)),
          at,
        );
        [mine, coming] = [there, []];
      } else if (kind === "move_abandoned") {
        const here = mine;
        leave(
          coming.filter((node) => !here.includes(node)),
          at,
        );
        coming = [];
      } else if (kind === "placement_ended") {
        leave([...since.keys()], at);
        [mine, coming] = [[], []];
      }
    }
    for (const node of since.keys()) open.add(`${job} ${node}`);
    leave([...since.keys()], Infinity);
  }
  for (const [node, jobs] of pinned) {
    for (const job of jobs) {
      // Of what the lists know and the facts that were read do not, it is not known since when.
      const over = history.placements.get(job)?.at(-1)?.kind === "placement_ended";
      if (!over && !open.has(`${job} ${node}`)) add(node, -Infinity, Infinity);
    }
  }
  for (const [node, list] of found) found.set(node, union(list));
  return found;
}

function nodesOf(history, job, before) {
  const nodes = new Set();
  for (const slot of history.slotsOfJob.get(job) ?? []) {
    if ((slot.claimed ?? Infinity) <= before) for (const node of slot.nodes.keys()) nodes.add(node);
  }
  return [...nodes];
}

function union(list) {
  list.sort(inOrder);
  const found = [];
  for (const { t0, t1 } of list) {
    const top = found[found.length - 1];
    if (top !== undefined && t0 <= top.t1) top.t1 = Math.max(top.t1, t1);
    else found.push({ t0, t1 });
  }
  return found;
}

/** The first of stretches in order of time that may reach into what follows ``at``. */
export function firstReaching(list, at, widest) {
  let [low, high] = [0, list.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle].t0 < at - widest) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Lanes, made when they are asked for and made anew when something in them has changed. */
export class Lanes {
  constructor(history) {
    this.history = history;
    /** by node: {gpus, status, pools, jobs} as they are now; by job: {status} */
    this.nodes = new Map();
    this.jobs = new Map();
    this._nodeLanes = new Map();
    this._jobLanes = new Map();
    this._allocations = new Map();
    this._placed = -1;
  }

  /** What the lists say now. */
  know(nodes, jobs) {
    this.nodes = nodes;
    this.jobs = jobs;
    this._nodeLanes.clear();
    this._jobLanes.clear();
    this._placed = -1;
  }

  /** Have made anew what has changed. True if anything has. */
  refresh() {
    const { touchedNodes, touchedJobs } = this.history;
    const changed = touchedNodes.size > 0 || touchedJobs.size > 0;
    for (const node of touchedNodes) this._nodeLanes.delete(node);
    for (const job of touchedJobs) this._jobLanes.delete(job);
    touchedNodes.clear();
    touchedJobs.clear();
    return changed;
  }

  node(id) {
    let lane = this._nodeLanes.get(id);
    if (lane === undefined) {
      const known = this.nodes.get(id);
      lane = nodeLane(this.history, id, known?.gpus ?? 1, known?.status);
      // One that has not ended reaches into every picture, so it has to be looked for apart.
      lane.open = openOf(lane);
      this._nodeLanes.set(id, lane);
    }
    return lane;
  }

  job(id) {
    let lane = this._jobLanes.get(id);
    if (lane === undefined) {
      lane = jobLane(this.history, id, this.jobs.get(id)?.status);
      lane.open = openOf(lane);
      this._jobLanes.set(id, lane);
    }
    return lane;
  }

  /** When jobs were placed on a node. */
  allocated(node) {
    if (this._placed !== this.history.placed) {
      this._placed = this.history.placed;
      this._allocations = allocations(this.history, new Map([...this.nodes].map(([id, known]) => [id, known.jobs])));
    }
    return this._allocations.get(node) ?? [];
  }
}

const openOf = (lane) => lane.bars.filter((bar) => bar.t1 === Infinity);

/** Call ``draw`` with each bar of a lane that reaches into a span of time, each once. */
export function eachBar(lane, from, to, draw) {
  const { bars } = lane;
  const start = firstReaching(bars, from, lane.widest);
  for (const bar of lane.open) if (bar.t0 < from - lane.widest) draw(bar);
  for (let index = start; index < bars.length && bars[index].t0 < to; index += 1) {
    if (bars[index].t1 > from) draw(bars[index]);
  }
}
