/* Shared by every mappnb canvas widget: elements, theme, error and status lines, help, table and copy panels. */

/**
 * An element with attributes, listeners left to the caller. Text is only ever set as text.
 * @param {string} tag
 * @param {object} [attributes] "class", "text", or any attribute; null and false are left out
 * @param {Node[]} [children]
 */
function make(tag, attributes = {}, children = []) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") node.className = value;
    else if (name === "text") node.textContent = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children);
  return node;
}

/** "light" or "dark": JupyterLab's theme, VS Code's, else the reader's preference. */
function currentTheme() {
  const body = document.body;
  const lab = body && body.dataset.jpThemeLight;
  if (lab === "true") return "light";
  if (lab === "false") return "dark";
  if (body && /vscode-(dark|high-contrast)(?!-light)/.test(body.className)) return "dark";
  if (body && /vscode-(light|high-contrast-light)/.test(body.className)) return "light";
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

/** Keep `data-mappnb-theme` of an element up to date; calls back after each change. */
function watchTheme(root, disposer, changed) {
  const apply = () => {
    root.dataset.mappnbTheme = currentTheme();
    changed();
  };
  root.dataset.mappnbTheme = currentTheme();
  const options = { attributes: true, attributeFilter: ["data-jp-theme-light", "data-jp-theme-name", "class"] };
  disposer.observe(new MutationObserver(apply), document.body, options);
  disposer.listen(matchMedia("(prefers-color-scheme: dark)"), "change", apply);
}

/** [r, g, b] of a CSS colour that a canvas understands; null for anything else. */
function parseColour(text) {
  const hex = /^#([0-9a-f]{3}|[0-9a-f]{6})$/i.exec(String(text).trim());
  if (hex) {
    const full = hex[1].length === 3 ? hex[1].replace(/./g, "$&$&") : hex[1];
    return [0, 2, 4].map((i) => parseInt(full.slice(i, i + 2), 16));
  }
  const rgb = /^rgba?\(\s*([\d.]+)[ ,]+([\d.]+)[ ,]+([\d.]+)/i.exec(String(text).trim());
  return rgb ? [1, 2, 3].map((i) => Math.round(Number(rgb[i]))) : null;
}

/** Mix of two [r, g, b]: share 0 is the first, 1 the second. */
function mixColours(a, b, share) {
  return a.map((v, i) => Math.round(v + (b[i] - v) * share));
}

/** "rgb(...)" of an [r, g, b]. */
function cssColour([r, g, b], alpha = 1) {
  return alpha === 1 ? `rgb(${r}, ${g}, ${b})` : `rgba(${r}, ${g}, ${b}, ${alpha})`;
}

/** Relative luminance (WCAG 2). */
function luminance(rgb) {
  const [r, g, b] = rgb.map((v) => {
    const s = v / 255;
    return s <= 0.04045 ? s / 12.92 : ((s + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

/** Black or white, whichever reads better on the colour. */
function inkOn(rgb) {
  const l = luminance(rgb);
  return (l + 0.05) / 0.05 >= 1.05 / (l + 0.05) ? [16, 20, 24] : [255, 255, 255];
}

/** The colours of a root element's theme, resolved for a canvas. */
function themeColours(root) {
  const style = getComputedStyle(root);
  const probe = document.createElement("canvas").getContext("2d");
  const read = (name, fallback) => {
    probe.fillStyle = fallback;
    probe.fillStyle = style.getPropertyValue(name).trim() || fallback;
    return parseColour(probe.fillStyle) || parseColour(fallback);
  };
  const dark = root.dataset.mappnbTheme === "dark";
  return {
    dark,
    background: read("--mappnb-background", dark ? "#15181c" : "#ffffff"),
    text: read("--mappnb-text", dark ? "#e6e9ed" : "#1b1f24"),
    muted: read("--mappnb-muted", dark ? "#9aa5b1" : "#57606a"),
    line: read("--mappnb-line", dark ? "#3a424b" : "#d0d7de"),
    accent: read("--mappnb-accent", dark ? "#6cb6ff" : "#0969da"),
    danger: read("--mappnb-danger", dark ? "#ff8f85" : "#b3261e"),
    font: style.fontFamily || "sans-serif",
  };
}

/** A labelled button. */
function toolButton(label, title, disposer, onClick, attributes = {}) {
  const button = make("button", { type: "button", class: "mappnb-button", title, text: label, ...attributes });
  disposer.listen(button, "click", onClick);
  return button;
}

/** Errors by kind, each there until its kind succeeds or it is clicked away. */
class ErrorLine {
  constructor(disposer) {
    this.node = make("div", { class: "mappnb-errors", role: "alert", hidden: true });
    this.entries = new Map();
    disposer.listen(this.node, "click", (event) => {
      const button = event.target.closest("button");
      if (button) this.clear(button.dataset.kind);
    });
  }

  show(kind, text) {
    let entry = this.entries.get(kind);
    if (!entry) {
      entry = make("button", { type: "button", class: "mappnb-error", title: "Click to put away", dir: "auto" });
      entry.dataset.kind = kind;
      this.entries.set(kind, entry);
      this.node.append(entry);
    }
    entry.textContent = text;
    this.node.hidden = false;
  }

  clear(kind) {
    const entry = this.entries.get(kind);
    if (!entry) return;
    entry.remove();
    this.entries.delete(kind);
    this.node.hidden = this.entries.size === 0;
  }
}

/** One line that says what goes on; read out politely. A text said twice is read twice. */
class StatusLine {
  constructor() {
    this.node = make("div", { class: "mappnb-status", role: "status", "aria-live": "polite", dir: "auto" });
    this.base = "";
    this.busy = false;
  }

  say(text) {
    this.base = text;
    this.write();
  }

  setBusy(busy) {
    this.busy = busy;
    this.write();
  }

  write() {
    const text = this.busy ? `the kernel is busy${this.base ? ` · ${this.base}` : ""}` : this.base;
    this.node.textContent = text === this.node.textContent && text ? `${text}\u200b` : text;
  }
}

/** A panel under the view with a heading and a button that closes it. */
class Panel {
  constructor(title, disposer, closed = () => {}) {
    this.title = make("span", { class: "mappnb-panel-title", text: title, dir: "auto" });
    const close = toolButton("Close", `Close: ${title}`, disposer, () => {
      this.hide();
      closed();
    });
    close.setAttribute("aria-label", `Close ${title}`);
    this.body = make("div", { class: "mappnb-panel-body" });
    const head = make("div", { class: "mappnb-panel-head" }, [this.title, close]);
    this.node = make("section", { class: "mappnb-panel", "aria-label": title, hidden: true }, [head, this.body]);
    this.close = close;
  }

  show(...children) {
    this.body.replaceChildren(...children);
    this.node.hidden = false;
  }

  hide() {
    this.node.hidden = true;
    this.body.replaceChildren();
  }

  get open() {
    return !this.node.hidden;
  }
}

/** A data table that can be reached and scrolled by keyboard. */
function dataTable(caption, columns, rows, more) {
  const head = make("tr", {}, columns.map((c) => make("th", { scope: "col", text: c, dir: "auto" })));
  const lines = rows.map((row) => make("tr", {}, row.map((v) => make("td", { text: v, dir: "auto" }))));
  const table = make("table", { class: "mappnb-table" }, [
    make("caption", { class: "mappnb-hidden-text", text: caption }),
    make("thead", {}, [head]),
    make("tbody", {}, lines),
  ]);
  const scroll = make("div", { class: "mappnb-scroll", tabindex: "0", role: "region", "aria-label": `${caption}, table` }, [table]);
  if (!more) return [scroll];
  return [scroll, make("p", { class: "mappnb-muted", text: `${more} more left out; zoom in to list them` })];
}

/** Label and text pairs as a description list. */
function fieldList(fields) {
  const list = make("dl", { class: "mappnb-fields" });
  for (const [label, text] of fields || []) {
    list.append(make("div", {}, [make("dt", { text: label, dir: "auto" }), make("dd", { text, dir: "auto" })]));
  }
  return list;
}

/** Put a text on the clipboard; where that is not allowed show it selected. Resolves to true if it was copied. */
async function copyText(text, panel) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch (err) {
    const area = make("textarea", { class: "mappnb-code", readonly: true, rows: 4, "aria-label": "Code to copy" });
    area.value = text;
    panel.show(area);
    area.focus();
    area.select();
    return false;
  }
}

/** The list of keys, over the view. */
class HelpOverlay {
  /** @param {[string, [string, string][]][]} sections heading and (keys, meaning) pairs */
  constructor(sections, disposer, closed) {
    this.close = toolButton("Close", "Close the help", disposer, () => this.hide());
    this.closed = closed;
    const head = make("div", { class: "mappnb-panel-head" }, [make("strong", { text: "Keys and gestures" }), this.close]);
    const body = make("div", { class: "mappnb-help-body" }, sections.map(HelpOverlay.section));
    const attributes = { class: "mappnb-help", role: "dialog", "aria-label": "Keys and gestures", hidden: true };
    this.node = make("div", attributes, [head, body]);
    disposer.listen(this.node, "keydown", (event) => {
      if (event.key === "Escape" || event.key === "?") {
        event.preventDefault();
        this.hide();
      }
    });
  }

  static section([heading, entries]) {
    const list = make("dl", {});
    for (const [keys, meaning] of entries) {
      const caps = keys.split(" ").map((k) => make("kbd", { text: k }));
      list.append(make("div", {}, [make("dt", {}, caps), make("dd", { text: meaning })]));
    }
    return make("section", {}, [make("strong", { class: "mappnb-help-heading", text: heading }), list]);
  }

  toggle() {
    if (this.node.hidden) this.show();
    else this.hide();
  }

  show() {
    this.node.hidden = false;
    this.close.focus();
  }

  hide() {
    this.node.hidden = true;
    this.closed();
  }
}

/** Hide the static twin of a view, also one that comes into the page later, for as long as the view is there. */
function hideTwin(id, disposer) {
  if (!/^[\w-]+$/.test(String(id || ""))) return;
  const style = document.createElement("style");
  style.textContent = `[data-mappnb-twin="${id}"] { display: none !important; }`;
  document.head.append(style);
  disposer.add(() => style.remove());
}

/** Show a view of a model: its root holds it, its static twin hides. Returns what undoes it. */
function showView(view, model) {
  view.root.mappnbView = view;
  hideTwin(model.get("twin_id"), view.disposer);
  return () => view.dispose();
}

/** Take a view out of the page: no message in or out, nothing listens. */
function removeView(view) {
  view.connection.close();
  view.disposer.dispose();
  view.root.remove();
  view.root.mappnbView = null;
}

/** Nothing in an element can be pressed or chosen any more. */
function disableControls(root) {
  for (const control of root.querySelectorAll("button, input, select")) control.disabled = true;
}

/** The kernel has closed a view: it says so, and asks for nothing any more. */
function closeView(view, name = "view") {
  view.connection.close();
  disableControls(view.root);
  view.status.say(`closed: run the cell again to open the ${name}`);
}

/** Ask for a line of Python, "code" or "timeline", and put it on the clipboard; one that is to be run is shown too. */
function copyLine(view, kind = "code") {
  view.connection.request(kind, {}, async (content) => {
    const copied = await copyText(content.text, view.codePanel);
    const toRun = kind === "timeline" && !content.linked;
    if (toRun) view.codePanel.show(make("pre", { class: "mappnb-python", text: content.text, tabindex: "0" }));
    const moved = content.linked ? "the linked timeline is there · " : toRun ? "run this line, or timeline = view.timeline() for a linked one · " : "";
    view.status.say(`${moved}${copied ? "code copied" : "copy it with Ctrl+C"}`);
  });
}
