/* Attention: the text as tokens coloured by what the chosen one attends to (or who attends to it), and the largest weights as a table. */

const STRIP = { most: 400, listed: 8 };

/** The tokens of a sample, one of which can be chosen. */
class TokenStrip {
  /** @param {object} on query(q), hover(q) */
  constructor(on, disposer) {
    this.on = on;
    this.node = make("div", { class: "mappnb-attn-strip", role: "group" });
    this.buttons = [];
    this.drawn = "";
    disposer.listen(this.node, "click", (event) => this.choose(event));
    disposer.listen(this.node, "pointerover", (event) => this.over(event));
    disposer.listen(this.node, "pointerleave", () => this.on.hover(null));
    disposer.listen(this.node, "keydown", (event) => this.key(event));
  }

  static index(event) {
    const button = event.target.closest("button");
    return button ? Number(button.dataset.at) : null;
  }

  choose(event) {
    const at = TokenStrip.index(event);
    if (at !== null) this.on.query(at);
  }

  over(event) {
    this.on.hover(TokenStrip.index(event));
  }

  key(event) {
    const by = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
    const at = TokenStrip.index(event);
    if (event.key === "Escape") {
      this.on.close();
    } else if (by && at !== null) {
      const next = this.buttons.find((b) => Number(b.dataset.at) === at + by);
      if (next) this.focus(next);
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }

  focus(button) {
    for (const other of this.buttons) other.tabIndex = other === button ? 0 : -1;
    button.focus();
  }

  /** Show tokens [from, to) of a sample. */
  build({ texts, slots, padding }, [from, to], label) {
    const key = JSON.stringify([texts.length, from, to, texts.slice(from, to)]);
    this.node.setAttribute("aria-label", label);
    if (key === this.drawn) return;
    this.drawn = key;
    this.buttons = [];
    for (let i = from; i < to; i++) {
      const button = make("button", { type: "button", class: padding.has(i) ? "mappnb-attn-token mappnb-attn-padding" : "mappnb-attn-token", text: texts[i], dir: "auto", tabindex: i === from ? "0" : "-1" });
      button.dataset.at = String(i);
      button.dataset.slot = String(slots[i]);
      this.buttons.push(button);
    }
    this.node.replaceChildren(...this.buttons);
  }

  /** Colour by weights: values by token (exact), or null for none. */
  colour(values, look, { signed, query }) {
    for (const button of this.buttons) {
      const at = Number(button.dataset.at);
      const value = values ? values[at] : NaN;
      const known = values && Number.isFinite(value);
      const colour = known ? weightColour(value, look, signed) : null;
      button.style.background = colour ? cssColour(colour) : "";
      button.style.color = colour ? cssColour(inkOn(colour)) : "";
      button.setAttribute("aria-pressed", String(at === query));
      button.title = `token ${button.dataset.slot}${known ? `: ${weightText(value, signed)}` : ""}`;
    }
  }
}

/** The part of a text that the strip shows: all, or what is around the window and the chosen token. */
function stripRange(count, window, query) {
  if (count <= STRIP.most) return [0, count];
  const middle = query === null ? (window[2] + window[3]) / 2 : query - STRIP.most / 4;
  const from = Math.max(0, Math.min(count - STRIP.most, Math.round(middle - STRIP.most / 2)));
  return [from, from + STRIP.most];
}

/** The largest weights of a chosen token as a table. */
function weightTable({ texts, slots }, { row, other }, axis, named) {
  const order = Array.from(row.keys()).filter((i) => Number.isFinite(row[i]));
  const size = (i) => (other ? Math.max(row[i], other[i]) : row[i]);
  order.sort((a, b) => size(b) - size(a));
  const listed = order.slice(0, STRIP.listed).filter((i) => size(i) > 0);
  const columns = [axis === "query" ? "key" : "query", "token", ...(other ? [named[0], named[1], "difference"] : ["weight"])];
  const lines = listed.map((i) => {
    const weights = other ? [weightText(row[i]), weightText(other[i]), weightText(row[i] - other[i], true)] : [weightText(row[i])];
    return make("tr", {}, [make("th", { scope: "row", text: texts[i], dir: "auto" }), ...[String(slots[i]), ...weights].map((text) => make("td", { text }))]);
  });
  const head = make("tr", {}, columns.map((text) => make("th", { scope: "col", text })));
  return make("table", { class: "mappnb-table mappnb-attn-weights" }, [
    make("caption", { class: "mappnb-hidden-text", text: axis === "query" ? "Largest weights of the keys" : "Largest weights of the queries" }),
    make("thead", {}, [head]),
    make("tbody", {}, lines),
  ]);
}
