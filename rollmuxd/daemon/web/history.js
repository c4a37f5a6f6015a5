// Facts in, history out: what each slot, state, node and job did, as far as the facts that were seen tell.
//
// Pure: no clock, no DOM, no network. Facts may come in any order and more than once: what a fact says is written down
// where it belongs, and nothing is counted. So a page begins with the newest facts and reads older ones when somebody
// looks at them; a slot whose beginning has not been read has no beginning, and gets it later.

import { millis } from "./format.js";

/** What a slot ended by. */
const ENDINGS = {
  slot_released: "released",
  slot_taken_away: "revoked",
  slot_withdrawn: "withdrawn",
};
const NODE_STATUS = {
  node_up: "up",
  node_occupied: "occupied",
  node_unknown: "unknown",
  node_lost: "lost",
  node_quarantined: "quarantined",
  node_draining: "draining",
  node_drained: "drained",
  node_undrained: "unknown",
};
const JOB_STATUS = {
  job_registered: "waiting",
  move_began: "moving",
  move_ended: "admitted",
  move_abandoned: "admitted",
  filler_placed: "admitted",
  job_promised: "admitted",
  job_unplaced: "waiting",
  job_paused: "paused",
  job_resumed: "", // where it was before the pause; out of quarantine, waiting
  job_quarantined: "quarantined",
  job_lost: "lost",
  job_ended: "ended",
};
const ORDERED = { load: "loading", park: "parking", discard: "discarding" };
const DONE = { load: "loaded", park: "parked", discard: "gone" };

export class History {
  constructor() {
    /** by id: {id, job, phase, queued, claimed, granted, ended, how, over, gpus, parts, nodes, fence, reason, ...} */
    this.slots = new Map();
    /** by id: {id, kind, job, pool, node, slot, issued, ended, how} */
    this.orders = new Map();
    /** by node: its statuses {seq, at, status, reason}, in order */
    this.nodes = new Map();
    /** by job: the same of its statuses */
    this.jobs = new Map();
    /** by "job pool node": the statuses of that state that were seen, and those that are not known */
    this.states = new Map();
    /** when the daemon started: what was up has to be seen again */
    this.starts = [];
    /** by job: the facts about which nodes are its, {seq, at, kind, nodes} */
    this.placements = new Map();
    /** names and owners, by job */
    this.names = new Map();
    /** which slots and orders were on a node, and which a job had; in no order */
    this.slotsOfNode = new Map();
    this.slotsOfJob = new Map();
    this.newestOfJob = new Map();
    this.ordersOfNode = new Map();
    this.statesOfNode = new Map();
    /** grows with each fact about a placement */
    this.placed = 0;
    /** jobs that are lent nodes, and have none of their own */
    this.fillers = new Set();
    /** {seq, at, level, text, job, node, slot} */
    this.events = [];
    /** by GPU: its node, and its place there */
    this.nodeOf = new Map();
    this.indexOf = new Map();
    /** numbers of the facts that were read: after the one, up to the other */
    this.after = undefined;
    this.last = undefined;
    this.forgot = false;
    this.earliest = undefined;
    this.latest = 0;
    /** what has changed since somebody looked: nodes and jobs */
    this.touchedNodes = new Set();
    this.touchedJobs = new Set();
    this._seen = new Set();
  }

  /** Which GPUs a node has: they are what slots name. */
  knowNode(node, gpus) {
    for (const [index, gpu] of gpus.entries()) {
      this.nodeOf.set(gpu, node);
      this.indexOf.set(gpu, index);
    }
  }

  /** A page of facts that came after fact ``after``, of which ``last`` was the last that was looked at. */
  take(facts, after, last) {
    if (!this.forgot) this.after = this.after === undefined ? after : Math.min(this.after, after);
    this.last = this.last === undefined ? last : Math.max(this.last, last);
    for (const fact of facts) this.see(fact);
  }

  see(given) {
    const fact = inWords(given);
    const at = fact.at;
    if (this.earliest === undefined || at < this.earliest) this.earliest = at;
    if (at > this.latest && fact.fact !== "audited") this.latest = at;
    const kind = fact.fact;
    if (kind in NODE_STATUS) this._mark(this.nodes, fact.node, fact, NODE_STATUS[kind], this.touchedNodes);
    if (kind in JOB_STATUS) this._mark(this.jobs, fact.job, fact, JOB_STATUS[kind], this.touchedJobs);
    HANDLERS[kind]?.(this, fact);
    const event = describe(this, fact);
    if (event !== undefined) this._note(fact, event);
  }

