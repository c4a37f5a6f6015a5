// A list of thousands of rows of which only those in sight are elements; told to a screen reader by their numbers.

import { h, say, set, show } from "./dom.js";

const ROW = 25;
const BEYOND = 12;

export class Table {
  /** ``columns``: [{id, head, width, num, cell(item) -> element or text, sort(item), title(item)}]. */
  constructor({ label, columns, key, open, sort, empty }) {
    Object.assign(this, { columns, key, open, empty: empty ?? "nothing here" });
    this.items = [];
    this.shown = [];
    this.wanted = () => true;
    this.sorted = sort ?? { by: columns[0].id, down: false };
    this.elements = new Map();
    const least = columns.reduce((sum, column) => sum + Number(/(\d+)px/.exec(column.width ?? "80px")[1]), 0);
    this.widths = columns.map((column) => column.width ?? "minmax(80px, 1fr)").join(" ");
    this.heads = h("div", {
      class: "row headers",
      role: "row",
      "aria-rowindex": 1,
      style: { gridTemplateColumns: this.widths },
    });
    for (const column of columns) {
      const button = h("button", { type: "button", onclick: () => this.sortBy(column.id) }, column.head);
      const cell = h(
        "div",
        { role: "columnheader", class: column.num ? "num" : "" },
        column.sort ? button : h("span", { class: "small" }, column.head),
      );
      column.button = button;
      column.header = cell;
      this.heads.append(cell);
    }
    this.body = h("div", { class: "body", role: "rowgroup" });
    this.none = h("div", { class: "empty", hidden: true });
    const all = h("div", { role: "presentation", style: { minWidth: `${least}px` } }, this.heads, this.body, this.none);
    this.element = h("div", { class: "table", role: "table", "aria-label": label, tabindex: 0 }, all);
    this.element.addEventListener("scroll", () => this.draw(), { passive: true });
    this._mark();
  }

  set(items) {
    this.items = items;
    this.arrange();
  }

  filter(wanted) {
    this.wanted = wanted;
    this.arrange();
  }

  sortBy(id) {
    this.sorted = { by: id, down: this.sorted.by === id ? !this.sorted.down : false };
    this._mark();
    this.arrange();
  }

  _mark() {
    for (const column of this.columns) {
      const here = column.id === this.sorted.by;
      column.button.textContent = here ? `${column.head} ${this.sorted.down ? "▾" : "▴"}` : column.head;
      if (here) column.header.setAttribute("aria-sort", this.sorted.down ? "descending" : "ascending");
      else column.header.removeAttribute("aria-sort");
    }
  }

  arrange() {
    const { sort } = this.columns.find((column) => column.id === this.sorted.by) ?? {};
    this.shown = this.items.filter(this.wanted);
    if (sort !== undefined) {
      const sign = this.sorted.down ? -1 : 1;
      const keys = new Map(this.shown.map((item) => [item, sort(item)]));
      this.shown.sort((a, b) => sign * compare(keys.get(a), keys.get(b)));
    }
    this.draw(true);
  }

  draw(anew = false) {
    const tall = `${this.shown.length * ROW}px`;
    if (this.body.style.height !== tall) this.body.style.height = tall;
    set(this.element, "aria-rowcount", this.shown.length + 1);
    if (this.none.hidden !== this.shown.length > 0) this.none.hidden = this.shown.length > 0;
    const empty = typeof this.empty === "function" ? this.empty() : this.empty;
    say(this.none, this.items.length ? "nothing fits the filter" : empty);
    const height = this.element.clientHeight || 560;
    const first = Math.max(0, Math.floor(this.element.scrollTop / ROW) - BEYOND);
    const last = Math.min(this.shown.length, Math.ceil((this.element.scrollTop + height) / ROW) + BEYOND);
    const there = new Map();
    for (let index = first; index < last; index += 1) {
      const item = this.shown[index];
      const key = this.key(item);
      let row = this.elements.get(key);
      if (row === undefined) {
        row = h("div", { class: "row", role: "row", style: { gridTemplateColumns: this.widths } });
        if (this.open !== undefined) {
          row.classList.add("open");
          row.addEventListener("click", (event) => {
            if (!event.target.closest("a, button") && !getSelection().toString()) this.open(row.item);
          });
        }
        for (const column of this.columns) row.append(h("div", { role: "cell", class: column.num ? "num" : "" }));
      }
      if (anew || row.item !== item) this._write(row, item);
      const top = `${index * ROW}px`;
      if (row.style.top !== top) row.style.top = top;
      set(row, "aria-rowindex", index + 2);
      there.set(key, row);
    }
    for (const [key, row] of this.elements) if (!there.has(key)) row.remove();
    let before = null;
    for (const row of there.values()) {
      if (row.parentNode !== this.body || row.previousSibling !== before)
        this.body.insertBefore(row, before === null ? this.body.firstChild : before.nextSibling);
      before = row;
    }
    this.elements = there;
  }

  _write(row, item) {
    row.item = item;
    for (const [index, column] of this.columns.entries()) {
      const cell = row.children[index];
      const content = column.cell(item);
      if (typeof content === "string") {
        if (cell.childElementCount || cell.textContent !== content) cell.textContent = content;
        set(cell, "title", column.title?.(item) ?? (content.length > 14 ? content : ""));
      } else {
        show(cell, content);
        set(cell, "title", column.title?.(item) ?? "");
      }
    }
  }
}

/** What is not known comes last, whichever way one sorts. */
function compare(a, b) {
  const unknown = (value) => value === undefined || value === null || Number.isNaN(value);
  if (unknown(a) || unknown(b)) return Number(unknown(a)) - Number(unknown(b));
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), "en", { numeric: true });
}
