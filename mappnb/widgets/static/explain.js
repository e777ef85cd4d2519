/* The explain view: tokens, waterfall, maps, ranked rows, the picked row, a check. One request of a kind in flight, the newest wins. */

/** One view in one element. */
class ExplainView {
  constructor(model, el) {
    this.model = model;
    this.disposer = new Disposer();
    this.busy = { ablate: null, level: false, check: false };
    this.traced = new Set();
    this.checked = null;
    this.build(el);
    this.connection = new Connection(model, {
      message: (content) => this.onMessage(content),
      busy: (busy) => this.status.setBusy(busy),
      error: (kind, text) => this.failed(kind, text),
      success: (kind) => this.errors.clear(kind),
    });
    watchTheme(this.root, this.disposer, () => this.draw());
    this.connection.request("ready", { theme: this.theme });
  }

  get theme() {
    return this.root.dataset.mappnbTheme;
  }

  build(el) {
    const { disposer } = this;
    this.root = make("div", { class: "mappnb-root mappnb-expl", "data-lm-suppress-shortcuts": "true" });
    this.errors = new ErrorLine(disposer);
    this.status = new StatusLine();
    this.codePanel = new Panel("Code", disposer);
    this.crumbs = make("nav", { class: "mappnb-expl-crumbs", "aria-label": "Way back" });
    disposer.listen(this.crumbs, "click", (event) => {
      const button = event.target.closest("button");
      if (button) this.askLevel(JSON.parse(button.dataset.path));
    });
    this.metric = make("span", { class: "mappnb-expl-metric" });
    const code = toolButton("Copy code", "Copy the Python line that makes this view again", disposer, () => this.copy());
    this.why = make("p", { class: "mappnb-expl-why", role: "note", hidden: true });
    this.strip = new TokenStrip({ choose: (position) => this.change({ position: this.where.position === position ? null : position }) }, disposer);
    this.stripSaid = make("div", { class: "mappnb-muted mappnb-expl-key" });
    this.choices = new ExplainChoices({ change: (changes) => this.change(changes) }, disposer);
    this.picked = new PickedPanel({ ablate: (label) => this.ablate(label), upstream: (label) => this.upstream(label) }, disposer);
    this.rows = new RankedRows({ pick: (l) => this.pick(l), ablate: (l) => this.ablate(l), upstream: (l) => this.upstream(l), back: () => this.back() }, disposer, Boolean(this.model.isStatic));
    this.waterfall = new Waterfall({ choose: (component, layer) => this.change({ component, layer: layer < 0 ? null : layer, position: null }) }, disposer);
    this.fallBox = make("div", {}, [make("div", { class: "mappnb-expl-label", text: "Direct effects, added up" }), this.waterfall.node]);
    const map = (name, title) => new EffectMap(title, { choose: (layer, position) => this.change({ component: name, layer, position }) }, disposer);
    this.maps = { head: map("head", "Heads of a layer, by token"), mlp: map("mlp", "MLPs, by token") };
    this.check = toolButton("Check 20", "Ablate 20 components for real: half the largest attributions, half at random", disposer, () => this.runCheck());
    this.checkPlot = new CheckPlot({ pick: (label) => this.pickRoot(label) }, disposer);
    const checkHead = make("div", { class: "mappnb-expl-checkhead" }, [make("span", { class: "mappnb-expl-label", text: "How good is the attribution here?" }), this.check]);
    this.checkBox = make("section", { "aria-label": "Check" }, [checkHead, this.checkPlot.node]);
    const head = make("div", { class: "mappnb-expl-head" }, [this.crumbs, this.metric, make("span", { class: "mappnb-space" }), code]);
    this.side = make("div", { class: "mappnb-expl-side" }, [this.fallBox, this.maps.head.node, this.maps.mlp.node, this.checkBox]);
    const main = make("div", { class: "mappnb-expl-main" }, [this.choices.node, this.picked.node, this.rows.node]);
    this.body = make("div", { class: "mappnb-expl-body", hidden: true }, [main, this.side]);
    this.root.append(head, this.why, this.errors.node, this.strip.node, this.stripSaid, this.body, this.codePanel.node, this.status.node);
    el.append(this.root);
    // An output cell of JupyterLab takes the arrow keys from lists otherwise.
    disposer.listen(this.root, "keydown", (event) => event.stopPropagation());
    disposer.observe(new ResizeObserver(() => {
      if (this.side.clientWidth !== this.width) this.drawSide();
    }), this.root);
  }

  // Messages

