/* Attention: one head as a heatmap, query by key, with tokens along both sides; pointer and keys on it. */

const HEAT = { font: 11, most: 96, least: 12, side: 500, cell: 30 };

/** A heatmap in a figure. The window, the cursor and the chosen query belong to the view: several heatmaps share them. */
class HeatBox {
  /** @param {object} on cursor(q, k), query(q), window(w), step(dx, dy), close(), state() */
  constructor(name, on, disposer) {
    this.on = on;
    this.name = name;
    this.title = make("div", { class: "mappnb-attn-box-title", dir: "auto" });
    this.canvas = make("canvas", { class: "mappnb-attn-heat", tabindex: "0", role: "application" });
    this.note = make("div", { class: "mappnb-muted mappnb-attn-note", hidden: true });
    this.tip = make("div", { class: "mappnb-tip", hidden: true });
    this.node = make("div", { class: "mappnb-attn-box" }, [this.title, this.canvas, this.note, this.tip]);
    this.drag = null;
    const listen = (type, fn, options) => disposer.listen(this.canvas, type, fn, options);
    listen("pointerdown", (event) => this.down(event));
    listen("pointermove", (event) => this.move(event));
    listen("pointerup", (event) => this.up(event));
    listen("pointercancel", () => { this.drag = null; });
    listen("pointerleave", () => this.leave());
    listen("dblclick", () => this.on.window(null));
    listen("wheel", (event) => this.wheel(event), { passive: false });
    listen("keydown", (event) => this.key(event));
    listen("focus", () => this.on.redraw());
    listen("blur", () => this.on.redraw());
  }

  /** Draw what there is: the pictures that cover the window, the coarse one first. */
  draw({ pictures, texts, window, cursor, query, padding, labels }, look) {
    Object.assign(this, { pictures, texts, window, queryCount: texts.length }, labels);
    const { side } = this;
    const g = sizedContext(this.canvas, this.left + side + 2, this.top + side + 2);
    g.font = `${HEAT.font}px ${look.colours.font}`;
    this.drawPictures(g, look);
    this.drawLabels(g, look, { query, padding });
    if (query !== null) this.band(g, query, null, look.colours.accent, 1.5);
    if (cursor) this.band(g, cursor[0], cursor[1], look.colours.text, 1, texts);
    g.strokeStyle = cssColour(look.colours.line);
    g.lineWidth = 1;
    g.strokeRect(this.left - 0.5, this.top - 0.5, side + 1, side + 1);
    if (cursor) this.drawCursorLabels(g, cursor, look);
  }

  /** Room for the labels and the side of the square, the same for heatmaps beside each other. */
  static layout(sources, width, font) {
    const g = document.createElement("canvas").getContext("2d");
    g.font = `${HEAT.font}px ${font}`;
    const most = Math.min(HEAT.most, width / 4);
    const [large, tokens] = [Math.min(width - 40, HEAT.side), Math.max(...sources.map(({ window: [q0, q1, k0, k1] }) => Math.max(q1 - q0, k1 - k0)))];
    const guess = Math.max(60, Math.min(large, tokens * HEAT.cell));
    const room = (at) => Math.ceil(Math.max(...sources.map(({ texts, window }) => labelRoom(g, texts, labelledTokens(window[at], window[at + 1], guess, HEAT.least), most)))) + 7;
    const [left, top] = [room(0), room(2)];
    return { left, top, guess, side: Math.floor(Math.max(60, Math.min(guess, width - left - 3))) };
  }

  x(k) {
    return this.left + ((k - this.window[2]) / (this.window[3] - this.window[2])) * this.side;
  }

  y(q) {
    return this.top + ((q - this.window[0]) / (this.window[1] - this.window[0])) * this.side;
  }

  drawPictures(g, look) {
    g.save();
    g.beginPath();
    g.rect(this.left, this.top, this.side, this.side);
    g.clip();
    g.fillStyle = cssColour(look.colours.line, 0.35);
    g.fillRect(this.left, this.top, this.side, this.side);
    for (const picture of this.pictures) {
      const [q0, q1, k0, k1] = picture.window;
      const [x, y] = [this.x(k0), this.y(q0)];
      const [w, h] = [this.x(k1) - x, this.y(q1) - y];
      g.imageSmoothingEnabled = w < picture.cells[1];
      g.drawImage(picture.canvas(look), x, y, w, h);
    }
    g.restore();
  }

  drawLabels(g, { colours }, { query, padding }) {
    const ink = (i) => cssColour(i === query ? colours.accent : padding.has(i) ? colours.line : colours.muted);
    g.textBaseline = "middle";
    g.textAlign = "right";
    const [q0, q1, k0, k1] = this.window;
    for (const i of labelledTokens(q0, q1, this.guess, HEAT.least)) {
      g.fillStyle = ink(i);
      g.fillText(cutText(g, this.texts[i], this.left - 7), this.left - 5, (this.y(i) + this.y(i + 1)) / 2);
    }
    g.textAlign = "left";
    for (const i of labelledTokens(k0, k1, this.guess, HEAT.least)) {
      g.save();
      g.translate((this.x(i) + this.x(i + 1)) / 2, this.top - 5);
      g.rotate(-Math.PI / 2);
      g.fillStyle = ink(i);
      g.fillText(cutText(g, this.texts[i], this.top - 7), 0, 0);
      g.restore();
    }
  }

