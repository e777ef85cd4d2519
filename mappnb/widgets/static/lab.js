/* The schedule lab: knobs, a lane per schedule, plots and numbers. One request in flight, the newest wins. */

/** One lab in one element. */
class ScheduleLab {
  constructor(model, el) {
    this.model = model;
    this.disposer = new Disposer();
    this.lanes = new Map();
    this.touched = new Map();
    this.state = null;
    this.shining = null;
    this.build(el);
    this.connection = new Connection(model, {
      message: (content, arrays) => this.onMessage(content, arrays),
      busy: (busy) => this.status.setBusy(busy),
      error: (kind, text) => this.errors.show(kind, text),
      success: (kind) => this.errors.clear(kind),
    });
    watchTheme(this.root, this.disposer, () => this.restyle());
    this.connection.request("ready", { theme: this.root.dataset.mappnbTheme });
  }

  build(el) {
    this.root = make("div", { class: "mappnb-root mappnb-lab", "data-lm-suppress-shortcuts": "true" });
    this.errors = new ErrorLine(this.disposer);
    this.status = new StatusLine();
    this.title = make("span", { class: "mappnb-lab-title" });
    this.says = make("p", { class: "mappnb-lab-says", role: "note", hidden: true });
    this.controls = new LabControls(this.disposer, (name, value) => this.set(name, value), (names) => this.choose(names));
    this.codePanel = new Panel("Code of this lab", this.disposer);
    this.plots = new LabPlots({
      hovered: (t) => this.hovered(t === null ? null : t * this.units.ns, null),
      shine: (label) => this.shine(label),
      pick: () => this.shining && this.pick(this.shining),
    });
    const fit = toolButton("Whole step", "Show the whole step again (0)", this.disposer, () => this.fit());
    const code = toolButton("Copy code", "Copy the Python line that makes this lab again", this.disposer, () => this.copyCode());
    this.chooser = make("div", { class: "mappnb-lab-where" });
    this.head = make("div", { class: "mappnb-lab-head" }, [this.title, this.chooser, make("span", { class: "mappnb-space" }), fit, code]);
    this.laneBox = make("div", { class: "mappnb-lab-lanes" });
    this.key = make("div", { class: "mappnb-lab-key" });
    this.memoryHead = make("div", { class: "mappnb-lab-subhead" });
    const right = make("div", { class: "mappnb-lab-main" }, [this.laneBox, this.key, this.memoryHead, this.plots.memory]);
    const body = make("div", { class: "mappnb-lab-body" }, [this.controls.node, right]);
    this.barKey = make("div", { class: "mappnb-lab-key" });
    const two = make("div", { class: "mappnb-lab-two" }, [
      make("div", {}, [make("div", { class: "mappnb-lab-subhead", text: "Step against memory" }), this.plots.pareto]),
      make("div", {}, [make("div", { class: "mappnb-lab-subhead", text: "Where a step goes" }), this.plots.bars, this.barKey]),
    ]);
    this.table = make("div", { class: "mappnb-lab-table" });
    this.root.append(this.head, this.says, this.errors.node, body, this.table, two, this.codePanel.node, this.status.node);
    el.append(this.root);
    // An output cell of JupyterLab takes the arrow keys from sliders otherwise.
    this.disposer.listen(this.root, "keydown", (event) => event.stopPropagation());
  }

  // Messages

  onMessage(content, arrays) {
    if (content.lane !== undefined) return;
    if (content.kind === "state" || content.kind === "set" || content.kind === "choose") this.take(content, arrays);
    else if (content.kind === "pick") this.takePick(content, arrays);
    else if (content.kind === "note") this.status.say(content.text);
    else if (content.kind === "close") this.close();
  }

  /** Everything that the kernel computed. */
  take(content, arrays) {
    if (content.controls) this.begin(content);
    this.state = content;
    const busy = new Set(this.connection.waiting.has("set") ? this.touched.keys() : []);
    if (!this.connection.waiting.has("set")) this.touched.clear();
    this.controls.take(content.values, busy);
    this.controls.takeChosen(content.chosen);
    this.says.textContent = content.says;
    this.says.hidden = !content.says;
    this.takeLanes(content.lanes);
    for (const told of content.windows || []) this.takeWindow(told, arrays);
    this.showTable(content.table);
    this.plots.patch(unpackColumns(content.plots, arrays));
    this.showPicked(content.selected);
  }

  begin(content) {
    this.units = content.units;
    this.legend = content.legend;
    this.title.textContent = content.title;
    const enabled = !this.model.isStatic;
    this.controls.build(content.controls, content.choices, enabled);
    this.chooser.replaceChildren(...(enabled ? [this.controls.chooser] : []));
    this.paintLegend();
    withBokeh(this, () => this.drawPlots());
  }

