/* The explain view: the prompt as a strip of tokens, direct effects as a waterfall, predicted against real ablation. */

const MOST_TOKENS = 2000;

/** The prompt's tokens, coloured by their sums; one can be chosen. */
class TokenStrip {
  /** @param {{choose: (position: number) => void}} on */
  constructor(on, disposer) {
    this.on = on;
    this.buttons = [];
    this.node = make("div", { class: "mappnb-expl-tokens", role: "group", "aria-label": "Tokens of the prompt" });
    disposer.listen(this.node, "click", (event) => {
      const button = event.target.closest("button");
      if (button) this.on.choose(Number(button.dataset.position));
    });
    disposer.listen(this.node, "keydown", (event) => this.key(event));
  }

  build(tokens) {
    this.first = Math.max(0, tokens.length - MOST_TOKENS);
    this.buttons = tokens.slice(this.first).map((text, i) => {
      const button = make("button", { type: "button", class: "mappnb-expl-token", text, dir: "auto", tabindex: i ? -1 : 0, "aria-pressed": "false" });
      button.dataset.position = String(i + this.first);
      return button;
    });
    const more = this.first ? [make("span", { class: "mappnb-muted", text: `… ${this.first} tokens before` })] : [];
    this.node.replaceChildren(...more, ...this.buttons);
    this.tokens = tokens;
  }

  draw(sums, { position, digits, what, stops }) {
    const top = largestOf(sums);
    this.buttons.forEach((button, i) => {
      const at = i + this.first;
      const colour = effectColour(sums[at], top, stops);
      button.style.background = cssColour(colour);
      button.style.color = luminance(colour) > 0.179 ? "#000000" : "#ffffff";
      button.title = `${this.tokens[at]} (${at}): ${what} ${signedText(sums[at], digits)}`;
      button.setAttribute("aria-pressed", String(at === position));
    });
    this.rove(position === null ? 0 : position - this.first);
    const chosen = position === null || position === this.shown ? null : this.buttons[position - this.first];
    this.shown = position;
    if (!chosen) return;
    const [low, high] = [chosen.offsetTop - this.node.offsetTop, chosen.offsetTop - this.node.offsetTop + chosen.offsetHeight];
    if (low < this.node.scrollTop || high > this.node.scrollTop + this.node.clientHeight) this.node.scrollTop = low - this.node.clientHeight / 2;
  }

  rove(index) {
    this.buttons.forEach((button, i) => {
      button.tabIndex = i === Math.max(0, index) ? 0 : -1;
    });
  }

  key(event) {
    const at = this.buttons.indexOf(event.target);
    const to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: this.buttons.length - 1 }[event.key];
    if (at < 0 || to === undefined || !this.buttons[to]) return;
    event.preventDefault();
    this.rove(to);
    this.buttons[to].focus();
  }
}

/** Round positions between two bounds. */
function roundTicks(low, high, most) {
  if (!(high > low)) return [low];
  const raw = (high - low) / most;
  const unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * unit).find((s) => s >= raw);
  const out = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) out.push(Number((k * step).toPrecision(12)));
  return out;
}

/** How direct effects add up to the metric, from left to right. */
class Waterfall {
  /** @param {{choose: (component: string, layer: number) => void}} on */
  constructor(on, disposer) {
    this.on = on;
    this.node = make("div", { class: "mappnb-expl-waterfall" });
    disposer.listen(this.node, "click", (event) => {
      const bar = event.target.closest("[data-step]");
      if (bar) this.choose(Number(bar.dataset.step));
    });
  }

  choose(index) {
    const [, component, layer] = this.steps[index] || [];
    if (component) this.on.choose(component, layer);
  }