  /** Lines around the row of a query and the column of a key. */
  band(g, q, k, colour, width) {
    g.save();
    g.beginPath();
    g.rect(this.left, this.top, this.side, this.side);
    g.clip();
    g.strokeStyle = cssColour(colour, 0.85);
    g.lineWidth = width;
    const least = (a, b) => (b - a < 3 ? [(a + b) / 2 - 1.5, 3] : [a, b - a]);
    if (q !== null) {
      const [y, h] = least(this.y(q), this.y(q + 1));
      g.strokeRect(this.left - 2, y, this.side + 4, h);
    }
    if (k !== null) {
      const [x, w] = least(this.x(k), this.x(k + 1));
      g.strokeRect(x, this.top - 2, w, this.side + 4);
    }
    g.restore();
  }

  /** The two tokens under the cursor, over the labels that are there. */
  drawCursorLabels(g, [q, k], { colours }) {
    const box = (text, x, y, w, h) => {
      g.fillStyle = cssColour(colours.text);
      g.fillRect(x, y, w, h);
      g.fillStyle = cssColour(colours.background);
      g.fillText(text, x + 3, y + h / 2 + 0.5);
    };
    g.textBaseline = "middle";
    g.textAlign = "left";
    if (q >= this.window[0] && q < this.window[1]) {
      const text = cutText(g, this.texts[q], this.left - 8);
      const w = g.measureText(text).width + 6;
      box(text, this.left - w - 2, (this.y(q) + this.y(q + 1)) / 2 - 7, w, 14);
    }
    if (k >= this.window[2] && k < this.window[3]) {
      const text = cutText(g, this.texts[k], this.top - 8);
      const w = g.measureText(text).width + 6;
      g.save();
      g.translate((this.x(k) + this.x(k + 1)) / 2, this.top - 2);
      g.rotate(-Math.PI / 2);
      box(text, 0, -7, w, 14);
      g.restore();
    }
  }

  /** [query, key] under the pointer, or null. */
  at(event) {
    if (!this.window) return null;
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [(event.clientX - box.left - this.left) / this.side, (event.clientY - box.top - this.top) / this.side];
    if (y < 0 || y >= 1 || x >= 1) return null;
    const q = Math.floor(this.window[0] + y * (this.window[1] - this.window[0]));
    if (x < 0) return [q, -1];
    return [q, Math.floor(this.window[2] + x * (this.window[3] - this.window[2]))];
  }

  value(q, k) {
    for (const picture of [...this.pictures].reverse()) if (picture.covers(q, k)) return picture.value(q, k);
    return NaN;
  }

  down(event) {
    if (event.button !== 0 || !this.window) return;
    this.drag = { x: event.clientX, y: event.clientY, window: this.window, moved: false };
    this.canvas.setPointerCapture(event.pointerId);
  }

  move(event) {
    if (this.drag) {
      const [dx, dy] = [event.clientX - this.drag.x, event.clientY - this.drag.y];
      if (Math.abs(dx) + Math.abs(dy) > 4) this.drag.moved = true;
      if (this.drag.moved) {
        const [q0, q1, k0, k1] = this.drag.window;
        const [by, along] = [(dy / this.side) * (q1 - q0), (dx / this.side) * (k1 - k0)];
        this.on.window(fittedWindow([q0 - by, q1 - by, k0 - along, k1 - along], this.queryCount));
        return;
      }
    }
    const found = this.at(event);
    this.on.cursor(found && found[1] >= 0 ? found : null);
    this.showTip(found, event);
  }

  up(event) {
    const { drag } = this;
    this.drag = null;
    const found = this.at(event);
    if (drag && !drag.moved && found) this.on.query(found[0]);
  }

  showTip(found, event) {
    this.tip.hidden = !found || found[1] < 0 || !this.pictures.length;
    if (this.tip.hidden) return;
    this.tip.replaceChildren(...this.on.words(found));
    const frame = this.node.getBoundingClientRect();
    this.tip.style.left = `${Math.max(0, Math.min(event.clientX - frame.left + 14, frame.width - this.tip.offsetWidth - 2))}px`;
    this.tip.style.top = `${event.clientY - frame.top + 18}px`;
  }

  leave() {
    this.tip.hidden = true;
    if (!this.drag) this.on.cursor(null);
  }

  wheel(event) {
    if (!(event.ctrlKey || document.activeElement === this.canvas) || !this.window) return;
    event.preventDefault();
    const found = this.at(event) || [(this.window[0] + this.window[1]) / 2, (this.window[2] + this.window[3]) / 2];
    this.on.window(zoomedWindow(this.window, Math.exp(Math.max(-100, Math.min(100, event.deltaY)) * 0.004), found[0] + 0.5, Math.max(0, found[1]) + 0.5, this.queryCount));
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.window) return;
    const arrow = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    const { cursor } = this.on.state();
    if (arrow && event.shiftKey) this.on.step(arrow[1], arrow[0]);
    else if (arrow) this.go(cursor ? [cursor[0] + arrow[0], cursor[1] + arrow[1]] : [this.window[0], this.window[2]]);
    else if ((event.key === "Enter" || event.key === " ") && cursor) this.on.query(cursor[0]);
    else if (event.key === "+" || event.key === "=") this.zoom(0.7, cursor);
    else if (event.key === "-") this.zoom(1 / 0.7, cursor);
    else if (event.key === "0") this.on.window(null);
    else if (event.key === "Escape" || event.key === "Backspace") this.on.close();
    else return;
    event.preventDefault();
  }

  zoom(factor, cursor) {
    const [q0, q1, k0, k1] = this.window;
    const [q, k] = cursor || [(q0 + q1) / 2, (k0 + k1) / 2];
    this.on.window(zoomedWindow(this.window, factor, q + 0.5, k + 0.5, this.queryCount));
  }

  go([q, k]) {
    const most = this.queryCount - 1;
    this.on.cursor([Math.max(0, Math.min(most, q)), Math.max(0, Math.min(most, k))], true);
  }
}
