// What is known of the daemon: who asks, its lists, the history of its facts, its clock. Asks for all of that, at a
// pace that the daemon does not feel; who shows it (see main.js) says what is to happen when there is news.

import { Api } from "./api.js";
import { duration } from "./format.js";
import { History, statusOf } from "./history.js";
import { Lanes } from "./lanes.js";
import { toast } from "./actions.js";

/** facts that the page begins with, and that are read at a time when somebody looks further back */
const BEGIN = 4000;
const PAGE = 4000;
/** slots that are remembered: older ones are forgotten, and not read again */
const SLOTS_MOST = 80000;
const SLOTS_BACK = 60000;
/** who comes back after so many facts begins anew */
const GAP_MOST = 20000;
/** the feed is asked at most so often; and lists are asked for again after so many times what they took */
const FEED_MS = 500;
const LISTS_MS = 4000;
const LISTS_TIMES = 40;
/** the report is asked for again after so long */
const REPORT_MS = 30000;
const LISTS = ["jobs", "nodes", "groups", "hosts", "pools"];

/**
 * Whoever extends it says what is to happen: ``began()`` the first picture can be drawn, ``listed()`` the lists are new,
 * ``news()`` facts have come, ``reported()``, ``online()``, ``lost(error)`` the daemon answers, or does not,
 * ``askForKey(why)``.
 */
export class Known {
  constructor() {
    this.api = new Api();
    this.me = null;
    this.clearAll();
    this.offset = null;
    /** what the daemon says of the lists that are here: while it says the same, they need not be read again */
    this.tag = undefined;
    this.report = null;
    this.reportSpan = SPANS.two;
    this.reportError = "";
    this.reportedAt = -Infinity;
    this.back = { wanted: Infinity, reading: false };
    /** what was read and how long it took: for those who measure */
    this.figures = { firstPaintMs: null, facts: 0, lists: 0 };
    this.life = null;
  }

  clearAll() {
    this.history = new History();
    this.lanes = new Lanes(this.history);
    this.jobs = [];
    this.jobById = new Map();
    this.nodes = new Map();
    this.groups = [];
    this.hosts = [];
    this.pools = [];
  }

  // ---- what the others ask -----------------------------------------------------------------------------------------

  /** The daemon's clock. */
  now() {
    return performance.now() + (this.offset ?? performance.timeOrigin);
  }

  /** Until when all that has happened is known: while the daemon is asked and has nothing to say, that is now. */
  knownUntil() {
    return this.asking ? this.now() : (this.answered ?? this.now());
  }

  /** Whether all that there is can be seen: by admins, and where all that is placed is one's own owner's. */
  get seesAll() {
    return this.me?.role === "admin" || this.groups.every((group) => group.jobs.every((job) => this.jobById.has(job)));
  }

  jobOf(id) {
    return this.jobById.get(id);
  }

  nameOf(id) {
    return this.jobById.get(id)?.name ?? this.history.names.get(id)?.name ?? id ?? "";
  }

  nowOf(job) {
    const slot = this.history.newestOfJob.get(job.job);
    return slot === undefined || slot.ended !== undefined || slot.over !== undefined ? "" : statusOf(slot);
  }

  /** What a job does now, in words. */
  doing(job) {
    if (job.silent_s !== undefined && job.silent_s !== null) return `silent for ${Math.round(job.silent_s)} s`;
    if (["ended", "lost", "quarantined", "paused"].includes(job.status) && !job.slot) return "";
    const slot = this.history.newestOfJob.get(job.job);
    const now = this.nowOf(job);
    if (!now) return job.status === "waiting" ? "waits for a place" : "between phases";
    const since = now === "queued" ? slot.queued : now === "loading" ? slot.claimed : slot.granted;
    const words =
      {
        queued: `waits its turn for ${slot.phase}`,
        loading: `loads for ${slot.phase}`,
        running: slot.phase,
        tail: `${slot.phase}, tail`,
      }[now] ?? now;
    return since === undefined ? words : `${words}, ${duration(this.now() - since)}`;
  }

  holderOf(node) {
    const names = new Set();
    for (const gpu of node.gpus)
      if (gpu.holder) names.add(this.nameOf(this.history.slots.get(gpu.holder)?.job ?? gpu.holder));
    return [...names].join(", ");
  }

