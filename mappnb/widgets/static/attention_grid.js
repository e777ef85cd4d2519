/* Attention: thumbnails of all heads on one canvas, by layer and head or by a score; pointer and keys on it. */

const GRID = { gap: 3, left: 30, top: 18, least: 16, most: 92, caption: 15, height: 640 };

/** The overview. */
class HeadGrid {
  /** @param {object} on open(index), words(index) */
  constructor(on, disposer) {
    this.on = on;
    this.canvas = make("canvas", { class: "mappnb-attn-grid-canvas", tabindex: "0", role: "application", "aria-label": "Heads" });
    this.tip = make("div", { class: "mappnb-tip", hidden: true });
    this.said = make("div", { class: "mappnb-hidden-text", "aria-live": "polite" });
    this.scroll = make("div", { class: "mappnb-attn-grid-scroll" }, [this.canvas]);
    this.node = make("div", { class: "mappnb-attn-grid" }, [this.scroll, this.tip, this.said]);
    this.order = [];
    this.cursor = 0;
    disposer.listen(this.canvas, "pointermove", (event) => this.hover(event));
    disposer.listen(this.canvas, "pointerleave", () => this.leave());
    disposer.listen(this.canvas, "click", (event) => this.click(event));
    disposer.listen(this.canvas, "keydown", (event) => this.key(event));
    disposer.listen(this.canvas, "focus", () => this.on.redraw());
    disposer.listen(this.canvas, "blur", () => this.on.redraw());
  }

  /** What there is: numbers of layers and heads, and the order, indices layer × heads + head. */
  arrange({ layers, heads, order, values, byLayer }) {
    Object.assign(this, { layers, heads, order, values, byLayer });
    const words = byLayer ? "Arrow keys go to another layer or head" : "Arrow keys go to the next head";
    this.canvas.setAttribute("aria-label", `${layers.length} layers of ${heads.length} heads. ${words}, Enter opens one.`);
  }

  measure(width) {
    const { gap, least, most, caption } = GRID;
    this.left = this.byLayer ? Math.max(GRID.left, 14 + 7 * String(this.layers[this.layers.length - 1]).length) : 0;
    this.top = this.byLayer ? GRID.top : 0;
    const wanted = Math.floor((width - this.left - gap) / Math.max(1, this.heads.length));
    const high = Math.max(44, Math.floor((GRID.height - 30) / Math.max(1, this.layers.length)));
    this.cell = this.byLayer ? Math.min(most, high, Math.max(least, wanted)) : 70;
    this.columns = this.byLayer ? this.heads.length : Math.max(1, Math.floor(width / this.cell));
    this.rowHeight = this.byLayer ? this.cell : this.cell + 2 * caption;
    this.rows = Math.ceil(this.order.length / this.columns);
    return [this.left + this.columns * this.cell + 2, this.top + this.rows * this.rowHeight + 2];
  }

  place(at) {
    return [this.left + (at % this.columns) * this.cell, this.top + Math.floor(at / this.columns) * this.rowHeight];
  }

  /**
   * Draw.
   * @param {object} atlas {codes: Uint8Array, size, there: boolean[] by layer} or null
   * @param {object} look colours, theme, how weights become colours
   */
  draw(atlas, look, { signed, open, width }) {
    const [w, h] = this.measure(width);
    const focused = document.activeElement === this.canvas;
    const drawn = [lookKey(look), signed, open, w, h, this.cell, this.order.join(), atlas ? atlas.id : "", atlas ? atlas.there.join() : "", focused && this.cursor, window.devicePixelRatio].join("|");
    if (drawn === this.drawn) return;
    this.drawn = drawn;
    const g = sizedContext(this.canvas, w, h);
    const { colours } = look;
    g.font = `11px ${colours.font}`;
    if (this.byLayer) this.drawHeads(g, colours);
    const pictures = HeadGrid.painted(atlas, look, signed);
    this.order.forEach((index, at) => this.drawOne(g, at, index, { atlas, pictures, look, open }));
    if (focused && this.order.length) this.frame(g, this.cursor, colours.text, 2, [4, 3]);
  }

  /** A canvas of each thumbnail in the present colours, by index; made when it is drawn. */
  static painted(atlas, look, signed) {
    if (!atlas) return null;
    const key = `${lookKey(look)} ${signed}`;
    if (!atlas.painted || atlas.painted.key !== key) {
      const table = codeTable(look, signed);
      const area = atlas.size * atlas.size;
      const made = new Map();
      const of = (index) => {
        if (!made.has(index)) made.set(index, paintCodes(atlas.codes.subarray(index * area, (index + 1) * area), atlas.size, atlas.size, table));
        return made.get(index);
      };
      atlas.painted = { key, of };
    }
    return atlas.painted.of;
  }

