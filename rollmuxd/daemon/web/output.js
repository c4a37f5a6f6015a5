// What a job's process has printed: its end, and what is printed while one looks.

import { fill, h } from "./dom.js";

/** bytes that are read at most at once, and of what was printed before */
const PIECE = 65536;
/** characters that are kept */
const KEPT = 400_000;
const EVERY_MS = 2000;
/** where the process is over, until the job may have another one */
const OVER_MS = 15000;

export class Output {
  constructor(api, job) {
    this.api = api;
    this.path = `/v1/jobs/${encodeURIComponent(job)}/logs`;
    this.at = -PIECE;
    this.launch = null;
    this.text = h("pre", { class: "output", tabindex: 0, "aria-label": "Output of this job" });
    this.said = h("span", { class: "dim", role: "status" });
    this.button = h("button", { onclick: () => this.begin() }, "Show");
    this.element = h("div", { class: "pad" }, h("div", {}, this.button, " ", this.said));
  }

  async begin() {
    this.button.hidden = true;
    this.element.append(this.text);
    await this.read();
  }

  /** Read what is new, and again in a while, until the page is left. */
  async read() {
    if (!this.element.isConnected) return;
    let wait = EVERY_MS;
    try {
      if (!document.hidden) wait = this.take(await this.api.get(this.path, { after: this.at, limit: PIECE }));
    } catch (error) {
      this.said.textContent = error.message;
      if (error.status !== undefined && error.status < 500 && error.status !== 429) {
        this.button.hidden = false;
        this.text.remove();
        return;
      }
    }
    setTimeout(() => this.read(), wait);
  }

  /** Show a piece. Milliseconds until the next may be there. */
  take(page) {
    if (this.launch !== null && this.launch !== page.launch) {
      // It was started again, with another file.
      [this.launch, this.at] = [null, -PIECE];
      fill(this.text);
      return 0;
    }
    this.launch = page.launch;
    const more = page.text !== "";
    if (more) {
      const { scrollTop, scrollHeight, clientHeight } = this.text;
      const follows = scrollTop + clientHeight >= scrollHeight - 20;
      this.text.append(page.text);
      if (this.text.textContent.length > KEPT) fill(this.text, this.text.textContent.slice(-KEPT / 2));
      if (follows) this.text.scrollTop = this.text.scrollHeight;
    }
    this.at = page.next;
    this.said.textContent = more ? "" : page.over ? "its process is over" : this.text.textContent ? "" : "nothing yet";
    return more ? 0 : page.over ? OVER_MS : EVERY_MS;
  }
}
