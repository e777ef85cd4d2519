/* Attention: one head as lines from queries (left) to keys (right), as thick in colour as their weight. */

const LINES = { row: 15, most: 96, label: 110, top: 20, width: 440, faint: 0.03 };

/** Lines in a figure, over the same state as a heatmap. */
class LineBox {
  /** @param {object} on cursor(q, k), query(q), close(), step(dx, dy), state() */
  constructor(name, on, disposer) {
    this.on = on;
    this.title = make("div", { class: "mappnb-attn-box-title", dir: "auto" });
    this.canvas = make("canvas", { class: "mappnb-attn-lines", tabindex: "0", role: "application" });
    this.scroll = make("div", { class: "mappnb-attn-lines-scroll" }, [this.canvas]);
    this.note = make("div", { class: "mappnb-muted mappnb-attn-note", hidden: true });
    this.node = make("div", { class: "mappnb-attn-box" }, [this.title, this.scroll, this.note]);
    disposer.listen(this.canvas, "pointermove", (event) => this.on.cursor(this.at(event)));
    disposer.listen(this.canvas, "pointerleave", () => this.on.cursor(null));
    disposer.listen(this.canvas, "click", (event) => this.click(event));
    disposer.listen(this.canvas, "keydown", (event) => this.key(event));
    disposer.listen(this.canvas, "focus", () => this.on.redraw());
    disposer.listen(this.canvas, "blur", () => this.on.redraw());
  }

  /** Tokens that have a row each: those of the window, around the chosen query if they are too many. */
  static range(window, query) {
    const from = Math.min(window[0], window[2]);
    const to = Math.max(window[1], window[3]);
    if (to - from <= LINES.most) return [from, to];
    const middle = query === null ? from : Math.max(from, Math.min(query - LINES.most + 8, to - LINES.most));
    return [middle, middle + LINES.most];
  }

  draw({ pictures, texts, window, cursor, query, padding }, look, width) {
    Object.assign(this, { pictures, texts });
    this.range = LineBox.range(window, query);
    const [from, to] = this.range;
    const w = Math.max(240, Math.min(width, LINES.width));
    const g = sizedContext(this.canvas, w, LINES.top + (to - from) * LINES.row + 4);
    this.sides = [LINES.label, w - LINES.label];
    g.font = `11px ${look.colours.font}`;
    g.textBaseline = "middle";
    g.fillStyle = cssColour(look.colours.muted);
    g.textAlign = "right";
    g.fillText("query", this.sides[0] - 6, 9);
    g.textAlign = "left";
    g.fillText("key", this.sides[1] + 6, 9);
    if (query !== this.shownQuery) this.showRow(query);
    const focus = cursor ? cursor[0] : query;
    this.drawLines(g, look, focus);
    for (let i = from; i < to; i++) {
      const y = this.y(i);
      const dim = padding.has(i) ? look.colours.line : look.colours.text;
      g.fillStyle = cssColour(i === query ? look.colours.accent : dim);
      g.font = `${i === focus ? "600 " : ""}11px ${look.colours.font}`;
      g.textAlign = "right";
      g.fillText(cutText(g, texts[i], LINES.label - 10), this.sides[0] - 6, y);
      g.textAlign = "left";
      const weight = focus === null || focus === undefined ? NaN : this.value(focus, i);
      g.font = `11px ${look.colours.font}`;
      g.fillStyle = cssColour(dim, Number.isNaN(weight) || look.signed ? 1 : 0.45 + 0.55 * weightShare(weight, look));
      g.fillText(cutText(g, texts[i], LINES.label - 10), this.sides[1] + 6, y);
    }
  }

  /** Scroll to a query that was chosen elsewhere. */
  showRow(query) {
    this.shownQuery = query;
    if (query === null) return;
    const [y, { scrollTop, clientHeight }] = [this.y(query), this.scroll];
    if (y < scrollTop + LINES.row || y > scrollTop + clientHeight - LINES.row) this.scroll.scrollTop = y - clientHeight / 2;
  }

  drawLines(g, look, focus) {
    const [from, to] = this.range;
    const [x0, x1] = this.sides;
    const signed = this.pictures.length > 0 && this.pictures[0].signed;
    const rows = focus !== null && focus !== undefined && focus >= from && focus < to ? [focus] : Array.from({ length: to - from }, (_, i) => from + i);
    for (const q of rows) {
      for (let k = from; k < to; k++) {
        const value = this.value(q, k);
        const share = weightShare(Math.abs(value), look);
        if (!(share > LINES.faint)) continue;
        g.strokeStyle = cssColour(signed ? weightColour(Math.sign(value) * look.top, look, true) : look.colours.accent, rows.length > 1 ? share * share : share);
        g.lineWidth = rows.length > 1 ? 1 : 1 + 2 * share;
        g.beginPath();
        g.moveTo(x0, this.y(q));
        g.bezierCurveTo((x0 + x1) / 2, this.y(q), (x0 + x1) / 2, this.y(k), x1, this.y(k));
        g.stroke();
      }
    }
  }

  y(i) {
    return LINES.top + (i - this.range[0] + 0.5) * LINES.row;
  }

  value(q, k) {
    for (const picture of [...this.pictures].reverse()) if (picture.covers(q, k)) return picture.value(q, k);
    return NaN;
  }

  at(event) {
    if (!this.range) return null;
    const box = this.canvas.getBoundingClientRect();
    const i = this.range[0] + Math.floor((event.clientY - box.top - LINES.top) / LINES.row);
    return i < this.range[0] || i >= this.range[1] ? null : [i, i];
  }

  click(event) {
    const found = this.at(event);
    if (found) this.on.query(found[0]);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.range) return;
    const { cursor } = this.on.state();
    const by = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    const arrow = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (arrow && event.shiftKey) this.on.step(...arrow);
    else if (by) {
      const to = Math.max(0, Math.min(this.texts.length - 1, (cursor ? cursor[0] : this.range[0] - 1) + by));
      this.on.cursor([to, to], true);
    } else if ((event.key === "Enter" || event.key === " ") && cursor) this.on.query(cursor[0]);
    else if (event.key === "Escape" || event.key === "Backspace") this.on.close();
    else return;
    event.preventDefault();
  }
}