  drawHeads(g, { muted }) {
    g.fillStyle = cssColour(muted);
    g.textBaseline = "middle";
    const every = this.cell < 20 ? Math.ceil(20 / this.cell) : 1;
    g.textAlign = "center";
    this.heads.forEach((head, i) => i % every === 0 && g.fillText(`${this.cell > 44 && i === 0 ? "head " : ""}${head}`, this.left + (i + 0.5) * this.cell, 9));
    g.textAlign = "right";
    this.layers.forEach((layer, i) => g.fillText(String(layer), this.left - 6, this.top + (i + 0.5) * this.cell));
    g.textAlign = "left";
  }

  drawOne(g, at, index, { atlas, pictures, look, open }) {
    const [x, y] = this.place(at);
    const side = this.cell - GRID.gap;
    const layer = Math.floor(index / this.heads.length);
    if (atlas && atlas.there[layer]) {
      g.imageSmoothingEnabled = side < atlas.size;
      g.drawImage(pictures(index), x, y, side, side);
    } else {
      g.fillStyle = cssColour(look.colours.line, 0.4);
      g.fillRect(x, y, side, side);
    }
    g.strokeStyle = cssColour(look.colours.line);
    g.lineWidth = 1;
    g.strokeRect(x - 0.5, y - 0.5, side + 1, side + 1);
    if (!this.byLayer) this.drawCaption(g, x, y + side, index, look.colours);
    if (index === open) this.frame(g, at, look.colours.accent, 3, []);
  }

  drawCaption(g, x, y, index, { text, muted }) {
    g.textBaseline = "middle";
    g.textAlign = "left";
    g.fillStyle = cssColour(text);
    g.fillText(`L${this.layers[Math.floor(index / this.heads.length)]} H${this.heads[index % this.heads.length]}`, x, y + 9);
    g.fillStyle = cssColour(muted);
    g.fillText(shortNumber(this.values[index], 3), x, y + 9 + 13);
  }

  frame(g, at, colour, width, dash) {
    const [x, y] = this.place(at);
    const side = this.cell - GRID.gap;
    g.strokeStyle = cssColour(colour);
    g.lineWidth = width;
    g.setLineDash(dash);
    g.strokeRect(x - 1, y - 1, side + 2, side + 2);
    g.setLineDash([]);
  }

  /** Place in the order under the pointer, or -1. */
  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left - this.left) / this.cell);
    const row = Math.floor((event.clientY - box.top - this.top) / this.rowHeight);
    if (column < 0 || column >= this.columns || row < 0) return -1;
    const at = row * this.columns + column;
    return at < this.order.length ? at : -1;
  }

  hover(event) {
    const at = this.at(event);
    this.tip.hidden = at < 0;
    this.canvas.style.cursor = at < 0 ? "default" : "pointer";
    if (at < 0) return;
    const { title, fields } = this.on.words(this.order[at]);
    this.tip.replaceChildren(make("div", { class: "mappnb-tip-title", text: title }), fieldList(fields));
    const frame = this.node.getBoundingClientRect();
    const [x, y] = [event.clientX - frame.left, event.clientY - frame.top];
    this.tip.style.left = `${Math.max(0, Math.min(x + 14, frame.width - this.tip.offsetWidth - 4))}px`;
    this.tip.style.top = `${y + 16}px`;
  }

  leave() {
    this.tip.hidden = true;
  }

  click(event) {
    const at = this.at(event);
    if (at < 0) return;
    this.cursor = at;
    this.on.open(this.order[at]);
  }

  key(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns }[event.key];
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (by !== undefined) this.move(this.cursor + by);
    else if (event.key === "Home") this.move(0);
    else if (event.key === "End") this.move(this.order.length - 1);
    else if (event.key === "Enter" || event.key === " ") this.on.open(this.order[this.cursor]);
    else if (event.key === "Escape") this.on.close();
    else return;
    event.preventDefault();
  }

  move(to) {
    if (to < 0 || to >= this.order.length) return;
    this.cursor = to;
    const [x, y] = this.place(to);
    const { scroll } = this;
    if (y < scroll.scrollTop) scroll.scrollTop = y - this.top;
    else if (y + this.rowHeight > scroll.scrollTop + scroll.clientHeight) scroll.scrollTop = y + this.rowHeight - scroll.clientHeight;
    if (x < scroll.scrollLeft) scroll.scrollLeft = x - this.left;
    else if (x + this.cell > scroll.scrollLeft + scroll.clientWidth) scroll.scrollLeft = x + this.cell - scroll.clientWidth;
    const { title, fields } = this.on.words(this.order[to]);
    this.said.textContent = [title, ...fields.map(([name, value]) => `${name} ${value}`)].join(", ");
    this.on.moved(this.order[to]);
    this.on.redraw();
  }

  /** Put the cursor on a head. */
  show(index) {
    const at = this.order.indexOf(index);
    if (at >= 0) this.cursor = at;
  }
}
