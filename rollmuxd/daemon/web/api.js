// Calls to the daemon: the key is in a header, never in an address.

const KEPT = "rollmux.key";

export class Refused extends Error {
  constructor(status, problem) {
    super(problem.detail || problem.title || `status ${status}`);
    this.status = status;
    this.kind = (problem.type || "").split(":").pop();
    this.data = problem.data || {};
    this.retryAfterMs = 0;
  }
}

export class Api {
  constructor() {
    this.key = sessionStorage.getItem(KEPT) || "";
    /** how many calls were made, and bytes that came: for those who measure */
    this.calls = 0;
  }

  /** Use this key from now on, for as long as the tab is open; "": none. */
  use(key) {
    this.key = key;
    if (key) sessionStorage.setItem(KEPT, key);
    else sessionStorage.removeItem(KEPT);
  }

  get(path, query = {}, signal = undefined) {
    const asked = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== undefined));
    return this.call("GET", asked.size ? `${path}?${asked}` : path, undefined, signal);
  }

  async call(method, path, body, signal) {
    const headers = {};
    if (this.key) headers.authorization = `Bearer ${this.key}`;
    if (body !== undefined) headers["content-type"] = "application/json";
    this.calls += 1;
    const answer = await fetch(path, {
      method,
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
    });
    if (answer.ok) return answer.json();
    let problem = {};
    try {
      problem = await answer.json();
    } catch {
      /* not ours: a proxy on the way */
    }
    const refused = new Refused(answer.status, problem);
    refused.retryAfterMs = 1000 * Number(answer.headers.get("retry-after") || 0);
    throw refused;
  }

  /** All items of a list, page by page. */
  async list(path, query = {}, signal = undefined) {
    const items = [];
    let after;
    do {
      const page = await this.get(path, { limit: 1000, ...query, after }, signal);
      items.push(...page.items);
      after = page.next ?? undefined;
    } while (after !== undefined);
    return items;
  }
}