  draw(steps, { metric, digits, width, where }) {
    this.steps = steps;
    const [left, right, top, bottom, height] = [44, 8, 8, 34, 190];
    const ends = [0];
    for (const [, , , value] of steps) ends.push(ends[ends.length - 1] + value);
    const low = Math.min(0, ...ends);
    const high = Math.max(0, ...ends);
    const pad = (high - low || 1) * 0.06;
    const y = (v) => top + ((high + pad - v) / (high - low + 2 * pad)) * (height - top - bottom);
    const each = (width - left - right) / (steps.length + 1);
    const x = (i) => left + i * each;
    const svg = makeSvg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": this.words(steps, metric, digits) });
    for (const tick of roundTicks(low, high, 4)) {
      svg.append(makeSvg("line", { x1: left, x2: width - right, y1: y(tick), y2: y(tick), class: tick === 0 ? "mappnb-expl-zero" : "mappnb-expl-grid" }));
      svg.append(makeSvg("text", { x: left - 5, y: y(tick) + 4, "text-anchor": "end", text: String(tick).replace("-", "−") }));
    }
    const gap = Math.min(3, each * 0.15);
    steps.forEach(([name, component, layer, value], i) => {
      const chosen = where.layer !== null && where.layer === layer && [component, "all"].includes(where.component) && component;
      const [a, b] = [y(ends[i]), y(ends[i + 1])];
      const kind = component ? effectClass(value) : "mappnb-expl-rest";
      const bar = makeSvg("rect", { x: x(i) + gap, width: Math.max(1, each - 2 * gap), y: Math.min(a, b), height: Math.max(1, Math.abs(a - b)), class: `mappnb-expl-bar ${kind}${chosen ? " mappnb-expl-chosen" : ""}` });
      const hit = makeSvg("rect", { x: x(i), width: each, y: top, height: height - top - bottom, class: "mappnb-expl-hit", "data-step": i }, [
        makeSvg("title", { text: `${name}: ${signedText(value, digits)}, then ${signedText(ends[i + 1], digits)}` }),
      ]);
      svg.append(bar, makeSvg("line", { x1: x(i) + gap, x2: x(i + 1) + gap, y1: b, y2: b, class: "mappnb-expl-link" }), hit);
    });
    const total = makeSvg("rect", { x: x(steps.length) + gap, width: Math.max(1, each - 2 * gap), y: Math.min(y(0), y(metric)), height: Math.max(1, Math.abs(y(0) - y(metric))), class: "mappnb-expl-total" });
    svg.append(total, makeSvg("title", { text: this.words(steps, metric, digits) }));
    this.label(svg, { steps, x, each, height, bottom });
    const key = this.letters ? "A: attention, M: MLP." : "For each layer its attention, then its MLP.";
    this.node.replaceChildren(svg, make("div", { class: "mappnb-muted", text: `${key} Sum: the metric.` }));
  }

  /** Names below the bars: one for each layer, as many as have room. */
  label(svg, { steps, x, each, height, bottom }) {
    const groups = [];
    steps.forEach(([name, component, layer], i) => {
      const last = groups[groups.length - 1];
      if (layer >= 0 && last && last.layer === layer) last.to = i + 1;
      else groups.push({ layer, from: i, to: i + 1, name: layer >= 0 ? `L${layer}` : { embed: "emb", "": "rest" }[component] || "bias" });
    });
    groups.push({ layer: -2, from: steps.length, to: steps.length + 1, name: "sum" });
    const letters = each >= 13 && groups.some((g) => g.to - g.from > 1);
    let free = -Infinity;
    this.letters = letters;
    const row = (text, at, y) => svg.append(makeSvg("text", { x: at, y, "text-anchor": "middle", text }));
    for (const { layer, from, to, name } of groups) {
      const at = (x(from) + x(to)) / 2;
      if (letters && layer >= 0) for (let i = from; i < to; i++) row({ head: "A", mlp: "M" }[steps[i][1]] || "", x(i) + each / 2, height - bottom + 13);
      const half = name.length * 3 + (each < 12 ? 3 : 1);
      if (at - half < free) continue;
      row(name, at, height - bottom + (letters ? 27 : 14));
      free = at + half;
    }
  }

  words(steps, metric, digits) {
    const largest = [...steps].sort((a, b) => Math.abs(b[3]) - Math.abs(a[3])).slice(0, 3);
    const said = largest.map(([name, , , value]) => `${name} ${signedText(value, digits)}`).join(", ");
    return `Direct effects add up to ${signedText(metric, digits)}; the largest: ${said}`;
  }
}

