/* Small charts of the activation views, as SVG: lines over a common axis, histograms. Colours by CSS, so that both themes share them. */

const CHART = { left: 52, right: 10, top: 20, bottom: 34, height: 190, least: 260 };

/** Round places between two bounds. */
function chartTicks(low, high, most) {
  const unit = 10 ** Math.floor(Math.log10((high - low) / most));
  const step = [1, 2, 5, 10].map((m) => m * unit).find((s) => (high - low) / s <= most);
  const out = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k++) out.push(Number((k * step).toPrecision(12)));
  return out;
}

/** Round values between two powers of ten, as their logarithms. */
function logTicks(low, high) {
  const steps = high - low > 2.5 ? [1] : [1, 2, 5];
  const out = [];
  for (let p = Math.floor(low); p <= high; p++) out.push(...steps.map((s) => p + Math.log10(s)).filter((v) => v >= low && v <= high));
  return out.length > 1 ? out : chartTicks(low, high, 3);
}

/** Lines or bars. */
class Chart {
  constructor(told) {
    this.told = told;
    this.node = make("div", { class: "mappnb-acts-chart" });
  }

  show() {
    this.width = Math.max(CHART.least, this.node.clientWidth || 320);
    const label = `${this.told.title}: ${this.told.y_label} over ${this.told.x_label}`;
    this.svg = document.createElementNS(SVG, "svg");
    for (const [name, value] of Object.entries({ viewBox: `0 0 ${this.width} ${CHART.height}`, width: "100%", role: "img", "aria-label": label })) this.svg.setAttribute(name, value);
    const { x, lines, bars, other } = this.told;
    const values = (bars ? [bars, ...(other ? [other] : [])] : lines.map(([, v]) => v)).map((v) => v.map((y) => this.scaled(y)));
    this.frame(x, values.flat().filter(Number.isFinite), Boolean(bars));
    if (bars) this.drawBars(x, ...values);
    else values.forEach((v, i) => this.drawLine(x, v, lines[i], i));
    this.legend();
    this.node.replaceChildren(this.svg);
    return Promise.resolve();
  }

  scaled(value) {
    if (value === null) return NaN;
    return this.told.log ? (value > 0 ? Math.log10(value) : NaN) : value;
  }

  draw(tag, attributes, text) {
    const node = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (text !== undefined) node.textContent = text;
    this.svg.append(node);
    return node;
  }

  frame(x, y, bars) {
    const ends = (v, pad) => {
      const [low, high] = v.length ? [Math.min(...v), Math.max(...v)] : [0, 1];
      const room = (high - low || Math.abs(high) || 1) * pad;
      return [low - room, high + room];
    };
    [this.x0, this.x1] = ends(x, x.length > 1 ? (bars ? 0.5 / (x.length - 1) : 0.03) : 0.5);
    [this.y0, this.y1] = bars ? [0, ends(y, 0.04)[1]] : ends(y, 0.08);
    const { left, right, top, bottom, height } = CHART;
    for (const tick of this.told.log ? logTicks(this.y0, this.y1) : chartTicks(this.y0, this.y1, 4)) {
      this.draw("line", { x1: left, x2: this.width - right, y1: this.py(tick), y2: this.py(tick), class: "mappnb-acts-gridline" });
      this.draw("text", { x: left - 6, y: this.py(tick) + 4, "text-anchor": "end" }, cellText(this.told.log ? 10 ** tick : tick));
    }
    const whole = x.every((v) => Number.isInteger(v));
    for (const tick of chartTicks(this.x0, this.x1, Math.max(2, Math.floor(this.width / 64)))) {
      if (!whole || Number.isInteger(tick)) this.draw("text", { x: this.px(tick), y: height - bottom + 15, "text-anchor": "middle" }, cellText(tick));
    }
    this.draw("text", { x: (left + this.width - right) / 2, y: height - 4, "text-anchor": "middle" }, this.told.x_label);
    this.draw("text", { x: left, y: top - 8 }, this.told.y_label);
  }

  px(x) {
    return CHART.left + ((x - this.x0) / (this.x1 - this.x0)) * (this.width - CHART.left - CHART.right);
  }

  py(y) {
    return CHART.height - CHART.bottom - ((y - this.y0) / (this.y1 - this.y0)) * (CHART.height - CHART.top - CHART.bottom);
  }

  drawLine(x, y, [name, raw], index) {
    let piece = [];
    const flush = () => {
      if (piece.length > 1) this.draw("polyline", { points: piece.map((p) => p.map((v) => v.toFixed(1)).join(",")).join(" "), class: `mappnb-acts-line mappnb-acts-series${index}` });
      piece = [];
    };
    y.forEach((v, i) => {
      if (!Number.isFinite(v)) return flush();
      piece.push([this.px(x[i]), this.py(v)]);
      return undefined;
    });
    flush();
    if (x.length > 120) return;
    y.forEach((v, i) => {
      if (!Number.isFinite(v)) return;
      const dot = this.mark(index, this.px(x[i]), this.py(v));
      const title = document.createElementNS(SVG, "title");
      title.textContent = `${this.told.x_label} ${cellText(x[i])}: ${name} ${cellText(raw[i])}`;
      dot.append(title);
    });
  }

  /** The sign of a line: shape tells as much as colour. */
  mark(index, x, y) {
    const cls = `mappnb-acts-dot mappnb-acts-series${index}`;
    if (index % 3 === 1) return this.draw("rect", { x: x - 3, y: y - 3, width: 6, height: 6, class: cls });
    if (index % 3 === 2) return this.draw("polygon", { points: `${x},${y - 4} ${x - 4},${y + 3} ${x + 4},${y + 3}`, class: cls });
    return this.draw("circle", { cx: x, cy: y, r: 3, class: cls });
  }

  drawBars(x, values, other) {
    const wide = x.length > 1 ? this.px(x[1]) - this.px(x[0]) : 40;
    values.forEach((v, i) => this.draw("rect", { x: this.px(x[i]) - 0.43 * wide, y: this.py(v), width: 0.86 * wide, height: Math.max(0, this.py(0) - this.py(v)), class: "mappnb-acts-bar" }));
    if (!other) return;
    const points = other.flatMap((v, i) => [[this.px(x[i]) - wide / 2, this.py(v)], [this.px(x[i]) + wide / 2, this.py(v)]]);
    this.draw("polyline", { points: points.map((p) => p.map((v) => v.toFixed(1)).join(",")).join(" "), class: "mappnb-acts-line mappnb-acts-series1" });
  }

  legend() {
    const { lines, other, legend } = this.told;
    const names = lines ? lines.map(([name]) => name) : other ? legend : [];
    if (names.length < 2) return;
    let x = this.width - CHART.right;
    for (const [i, name] of [...names.entries()].reverse()) {
      const text = this.draw("text", { x, y: CHART.top - 8, "text-anchor": "end" }, name.slice(0, 22));
      x -= 7 * Math.min(22, name.length) + 8;
      text.classList.add("mappnb-acts-legend");
      this.mark(i, x, CHART.top - 12);
      x -= 14;
    }
  }

  clear() {}
}