  drawPlots() {
    if (!this.bokeh || this.disposer.done) return;
    const ground = cssColour(themeColours(this.root).background);
    this.connection.request("figures", { theme: this.root.dataset.mappnbTheme, ground }, (content) => {
      this.plots.draw(this.bokeh, content.figures).catch((err) => this.errors.show("figures", `plots: ${err.message || err}`));
    });
  }

  restyle() {
    this.paintLegend();
    if (this.state) this.takeLanes(this.state.lanes);
    if (this.state) this.showTable(this.state.table);
    this.drawPlots();
  }

  // Lanes

  takeLanes(lanes) {
    const wanted = lanes.map((l) => l.label);
    const same = wanted.join("|") === [...this.lanes.keys()].join("|");
    if (!same) this.rebuildLanes(lanes);
    lanes.forEach((told) => {
      const { lane, head, why } = this.lanes.get(told.label);
      const { name, text } = head;
      name.style.setProperty("--mappnb-series", this.colourOf(told));
      text.textContent = told.says;
      this.sayWhy(why, told.why);
      lane.host.hidden = Boolean(told.meta.empty) && !lane.withAxis;
      if (lane.told !== told) lane.take(told);
    });
    this.paintKey(lanes);
  }

  /** Why it cannot run or does not fit: the first paragraph, the grid behind a button. */
  sayWhy(node, text) {
    node.hidden = !text;
    if (node.dataset.text === text) return;
    node.dataset.text = text;
    const [first, ...rest] = String(text).split("\n\n");
    const more = rest.length ? [make("details", {}, [make("summary", { text: "where" }), make("pre", { text: rest.join("\n\n"), tabindex: "0" })])] : [];
    node.replaceChildren(make("span", { text: first, dir: "auto" }), ...more);
  }

  /** The spans of a lane came with the answer: it need not ask. */
  takeWindow(told, arrays) {
    const found = this.lanes.get(told.label);
    const mine = Object.entries(arrays).filter(([name]) => name.startsWith(told.prefix));
    if (found) found.lane.takeSpans(told, Object.fromEntries(mine.map(([name, array]) => [name.slice(told.prefix.length), array])));
  }

  rebuildLanes(lanes) {
    for (const { lane } of this.lanes.values()) this.drop(lane);
    this.lanes.clear();
    const nodes = lanes.map((told, i) => {
      const model = this.model.laneModel ? this.model.laneModel(told.label) : new LaneModel(this.model, told.label);
      const lane = new LabLane(this, told, model, i === 0);
      const name = make("button", { type: "button", class: "mappnb-lab-name", title: "Show its memory", disabled: !told.pickable }, [
        make("span", { class: "mappnb-lab-mark", "aria-hidden": "true" }), make("span", { text: told.label, dir: "auto" }),
      ]);
      name.onclick = () => this.pick(told.label);
      const text = make("span", { class: "mappnb-lab-says-lane" });
      const why = make("div", { class: "mappnb-lab-why", hidden: true });
      const box = make("section", { class: "mappnb-lab-lane", "aria-label": told.label }, [make("div", { class: "mappnb-lab-lane-head" }, [name, text]), why, lane.host]);
      this.lanes.set(told.label, { lane, head: { name, text }, why, box });
      return box;
    });
    this.laneBox.replaceChildren(...nodes);
    for (const { lane } of this.lanes.values()) lane.resize();
  }

  drop(lane) {
    lane.dispose();
    if (lane.model.close) lane.model.close();
  }

  colourOf(told) {
    return told.colours ? told.colours[this.root.dataset.mappnbTheme === "dark" ? 1 : 0] : "transparent";
  }

  /** The colours of the passes that are there. */
  paintKey(lanes) {
    const dark = this.root.dataset.mappnbTheme === "dark";
    const there = new Map();
    for (const { meta } of lanes) {
      for (const c of meta.categories) if (meta.present.includes(c.name)) there.set(c.name, dark ? c.dark : c.light);
    }
    const said = [...there].map(([name, colour]) => this.keyEntry(name, colour));
    const text = make("span", { class: "mappnb-muted", text: "3F0: stage 3, forward, microbatch 0. Click a lane to see its memory." });
    this.key.replaceChildren(...said, text);
  }

  keyEntry(name, colour) {
    const swatch = make("span", { class: "mappnb-swatch", "aria-hidden": "true" });
    swatch.style.background = colour;
    return make("span", { class: "mappnb-lab-key-entry" }, [swatch, make("span", { text: name })]);
  }

  paintLegend() {
    if (!this.legend) return;
    const dark = this.root.dataset.mappnbTheme === "dark" ? 2 : 1;
    this.barKey.replaceChildren(...this.legend.map((entry) => this.keyEntry(entry[0], entry[dark])));
  }

  /** One lane was zoomed or moved: the others and the memory plot follow. */
  zoomed(source) {
    for (const { lane } of this.lanes.values()) if (lane !== source) lane.follow(source);
    const { t0, t1 } = source.state.view;
    if (this.units) this.plots.showRange(t0 / this.units.ns, t1 / this.units.ns);
  }