  /** An open slot, or one that ended lately, as the list of slots shows it; facts know better. */
  knowSlot(view) {
    const slot = this._slot(view.slot);
    slot.job ??= view.job;
    slot.phase ??= view.phase;
    slot.queued ??= millis(view.queued_at);
    slot.claimed ??= millis(view.claimed_at);
    slot.granted ??= millis(view.granted_at);
    slot.ended ??= millis(view.ended_at);
    slot.fence ??= view.fence ?? undefined;
    slot.reason ??= view.reason || undefined;
    slot.gpus ??= view.gpus;
    if (view.status === "tail") slot.tail = true;
    // It is over, and no fact says when it freed them: as far as is known, at its end.
    if ((view.status === "over" || view.status === "withdrawn") && slot.over === undefined) slot.over = slot.ended;
    if (["withdrawn", "faulted", "lost", "revoked"].includes(view.status)) slot.how ??= view.status;
    this._placeSlot(slot);
  }

  /** A fresh page need not know of what ended before this: memory is not without end. */
  forget(before) {
    for (const [id, slot] of this.slots) {
      if ((slot.over ?? Infinity) < before) {
        this.slots.delete(id);
        for (const { gpus } of [...slot.tries, ...slot.parts, slot]) {
          for (const gpu of gpus ?? []) this.slotsOfNode.get(this.nodeOf.get(gpu))?.delete(slot);
        }
        this.slotsOfJob.get(slot.job)?.delete(slot);
        this._touch(slot);
      }
    }
    for (const [id, order] of this.orders) {
      if ((order.ended ?? Infinity) < before) {
        this.orders.delete(id);
        this.ordersOfNode.get(order.node)?.delete(order);
      }
    }
    for (const lists of [this.nodes, this.jobs, this.states]) {
      for (const list of lists.values()) {
        // The last of them says how it was at that time.
        const first = list.findIndex((mark) => mark.at >= before);
        list.splice(0, first < 0 ? Math.max(0, list.length - 1) : Math.max(0, first - 1));
      }
    }
    this.events = this.events.filter((event) => event.at >= before);
    this._seen.clear();
    for (const event of this.events) this._seen.add(event.seq);
    this.earliest = Math.max(this.earliest ?? before, before);
    // What is older is not read again.
    this.forgot = true;
    this.after = undefined;
  }

  // ---- writing down --------------------------------------------------------------------------------------------------

  _slot(id) {
    let slot = this.slots.get(id);
    if (slot === undefined) {
      slot = { id, tries: [], parts: [], nodes: new Map() };
      this.slots.set(id, slot);
    }
    return slot;
  }

  _order(id) {
    let order = this.orders.get(id);
    if (order === undefined) {
      order = { id };
      this.orders.set(id, order);
    }
    return order;
  }

  /** Let a slot be found by its job, and by the nodes that it is on. */
  _placeSlot(slot) {
    if (slot.job !== undefined) {
      of(this.slotsOfJob, slot.job).add(slot);
      const newest = this.newestOfJob.get(slot.job);
      if (newest === undefined || numberOf(newest) < numberOf(slot)) this.newestOfJob.set(slot.job, slot);
    }
    if (slot.gpus !== undefined) {
      slot.nodes = this.count(slot.gpus);
      for (const node of slot.nodes.keys()) of(this.slotsOfNode, node).add(slot);
    }
    this._touch(slot);
  }

  /** A slot was on the nodes of these GPUs, too. */
  _onNodes(slot, gpus) {
    for (const node of this.count(gpus).keys()) {
      of(this.slotsOfNode, node).add(slot);
      this.touchedNodes.add(node);
    }
  }

  _touch(slot) {
    for (const { gpus } of slot.tries)
      if (gpus !== undefined) for (const gpu of gpus) this.touchedNodes.add(this.nodeOf.get(gpu));
    for (const node of slot.nodes.keys()) this.touchedNodes.add(node);
    if (slot.job !== undefined) this.touchedJobs.add(slot.job);
  }

  /** How many of these GPUs each node has. */
  count(gpus) {
    const found = new Map();
    for (const gpu of gpus) {
      const node = this.nodeOf.get(gpu);
      if (node !== undefined) found.set(node, (found.get(node) ?? 0) + 1);
    }
    return found;
  }

  _mark(marks, thing, fact, status, touched) {
    const list = marks.get(thing) ?? [];
    marks.set(thing, list);
    insert(list, {
      seq: fact.seq,
      at: fact.at,
      kind: fact.fact,
      status,
      reason: fact.reason ?? (fact.by ? `by ${fact.by}` : ""),
    });
    touched?.add(thing);
  }

