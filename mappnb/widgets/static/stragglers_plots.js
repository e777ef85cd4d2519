/* The figures of the stragglers view, drawn by bokeh, and the pointer and keys on its heatmap. BokehJS comes from the kernel, once a page. */

/** One figure in one box. */
class FigureBox {
  constructor(label, attributes = {}) {
    this.node = make("div", { class: "mappnb-strag-figure", role: "img", "aria-label": label, ...attributes });
    this.views = null;
    this.turn = 0;
  }

  /** Draw; resolves to true unless something newer came in between. */
  async draw(bokeh, figure) {
    const turn = ++this.turn;
    const inner = make("div", { class: "mappnb-strag-bokeh" });
    const old = this.inner;
    if (this.views) this.views.clear();
    this.views = null;
    if (old) old.remove();
    this.inner = inner;
    this.node.prepend(inner);
    if (!figure) return false;
    const made = await bokeh.embed.embed_item(figure, inner);
    if (turn !== this.turn) {
      made.clear();
      return false;
    }
    this.views = made;
    this.unfocus(inner);
    return true;
  }

  /** Bokeh takes the focus for keys that it has no tools for: it stays with the box. */
  unfocus(node) {
    for (const child of node.querySelectorAll("*")) {
      if (child.tabIndex >= 0 && child.hasAttribute("tabindex")) child.removeAttribute("tabindex");
      if (child.shadowRoot) this.unfocus(child.shadowRoot);
    }
  }

  get view() {
    return this.views ? [...this.views][0] : null;
  }

  find(name) {
    return this.view ? this.view.model.document.get_model_by_name(name) : null;
  }

  clear() {
    this.turn += 1;
    if (this.views) this.views.clear();
    this.views = null;
    if (this.inner) this.inner.remove();
    this.inner = null;
  }
}

/** A figure with pointer, keys and a tip; a subclass says where the pointer is (placeAt), and gives move, leave, click and key. */
class PointedBox extends FigureBox {
  constructor(label, disposer) {
    super(label, { role: "application", tabindex: "0" });
    this.tip = make("div", { class: "mappnb-tip", hidden: true });
    this.said = make("div", { class: "mappnb-hidden-text", "aria-live": "polite" });
    this.node.append(this.tip, this.said);
    disposer.listen(this.node, "pointermove", (event) => this.hover(event));
    disposer.listen(this.node, "pointerleave", () => this.leave());
    disposer.listen(this.node, "click", (event) => this.click(event));
    disposer.listen(this.node, "keydown", (event) => this.key(event));
  }

  hover(event) {
    const at = this.placeAt(event);
    if (at === null) return this.leave();
    this.move(at, true);
    const box = this.node.getBoundingClientRect();
    const left = event.clientX - box.left;
    this.tip.hidden = false;
    const wide = this.tip.offsetWidth;
    this.tip.style.left = `${Math.max(0, left + 14 + wide > box.width ? left - wide - 10 : left + 14)}px`;
    this.tip.style.top = `${event.clientY - box.top + 14}px`;
    return undefined;
  }

  /** Put words into the tip, the first as its title; read them out unless `quiet`. */
  tell(words, quiet) {
    this.tip.replaceChildren(...words.map((text, i) => make("div", { text, class: i ? null : "mappnb-tip-title", dir: "auto" })));
    if (!quiet) this.said.textContent = words.join(", ");
  }
}

/** A value of a metric in words. */
function valueText(value, scale) {
  if (!Number.isFinite(value)) return "no events";
  if (scale === "ratio") return `${shortNumber(value, 3)}×`;
  if (scale === "share") return `${Math.round(100 * value)} %`;
  const size = Math.abs(value) < 5e-10 ? "0 s" : formatDuration(Math.abs(value) * 1e9);
  return scale === "above" ? `${value < 0 ? "−" : "+"}${size}` : size;
}

const MOST_MARKED = 80; // rows, of which victims too have a mark: of more these would run together

