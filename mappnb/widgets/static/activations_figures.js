/* Figures of the activation views: heatmaps and points with pointer, keys and picks. */

/** A value in few digits. */
function cellText(value) {
  if (!Number.isFinite(value)) return "nothing recorded";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e5)) return value.toExponential(2).replace(/-/g, "−").replace("e+", "e");
  return String(Number(value.toPrecision(4))).replace("-", "−");
}

/** A figure in a panel: what is common to those that can be picked in. */
class PickFigure extends PointedBox {
  /** @param {object} on pick(panel key, place), words */
  constructor(on, disposer, told) {
    super(`${told.title}. Arrow keys move, Enter or space chooses.`, disposer);
    this.node.classList.add("mappnb-acts-pick");
    this.on = on;
    this.told = told;
    this.at = null;
    this.picked = null;
  }

  leave() {
    this.tip.hidden = true;
    this.at = null;
    this.outline();
  }

  move(at, quiet) {
    this.at = at;
    this.outline();
    this.tell(this.words(at), quiet);
  }

  mark(pick) {
    this.picked = pick;
    this.outline();
  }

  click(event) {
    const at = this.placeAt(event);
    this.node.focus({ preventScroll: true });
    if (at !== null) this.on.pick(this.told.key, this.place(at));
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target !== this.node || !this.view) return;
    const arrow = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (arrow) this.move(this.step(arrow), false);
    else if ((event.key === " " || event.key === "Enter") && this.at !== null) this.on.pick(this.told.key, this.place(this.at));
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}

/** A heatmap. */
class HeatFigure extends PickFigure {
  async show(bokeh) {
    if (!(await this.draw(bokeh, this.told.figure))) return;
    const cells = this.find("cells");
    this.values = cells ? cells.data.image[0] : null;
    this.bad = new Set(this.told.bad.map(([r, c]) => `${r} ${c}`));
    this.outline();
  }

  get rows() {
    return this.told.rows.length;
  }

  get cols() {
    return this.told.columns.length;
  }

  value([row, col]) {
    const drawn = this.values ? this.values[(this.rows - 1 - row) * this.cols + col] : NaN;
    return this.told.log ? 10 ** drawn : drawn;
  }

  place([row, col]) {
    return { row, col };
  }

  placeAt(event) {
    if (!this.view) return null;
    const { bbox } = this.view.frame;
    const box = this.inner.getBoundingClientRect();
    const row = Math.floor(((event.clientY - box.top - bbox.top) / bbox.height) * this.rows);
    const col = Math.floor(((event.clientX - box.left - bbox.left) / bbox.width) * this.cols);
    return row >= 0 && row < this.rows && col >= 0 && col < this.cols ? [row, col] : null;
  }

  step([down, right]) {
    const from = this.at || (this.picked && [this.picked.row, this.picked.col]);
    if (!from) return [0, 0];
    return [Math.min(this.rows - 1, Math.max(0, from[0] + down)), Math.min(this.cols - 1, Math.max(0, from[1] + right))];
  }

  words(at) {
    const bad = this.bad.has(at.join(" ")) ? ["NaN or infinite values here"] : [];
    return [`${this.told.rows[at[0]]}, ${this.told.columns[at[1]]}`, cellText(this.value(at)), ...bad];
  }

  outline() {
    const source = this.view && this.find("boxes");
    if (!source) return;
    const { background, text, muted } = themeColours(this.node.closest(".mappnb-root"));
    const picked = this.picked && this.picked.panel === this.told.key && this.picked.row !== undefined ? [this.picked.row, this.picked.col] : null;
    const all = [...(picked ? [[picked, background, 4], [picked, text, 2]] : []), ...(this.at ? [[this.at, muted, 1.5]] : [])];
    source.data = {
      left: all.map(([b]) => b[1]),
      right: all.map(([b]) => b[1] + 1),
      top: all.map(([b]) => this.rows - b[0]),
      bottom: all.map(([b]) => this.rows - b[0] - 1),
      colour: all.map(([, colour]) => cssColour(colour)),
      width: all.map(([, , width]) => width),
    };
  }
}

const NEAR = 14; // pixels from a point that count as on it

/** Points in a plane. */
class ScatterFigure extends PickFigure {
  async show(bokeh) {
    if (!(await this.draw(bokeh, this.told.figure))) return;
    const { data } = this.find("points");
    [this.x, this.y] = [data.x, data.y];
    this.outline();
  }

  place(index) {
    return { index };
  }

  /** Where a point is in the node, in pixels. */
  pixel(index) {
    const { bbox, x_range: x, y_range: y } = this.view.frame;
    return [bbox.left + ((this.x[index] - x.start) / (x.end - x.start)) * bbox.width, bbox.top + (1 - (this.y[index] - y.start) / (y.end - y.start)) * bbox.height];
  }

  placeAt(event) {
    if (!this.view) return null;
    const box = this.inner.getBoundingClientRect();
    const [px, py] = [event.clientX - box.left, event.clientY - box.top];
    let [best, least] = [null, NEAR * NEAR];
    for (let i = 0; i < this.x.length; i++) {
      const [x, y] = this.pixel(i);
      const away = (x - px) ** 2 + (y - py) ** 2;
      if (away < least) [best, least] = [i, away];
    }
    return best;
  }

  step([down, right]) {
    const from = this.at === null ? (this.picked && this.picked.index !== undefined ? this.picked.index : -1) : this.at;
    return Math.min(this.x.length - 1, Math.max(0, from + (down || right)));
  }

  words(index) {
    return [this.told.titles[index], `${cellText(this.x[index])}, ${cellText(this.y[index])}`];
  }

  outline() {
    const source = this.view && this.find("picked");
    if (!source) return;
    const { background, text, muted } = themeColours(this.node.closest(".mappnb-root"));
    const picked = this.picked && this.picked.panel === this.told.key ? this.picked.index : null;
    const all = [...(picked === null || picked === undefined ? [] : [[picked, 16, background, 4], [picked, 16, text, 2]]), ...(this.at === null ? [] : [[this.at, 13, muted, 1.5]])];
    source.data = {
      x: all.map(([i]) => this.x[i]),
      y: all.map(([i]) => this.y[i]),
      size: all.map(([, size]) => size),
      colour: all.map(([, , colour]) => cssColour(colour)),
      width: all.map(([, , , width]) => width),
    };
  }
}
