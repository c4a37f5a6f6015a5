// What one may do here, and is asked about first. What somebody may not do is shown, with the reason.

import { $, h, say } from "./dom.js";

const acts = (me, job) => {
  if (me.role === "admin") return "";
  if (me.role === "viewer") return "viewers do not act on jobs";
  if (job.owner !== me.owner) return `it is ${job.owner}'s`;
  if (me.role === "user" && job.user !== me.user) return `it is ${job.user}'s: it takes that user, a lead, or an admin`;
  return "";
};
const admins = (me) => (me.role === "admin" ? "" : `only admins do this, and you have the role ${me.role}`);
const at = (path, thing) => `/v1/${path}/${thing.split("/").map(encodeURIComponent).join("/")}`;

/** Each: label, why not ("" if one may and can), the question, and the call. */
export const ACTIONS = {
  pause: {
    label: "Pause",
    not: (me, job) =>
      acts(me, job) || (["waiting", "probing", "admitted", "moving"].includes(job.status) ? "" : `it is ${job.status}`),
    ask: (job) => `${job.name} lets its running slot end, and gets no other until it is resumed. It keeps its place.`,
    call: (api, job) => api.call("POST", `${at("jobs", job.job)}/pause`),
  },
  resume: {
    label: "Resume",
    not: (me, job) => acts(me, job) || (job.status === "paused" ? "" : `it is ${job.status}, not paused`),
    ask: (job) => `${job.name} goes on where it was.`,
    call: (api, job) => api.call("POST", `${at("jobs", job.job)}/resume`),
  },
  reinstate: {
    label: "Reinstate",
    not: (me, job) => acts(me, job) || (job.status === "quarantined" ? "" : `it is ${job.status}, not quarantined`),
    ask: (job) => `${job.name} waits for a placement again.`,
    call: (api, job) => api.call("POST", `${at("jobs", job.job)}/reinstate`),
  },
  end: {
    label: "End",
    danger: true,
    why: true,
    not: (me, job) => acts(me, job) || (job.status === "ended" ? "it has ended" : ""),
    ask: (job) =>
      `${job.name} ends now, and all that it holds is freed once it was verified clean. What it has not saved is lost.`,
    call: (api, job, { reason }) => api.call("DELETE", at("jobs", job.job), reason ? { reason } : {}),
  },
  revoke: {
    label: "Revoke",
    danger: true,
    why: true,
    not: (me, slot) =>
      admins(me) || (["running", "tail", "loading"].includes(slot.status) ? "" : `it is ${slot.status}`),
    ask: (slot) =>
      `Slot ${slot.id} of ${slot.name} is taken away now. No other job gets its GPUs until they were verified clean.`,
    call: (api, slot, { reason }) => api.call("POST", `${at("slots", slot.id)}/revoke`, reason ? { reason } : {}),
  },
  drain: {
    label: "Drain",
    why: true,
    evict: "end the jobs that are placed on it",
    not: (me, node) => admins(me) || (["draining", "drained"].includes(node.status) ? `it is ${node.status}` : ""),
    ask: (node) =>
      `Nothing new starts on ${node.node}. What runs comes to its end, states are parked, and then it is drained.`,
    call: (api, node, { reason, evict }) =>
      api.call("POST", `${at("nodes", node.node)}/drain`, { evict, ...(reason ? { reason } : {}) }),
  },
  undrain: {
    label: "Undrain",
    not: (me, node) =>
      admins(me) || (["draining", "drained"].includes(node.status) ? "" : `it is ${node.status}, and not drained`),
    ask: (node) => `${node.node} may be used again.`,
    call: (api, node) => api.call("POST", `${at("nodes", node.node)}/undrain`),
  },
  clean: {
    label: "Declare clean",
    danger: true,
    why: true,
    not: (me, node) => admins(me) || (node.status === "quarantined" ? "" : `it is ${node.status}, and not quarantined`),
    ask: (node) =>
      `You say that nothing of any job is left on the GPUs of ${node.node}. If something is, two jobs will meet there.`,
    call: (api, node, { reason }) =>
      api.call("POST", `${at("nodes", node.node)}/declare-clean`, reason ? { reason } : {}),
  },
};

/**
 * Buttons for some of what may be done to a thing; ``done`` is called when something was. They say of which thing they
 * are, so that ``show`` leaves them where they are as long as it is that one: a click that began on a button which was
 * replaced meanwhile is lost.
 */
export function buttons(app, names, thing, done) {
  return h(
    "div",
    { class: "buttons" },
    names.map((name) => {
      const action = ACTIONS[name];
      const not = action.not(app.me, thing);
      return h(
        "button",
        {
          type: "button",
          class: action.danger ? "danger" : "",
          disabled: not !== "",
          title: not || undefined,
          "aria-label": not ? `${action.label}: not now, ${not}` : action.label,
          data: { action: name, of: thing.job ?? thing.node ?? thing.id },
          onclick: () => perform(app, name, thing, done),
        },
        action.label,
      );
    }),
  );
}

/** Ask, do, and tell what came of it. */
export function perform(app, name, thing, done) {
  const action = ACTIONS[name];
  const dialog = $("confirm");
  say($("confirm-head"), `${action.label}?`);
  say($("confirm-text"), action.ask(thing));
  say($("confirm-error"), "");
  const yes = $("confirm-yes");
  say(yes, action.label);
  yes.className = action.danger ? "main danger" : "main";
  yes.disabled = false;
  $("confirm-why").hidden = !action.why;
  $("confirm-evict").hidden = !action.evict;
  if (action.evict) say($("confirm-evict").querySelector("span"), action.evict);
  $("reason").value = "";
  $("evict").checked = false;
  $("confirm-no").onclick = () => dialog.close();
  $("confirm-form").onsubmit = async (event) => {
    event.preventDefault();
    yes.disabled = true;
    try {
      await action.call(app.api, thing, { reason: $("reason").value.trim(), evict: $("evict").checked });
      dialog.close();
      toast(`${action.label}: ${thing.name ?? thing.node ?? thing.id}, done`);
      await done?.();
    } catch (error) {
      say($("confirm-error"), error.message);
      yes.disabled = false;
    }
  };
  dialog.showModal();
}

export function toast(text, bad = false) {
  const note = h("div", { class: bad ? "bad" : "" }, text);
  $("toasts").append(note);
  setTimeout(() => note.remove(), 6000);
}