  _note(fact, [level, text, about = {}]) {
    if (this._seen.has(fact.seq)) return;
    this._seen.add(fact.seq);
    insert(this.events, {
      seq: fact.seq,
      at: fact.at,
      kind: fact.fact,
      level,
      text,
      job: fact.job,
      node: fact.node,
      slot: fact.slot,
      ...about,
    });
  }
}

/** A fact whose causes are the sentences that they are for this reader. */
function inWords(fact) {
  const { reason, why, error } = fact;
  return { ...fact, reason: reason?.text ?? reason, why: why?.text ?? why, error: error?.text ?? error };
}

const HANDLERS = {
  daemon_started: (history, fact) => {
    insert(history.starts, { seq: fact.seq, at: fact.at, kind: fact.fact, status: "unknown", reason: "" });
    for (const node of history.nodes.keys()) history.touchedNodes.add(node);
  },
  node_added: (history, fact) => {
    history.knowNode(fact.node.id, fact.node.gpus);
    history._mark(history.nodes, fact.node.id, fact, "unknown", history.touchedNodes);
  },
  job_registered: (history, fact) => {
    history.names.set(fact.job, { name: fact.spec.name, owner: fact.owner });
    if (fact.spec.filler) history.fillers.add(fact.job);
  },
  filler_placed: (history, fact) => history.fillers.add(fact.job),
  job_placed: (history, fact) => {
    history._mark(history.jobs, fact.job, fact, fact.status, history.touchedJobs);
    pinned(history, fact);
  },
  move_planned: pinned,
  move_ended: pinned,
  move_abandoned: pinned,
  node_left: pinned,
  placement_ended: pinned,
  slot_queued: (history, fact) => {
    const slot = history._slot(fact.slot);
    slot.job = fact.job;
    slot.phase = fact.phase;
    slot.queued = fact.at;
    slot.side = fact.side ?? false;
    slot.request = fact.request_id;
    history._placeSlot(slot);
  },
  slot_claimed: (history, fact) => {
    tried(history, fact);
    const { job } = history._slot(fact.slot);
    if (job !== undefined && fact.turn === undefined) history.fillers.add(job); // a loan passes no turn
  },
  slot_granted: (history, fact) => {
    const slot = history._slot(fact.slot);
    slot.granted = fact.at;
    slot.fence = fact.fence.join(".");
    history._touch(slot);
  },
  slot_resized: part,
  slot_overran: (history, fact) => {
    const slot = history._slot(fact.slot);
    slot.overran = fact.at;
    history._touch(slot);
  },
  slot_over: (history, fact) => {
    const slot = history._slot(fact.slot);
    slot.over = fact.at;
    history._touch(slot);
  },
  order_issued: (history, fact) => {
    const order = history._order(fact.order);
    Object.assign(order, { kind: fact.kind, job: fact.job, pool: fact.pool, node: fact.node, slot: fact.slot });
    order.issued = fact.at;
    of(history.ordersOfNode, fact.node).add(order);
    stateMark(history, fact, ORDERED[fact.kind], fact.at);
    if (order.ended !== undefined) orderEnded(history, order);
    history.touchedNodes.add(fact.node);
  },
  state_unknown: (history, fact) => stateMark(history, fact, "unknown", fact.at),
  state_observed: (history, fact) => stateMark(history, fact, fact.status, fact.at),
};
for (const [kind, how] of Object.entries(ENDINGS)) {
  HANDLERS[kind] = (history, fact) => {
    const slot = history._slot(fact.slot);
    slot.ended = fact.at;
    slot.how = fact.how ?? how; // of one that was taken away the fact says it
    if (fact.reason) slot.reason = fact.reason;
    if (how === "withdrawn") slot.over = fact.at;
    history._touch(slot);
  };
}
for (const [kind, how] of Object.entries({
  order_ended: "done",
  order_faulted: "failed",
  order_contact_lost: "no contact",
})) {
  HANDLERS[kind] = (history, fact) => {
    const order = history._order(fact.order);
    if (how === "no contact") (order.unheard ??= []).push(fact);
    if (how !== "no contact" || order.ended === undefined) // else its end came after all
      Object.assign(order, { ended: fact.at, how, endSeq: fact.seq, error: fact.error });
    if (order.node !== undefined) orderEnded(history, order);
  };
}

