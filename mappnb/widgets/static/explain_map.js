/* The explain view: sums by layer and token of heads and of MLPs, as two canvases with one scale. */

/** One component's map. */
class EffectMap {
  /** @param {{choose: (layer: number, position: number|null) => void}} on */
  constructor(title, on, disposer) {
    this.on = on;
    this.cursor = null;
    this.canvas = make("canvas", { class: "mappnb-expl-canvas", tabindex: "0", role: "application", "aria-label": title });
    this.tip = make("div", { class: "mappnb-tip", hidden: true });
    this.live = make("span", { class: "mappnb-hidden-text", "aria-live": "polite" });
    this.frame = make("div", { class: "mappnb-expl-frame" }, [this.canvas, this.tip]);
    this.node = make("div", { class: "mappnb-expl-map" }, [make("div", { class: "mappnb-expl-label", text: title }), this.frame, this.live]);
    disposer.listen(this.canvas, "pointermove", (event) => this.point(this.cellAt(event)));
    disposer.listen(this.canvas, "pointerleave", () => this.point(null));
    // Clicks come with whole pixels, which may be the neighbour of a narrow cell.
    disposer.listen(this.canvas, "pointerdown", (event) => {
      this.pressed = this.cellAt(event);
    });
    disposer.listen(this.canvas, "click", (event) => {
      const cell = this.pressed || this.cellAt(event);
      this.pressed = null;
      if (!cell) return;
      this.cursor = cell;
      this.choose(cell);
    });
    disposer.listen(this.canvas, "keydown", (event) => this.key(event));
    disposer.listen(this.canvas, "focus", () => this.paint());
    disposer.listen(this.canvas, "blur", () => {
      this.point(null);
      this.paint();
    });
  }

  draw(values, look) {
    Object.assign(this, { values, look, columns: look.edges.length - 1 });
    this.layers = values.length / this.columns;
    if (this.cursor && (this.cursor.layer >= this.layers || this.cursor.column >= this.columns)) this.cursor = null;
    this.paint();
  }

  /** Sizes in CSS pixels: layers upwards, tokens to the right. */
  measure() {
    const { width, tokens, edges } = this.look;
    const left = 32;
    this.cell = Math.min(34, (width - left - 4) / this.columns);
    this.high = Math.max(5, Math.min(18, 220 / this.layers));
    this.labels = this.cell >= 11 && edges.length === tokens.length + 1;
    const longest = this.labels ? Math.max(...tokens.map((t) => Math.min(t.length, 7))) : 0;
    this.bottom = this.labels ? 14 + longest * 5.2 : 18;
    this.left = left;
    return { width, height: this.layers * this.high + this.bottom + 4 };
  }

  x(column) {
    return this.left + column * this.cell;
  }

  y(layer) {
    return 2 + (this.layers - 1 - layer) * this.high;
  }

  paint() {
    if (!this.look) return;
    const { width, height } = this.measure();
    const g = sizedContext(this.canvas, width, height);
    const { colours, stops, top, chosen } = this.look;
    g.fillStyle = cssColour(colours.background);
    g.fillRect(0, 0, width, height);
    for (let layer = 0; layer < this.layers; layer++) {
      for (let c = 0; c < this.columns; c++) {
        g.fillStyle = cssColour(effectColour(this.values[layer * this.columns + c], top, stops));
        g.fillRect(this.x(c), this.y(layer), this.cell - (this.cell > 5 ? 1 : 0), this.high - (this.high > 5 ? 1 : 0));
      }
    }
    this.paintLabels(g, colours);
    if (chosen) this.box(g, chosen, colours.text, 2);
    if (this.cursor && document.activeElement === this.canvas) this.box(g, this.cursor, colours.accent, 2);
    g.strokeStyle = cssColour(colours.line);
    g.strokeRect(this.left - 0.5, 1.5, this.columns * this.cell, this.layers * this.high);
  }

  paintLabels(g, colours) {
    g.fillStyle = cssColour(colours.muted);
    g.font = `11px ${colours.font}`;
    g.textAlign = "right";
    g.textBaseline = "middle";
    const every = Math.max(1, Math.ceil(12 / this.high));
    for (let layer = 0; layer < this.layers; layer += every) g.fillText(`L${layer}`, this.left - 4, this.y(layer) + this.high / 2);
    const base = 2 + this.layers * this.high;
    if (this.labels) {
      for (let c = 0; c < this.columns; c++) {
        g.save();
        g.translate(this.x(c) + this.cell / 2, base + 5);
        g.rotate(-Math.PI / 3.2);
        g.fillText(shortText(this.look.tokens[c], 7), 0, 0);
        g.restore();
      }
      return;
    }
    g.textAlign = "center";
    const step = Math.max(1, Math.ceil(34 / this.cell));
    const room = this.look.width - 12;
    for (let c = 0; c < this.columns && this.x(c) + this.cell / 2 < room; c += step) g.fillText(String(this.look.edges[c]), this.x(c) + this.cell / 2, base + 10);
  }

  box(g, { layer, column }, colour, width) {
    g.strokeStyle = cssColour(colour);
    g.lineWidth = width;
    const [x, w] = column === null ? [this.left, this.columns * this.cell] : [this.x(column), this.cell];
    const [y, h] = layer === null ? [2, this.layers * this.high] : [this.y(layer), this.high];
    g.strokeRect(x - 0.5, y - 0.5, w, h);
    g.lineWidth = 1;
  }

  cellAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left - this.left) / this.cell);
    const layer = this.layers - 1 - Math.floor((event.clientY - box.top - 2) / this.high);
    return column >= 0 && column < this.columns && layer >= 0 && layer < this.layers ? { layer, column } : null;
  }

  say({ layer, column }) {
    const { edges, tokens, digits, what } = this.look;
    const [from, to] = [edges[column], edges[column + 1]];
    const token = to - from > 1 ? `tokens ${from} to ${to - 1}` : `“${tokens[from]}” (${from})`;
    return `L${layer} ${what}, ${token}: ${signedText(this.values[layer * this.columns + column], digits)}`;
  }

  point(cell) {
    this.tip.hidden = !cell;
    if (!cell) return;
    this.tip.textContent = this.say(cell);
    const x = this.x(cell.column) + this.cell;
    const room = this.frame.clientWidth;
    this.tip.style.left = x > room / 2 ? "auto" : `${x + 8}px`;
    this.tip.style.right = x > room / 2 ? `${room - this.x(cell.column) + 8}px` : "auto";
    this.tip.style.top = `${this.y(cell.layer) + this.high + 4}px`;
  }

  choose({ layer, column }) {
    const { edges } = this.look;
    this.on.choose(layer, edges[column + 1] - edges[column] > 1 ? null : edges[column]);
  }

  key(event) {
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [1, 0], ArrowDown: [-1, 0] };
    if (moves[event.key]) {
      event.preventDefault();
      const [up, right] = moves[event.key];
      const at = this.cursor || { layer: this.layers - 1 - up, column: -right };
      const clip = (v, n) => Math.max(0, Math.min(n - 1, v));
      this.cursor = { layer: clip(at.layer + up, this.layers), column: clip(at.column + right, this.columns) };
      this.paint();
      this.point(this.cursor);
      this.live.textContent = this.say(this.cursor);
    } else if ((event.key === "Enter" || event.key === " ") && this.cursor) {
      event.preventDefault();
      this.choose(this.cursor);
    }
  }
}

/** A text of at most `most` characters. */
function shortText(text, most) {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}
