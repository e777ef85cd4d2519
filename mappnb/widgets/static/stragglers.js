/* The stragglers view: heatmap, verdicts, evidence, prices. One request of a kind in flight, the newest wins. */

/** One view in one element. */
class StragglersView {
  constructor(model, el) {
    this.model = model;
    this.disposer = new Disposer();
    this.picked = { ranks: [], steps: null, verdict: null, op: null };
    this.build(el);
    this.connection = new Connection(model, {
      message: (content) => this.onMessage(content),
      busy: (busy) => this.status.setBusy(busy),
      error: (kind, text) => this.failed(kind, text),
      success: (kind) => this.errors.clear(kind),
    });
    watchTheme(this.root, this.disposer, () => this.restyle());
    this.connection.request("ready", { theme: this.theme });
  }

  get theme() {
    return this.root.dataset.mappnbTheme;
  }

  build(el) {
    this.root = make("div", { class: "mappnb-root mappnb-strag", "data-lm-suppress-shortcuts": "true" });
    this.errors = new ErrorLine(this.disposer);
    this.status = new StatusLine();
    this.bar = new StragglerBar({ go: (changes) => this.go(changes) }, this.disposer);
    this.heat = new HeatBox({ choose: (r, c) => this.choose(r, c), enter: (r, c) => this.enter(r, c), up: () => this.up() }, this.disposer);
    this.verdicts = new VerdictList({ verdict: (index) => this.pick({ verdict: index }) });
    this.evidence = new EvidencePanel({ inside: (told) => this.go({ rank: told.ranks[0], step: null }), timeline: () => this.timeline(), metric: (key) => this.colour(key) });
    this.prices = new PricePanel({ prices: (by) => this.wantPrices(by) });
    this.codePanel = new Panel("Code", this.disposer);
    this.refresh = toolButton("Refresh", "Look again at what the job has written", this.disposer, () => this.connection.notify("refresh"));
    this.refresh.hidden = true;
    const code = toolButton("Copy code", "Copy the Python line that makes this view again", this.disposer, () => copyLine(this));
    this.title = make("span", { class: "mappnb-hidden-text" });
    const head = make("div", { class: "mappnb-strag-head" }, [this.title, this.bar.crumbs, make("span", { class: "mappnb-space" }), this.bar.choices, this.refresh, code]);
    this.why = make("p", { class: "mappnb-strag-why", role: "note", hidden: true, dir: "auto" });
    this.label = make("div", { class: "mappnb-strag-label" });
    this.caption = make("p", { class: "mappnb-muted mappnb-strag-caption" });
    this.key = make("div", { class: "mappnb-strag-key" });
    const main = make("div", { class: "mappnb-strag-main" }, [this.label, this.heat.node, this.key, this.caption]);
    this.body = make("div", { class: "mappnb-strag-body", hidden: true }, [main, this.verdicts.node, this.evidence.node, this.prices.node]);
    this.root.append(head, this.why, this.errors.node, this.body, this.codePanel.node, this.status.node);
    el.append(this.root);
    // An output cell of JupyterLab takes the arrow keys from lists otherwise.
    this.disposer.listen(this.root, "keydown", (event) => event.stopPropagation());
  }

  // Messages

  onMessage(content) {
    if (content.kind === "state") this.begin(content);
    else if (content.kind === "goto") this.askHeat(content.where);
    else if (content.kind === "picked") this.pick({ ranks: content.ranks, steps: content.steps, verdict: content.verdict, op: content.op }, true);
    else if (content.kind === "marked") this.heat.mark({ ...this.picked, ranks: this.allRanks(), steps: content.steps });
    else if (content.kind === "note") this.status.say(content.text);
    else if (content.kind === "close") this.close();
  }

  failed(kind, text) {
    this.errors.show(kind, text);
    if (kind === "prices") this.prices.failed();
  }

  begin(state) {
    this.title.textContent = state.title;
    this.refresh.hidden = !state.live;
    this.why.textContent = state.why ? `Nothing to judge: ${state.why}` : "";
    this.why.hidden = !state.why;
    this.body.hidden = Boolean(state.why);
    if (state.why) return;
    this.where = state.where;
    this.bar.build(state.options);
    withBokeh(this, () => {
      this.askHeat({});
      this.connection.request("verdicts", {}, (content) => this.takeVerdicts(content));
      const { picked } = state;
      if (picked && (picked.ranks.length || picked.verdict !== null)) this.pick(picked);
    });
  }

  look() {
    return { theme: this.theme, ground: cssColour(themeColours(this.root).background) };
  }

  // The heatmap

  go(changes) {
    this.askHeat({ ...this.where, ...changes });
  }

  askHeat(where) {
    const asked = { ...this.where, ...where };
    this.connection.request("heat", { where: asked, ...this.look() }, (content) => this.takeHeat(content));
  }