/** A slot holds GPUs, or has freed them again, its state not being loaded there: then it waits for others. */
function tried(history, fact) {
  const slot = history._slot(fact.slot);
  insert(slot.tries, { seq: fact.seq, at: fact.at, gpus: fact.gpus, reason: fact.reason });
  const last = slot.tries[slot.tries.length - 1];
  slot.claimed = last.gpus === undefined ? undefined : last.at;
  slot.gpus = slot.tries.findLast((one) => one.gpus !== undefined)?.gpus;
  if (last.gpus !== undefined || slot.gpus !== undefined) history._placeSlot(slot);
  for (const { gpus } of slot.tries) if (gpus !== undefined) history._onNodes(slot, gpus);
}

/** A fact about which nodes are a job's. */
function pinned(history, fact) {
  const nodes = fact.pins === undefined ? undefined : [...new Set(Object.values(fact.pins).flat())];
  insert(of(history.placements, fact.job, Array), {
    seq: fact.seq,
    at: fact.at,
    kind: fact.fact,
    nodes,
    node: fact.node,
  });
  history.placed += 1;
  for (const node of nodes ?? [fact.node]) if (node !== undefined) history.touchedNodes.add(node);
  // Where else it was will be known from its other facts: what it left there is gone from now on.
  for (const slot of history.slotsOfJob.get(fact.job) ?? [])
    for (const node of slot.nodes.keys()) history.touchedNodes.add(node);
  history.touchedJobs.add(fact.job);
}

function orderEnded(history, order) {
  for (const { seq, at } of order.unheard ?? []) stateMark(history, { ...order, seq }, "unknown", at);
  stateMark(history, { ...order, seq: order.endSeq }, order.how === "done" ? DONE[order.kind] : "unknown", order.ended);
}

function stateMark(history, fact, status, at) {
  const key = `${fact.job} ${fact.pool} ${fact.node}`;
  insert(of(history.states, key, Array), { seq: fact.seq, at, status });
  of(history.statesOfNode, fact.node).add(key);
  history.touchedNodes.add(fact.node);
}

function part(history, fact) {
  const slot = history._slot(fact.slot);
  insert(slot.parts, { seq: fact.seq, at: fact.at, gpus: fact.gpus, tail: Boolean(fact.tail) });
  history._onNodes(slot, fact.gpus);
  history._touch(slot);
}

/** Ids count up: the later slot has the greater. */
const numberOf = (slot) => Number(slot.id.slice(1));

/** Where a slot is in its life, as far as is known. */
export function statusOf(slot) {
  if (slot.over !== undefined) return slot.how ?? "over";
  if (slot.ended !== undefined) return slot.how === "released" ? "released" : "reclaiming";
  if (slot.granted !== undefined) {
    const now = slot.parts.length ? slot.parts[slot.parts.length - 1].tail : slot.tail;
    return now ? "tail" : "running";
  }
  return slot.claimed === undefined ? "queued" : "loading";
}

/** The collection that a map has under a key; a new one where it has none. */
function of(map, key, Kind = Set) {
  let found = map.get(key);
  if (found === undefined) map.set(key, (found = new Kind()));
  return found;
}

/** Put a mark where its number belongs; one that is there already stays as it is. Most are newer than all others. */
function insert(list, mark) {
  let at = list.length;
  while (at > 0 && list[at - 1].seq > mark.seq) at -= 1;
  if (at > 0 && list[at - 1].seq === mark.seq) return;
  list.splice(at, 0, mark);
}