  /** The pointer is at a time (ns; null: nowhere) of one lane or, without one, of the memory plot. */
  hovered(t, source) {
    for (const { lane } of this.lanes.values()) if (lane !== source) lane.markTime(t);
    if (source) this.plots.markTime(t === null ? null : t / this.units.ns);
  }

  fit() {
    const first = this.lanes.values().next().value;
    if (first) first.lane.state.glide(...first.lane.state.wholeView());
  }

  // Choices

  set(name, value) {
    this.touched.set(name, value);
    this.connection.request("set", { values: Object.fromEntries(this.touched), view: this.view() }, (content, arrays) => this.take(content, arrays));
  }

  /** What the lanes show: width, and the range unless it is the whole step. */
  view() {
    const lane = [...this.lanes.values()].map((l) => l.lane).find((l) => l.state.loaded && l.state.meta.rows.length);
    if (!lane) return null;
    const { t0, t1 } = lane.state.target;
    return { pixels: Math.round(lane.geometry.plot.w), ...(lane.isWhole() ? { t0: null, t1: null } : { t0, t1 }) };
  }

  choose(names) {
    this.connection.request("choose", { names }, (content, arrays) => this.take(content, arrays));
  }

  pick(label) {
    this.connection.request("pick", { label }, (content, arrays) => this.takePick(content, arrays));
  }

  takePick(content, arrays) {
    this.plots.patch(unpackColumns(content.plots, arrays));
    if (this.state) this.state.selected = content.selected;
    this.showPicked(content.selected);
  }

  showPicked(label) {
    const unit = this.units ? `, ${this.units.memory} over time, by rank` : "";
    this.memoryHead.textContent = `Memory of ${label || "none"}${unit}`;
    for (const [name, { box, head }] of this.lanes) {
      box.classList.toggle("mappnb-lab-picked", name === label);
      head.name.setAttribute("aria-pressed", String(name === label));
    }
    for (const row of this.table.querySelectorAll("tbody tr")) row.classList.toggle("mappnb-lab-picked", row.dataset.label === label);
  }

  /** Let one schedule stand out everywhere. */
  shine(label) {
    if (label === this.shining) return;
    this.shining = label;
    for (const [name, { box }] of this.lanes) box.classList.toggle("mappnb-lab-shines", name === label);
    for (const row of this.table.querySelectorAll("tbody tr")) row.classList.toggle("mappnb-lab-shines", row.dataset.label === label);
  }

  // Numbers

  showTable({ columns, rows }) {
    const lines = rows.map((row) => {
      const tr = make("tr", {}, [this.rowHead(row), ...row.cells.slice(1).map((text, i) => this.cell(text, i, row))]);
      tr.dataset.label = row.label;
      return tr;
    });
    const table = make("table", { class: "mappnb-table" }, [
      make("caption", { class: "mappnb-hidden-text", text: "Numbers of each schedule" }),
      make("thead", {}, [make("tr", {}, columns.map((c) => make("th", { scope: "col", text: c })))]),
      make("tbody", {}, lines),
    ]);
    const scroll = make("div", { class: "mappnb-lab-scroll", tabindex: "0", role: "region", "aria-label": "Numbers of each schedule" }, [table]);
    scroll.onpointerover = (event) => this.shine((event.target.closest("tbody tr") || { dataset: { label: null } }).dataset.label);
    scroll.onpointerleave = () => this.shine(null);
    this.table.replaceChildren(scroll);
    if (this.state) this.showPicked(this.state.selected);
  }

  rowHead(row) {
    const mark = make("span", { class: "mappnb-lab-mark", "aria-hidden": "true" });
    const told = this.state && this.state.lanes.find((l) => l.label === row.label);
    if (told) mark.style.setProperty("--mappnb-series", this.colourOf(told));
    return make("th", { scope: "row" }, [mark, make("span", { text: row.label, dir: "auto" })]);
  }

  cell(text, i, row) {
    const last = i === row.cells.length - 2;
    const cell = make("td", { text, class: last && !row.fits ? "mappnb-lab-no" : null });
    if (last && row.why) cell.title = row.why;
    return cell;
  }

  copyCode() {
    this.connection.request("code", {}, async (content) => {
      const copied = await copyText(content.text, this.codePanel);
      this.status.say(copied ? "code copied" : "the code is selected: copy it with Ctrl+C");
    });
  }

  // End

  dispose() {
    for (const { lane } of this.lanes.values()) this.drop(lane);
    this.plots.clear();
    removeView(this);
  }

  close() {
    for (const { lane } of this.lanes.values()) lane.close();
    closeView(this, "lab");
  }
}

/**
 * Entry point: draw a lab for a model into an element.
 * @returns {() => void} what undoes it
 */
function renderLab({ model, el }) {
  return showView(new ScheduleLab(model, el), model);
}
