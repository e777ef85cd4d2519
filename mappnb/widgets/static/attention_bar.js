/* Attention: what is chosen above the pictures: samples, steps, order, colours. */

/** A labelled control. */
function attentionField(label, control) {
  control.setAttribute("aria-label", label);
  return make("label", { class: "mappnb-attn-field" }, [make("span", { class: "mappnb-muted", text: label }), control]);
}

/** A select of [value, words] pairs. */
function attentionSelect(options, value, change) {
  const select = make("select", { class: "mappnb-input" }, options.map(([key, words]) => make("option", { value: key, text: words })));
  select.value = value;
  select.onchange = () => change(select.value);
  return select;
}

/** Choices of the view; each calls back with what changes of the place. */
class AttentionBar {
  /** @param {object} on go(changes), thumbs(which) */
  constructor(on) {
    this.on = on;
    this.node = make("div", { class: "mappnb-attn-bar" });
    this.player = make("div", { class: "mappnb-attn-player", hidden: true });
  }

  build(state) {
    const { options } = state;
    this.state = state;
    const samples = (none) => [...(none ? [["", "none"]] : []), ...state.samples.map((words, i) => [String(i), words])];
    const number = (change, none) => {
      const input = make("input", { class: "mappnb-input mappnb-attn-number", type: "number", min: none ? -1 : 0, max: state.num_samples - 1, step: 1 });
      input.onchange = () => change(input.value);
      return input;
    };
    const toSample = (value) => this.on.go({ sample: Number(value) });
    const toOther = (value) => this.on.go({ compare: value === "" || Number(value) < 0 ? null : Number(value) });
    this.sample = state.samples.length ? attentionSelect(samples(false), "0", toSample) : number(toSample, false);
    this.compare = state.samples.length ? attentionSelect(samples(true), "", toOther) : number(toOther, true);
    this.thumbs = attentionSelect([["a", "A"], ["b", "B"], ["d", "A − B"]], "a", (value) => this.on.thumbs(value));
    this.order = attentionSelect([["layer", "layer and head"]], "layer", (order) => this.on.go({ order }));
    this.scale = attentionSelect(options.scale, "sqrt", (scale) => this.on.go({ scale }));
    this.pool = attentionSelect(options.pool, "max", (pool) => this.on.go({ pool }));
    this.threshold = make("input", { class: "mappnb-input mappnb-attn-number", type: "number", min: 0, max: 0.99, step: 0.01, title: "Weights below are not drawn" });
    this.threshold.onchange = () => this.on.go({ threshold: Math.min(0.99, Math.max(0, Number(this.threshold.value) || 0)) });
    this.fit = make("input", { type: "checkbox", title: "Colours end at the head's largest weight, not at 1" });
    this.fit.onchange = () => this.on.go({ fit: this.fit.checked });
    this.thumbsField = attentionField("thumbnails", this.thumbs);
    const compared = state.num_samples > 1 ? [attentionField("sample A", this.sample), attentionField("B", this.compare), this.thumbsField] : [];
    this.orderField = attentionField("order", this.order);
    const rest = [this.orderField, attentionField("colours", this.scale), attentionField("at least", this.threshold), attentionField("a cell shows", this.pool)];
    const fit = make("label", { class: "mappnb-attn-field" }, [this.fit, make("span", { text: "fit colours" })]);
    this.node.replaceChildren(...compared, ...rest, fit);
  }

  /** The scores by which heads can be ordered. */
  takeScores(scores) {
    const options = [["layer", "layer and head"], ...scores.map(({ name, label }) => [name, label])];
    this.order.replaceChildren(...options.map(([value, text]) => make("option", { value, text })));
    this.orderField.hidden = !scores.length;
  }

  show(where, which) {
    this.sample.value = String(where.sample);
    this.compare.value = where.compare === null ? (this.state.samples.length ? "" : "-1") : String(where.compare);
    this.thumbsField.hidden = where.compare === null;
    this.thumbs.value = which;
    this.order.value = where.order;
    this.scale.value = where.scale;
    this.pool.value = where.pool;
    if (document.activeElement !== this.threshold) this.threshold.value = String(where.threshold);
    this.fit.checked = where.fit;
  }
}

/** Plays through the samples of other steps: one picture after the other, the next when the last has come. */
class StepPlayer {
  /** @param {object} on go(changes), ready() whether everything that was asked for has come */
  constructor(on, disposer) {
    this.on = on;
    this.frames = [];
    this.timer = null;
    this.play = toolButton("▶ Play", "Play through the steps", disposer, () => this.toggle());
    this.slider = make("input", { type: "range", min: 0, max: 0, step: 1, "aria-label": "Step" });
    this.said = make("output", { class: "mappnb-muted" });
    this.node = make("div", { class: "mappnb-attn-player", hidden: true }, [this.play, this.slider, this.said]);
    disposer.listen(this.slider, "input", () => this.go(Number(this.slider.value)));
    disposer.add(() => this.stop());
  }

  show(frames, sample) {
    const keep = this.frames.some(([position]) => position === sample) && frames.length === this.frames.length;
    if (!keep) this.frames = frames;
    this.at = Math.max(0, this.frames.findIndex(([position]) => position === sample));
    this.node.hidden = this.frames.length < 2;
    if (this.node.hidden) return this.stop();
    this.slider.max = String(this.frames.length - 1);
    this.slider.value = String(this.at);
    const text = `step ${this.frames[this.at][1]}`;
    this.slider.setAttribute("aria-valuetext", text);
    this.said.textContent = `${text} (${this.at + 1} of ${this.frames.length})`;
    return undefined;
  }

  go(at) {
    this.at = at;
    this.on.go({ sample: this.frames[at][0] });
  }

  toggle() {
    if (this.timer) return this.stop();
    if (this.at >= this.frames.length - 1) this.go(0);
    this.timer = setInterval(() => this.tick(), 350);
    this.play.textContent = "❚❚ Pause";
    return undefined;
  }

  tick() {
    if (!this.on.ready()) return;
    if (this.at + 1 >= this.frames.length) this.stop();
    else this.go(this.at + 1);
  }

  stop() {
    clearInterval(this.timer);
    this.timer = null;
    this.play.textContent = "▶ Play";
  }
}