/** The heatmap, or the bars of one step: hover, cursor, choice. */
class HeatBox extends PointedBox {
  /** @param {object} on choose(row, column), enter(row, column), up() */
  constructor(on, disposer) {
    super("Ranks by step. Arrow keys move, space selects, Enter looks inside, Backspace goes back.", disposer);
    this.on = on;
    this.told = null;
    this.at = null;
    this.boxes = { cursor: [], picked: [] };
    disposer.listen(this.node, "dblclick", (event) => this.enter(this.placeAt(event)));
  }

  async show(bokeh, told) {
    this.at = null;
    this.boxes = { cursor: [], picked: [] };
    this.tip.hidden = true;
    if (!(await this.draw(bokeh, told.figure))) return false;
    this.told = told;
    const cells = this.find("cells");
    this.values = cells ? cells.data.image[0] : null;
    this.node.setAttribute("aria-label", `${told.label}. Arrow keys move, space selects, Enter looks inside, Backspace goes back.`);
    return true;
  }

  get rows() {
    return this.told ? (this.told.bars ? this.told.bars.length : this.told.rows.length) : 0;
  }

  get cols() {
    return this.told && !this.told.bars ? this.told.columns.length : 1;
  }

  value(row, col) {
    return this.values ? this.values[(this.rows - 1 - row) * this.cols + col] : NaN;
  }

  /** [row, column] under the pointer; column -1 left of the cells; null beside the rows. */
  placeAt(event) {
    const { view } = this;
    if (!view || !this.told) return null;
    const { bbox, x_range: range } = view.frame;
    const box = this.inner.getBoundingClientRect();
    const row = Math.floor(((event.clientY - box.top - bbox.top) / bbox.height) * this.rows);
    if (row < 0 || row >= this.rows) return null;
    if (this.told.bars) return [row, 0];
    const x = range.start + ((event.clientX - box.left - bbox.left) / bbox.width) * (range.end - range.start);
    return [row, x < 0 ? -1 : Math.min(this.cols - 1, Math.floor(x))];
  }

  leave() {
    this.tip.hidden = true;
    this.outline("cursor", []);
  }

  /** Put the cursor on a cell and say what is there. */
  move(cell, quiet) {
    this.at = cell;
    const [row, col] = cell;
    this.outline("cursor", [this.told.bars ? [row, row, 0, 0] : [row, row, Math.max(col, 0), col < 0 ? this.cols - 1 : col]]);
    this.tell(this.text(cell), quiet);
  }

  text([row, col]) {
    if (this.told.bars) return this.told.bars[row];
    const { title } = this.told.rows[row];
    if (col < 0) return [title];
    return [title, `${this.stepText(col)} · ${valueText(this.value(row, col), this.told.scale)}`];
  }

  stepText(col) {
    const [a, b] = this.told.columns[col];
    return a === b ? `step ${a}` : `steps ${a} to ${b}`;
  }

  /** Draw boxes, [row, last row, column, last column] each: the cursor's thin, those of the selection thick. */
  outline(name, boxes) {
    this.boxes[name] = boxes;
    const source = this.find("boxes");
    if (!source || !this.told) return;
    const { background, text, muted } = themeColours(this.node.closest(".mappnb-root"));
    const { picked, cursor } = this.boxes;
    const all = [...picked.map((b) => [b, background, 4]), ...picked.map((b) => [b, text, 2]), ...cursor.map((b) => [b, muted, 1])];
    const wide = this.told.bars ? this.view.frame.x_range.end : 1;
    source.data = {
      left: all.map(([b]) => b[2] * wide),
      right: all.map(([b]) => (b[3] + 1) * wide),
      top: all.map(([b]) => this.rows - b[0]),
      bottom: all.map(([b]) => this.rows - b[1] - 1),
      colour: all.map(([, colour]) => cssColour(colour)),
      width: all.map(([, , width]) => width),
    };
  }

  /** Mark what is selected: neighbouring rows share a box. */
  mark(picked) {
    if (!this.told) return;
    const [first, last] = this.told.bars ? [0, 0] : this.span(picked.steps);
    const boxes = [];
    for (const row of first <= last ? this.marked(picked) : []) {
      const before = boxes[boxes.length - 1];
      if (before && before[1] === row - 1) before[1] = row;
      else boxes.push([row, row, first, last]);
    }
    this.outline("picked", boxes);
  }

