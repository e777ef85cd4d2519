/* The attention view: heads, one head, its tokens. What is missing is asked for when it is drawn; the newest request of a kind wins. */

const ATTENTION_HELP = [
  ["All heads", [["← ↑ → ↓", "go to another head"], ["Enter", "open it"]]],
  ["One head", [
    ["← ↑ → ↓", "move over queries and keys"], ["Enter", "choose the query: what does it attend to?"], ["Shift ←→↑↓", "next head, next layer"],
    ["+ −", "zoom"], ["0", "all tokens"], ["Esc", "back to all heads"],
  ]],
  ["Pointer", [["click", "choose a query"], ["drag", "move, when zoomed"], ["wheel", "zoom, with Ctrl or after a click"], ["double click", "all tokens"]]],
];

/** One view in one element. */
class AttentionView {
  constructor(model, el) {
    this.model = model;
    this.disposer = new Disposer();
    this.cursor = null;
    this.axis = "query";
    this.which = "a";
    this.state = null;
    this.pending = false;
    this.fines = {};
    this.atlases = new NewestMap(24);
    this.stats = { draws: [] };
    this.build(el);
    this.connection = new Connection(model, {
      message: (content) => this.onMessage(content),
      busy: (busy) => this.status.setBusy(busy),
      error: (kind, text) => this.failed(kind, text),
      success: (kind) => this.errors.clear(kind),
    });
    this.store = new AnswerStore(this.connection, () => this.redraw());
    watchTheme(this.root, this.disposer, () => this.redraw());
    this.disposer.observe(new ResizeObserver(() => this.redraw()), this.root);
    this.connection.request("ready", { theme: this.root.dataset.mappnbTheme });
  }

  build(el) {
    const { disposer } = this;
    this.root = make("div", { class: "mappnb-root mappnb-attn", "data-lm-suppress-shortcuts": "true" });
    this.errors = new ErrorLine(disposer);
    this.status = new StatusLine();
    this.bar = new AttentionBar({ go: (changes) => this.go(changes), thumbs: (which) => this.setThumbs(which) });
    this.player = new StepPlayer({ go: (changes) => this.go(changes), ready: () => this.store.idle }, disposer);
    this.grid = new HeadGrid({ open: (index) => this.open(index), close: () => this.close(), moved: (index) => this.moved(index), words: (index) => this.headWords(index), redraw: () => this.redraw() }, disposer);
    this.scores = new ScorePanel({ open: (index) => this.open(index), order: (order) => this.go({ order }), wanted: () => { this.scoresWanted = true; this.redraw(); } });
    const shared = {
      cursor: (at, keyed) => this.setCursor(at, keyed), query: (q) => this.choose(q), window: (w) => this.setWindow(w), close: () => this.close(),
      step: (heads, layers) => this.step(heads, layers), state: () => ({ cursor: this.cursor }), words: (at) => this.cellWords(at), redraw: () => this.redraw(),
    };
    this.boxes = ["a", "b", "d"].map((name) => ({ name, heat: new HeatBox(name, shared, disposer), lines: new LineBox(name, shared, disposer) }));
    this.keys = [new ColourKey(), new ColourKey()];
    this.strips = ["a", "b"].map(() => new TokenStrip({ query: (q) => this.choose(q), hover: (q) => this.setCursor(q === null ? null : [q, q]), close: () => this.close() }, disposer));
    this.codePanel = new Panel("Code", disposer);
    this.help = new HelpOverlay(ATTENTION_HELP, disposer, () => this.helpButton.focus());
    this.arrange(el);
  }

