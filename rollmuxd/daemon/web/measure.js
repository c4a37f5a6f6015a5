// What share of the GPUs was used for what, over time. Pure.

import { eachBar } from "./lanes.js";

const PART = {
  ...{ running: "used", lent: "used", tail: "used" },
  ...{ loading: "switching", closing: "switching", reclaiming: "switching" },
};

/** Sums over equal stretches of time, of amounts that are spread over any. */
class Buckets {
  constructor(from, to, count) {
    this.from = from;
    this.width = (to - from) / count;
    this.count = count;
    this.at = new Float64Array(count);
    this.steps = new Float64Array(count + 1);
  }

  /** So much, at every instant from t0 to t1. */
  add(t0, t1, amount) {
    const a = (Math.max(t0, this.from) - this.from) / this.width;
    const b = Math.min((t1 - this.from) / this.width, this.count);
    if (b <= a) return;
    const [first, last] = [Math.floor(a), Math.min(Math.floor(b), this.count - 1)];
    if (first === last) {
      this.at[first] += (b - a) * amount;
      return;
    }
    this.at[first] += (first + 1 - a) * amount;
    this.at[last] += (b - last) * amount;
    this.steps[first + 1] += amount;
    this.steps[last] -= amount;
  }

  /** The mean amount in each. */
  means() {
    const found = new Float64Array(this.count);
    let level = 0;
    for (let index = 0; index < this.count; index += 1) {
      level += this.steps[index];
      found[index] = this.at[index] + level;
    }
    return found;
  }
}

/**
 * By pool: shares of its GPUs in ``count`` stretches of the span, {used, switching, bubble, unallocated, gpus}. What is
 * still to come (after ``now``) is not counted, and null. The four add up to one.
 */
export function usage(lanes, pools, from, to, count, now) {
  const end = Math.min(to, now);
  const found = new Map();
  for (const [pool, nodes] of pools) {
    const sums = { used: new Buckets(from, to, count), switching: new Buckets(from, to, count) };
    const allocated = new Buckets(from, to, count);
    const there = new Buckets(from, to, count);
    let gpus = 0;
    for (const node of nodes) {
      const size = lanes.nodes.get(node)?.gpus ?? 0;
      gpus += size;
      eachBar(lanes.node(node), from, end, (bar) => {
        const part = PART[bar.kind];
        if (part !== undefined) sums[part].add(bar.t0, Math.min(bar.t1, end), bar.share * size);
      });
      for (const { t0, t1 } of lanes.allocated(node)) {
        if (t1 > from && t0 < end) allocated.add(t0, Math.min(t1, end), size);
      }
    }
    there.add(from, end, gpus);
    const [used, switching, placed, time] = [
      sums.used.means(),
      sums.switching.means(),
      allocated.means(),
      there.means(),
    ];
    const shares = { used: [], switching: [], bubble: [], unallocated: [], gpus };
    for (let index = 0; index < count; index += 1) {
      const known = time[index] > 1e-9;
      const share = (amount) => (known ? Math.min(1, Math.max(0, amount / time[index])) : null);
      const held = used[index] + switching[index];
      const on = Math.max(placed[index], held);
      shares.used.push(share(used[index]));
      shares.switching.push(share(switching[index]));
      shares.bubble.push(share(on - held));
      shares.unallocated.push(share(time[index] - on));
    }
    found.set(pool, shares);
  }
  return found;
}