  onMessage(content) {
    if (content.kind === "state") this.begin(content);
    else if (content.kind === "goto") this.goto(content.where);
    else if (content.kind === "ablated") this.takeAblation(content);
    else if (content.kind === "checked") this.takeCheck(content);
    else if (content.kind === "note") this.status.say(content.text);
    else if (content.kind === "close") this.close();
  }

  failed(kind, text) {
    this.errors.show(kind, text);
    if (kind in this.busy) this.busy[kind] = kind === "ablate" ? null : false;
    this.draw();
  }

  begin(state) {
    this.state = state;
    this.traced = new Set(state.traced.map((path) => path.join("/")));
    this.checked = state.check;
    this.why.textContent = state.readonly;
    this.why.hidden = !state.readonly;
    this.strip.build(state.tokens);
    this.goto(state.where);
  }

  goto(where) {
    if (!this.table || JSON.stringify(where.path) !== JSON.stringify(this.table.path)) this.askLevel(where.path, where, false);
    else {
      this.where = where;
      this.draw();
      if (this.table.left > 0) this.fetch();
    }
  }

  /** Look at another table, at `where` in it; tell: the kernel does not know of that place yet. */
  askLevel(path, where = null, tell = true) {
    this.busy.level = true;
    this.draw();
    this.connection.request("level", { path }, (content, arrays) => {
      this.busy.level = false;
      const cameFrom = this.table && path.length < this.table.path.length ? this.table.path[path.length] : null;
      this.table = new ExplainTable(content, arrays);
      if (path.length) this.traced.add(path.join("/"));
      this.where = where || { by: "attribution", component: "all", layer: null, position: null, row: cameFrom, path };
      this.body.hidden = false;
      if (tell) this.tellWhere();
      this.status.say(this.table.root ? this.state.title : `${content.crumbs[content.crumbs.length - 1][1]}: ${this.table.count} components before it`);
      this.draw();
    });
  }

  tellWhere() {
    this.connection.notify("go", this.where);
  }

  // Choices

  change(changes) {
    if (!this.table) return;
    this.where = { ...this.where, ...changes };
    this.tellWhere();
    this.draw();
    if (this.table.left > 0 && !("row" in changes)) this.fetch();
  }

  /** Get rows of this choice that stayed in the kernel. */
  fetch() {
    if (this.model.isStatic) return;
    this.connection.request("rows", this.where, (content, arrays) => {
      if (JSON.stringify(content.path) !== JSON.stringify(this.table.path) || !this.table.merge(content, arrays)) return;
      this.rows.table = null;
      this.draw();
    });
  }

  pick(label) {
    this.change({ row: this.where.row === label ? null : label });
    const i = this.where.row === null ? undefined : this.table.place.get(label);
    if (i !== undefined) this.status.say(`${this.table.name(i)}, ${this.where.by.replace("_", " ")} ${this.table.text(this.table.value(i, this.where.by))}`);
  }

  /** Pick a row of the explanation itself. */
  pickRoot(label) {
    const where = { by: "attribution", component: "all", layer: null, position: null, row: label, path: [] };
    if (this.table.root) this.change(where);
    else this.askLevel([], where);
  }

  back() {
    const { path } = this.table;
    if (path.length) this.askLevel(path.slice(0, -1));
    else if (this.where.row !== null) this.change({ row: null });
  }

  // What runs the model

  ablate(label) {
    if (this.busy.ablate !== null || this.table.ablated.has(label)) return;
    if (this.where.row !== label) this.change({ row: label });
    if (this.picked.ablate.disabled) return;
    this.busy.ablate = label;
    this.draw();
    this.connection.request("ablate", { row: label, path: this.table.path }, (content) => {
      this.busy.ablate = null;
      this.takeAblation(content);
    });
  }

  takeAblation({ path, row, real, predicted }) {
    if (JSON.stringify(path) === JSON.stringify(this.table.path)) {
      this.table.ablated.set(row, real);
      this.table.predicted.set(row, predicted === null ? NaN : predicted);
      const i = this.table.place.get(row);
      if (i !== undefined) this.status.say(`${this.table.name(i)} ablated: ${this.table.text(real)}${predicted === null ? "" : `, predicted ${this.table.text(predicted)}`}`);
    }
    this.draw();
  }

  upstream(label) {
    if (this.busy.level) return;
    if (this.where.row !== label) this.change({ row: label });
    if (!this.picked.upstream.disabled) this.askLevel([...this.table.path, label]);
  }