/** Attribution (what was predicted) against real ablation. */
class CheckPlot {
  /** @param {{pick: (label: number) => void}} on */
  constructor(on, disposer) {
    this.on = on;
    this.node = make("div", { class: "mappnb-expl-check" });
    disposer.listen(this.node, "click", (event) => {
      const at = event.target.closest("[data-row]");
      if (at) this.on.pick(Number(at.dataset.row));
    });
  }

  draw(told, { width, row }) {
    const side = Math.min(width, 300);
    const [left, right, top, bottom] = [48, 10, 8, 34];
    const height = Math.round(side * 0.8);
    const all = [...told.predicted, ...told.real];
    const ends = (values) => {
      const [low, high] = [Math.min(...values, 0), Math.max(...values, 0)];
      const pad = (high - low || 1) * 0.08;
      return [low - pad, high + pad];
    };
    const [xs, ys] = [ends(told.predicted), ends(told.real)];
    const x = (v) => left + ((v - xs[0]) / (xs[1] - xs[0])) * (side - left - right);
    const y = (v) => height - bottom - ((v - ys[0]) / (ys[1] - ys[0])) * (height - top - bottom);
    const digits = digitsFor(largestOf(all));
    const svg = makeSvg("svg", { width: side, height, viewBox: `0 0 ${side} ${height}`, role: "img", "aria-label": `${told.rows.length} components: attribution against real ablation. ${CheckPlot.words(told)}` });
    for (const tick of roundTicks(...ys, 4)) {
      svg.append(makeSvg("line", { x1: left, x2: side - right, y1: y(tick), y2: y(tick), class: tick === 0 ? "mappnb-expl-zero" : "mappnb-expl-grid" }));
      svg.append(makeSvg("text", { x: left - 5, y: y(tick) + 4, "text-anchor": "end", text: String(tick).replace("-", "−") }));
    }
    for (const tick of roundTicks(...xs, 4)) {
      svg.append(makeSvg("line", { x1: x(tick), x2: x(tick), y1: top, y2: height - bottom, class: tick === 0 ? "mappnb-expl-zero" : "mappnb-expl-grid" }));
      svg.append(makeSvg("text", { x: x(tick), y: height - bottom + 14, "text-anchor": "middle", text: String(tick).replace("-", "−") }));
    }
    const [from, to] = [Math.max(xs[0], ys[0]), Math.min(xs[1], ys[1])];
    svg.append(makeSvg("line", { x1: x(from), y1: y(from), x2: x(to), y2: y(to), class: "mappnb-expl-equal" }));
    svg.append(makeSvg("text", { x: (left + side - right) / 2, y: height - 4, "text-anchor": "middle", text: "attribution (predicted)" }));
    svg.append(makeSvg("text", { transform: `translate(11 ${(height - bottom + top) / 2}) rotate(-90)`, "text-anchor": "middle", text: "real ablation" }));
    told.rows.forEach(([label, component, layer, unit, position, token], i) => {
      const name = `${componentName(component, layer, unit)} at ${position} “${token}”: predicted ${signedText(told.predicted[i], digits)}, real ${signedText(told.real[i], digits)}`;
      const dot = makeSvg("circle", { cx: x(told.predicted[i]), cy: y(told.real[i]), r: label === row ? 6 : 4, class: `mappnb-expl-dot${label === row ? " mappnb-expl-chosen" : ""}`, "data-row": label }, [makeSvg("title", { text: name })]);
      svg.append(dot);
    });
    const rows = told.rows.map(([, component, layer, unit, position, token], i) => [
      `${componentName(component, layer, unit)} at ${position} “${token}”`, signedText(told.predicted[i], digits), signedText(told.real[i], digits),
    ]);
    const list = make("details", {}, [make("summary", { text: "As a table" }), ...dataTable("Attribution and real ablation", ["component", "predicted", "real"], rows)]);
    this.node.replaceChildren(svg, make("p", { class: "mappnb-expl-said", text: CheckPlot.words(told) }), list);
  }

  static words({ correlation, ratio }) {
    if (correlation === null) return "No correlation: the values do not vary.";
    return `Correlation ${correlation.toFixed(2)}${ratio === null ? "" : `; real = ${ratio.toFixed(2)} × predicted`}. Dashed: as predicted.`;
  }
}