  recent(job) {
    const marks = this.history.jobs.get(job.job);
    return marks !== undefined && marks.length > 0;
  }

  // ---- asking the daemon -------------------------------------------------------------------------------------------

  async start() {
    this.life?.abort();
    const life = (this.life = new AbortController());
    this.clearAll();
    try {
      await this._begin(life.signal);
    } catch (error) {
      if (life.signal.aborted) return;
      if (error.status === 401) return this.askForKey(this.api.key ? error.message : "");
      this.lost(error);
      setTimeout(() => !life.signal.aborted && this.start(), Math.max(2000, error.retryAfterMs ?? 0));
      return;
    }
    this._follow(life.signal);
    this._relist(life.signal);
    this.askReport(this.reportSpan);
  }

  /** The present from the lists, and of the past no more than a picture needs. */
  async _begin(signal) {
    this.tag = undefined;
    const slots = await this._lists(signal, "open");
    const after = Math.max(this.me.first - 1, this.me.last - BEGIN);
    const page =
      after < this.me.last
        ? await this.api.get("/v1/facts", { after: after || undefined, limit: BEGIN }, signal)
        : { facts: [], last: this.me.last };
    this._take(page.facts, after, page.last);
    for (const slot of slots) this.history.knowSlot(slot);
    this.began();
  }

  _take(facts, after, last) {
    this.history.take(facts, after, last);
    this.figures.facts += facts.length;
  }

  /** Read how all is, and the slots that are asked for; null where nothing has happened since the last time. */
  async _lists(signal, which = "none") {
    const began = performance.now();
    const { me, tag, lists } = await this.api.get("/v1/overview", { since: this.tag, slots: which }, signal);
    if (this.me === null || which !== "none") {
      // Half of the way there and back is as near as one comes.
      this.offset = Date.parse(me.now) - (began + performance.now()) / 2;
    }
    this.me = me;
    if (lists === null) return null;
    const rest = (name, query) =>
      lists[name].next === null
        ? lists[name].items
        : this.api.list(`/v1/${name}`, { ...query, after: lists[name].next }, signal).then((more) => [...lists[name].items, ...more]);
    const [jobs, nodes, groups, hosts, pools] = await Promise.all(LISTS.map((name) => rest(name)));
    const slots = which === "none" ? [] : await rest("slots", { which, why: false });
    this.listsTook = performance.now() - began;
    this.tag = tag;
    Object.assign(this, { jobs, groups, hosts, pools: pools.sort((a, b) => natural(a.pool, b.pool)) });
    this.jobById = new Map(jobs.map((job) => [job.job, job]));
    // Facts that name a job are read later than the one that says what it is called, or that one never.
    for (const { job, name, owner, filler } of jobs) {
      this.history.names.set(job, { name, owner });
      if (filler) this.history.fillers.add(job);
    }
    this.nodes = new Map(nodes.map((node) => [node.node, node]));
    for (const node of nodes)
      this.history.knowNode(
        node.node,
        node.gpus.map((gpu) => gpu.gpu),
      );
    this.lanes.know(
      new Map(
        nodes.map((node) => [
          node.node,
          { gpus: node.gpus.length, status: node.status, jobs: node.jobs.map((one) => one.job) },
        ]),
      ),
      this.jobById,
    );
    this.figures.lists += 1;
    return slots;
  }

  /** Follow the feed until the end of this life. Asked no more often than the eye follows, and not for who looks away. */
  async _follow(signal) {
    while (!signal.aborted) {
      try {
        if (document.hidden)
          await new Promise((back) => document.addEventListener("visibilitychange", back, { once: true }));
        const { last } = this.history;
        this.asking = true;
        const page = await this.api.get("/v1/facts", { after: last, wait_ms: 20000, limit: 2000 }, signal);
        this.asking = false;
        this.answered = this.now();
        this.online();
        this._take(page.facts, last, page.last);
        if (page.facts.length) {
          if (page.facts.some((fact) => /^(job|node|placement|host)_/.test(fact.fact))) this.stale = true;
          this.news();
          if (this.history.slots.size > SLOTS_MOST) this._forget();
        }
        if (page.facts.length < 2000) await pause(FEED_MS, signal);
        else if ((await this.api.get("/v1/me", {}, signal)).last - page.last > GAP_MOST) return this.start();
      } catch (error) {
        this.asking = false;
        if (signal.aborted) return;
        if (error.status === 401) return this.askForKey(error.message);
        if (error.status === 410) return this.start();
        this.lost(error);
        await pause(Math.max(1000, error.retryAfterMs ?? 0), signal);
      }
    }
  }