  /** Rows that belong to a selection. */
  marked({ ranks, steps, op }) {
    if (this.told.bars) return op === null || op === undefined ? [] : [op];
    if (this.told.level === "rank") return steps ? this.told.rows.map((_, i) => i) : [];
    const wanted = new Set(ranks);
    return this.told.rows.flatMap((r, i) => (r.ranks.some((k) => wanted.has(k)) ? [i] : []));
  }

  /** First and last column that hold a range of steps. */
  span(steps) {
    if (!steps) return [0, this.cols - 1];
    const inside = this.told.columns.flatMap(([a, b], i) => (b >= steps[0] && a <= steps[1] ? [i] : []));
    return inside.length ? [inside[0], inside[inside.length - 1]] : [0, -1];
  }

  /** Marks of the verdicts at the right edge: the gravest of each row. */
  judge(rows) {
    if (!this.told || this.told.bars || this.told.level === "rank") return new Set();
    const worst = new Map();
    for (const verdict of ["victim", "undecided", "culprit"]) {
      const ranks = new Set(rows.filter((r) => r.marked && r.verdict === verdict).flatMap((r) => r.ranks));
      this.told.rows.forEach((row, i) => row.ranks.some((r) => ranks.has(r)) && worst.set(i, verdict));
    }
    const shown = [...worst].filter(([, v]) => v === "culprit" || this.rows <= MOST_MARKED);
    const x = (this.cols + this.view.frame.x_range.end) / 2;
    const look = shown.map(([, v]) => this.told.marks[v]);
    const columns = Object.fromEntries(["marker", "angle", "colour", "fill"].map((n) => [n, look.map((l) => l[n])]));
    const source = this.find("marks");
    if (source) source.data = { x: shown.map(() => x), y: shown.map(([i]) => this.rows - i - 0.5), ...columns };
    return new Set(shown.map(([, v]) => v));
  }

  click(event) {
    const cell = this.placeAt(event);
    this.node.focus({ preventScroll: true });
    if (cell) this.on.choose(...cell);
  }

  enter(cell) {
    if (cell && !this.told.bars) this.on.enter(...cell);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target !== this.node || !this.told) return;
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    const [row, col] = this.at || [0, 0];
    if (step) {
      const to = [Math.min(this.rows - 1, Math.max(0, row + step[0])), Math.min(this.cols - 1, Math.max(this.told.bars ? 0 : -1, col + step[1]))];
      this.move(this.at ? to : [row, col], false);
    } else if (event.key === " ") this.on.choose(row, col);
    else if (event.key === "Enter") this.enter([row, col]);
    else if (event.key === "Backspace" || event.key === "Escape") this.on.up();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}

const SVG = "http://www.w3.org/2000/svg";

/** A small line chart: one line over another, a part of it shaded. */
function sparkline({ t, own, others, least }, span, label) {
  const [wide, high] = [76, 24];
  const svg = document.createElementNS(SVG, "svg");
  const draw = (tag, attributes) => {
    const node = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    svg.append(node);
  };
  for (const [name, value] of Object.entries({ width: wide, height: high, viewBox: `0 0 ${wide} ${high}`, role: "img", "aria-label": label })) svg.setAttribute(name, value);
  const values = [...own, ...others].filter((v) => v !== null);
  const [low, top] = [Math.min(...values), Math.max(...values)];
  const room = Math.max(top - low, 0.1 * Math.abs(top), least || 0, 1e-9); // what differs by a few percent looks flat
  const x = (v) => ((v - t[0]) / Math.max(t[t.length - 1] - t[0], 1e-9)) * wide;
  const y = (v) => high - 2 - ((v - (low + top - room) / 2) / room) * (high - 4);
  if (span) draw("rect", { x: Math.max(0, x(span[0])), y: 0, width: Math.max(1, Math.min(wide, x(span[1])) - Math.max(0, x(span[0]))), height: high, class: "mappnb-strag-span" });
  for (const [line, cls] of [[others, "mappnb-strag-others-line"], [own, "mappnb-strag-own-line"]]) {
    const points = line.flatMap((v, i) => (v === null ? [] : [`${x(t[i]).toFixed(1)},${y(v).toFixed(1)}`]));
    if (points.length) draw("polyline", { points: points.join(" "), class: cls });
  }
  return svg;
}