  arrange(el) {
    const { disposer } = this;
    this.title = make("h2", { class: "mappnb-attn-title" });
    this.helpButton = toolButton("?", "Keys and gestures", disposer, () => this.help.toggle(), { "aria-label": "Keys and gestures" });
    const code = toolButton("Copy code", "Copy the Python line that makes this view again", disposer, () => this.copy());
    const head = make("div", { class: "mappnb-attn-head" }, [this.title, make("span", { class: "mappnb-space" }), code, this.helpButton]);
    this.caption = make("p", { class: "mappnb-muted mappnb-attn-caption" });
    this.overview = make("section", { class: "mappnb-attn-overview", "aria-label": "All heads" }, [this.grid.node, this.caption, this.scores.node]);
    this.back = toolButton("← All heads", "Back to all heads (Esc)", disposer, () => this.close());
    this.headTitle = make("h3", { class: "mappnb-attn-title" });
    this.modes = [["heat", "Heatmap"], ["lines", "Lines"]].map(([mode, words]) => toolButton(words, `Draw as ${words.toLowerCase()}`, disposer, () => this.go({ mode })));
    this.zoomOut = toolButton("All tokens", "Zoom out to all tokens (0)", disposer, () => this.setWindow(null));
    const detailHead = make("div", { class: "mappnb-attn-head" }, [this.back, this.headTitle, make("span", { class: "mappnb-group" }, this.modes), this.zoomOut]);
    this.facts = make("p", { class: "mappnb-muted mappnb-attn-caption" });
    this.figures = make("div", { class: "mappnb-attn-figures" });
    this.cell = make("div", { class: "mappnb-attn-cell", dir: "auto" });
    this.said = make("div", { class: "mappnb-hidden-text", "aria-live": "polite" });
    this.axes = [["query", "attends to"], ["key", "is attended by"]].map(([axis, words]) => toolButton(words, axis === "query" ? "Colour the tokens that the chosen one attends to" : "Colour the tokens that attend to the chosen one", disposer, () => this.setAxis(axis)));
    this.stripTitle = make("span", { class: "mappnb-attn-strip-title", dir: "auto" });
    this.clear = toolButton("Clear", "Choose no token", disposer, () => this.choose(null));
    const stripHead = make("div", { class: "mappnb-attn-head" }, [this.stripTitle, make("span", { class: "mappnb-group" }, this.axes), this.clear]);
    this.stripNames = ["A", "B"].map((text) => make("span", { class: "mappnb-muted", text }));
    const strips = this.strips.map((strip, i) => make("div", { class: "mappnb-attn-strip-row" }, [this.stripNames[i], strip.node]));
    this.weights = make("div", { class: "mappnb-attn-weights-box" });
    const main = make("div", { class: "mappnb-attn-main" }, [this.figures, this.weights]);
    const keys = make("div", { class: "mappnb-attn-keys" }, this.keys.map(({ node }) => node));
    this.detail = make("section", { class: "mappnb-attn-detail", "aria-label": "One head", hidden: true }, [
      detailHead, this.facts, main, this.cell, keys, stripHead, ...strips, this.said,
    ]);
    this.body = make("div", { class: "mappnb-attn-body" }, [this.overview, this.detail]);
    this.root.append(head, this.bar.node, this.player.node, this.errors.node, this.body, this.codePanel.node, this.status.node, this.help.node);
    el.append(this.root);
    // An output cell of JupyterLab takes the arrow keys from lists otherwise.
    disposer.listen(this.root, "keydown", (event) => event.stopPropagation());
  }

  // Messages

  onMessage(content) {
    if (content.kind === "state") this.begin(content);
    else if (content.kind === "goto") this.moveTo(content.where);
    else if (content.kind === "note") this.status.say(content.text);
    else if (content.kind === "close") this.shut();
  }

  failed(kind, text) {
    this.errors.show(kind, text);
    if (this.store) this.store.failed(kind);
    this.redraw();
  }

  begin(state) {
    this.state = state;
    this.where = state.where;
    this.bar.build(state);
    this.redraw();
  }

  // The place

  /** Change the place, tell the kernel, draw. */
  go(changes) {
    const where = { ...this.where, ...changes };
    const lost = changes.sample !== undefined && changes.sample !== this.where.sample && !this.alikeNow(changes.sample);
    if (lost) Object.assign(where, { query: null, window: null });
    this.where = where;
    this.connection.notify("go", where);
    this.redraw();
  }

