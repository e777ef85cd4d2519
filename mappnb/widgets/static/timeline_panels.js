/* Everything of the timeline that is not canvas: toolbar, search, legend, tooltip, details, table, help. */

/** The text beside the pointer or the keyboard's span. */
class Tooltip {
  constructor(stage) {
    this.stage = stage;
    this.node = make("div", { class: "mappnb-tip", role: "tooltip", hidden: true });
    stage.append(this.node);
  }

  /** Show a title and fields near (x, y), inside the stage. */
  show(x, y, title, fields, colour) {
    const swatch = make("span", { class: "mappnb-swatch", "aria-hidden": "true" });
    if (colour) swatch.style.background = colour;
    const head = make("div", { class: "mappnb-tip-title" }, [swatch, make("span", { text: title, dir: "auto" })]);
    this.node.replaceChildren(head, fieldList(fields));
    this.node.hidden = false;
    const { offsetWidth: w, offsetHeight: h } = this.node;
    const left = x + 14 + w > this.stage.clientWidth ? Math.max(4, x - w - 14) : x + 14;
    const below = y + 16 + h <= Math.max(this.stage.clientHeight, h + 8);
    this.node.style.left = `${left}px`;
    this.node.style.top = `${below ? y + 16 : Math.max(4, y - h - 12)}px`;
  }

  hide() {
    this.node.hidden = true;
  }
}

/** Toolbar, legend and panels of one view. `app` is the Timeline. */
class TimelinePanels {
  constructor(app, disposer) {
    this.app = app;
    this.disposer = disposer;
    this.cancelTyping = () => {};
    this.search = this.buildSearch();
    this.toolbar = this.buildToolbar();
    this.legend = make("div", { class: "mappnb-legend", role: "group", "aria-label": "Categories: press to hide or show" });
    this.legendUndo = [];
    this.selectionText = make("span", { class: "mappnb-selection", dir: "auto" });
    this.rangeText = make("span", { class: "mappnb-selection", dir: "auto" });
    this.note = make("span", { class: "mappnb-note", dir: "auto" });
    this.line = make("div", { class: "mappnb-line", "aria-live": "polite" }, [this.selectionText, this.rangeText, this.note]);
    const back = () => app.focus();
    this.details = new Panel("Details", disposer, back);
    this.range = new Panel("Measured range", disposer, back);
    this.table = new Panel("Visible spans", disposer, back);
    this.code = new Panel("Code of this view", disposer, back);
    this.help = new HelpOverlay(TIMELINE_HELP, disposer, back);
  }

  button(label, title, onClick, attributes) {
    return toolButton(label, title, this.disposer, onClick, { "aria-label": title, ...attributes });
  }

  buildSearch() {
    const input = make("input", {
      type: "search", class: "mappnb-input", placeholder: "Search spans", "aria-label": "Search spans, /…/ for an expression",
      title: "Part of a name, or /expression/. Enter: next hit, Shift+Enter: previous", spellcheck: "false", autocomplete: "off",
    });
    const hits = make("span", { class: "mappnb-hits", "aria-live": "polite" });
    const error = make("span", { class: "mappnb-search-error", role: "alert", dir: "auto" });
    this.disposer.listen(input, "input", () => this.typed());
    this.disposer.listen(input, "keydown", (event) => this.searchKey(event));
    return { input, hits, error };
  }

  buildToolbar() {
    const { app, search } = this;
    const go = (way) => () => app.requests.search(search.input.value, way);
    const step = (way) => () => app.requests.step(way);
    const middle = () => (app.state.target.t0 + app.state.target.t1) / 2;
    this.hitButtons = [["‹", "Previous hit", "previous"], ["›", "Next hit", "next"]].map(([label, title, way]) =>
      this.button(label, title, go(way), { disabled: true }));
    this.stepGroup = this.group("Steps", [
      make("span", { class: "mappnb-group-label", text: "Step" }),
      this.button("‹", "Previous step (P)", step("previous")),
      this.button("›", "Next step (N)", step("next")),
      this.button("Slowest", "Slowest step (B)", step("worst")),
    ]);
    const zoom = this.group("Zoom", [
      this.button("−", "Zoom out (S)", () => app.state.zoom(1 / 1.6, middle(), true)),
      this.button("+", "Zoom in (W)", () => app.state.zoom(1.6, middle(), true)),
      this.button("Fit", "Fit the selection, or all (F)", () => app.fit()),
    ]);
    this.grouping = make("select", { class: "mappnb-input", "aria-label": "Group rows by", title: "Group rows by (G)" });
    this.disposer.listen(this.grouping, "change", () => app.requests.options({ group_by: this.groupValue() }));
    this.flowButton = this.button("Flows", "Lines between matched calls of the selected span", () => app.toggleFlows(), {
      "aria-pressed": "true",
    });
    this.measureButton = this.button("Measure", "Measure a range by dragging (M)", () => app.setMeasureMode(!app.measureMode), {
      "aria-pressed": "false",
    });
    return make("div", { class: "mappnb-toolbar", role: "toolbar", "aria-label": "Timeline" }, [
      this.group("Search", [
        make("span", { class: "mappnb-search" }, [search.input, search.hits]), ...this.hitButtons, search.error,
      ]),
      this.stepGroup,
      zoom,
      make("span", { class: "mappnb-space" }),
      this.grouping,
      this.measureButton,
      this.flowButton,
      this.button("Table", "What is visible, as a table (T)", () => this.toggleTable()),
      this.button("Copy code", "Copy the code for this view (C)", () => app.copyCode()),
      this.button("?", "Keys and gestures (?)", () => this.help.toggle()),
    ]);
  }