  _forget() {
    const ends = [...this.history.slots.values()]
      .map((slot) => slot.over)
      .filter((over) => over !== undefined)
      .sort((a, b) => a - b);
    this.history.forget(ends[Math.floor(ends.length / 4)]);
  }

  /** Ask for the lists again: soon where something has changed, but never so often that the daemon would feel it. */
  async _relist(signal) {
    let asked = performance.now();
    while (!signal.aborted) {
      await pause(250, signal);
      const due = performance.now() - this.reportedAt > REPORT_MS && this.reportSpan !== SPANS.hour;
      if (due && !document.hidden) this.askReport(this.reportSpan);
      const age = performance.now() - asked;
      const least = Math.max(LISTS_MS / 2, this.listsTook * LISTS_TIMES);
      if (document.hidden || age < least || (!this.stale && age < 2 * Math.max(LISTS_MS, least))) continue;
      asked = performance.now();
      this.stale = false;
      await this.refresh(signal);
    }
  }

  async refresh(signal = this.life?.signal) {
    try {
      if ((await this._lists(signal)) !== null) await this.listed();
    } catch (error) {
      if (signal?.aborted) return;
      if (error.status === 401) this.askForKey(error.message);
      else this.lost(error);
    }
  }

  /** Read facts from before those that are there, while somebody looks at a time before them. */
  async wantBack(from) {
    this.back.wanted = from;
    if (this.back.reading) return;
    this.back.reading = true;
    const { signal } = this.life;
    try {
      while (!signal.aborted) {
        const { history } = this;
        const more = history.after !== undefined && history.after >= this.me.first && history.slots.size < SLOTS_BACK;
        if (!more || history.earliest === undefined || history.earliest <= this.back.wanted) break;
        const until = history.after;
        const after = Math.max(this.me.first - 1, until - PAGE);
        const began = performance.now();
        const facts = [];
        for (let last = after, before; last < until && last !== before; ) {
          before = last;
          const page = await this.api.get("/v1/facts", { after: last || undefined, until, limit: PAGE }, signal);
          facts.push(...page.facts); // a page ends early where facts are large
          last = page.last;
        }
        this._take(facts, after, until);
        this.news();
        await pause(Math.max(20, performance.now() - began), signal);
      }
    } catch (error) {
      if (!signal.aborted && error.status !== 410) toast(`older facts could not be read: ${error.message}`, true);
    } finally {
      this.back.reading = false;
    }
  }

  async askReport(span) {
    if (this.reckoning) return;
    this.reckoning = true;
    this.reportSpan = span;
    this.reportError = "";
    this.reportedAt = performance.now();
    try {
      const since = span.since(this.now());
      this.report = await this.api.get("/v1/report", { since: since && new Date(since).toISOString() }, this.life.signal);
    } catch (error) {
      if (error.name === "AbortError") return;
      this.report = null;
      this.reportError = error.message;
    } finally {
      this.reckoning = false;
    }
    this.reported();
  }
}

const DAY = 86400000;
const days = (count) => (now) => (Math.floor(now / DAY) - count) * DAY;

/**
 * Spans of a report. They begin with a day (UTC), since of days the daemon has the usage; only the last hour makes it
 * read facts, and is not what one is shown unasked.
 */
export const SPANS = {
  hour: { id: "hour", text: "last hour", since: (now) => now - 3600000 },
  today: { id: "today", text: "today", since: days(0) },
  two: { id: "two", text: "since yesterday", since: days(1) },
  week: { id: "week", text: "last 7 days", since: days(6) },
  all: { id: "all", text: "all that is kept", since: () => undefined },
};

/** So long, or until all is over. */
export const pause = (ms, signal) =>
  new Promise((done) => {
    const timer = setTimeout(done, ms);
    signal?.addEventListener("abort", () => (clearTimeout(timer), done()), { once: true });
  });

export const natural = (a, b) => a.localeCompare(b, "en", { numeric: true });
