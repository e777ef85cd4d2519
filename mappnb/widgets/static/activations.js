/* The activation views: choices above, panels, what is picked beside them, tables below. The kernel says what there is. */

/** One view in one element. */
class ActivationsView {
  constructor(model, el) {
    this.model = model;
    this.disposer = new Disposer();
    this.figures = [];
    this.details = [];
    this.turn = 0;
    this.build(el);
    this.connection = new Connection(model, {
      message: (content) => this.onMessage(content),
      busy: (busy) => this.status.setBusy(busy),
      error: (kind, text) => this.errors.show(kind, text),
      success: (kind) => this.errors.clear(kind),
    });
    watchTheme(this.root, this.disposer, () => this.restyle());
    this.connection.request("ready", { theme: this.root.dataset.mappnbTheme });
  }

  build(el) {
    this.root = make("div", { class: "mappnb-root mappnb-acts", "data-lm-suppress-shortcuts": "true" });
    this.errors = new ErrorLine(this.disposer);
    this.status = new StatusLine();
    this.codePanel = new Panel("Code", this.disposer);
    this.fields = make("div", { class: "mappnb-acts-fields" });
    this.refresh = toolButton("Refresh", "Look again at what the job has written", this.disposer, () => this.connection.notify("refresh"));
    this.refresh.hidden = true;
    const code = toolButton("Copy code", "Copy the Python line that makes this view again", this.disposer, () => copyLine(this));
    this.title = make("span", { class: "mappnb-hidden-text" });
    const head = make("div", { class: "mappnb-acts-head" }, [this.title, this.fields, this.refresh, code]);
    this.main = make("div", { class: "mappnb-acts-panels" });
    this.caption = make("p", { class: "mappnb-muted mappnb-acts-caption", dir: "auto" });
    this.tables = make("div", { class: "mappnb-acts-tables" });
    this.side = make("section", { class: "mappnb-acts-side", "aria-label": "What is chosen" });
    const left = make("div", { class: "mappnb-acts-main" }, [this.main, this.caption, this.tables]);
    this.body = make("div", { class: "mappnb-acts-body" }, [left, this.side]);
    this.root.append(head, this.errors.node, this.body, this.codePanel.node, this.status.node);
    el.append(this.root);
    // An output cell of JupyterLab takes the arrow keys from lists otherwise.
    this.disposer.listen(this.root, "keydown", (event) => event.stopPropagation());
  }

  onMessage(content) {
    if (content.kind === "state") this.begin(content);
    else if (content.kind === "goto") this.show({});
    else if (content.kind === "picked") this.pick(content.pick);
    else if (content.kind === "note") this.status.say(content.text);
    else if (content.kind === "close") this.shut();
  }

  begin(state) {
    this.state = state;
    this.root.classList.add(`mappnb-acts-${state.name}`);
    this.title.textContent = state.title;
    this.refresh.hidden = !state.live;
    this.where = state.where;
    this.empty();
    withBokeh(this, () => this.show({}));
  }

  look() {
    return { theme: this.root.dataset.mappnbTheme, ground: cssColour(themeColours(this.root).background) };
  }

  // Panels

  show(changes, then = null) {
    this.connection.request("show", { changes, ...(this.model.isStatic ? { where: this.where } : {}), ...this.look() }, (content) => this.take(content, then));
  }

  async take(told, then) {
    const turn = ++this.turn;
    this.where = told.where;
    this.told = told;
    this.showFields(told.fields);
    this.caption.textContent = told.caption;
    this.clear(this.figures);
    this.figures = told.panels.map((panel) => this.figure(panel));
    this.main.replaceChildren(...this.figures.map(({ box }) => box));
    this.tables.replaceChildren(...told.tables.map((table) => activationTable(table, (pick) => this.jump(pick))));
    await this.drawAll(this.figures);
    if (turn !== this.turn || this.disposer.done) return;
    if (told.pick) this.pick(told.pick);
    else if (!then) this.empty();
    if (then) then();
    this.drawn = turn;
  }