  runCheck() {
    this.busy.check = true;
    this.draw();
    this.connection.request("check", { n: 20 }, (content) => {
      this.busy.check = false;
      this.takeCheck(content);
      this.status.say(`${content.rows.length} components ablated. ${CheckPlot.words(content)}`);
    });
  }

  takeCheck(told) {
    this.checked = told;
    if (this.table.root) told.rows.forEach(([label], i) => this.table.ablated.set(label, told.real[i]));
    this.draw();
  }

  copy() {
    copyLine(this);
  }

  // Drawing

  draw() {
    if (this.disposer.done || !this.table) return;
    const { state, table, where } = this;
    this.drawHead();
    const what = where.by.replace("_", " ");
    this.strip.draw(table.strip(where), { position: where.position, digits: table.digits, what, stops: this.stops });
    this.choices.take(state, table, where);
    this.picked.take(this);
    this.rows.take(table, where, state.tokens);
    this.drawSide();
    this.check.disabled = this.busy.check || Boolean(state.readonly);
    this.check.textContent = this.busy.check ? "Ablating 20…" : "Check 20";
    this.check.setAttribute("aria-busy", String(this.busy.check));
  }

  get stops() {
    return this.state.palette[this.theme];
  }

  drawHead() {
    const { state, table } = this;
    const last = table.crumbs.length - 1;
    const parts = table.crumbs.flatMap(([path, title], i) => {
      const button = make("button", { type: "button", class: "mappnb-expl-crumb", dir: "auto", text: title, disabled: i === last });
      button.dataset.path = JSON.stringify(path);
      return i ? [make("span", { class: "mappnb-muted", text: "›", "aria-hidden": "true" }), button] : [button];
    });
    if (this.crumbs.textContent !== parts.map((p) => p.textContent).join("")) this.crumbs.replaceChildren(...parts);
    const what = table.root ? `${table.text(state.metric)}, unexplained ${Math.abs(state.unexplained) < 1e-4 ? state.unexplained.toExponential(0).replaceAll("-", "−") : table.text(state.unexplained)}` : "shares in the component's own effect on the metric";
    this.metric.textContent = what;
    const key = (kind, text) => make("span", { class: "mappnb-expl-keyed" }, [make("span", { class: `mappnb-swatch ${kind}`, "aria-hidden": "true" }), make("span", { text })]);
    const [wanted, other] = state.question.split(" instead of ");
    const which = this.where.component === "all" ? "embeddings, heads and MLPs" : (table.components.find(([n]) => n === this.where.component) || ["", ""])[1];
    this.stripSaid.replaceChildren(
      key("mappnb-expl-for", `for ${wanted}`), key("mappnb-expl-against", other ? `for ${other}` : `against ${wanted}`),
      make("span", { text: `Tokens: ${this.where.by.replace("_", " ")} of ${which} at each position, summed.` }),
    );
  }

  drawSide() {
    if (!this.table || this.body.hidden) return;
    const { table, where, state } = this;
    this.width = this.side.clientWidth;
    const width = Math.max(200, this.width - parseFloat(getComputedStyle(this.side).paddingLeft || "0"));
    this.fallBox.hidden = !table.waterfall;
    if (table.waterfall) this.waterfall.draw(table.waterfall, { metric: state.metric, digits: table.digits, width, where });
    const values = { head: table.arrays[`head_${where.by}`], mlp: table.arrays[`mlp_${where.by}`] };
    const look = { edges: table.arrays.edges, tokens: state.tokens, digits: table.digits, stops: this.stops, colours: themeColours(this.root), width, top: Math.max(largestOf(values.head), largestOf(values.mlp)) };
    for (const [name, map] of Object.entries(this.maps)) {
      const chosen = where.component === name && (where.layer !== null || where.position !== null) ? { layer: where.layer, column: where.position === null ? null : this.columnOf(where.position) } : null;
      map.draw(values[name], { ...look, chosen, what: name === "head" ? "heads" : "MLP" });
    }
    this.checkBox.hidden = Boolean(state.readonly) && !this.checked;
    this.check.hidden = Boolean(state.readonly);
    if (this.checked) this.checkPlot.draw(this.checked, { width, row: table.root ? where.row : null });
  }

  columnOf(position) {
    const { edges } = this.table.arrays;
    let column = 0;
    while (column + 2 < edges.length && edges[column + 1] <= position) column += 1;
    return column;
  }

  // End

  dispose() {
    removeView(this);
  }

  close() {
    closeView(this);
  }
}

/**
 * Entry point: draw an explanation for a model into an element.
 * @returns {() => void} what undoes it
 */
function renderExplain({ model, el }) {
  return showView(new ExplainView(model, el), model);
}