/** What a fact says to people, if it is one to be told of: how grave, in a sentence, and about what. */
function describe(history, fact) {
  const name = (job) => history.names.get(job)?.name ?? job;
  const job = fact.job === undefined ? undefined : name(fact.job);
  const slotOf = () => {
    const slot = history.slots.get(fact.slot);
    return slot?.job === undefined ? `slot ${fact.slot}` : `${name(slot.job)}'s ${slot.phase} slot ${fact.slot}`;
  };
  const about = () => ({
    job: history.slots.get(fact.slot)?.job,
    node: [...(history.slots.get(fact.slot)?.nodes.keys() ?? [])][0],
  });
  const why = fact.reason ? `: ${fact.reason}` : "";
  const by = fact.by ? ` by ${fact.by}` : "";
  switch (fact.fact) {
    case "daemon_started":
      return ["info", `the daemon started (incarnation ${fact.incarnation}); every lease was renewed`];
    case "loop_stalled":
      return ["warn", `the daemon's loop was ${Math.round(fact.late_ms)} ms late; every lease was renewed`];
    case "host_booted":
      return ["info", `host ${fact.host} was started again`];
    case "node_up":
      return ["ok", `node ${fact.node} is up`];
    case "node_occupied":
      return ["warn", `node ${fact.node} is occupied${why}`];
    case "node_lost":
      return ["bad", `node ${fact.node} cannot be reached${why}`];
    case "node_quarantined":
      return ["bad", `node ${fact.node} is quarantined${why}`];
    case "node_draining":
      return ["info", `node ${fact.node} is being drained${by}`];
    case "node_drained":
      return ["info", `node ${fact.node} is drained`];
    case "node_undrained":
      return ["ok", `node ${fact.node} may be used again${by}`];
    case "gpus_not_clean":
      return ["warn", `on node ${fact.node} GPUs are not clean${why}`];
    case "gpus_verified_clean":
      return fact.by ? ["info", `GPUs of ${fact.node} were declared clean${by}${why}`] : undefined;
    case "job_registered":
      return ["info", `${fact.spec.name} was registered (run ${fact.run}) by ${fact.owner}/${fact.user}`];
    case "job_placed":
      return ["ok", `${job} was placed in group ${fact.group}, ${fact.admission || fact.status}`];
    case "move_planned":
      return ["info", `${job} is to move to group ${fact.group}: ${fact.why}`];
    case "move_ended":
      return ["ok", `${job} has moved`];
    case "move_abandoned":
      return ["warn", `${job} stays where it is${why}`];
    case "job_promised":
      return ["ok", fact.promised ? `${job} has its promise` : `${job} stays best effort`];
    case "job_unplaced":
      return ["warn", `${job} lost its place${why}`];
    case "job_paused":
      return ["info", `${job} was paused${by}`];
    case "job_resumed":
      return ["ok", `${job} was resumed${by}`];
    case "job_quarantined":
      return ["bad", `${job} is quarantined${why}`];
    case "job_lost":
      return ["bad", `${job} is lost${why}${fact.attempt ? `; it is to be started again, attempt ${fact.attempt}` : ""}`];
    case "job_ended":
      return ["info", `${job} has ended${why}`];
    case "slot_taken_away":
      if (fact.how === "faulted") return ["bad", `${slotOf()} could not be loaded${why}`, about()];
      if (fact.how === "lost") return ["bad", `${slotOf()} is lost${why}`, about()];
      return ["warn", `${slotOf()} was revoked${by}${why}`, about()];
    case "residual_memory_observed":
      if (fact.mb <= fact.agreed_mb) return undefined;
      return [
        "warn",
        `${job}'s ${fact.pool} state leaves ${fact.mb / 1000} GB on each GPU of ${fact.node}; ${fact.agreed_mb / 1000} GB were agreed`,
      ];
    case "times_drifted":
      if (!fact.was) return ["info", `plans reckon with what ${job}'s phases, loads or parks were seen to take`];
      return ["info", `phases, loads or parks of ${job} take another time than planned`];
    case "group_replanned":
      if (!fact.at_risk?.length) return undefined;
      return ["warn", `${fact.at_risk.map(name).join(", ")}: no room for the promise in the plan of group ${fact.group}`];
    case "guard_changed":
      if (fact.guarded) return ["warn", `${job} is short of credit: it goes first, or to nodes of its own`];
      if (fact.reason) return ["warn", `${job} is not guarded any more: ${fact.reason}`];
      return ["ok", `${job} has earned its credit`];
    case "slot_overran":
      return [
        "warn",
        `${slotOf()} runs for ${Math.round(fact.ran_ms / 1000)} s, longer than the ${Math.round(fact.bound_ms / 1000)} s expected`,
        about(),
      ];
    case "slot_resized":
      if (!fact.tail) return undefined;
      return ["info", `${slotOf()} continues on ${fact.gpus.length} GPUs: its tail`, about()];
    case "order_faulted":
    case "order_contact_lost": {
      const order = history.orders.get(fact.order) ?? {};
      const what = order.kind
        ? `to ${order.kind} ${name(order.job)}'s ${order.pool} state on ${order.node}`
        : fact.order;
      const ended = fact.fact === "order_faulted" ? "failed" : "was not heard of again";
      return ["bad", `the order ${what} ${ended}: ${fact.error}`, { job: order.job, node: order.node }];
    }
    case "audited":
      return [
        "info",
        `${fact.who} (${fact.role || "nobody"}): ${fact.action.replaceAll("_", " ")} ${fact.about ?? ""}${why}`,
      ];
    default:
      return undefined;
  }
}