  group(label, children) {
    return make("div", { class: "mappnb-group", role: "group", "aria-label": label }, children);
  }

  /** Take over what meta says: legend, groupings, note. */
  setMeta(meta) {
    this.stepGroup.hidden = meta.steps.number.length === 0;
    this.note.textContent = meta.note || "";
    this.flowButton.setAttribute("aria-pressed", String(this.app.state.flowsOn));
    const options = meta.group_options || [];
    this.grouping.replaceChildren(...options.map((value) => make("option", { value: String(value), text: groupText(value) })));
    this.grouping.value = String(meta.group_by);
    this.grouping.hidden = options.length < 2;
    this.buildLegend(meta);
  }

  buildLegend(meta) {
    for (const undo of this.legendUndo.splice(0)) undo();
    this.legend.replaceChildren(...meta.categories.map((c, i) => this.legendButton(c, i)));
    this.paintLegend();
  }

  legendButton(category, index) {
    const swatch = make("span", { class: `mappnb-swatch${category.hatch ? " mappnb-hatch" : ""}`, "aria-hidden": "true" });
    const button = make("button", { type: "button", class: "mappnb-key", title: `Hide or show ${category.name}` }, [
      swatch, make("span", { text: category.name.replace(/_/g, " "), dir: "auto" }),
    ]);
    const { present } = this.app.state.meta;
    button.hidden = Boolean(present) && !present.includes(category.name) && !this.app.state.hidden[index];
    this.legendUndo.push(this.disposer.listen(button, "click", () => this.app.toggleCategory(index)));
    return button;
  }

  /** Colours and states of the legend; again after a change of theme. */
  paintLegend() {
    const { look, state } = this.app;
    [...this.legend.children].forEach((button, i) => {
      if (look && look.cats[i]) button.firstChild.style.backgroundColor = look.cats[i].css;
      button.setAttribute("aria-pressed", String(!state.hidden[i]));
    });
  }

  groupValue() {
    return this.app.state.meta.group_options[this.grouping.selectedIndex];
  }

  nextGrouping() {
    const options = this.app.state.meta.group_options;
    if (options.length < 2) return;
    this.grouping.selectedIndex = (this.grouping.selectedIndex + 1) % options.length;
    this.app.requests.options({ group_by: this.groupValue() });
    this.app.say(`grouped by ${groupText(this.groupValue())}`);
  }

  focusSearch() {
    this.search.input.focus();
    this.search.input.select();
  }

  typed() {
    this.cancelTyping();
    this.cancelTyping = this.disposer.timer(() => this.app.requests.search(this.search.input.value, "first"), 220);
  }

  searchKey(event) {
    if (event.key === "Enter") {
      event.preventDefault();
      this.cancelTyping();
      const text = this.search.input.value;
      const fresh = text !== this.app.state.search.text;
      this.app.requests.search(text, fresh ? "first" : event.shiftKey ? "previous" : "next");
    } else if (event.key === "Escape") {
      event.preventDefault();
      this.clearSearch();
      this.app.focus();
    }
    event.stopPropagation();
  }

  clearSearch() {
    this.cancelTyping();
    this.search.input.value = "";
    this.app.requests.search("", "first");
  }

  showSearching() {
    this.search.hits.classList.add("mappnb-waiting");
  }

  showSearch() {
    const { text, hits, position, error } = this.app.state.search;
    this.search.hits.classList.remove("mappnb-waiting");
    this.search.hits.textContent = text === "" ? "" : hits ? `${position} / ${hits}` : "no hits";
    this.search.error.textContent = error;
    this.search.input.setAttribute("aria-invalid", String(Boolean(error)));
    for (const button of this.hitButtons) button.disabled = hits === 0;
  }

  showSelection(text) {
    this.selectionText.textContent = text;
  }

  showDetails(content) {
    this.details.title.textContent = content.title || "Details";
    this.details.show(fieldList(content.fields));
  }

  showRange(content) {
    this.rangeText.textContent = content.text || "";
    if (content.fields && content.fields.length) this.range.show(fieldList(content.fields));
  }

  clearRange() {
    this.rangeText.textContent = "";
    this.range.hide();
  }

  toggleTable() {
    if (this.table.open) {
      this.table.hide();
      this.app.focus();
      return;
    }
    this.app.requests.table((content) => {
      this.showTable(content);
      this.table.body.querySelector(".mappnb-scroll").focus();
    });
  }

  showTable(content) {
    this.table.show(...dataTable("Visible spans", content.columns || [], content.rows || [], content.more));
  }

  /** The view has moved: the open table follows, unless the reader is in it. */
  refreshTable() {
    if (this.table.open && !this.table.node.contains(document.activeElement)) this.app.requests.table((c) => this.showTable(c));
  }
}

/** A grouping's name for people. */
function groupText(value) {
  return value === null || value === "" || value === "none" ? "not grouped" : `by ${String(value)}`;
}