  async takeHeat(told) {
    this.where = told.where;
    this.bar.take(told);
    this.caption.textContent = told.caption;
    this.label.textContent = told.level === "step" ? "Operations: the rank above, its peers below" : told.level === "rank" ? `Parts by step: ${told.label}` : `Colour: ${told.label}`;
    try {
      if (!(await this.heat.show(this.bokeh, told))) return;
    } catch (err) {
      this.errors.show("heat", `heatmap: ${err.message || err}`);
      return;
    }
    this.heat.mark(this.picked);
    this.judge();
    if (told.level === "step") this.pick({ ranks: [told.where.rank], steps: [told.where.step, told.where.step] });
    else if (told.level === "rank" && !(this.picked.ranks.length === 1 && this.picked.ranks[0] === told.where.rank)) this.pick({ ranks: [told.where.rank] });
  }

  takeVerdicts(told) {
    this.verdicts.take(told);
    this.verdicts.mark(this.picked.verdict);
    this.judge();
  }

  judge() {
    const seen = this.heat.judge(this.verdicts.rows);
    const marks = ["culprit", "undecided", "victim"].filter((v) => seen.has(v) && (v === "culprit" || this.heat.rows <= 80));
    const colours = ((this.heat.told && this.heat.told.legend) || []).map((entry) => this.swatch(entry));
    this.key.replaceChildren(...marks.map((v) => make("span", { class: "mappnb-strag-key-entry" }, [verdictSign(v), make("span", { text: v })])), ...colours);
  }

  swatch([name, light, dark]) {
    const box = make("span", { class: "mappnb-swatch", "aria-hidden": "true" });
    box.style.background = this.theme === "dark" ? dark : light;
    return make("span", { class: "mappnb-strag-key-entry" }, [box, make("span", { text: name })]);
  }

  allRanks() {
    return this.heat.told ? this.heat.told.rows.flatMap((r) => r.ranks) : [];
  }

  choose(row, col) {
    const { told } = this.heat;
    if (told.bars) return this.pick({ ranks: [told.where.rank], steps: [told.where.step, told.where.step], op: row });
    const steps = col < 0 ? null : told.columns[col].slice(0, 2);
    return this.pick({ ranks: told.rows[row].ranks, steps });
  }

  enter(row, col) {
    const { told } = this.heat;
    if (told.level === "rank") {
      if (col >= 0) this.go({ step: told.columns[col][2] });
    } else this.go({ host: null, rank: null, step: null, ...(told.level === "host" ? { host: told.where.host } : {}), ...told.rows[row].into });
  }

  up() {
    const { told } = this.heat;
    if (told && told.crumbs.length > 1) this.go(told.crumbs[told.crumbs.length - 2].to);
  }

  colour(key) {
    const level = this.heat.told ? this.heat.told.level : "all";
    this.go({ metric: key, ...(level === "all" || level === "host" ? {} : { host: null, rank: null, step: null }) });
  }

  // Selection

  /** Select; silent: the kernel knows already, only the evidence is wanted. */
  pick(what) {
    const body = { ranks: [], steps: null, verdict: null, op: null, ...what };
    if (body.verdict === null && !body.ranks.length) {
      this.picked = body;
      this.heat.mark(body);
      this.verdicts.mark(null);
      this.evidence.empty();
      return;
    }
    this.connection.request("pick", body, (content) => this.takePick(content, body));
  }

  takePick(told, asked) {
    this.picked = { ...asked, ranks: told.ranks, steps: told.steps };
    const { told: drawn } = this.heat;
    const absent = drawn && asked.verdict !== null && !drawn.bars && !drawn.rows.some((r) => r.ranks.some((k) => told.ranks.includes(k)));
    if (asked.verdict !== null && drawn && (drawn.bars || absent || drawn.level === "rank")) this.go({ host: null, rank: null, step: null });
    else this.heat.mark(this.picked);
    this.verdicts.mark(asked.verdict);
    this.evidence.take(told, this.model.isStatic);
    this.status.say(`${told.title}${told.verdict ? `: ${told.verdict.text}` : ""}`);
  }

  // Prices, timeline, code

  wantPrices(by) {
    this.connection.request("prices", { by, ...this.look() }, (content) => {
      this.prices.take(content, this.bokeh).catch((err) => this.errors.show("prices", `bars: ${err.message || err}`));
    });
  }

  timeline() {
    copyLine(this, "timeline");
  }

  restyle() {
    if (!this.bokeh || this.disposer.done || !this.where) return;
    this.askHeat({});
    if (this.prices.told) this.wantPrices(this.prices.told.by);
  }

  // End

  dispose() {
    this.prices.figure.clear();
    this.heat.clear();
    removeView(this);
  }

  close() {
    closeView(this);
  }
}

/**
 * Entry point: draw a stragglers view for a model into an element.
 * @returns {() => void} what undoes it
 */
function renderStragglers({ model, el }) {
  return showView(new StragglersView(model, el), model);
}