  /** Whether a sample is known to have as many tokens as the one that is shown. */
  alikeNow(sample) {
    const [now, then] = [this.tokens(this.where.sample), this.tokens(sample)];
    return Boolean(now && then && now.texts.length === then.texts.length) || this.player.frames.some(([position]) => position === sample);
  }

  moveTo(where) {
    this.where = where;
    this.cursor = null;
    if (where.compare === null) this.which = "a";
    this.redraw();
  }

  get index() {
    const { layer, head } = this.where;
    return layer === null ? -1 : this.state.layers.indexOf(layer) * this.state.heads.length + this.state.heads.indexOf(head);
  }

  headOf(index) {
    const { layers, heads } = this.state;
    return { layer: layers[Math.floor(index / heads.length)], head: heads[index % heads.length] };
  }

  open(index) {
    this.stats.clicked = performance.now();
    this.grid.show(index);
    this.go(this.headOf(index));
    this.status.say(this.headWords(index).title);
  }

  moved(index) {
    if (this.where.layer !== null) this.open(index);
  }

  close() {
    if (this.where.layer === null) return;
    this.cursor = null;
    this.go({ layer: null, head: null });
    this.draw();
    this.grid.canvas.focus();
  }

  /** The next head or layer. */
  step(byHead, byLayer) {
    const { layers, heads } = this.state;
    const at = [layers.indexOf(this.where.layer) + byLayer, heads.indexOf(this.where.head) + byHead];
    if (layers[at[0]] === undefined || heads[at[1]] === undefined) return;
    this.open(at[0] * heads.length + at[1]);
    this.said.textContent = `layer ${layers[at[0]]}, head ${heads[at[1]]}`;
  }

  choose(query) {
    this.stats.clicked = performance.now();
    this.go({ query: query === this.where.query ? null : query });
  }

  setAxis(axis) {
    this.axis = axis;
    this.redraw();
  }

  setThumbs(which) {
    this.which = which;
    this.redraw();
  }

  setCursor(at, keyed = false) {
    this.cursor = at;
    if (keyed && at) this.said.textContent = this.cellText(at);
    this.redraw();
  }

  setWindow(window) {
    const now = this.tokens(this.where.sample);
    if (!now) return;
    const count = now.texts.length;
    const whole = window && window[0] === 0 && window[2] === 0 && window[1] === count && window[3] === count;
    const next = whole ? null : window;
    if (JSON.stringify(next) === JSON.stringify(this.where.window)) return;
    this.where = { ...this.where, window: next };
    if (this.tellWindow) this.tellWindow();
    this.tellWindow = this.disposer.timer(() => this.connection.notify("go", { window: this.where.window }), 150);
    this.redraw();
  }

  // What there is

  tokens(sample) {
    return this.store.want("tokens", { sample }, (content) => ({ ...content, padding: new Set(content.padding) }));
  }

  /** Thumbnails of a sample (or of a difference) put together; asks for the next part. */
  atlas(sample, compare) {
    const { layers, heads } = this.state;
    const id = JSON.stringify([sample, compare, this.where.pool]);
    let out = this.atlases.get(id) || null;
    for (let first = out ? out.there.indexOf(false) : 0; first >= 0 && first < layers.length;) {
      const part = this.store.want("thumbs", { sample, compare, first, pool: this.where.pool }, (content, { thumbs }) => ({ ...content, thumbs }));
      if (!part) break;
      const area = part.size * part.size;
      out = out || this.atlases.set(id, { id, codes: new Uint8Array(layers.length * heads.length * area), size: part.size, every: part.every, there: layers.map(() => false) });
      out.codes.set(part.thumbs, first * heads.length * area);
      out.there.fill(true, first, first + part.count);
      first += part.count;
    }
    return out;
  }