  figure(told) {
    if (told.kind === "table") return { box: activationTable(told, (pick) => this.jump(pick)), drawing: null };
    const on = { pick: (panel, place) => this.pick({ panel, ...place }) };
    const kinds = { heat: HeatFigure, scatter: ScatterFigure };
    let drawing;
    if (told.kind === "grid") drawing = new TokenGrid(on, this.disposer, told);
    else drawing = kinds[told.kind] ? new kinds[told.kind](on, this.disposer, told) : new Chart(told);
    const label = told.kind === "grid" ? [] : [make("div", { class: "mappnb-acts-label", text: told.title, dir: "auto" })];
    return { box: make("div", { class: `mappnb-acts-panel mappnb-acts-${told.kind}` }, [...label, drawing.node]), drawing };
  }

  async drawAll(figures) {
    for (const { drawing } of figures) {
      if (!drawing) continue;
      try {
        await drawing.show(this.bokeh);
      } catch (err) {
        this.errors.show("show", `figure: ${err.message || err}`);
      }
    }
  }

  clear(figures) {
    for (const { drawing } of figures) if (drawing) drawing.clear();
  }

  showFields(fields) {
    const keys = JSON.stringify(fields.map(({ key, options }) => [key, options]));
    if (keys !== this.fieldKeys) {
      this.fieldKeys = keys;
      this.selects = fields.map((field) => this.select(field));
      this.fields.replaceChildren(...this.selects.map(({ label }) => label));
    }
    fields.forEach(({ options, value }, i) => { this.selects[i].select.selectedIndex = options.findIndex(([v]) => v === value); });
  }

  select({ key, label, options }) {
    const select = make("select", { class: "mappnb-input", "aria-label": label }, options.map(([, text]) => make("option", { text: visibleSpaces(text) })));
    select.onchange = () => this.show({ [key]: options[select.selectedIndex][0] });
    return { select, label: make("label", { class: "mappnb-acts-field" }, [make("span", { class: "mappnb-muted", text: label, "aria-hidden": "true" }), select]) };
  }

  // What is picked

  /** Go where a row of a table says. */
  jump({ changes, ...pick }) {
    const wanted = Object.entries(changes || {}).some(([key, value]) => this.where[key] !== value);
    if (wanted) this.show(changes, () => this.pick(pick));
    else this.pick(pick);
  }

  pick(place) {
    const where = this.model.isStatic ? { where: this.where } : {};
    this.connection.request("pick", { ...place, ...where, ...this.look() }, (content) => this.takePick(content, place));
  }

  async takePick(told, place) {
    for (const { drawing } of this.figures) if (drawing && !(drawing instanceof Chart)) drawing.mark(place);
    this.picked = place;
    this.clear(this.details);
    this.details = told.panels.map((panel) => this.figure(panel));
    const open = told.timeline && !this.model.isStatic ? [this.timelineButton()] : [];
    this.side.replaceChildren(make("div", { class: "mappnb-acts-title", text: told.title, dir: "auto" }), fieldList(told.fields.map(([k, v]) => [k, visibleSpaces(v)])), ...open, ...this.details.map(({ box }) => box));
    this.status.say(told.title);
    await this.drawAll(this.details);
    this.shown = told;
  }

  timelineButton() {
    const button = make("button", { type: "button", class: "mappnb-button", text: "Timeline", title: "Copy the line that opens a timeline at this step" });
    button.onclick = () => copyLine(this, "timeline");
    return button;
  }

  empty() {
    this.clear(this.details);
    this.details = [];
    this.picked = null;
    this.status.say("");
    this.side.replaceChildren(make("p", { class: "mappnb-muted", text: `${this.state.hint}.` }));
  }

  restyle() {
    if (!this.bokeh || this.disposer.done || !this.told) return;
    const { picked } = this;
    this.show({}, picked ? () => this.pick(picked) : null);
  }

  // End

  dispose() {
    this.clear(this.figures);
    this.clear(this.details);
    removeView(this);
  }

  shut() {
    closeView(this);
  }
}

/**
 * Entry point: draw an activation view for a model into an element.
 * @returns {() => void} what undoes it
 */
function renderActivations({ model, el }) {
  return showView(new ActivationsView(model, el), model);
}
