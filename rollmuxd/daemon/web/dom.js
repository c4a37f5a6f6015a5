// Elements, made without markup in strings: text stays text, whatever a job is named.

/** An element. ``props``: attributes; ``on...`` listeners; ``class``; ``style`` as an object; ``data`` likewise. */
export function h(tag, props, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(
    ...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false),
  );
  return element;
}

/** Give an element other children. Those that are the same elements stay where they are, with their focus. */
export function fill(element, ...children) {
  element.replaceChildren(
    ...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false),
  );
  return element;
}

/**
 * The same, where children are made anew each time and most are as they were: those stay, so that the browser has
 * nothing to lay out and nothing blinks. Not for what has listeners that know more than can be seen.
 */
export function show(element, ...children) {
  const made = document.createDocumentFragment();
  fill(made, ...children);
  const [old, fresh] = [[...element.childNodes], [...made.childNodes]];
  for (const [index, node] of fresh.entries()) {
    if (old[index] === undefined) element.append(node);
    else if (!old[index].isEqualNode(node)) old[index].replaceWith(node);
  }
  for (const node of old.slice(fresh.length)) node.remove();
  return element;
}

/** Change text only where it is another: a screen reader, and the layout, are told of changes only. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Set an attribute only where it is another. */
export function set(element, name, value) {
  if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

export const $ = (id) => document.getElementById(id);