  /** The pictures of one box: all tokens, and the window where that was too coarse. */
  pictures(name, sample, compare, window) {
    const { layer, head, pool } = this.where;
    const kind = { a: "detail", b: "other", d: "difference" }[name];
    const ask = (part) => this.store.want(kind, { sample, compare, layer, head, window: part, pool }, (content, { codes }) => new PatternPicture(content, codes, compare !== null));
    const whole = ask(null);
    if (!whole) return [];
    if (whole.exact || !window) return [whole];
    const fine = ask(window);
    const key = JSON.stringify([sample, compare, layer, head, pool]);
    if (fine) this.fines[name] = { key, fine };
    const last = this.fines[name]; // shown until a sharper one has come
    return last && last.key === key ? [whole, last.fine] : [whole];
  }

  scoreValues() {
    const wanted = this.state.scores_soon || this.scoresWanted || this.where.order !== "layer";
    if (!wanted) return null;
    return this.store.want("scores", { sample: this.where.sample }, (content, arrays) => ({ list: content.scores, values: arrays }));
  }

  // Words

  headWords(index) {
    const { layer, head } = this.headOf(index);
    const scores = this.lastScores;
    const fields = scores ? scores.list.map(({ name, label, unit }) => [label, `${shortNumber(scores.values[name][index], 3)}${unit ? ` ${unit}` : ""}`]) : [];
    return { title: `Layer ${layer}, head ${head}`, fields };
  }

  cellText([q, k]) {
    const { texts } = this.drawnTokens;
    const values = this.boxes.filter((b) => b.shown).map((b) => `${this.boxNames ? `${this.boxNames[b.name]} ` : ""}${weightText(b.heat.value(q, k), b.name === "d")}`);
    return `${texts[q]} (${this.drawnTokens.slots[q]}) to ${texts[k]} (${this.drawnTokens.slots[k]}): ${values.join(", ")}`;
  }

  cellWords([q, k]) {
    const { texts, slots } = this.drawnTokens;
    const fields = [["query", `${texts[q]}  ·  ${slots[q]}`], ["key", `${texts[k]}  ·  ${slots[k]}`]];
    for (const box of this.boxes.filter((b) => b.shown)) {
      const coarse = box.heat.pictures.length && !box.heat.pictures[box.heat.pictures.length - 1].exact;
      const about = coarse ? `${this.where.pool === "max" || box.name === "d" ? "largest" : "mean"} of the cell ` : "";
      fields.push([this.boxNames ? this.boxNames[box.name] : "weight", `${about}${weightText(box.heat.value(q, k), box.name === "d")}`]);
    }
    return [fieldList(fields)];
  }

  copy() {
    copyLine(this);
  }

  // Drawing

  redraw() {
    if (this.pending || !this.state || this.disposer.done) return;
    this.pending = true;
    this.disposer.frame(() => this.draw());
  }

  look() {
    const { scale, threshold } = this.where;
    return { scale, threshold, top: 1, theme: this.root.dataset.mappnbTheme, palette: this.state.palette, colours: themeColours(this.root) };
  }

  draw() {
    this.pending = false;
    const begun = performance.now();
    const now = this.tokens(this.where.sample);
    if (!now) return;
    const other = this.where.compare === null ? null : this.tokens(this.where.compare);
    this.alike = Boolean(other) && other.texts.length === now.texts.length;
    const opened = this.where.layer !== null;
    this.root.classList.toggle("mappnb-attn-open", opened);
    this.detail.hidden = !opened;
    this.bar.show(this.where, this.which);
    this.player.show(now.frames, this.where.sample);
    const look = this.look();
    const drawDetailFirst = opened ? drawAttentionDetail(this, now, other, look) : true;
    drawAttentionOverview(this, now, look);
    if (drawDetailFirst && this.stats.clicked && this.store.idle) {
      this.stats.clickMs = performance.now() - this.stats.clicked;
      this.stats.clicked = null;
    }
    this.stats.draws.push(performance.now() - begun);
    if (this.stats.draws.length > 100) this.stats.draws.shift();
  }

  // End

  dispose() {
    removeView(this);
  }

  shut() {
    this.player.stop();
    closeView(this);
  }
}

/**
 * Entry point: draw an attention view for a model into an element.
 * @returns {() => void} what undoes it
 */
function renderAttention({ model, el }) {
  return showView(new AttentionView(model, el), model);
}
