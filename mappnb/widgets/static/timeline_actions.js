/* What the reader does with spans: hover, click, keyboard cursor, selection, measuring. Methods of Timeline. */

const TimelineActions = {
  /** What lies at a place of the canvas. */
  hitAt(at) {
    const { state, geometry } = this;
    const t = geometry.timeOf(at.x, state.view);
    const row = geometry.rowAt(at.y, state.scroll);
    const found = { x: at.x, y: at.y, t, row, span: null, cell: null };
    const win = state.window;
    if (row < 0 || !win) return found;
    const slack = (1.5 * (state.view.t1 - state.view.t0)) / geometry.plot.w;
    const i = win.hit(row, t, slack, state.hidden);
    if (i >= 0) found.span = win.span(i);
    else found.cell = win.cell(row, t);
    if (found.cell && state.hidden[found.cell.cat]) found.cell = null;
    return found;
  },

  /** The pointer is at a place (null: outside). */
  hoverAt(at, region) {
    const { state } = this;
    if (!at || (region !== "plot" && region !== "axis")) {
      state.hover = null;
      this.tooltip.hide();
      this.drawOverlay();
      return;
    }
    state.hover = region === "plot" ? this.hitAt(at) : { x: at.x, y: at.y, t: this.geometry.timeOf(at.x, state.view) };
    if (state.hover.span) this.tipOfSpan(state.hover.span, at, () => state.hover && state.hover.span);
    else if (state.hover.cell) this.tipOfCell(state.hover.cell, at);
    else this.tooltip.hide();
    this.drawOverlay();
  },

  categoryOf(index) {
    return this.look.cats[index] || { name: `category ${index}`, css: this.look.muted };
  },

  /** Tooltip of a span: at once what is known here, then what the kernel says if it is still the one shown. */
  tipOfSpan(span, at, current) {
    const category = this.categoryOf(span.cat);
    const title = span.label || category.name;
    const fields = [["category", category.name], ["duration", formatDuration(span.duration)]];
    if (span.flag & FLAG.OPEN) fields.push(["", "not ended"]);
    if (span.flag & FLAG.FAILED) fields.push(["", "failed"]);
    const known = this.requests.described.get(span.event);
    if (known) {
      this.tooltip.show(at.x, at.y, known.title, known.fields, category.css);
      return;
    }
    this.tooltip.show(at.x, at.y, title, fields, category.css);
    this.requests.describe(span.event, (content) => {
      const now = current();
      if (now && now.event === span.event) this.tooltip.show(at.x, at.y, content.title, content.fields, category.css);
    });
  },

  tipOfCell(cell, at) {
    const category = this.categoryOf(cell.cat);
    const share = Math.max(1, Math.round(cell.share * 100));
    const fields = [["busy here", `${share} %`], ["", "many short spans: zoom in to see each"]];
    this.tooltip.show(at.x, at.y, `mostly ${category.name}`, fields, category.css);
  },

  clickAt(at) {
    const { span } = this.hitAt(at);
    if (!span) {
      if (this.state.selected.count || this.state.cursor) this.clearSelection();
      return;
    }
    this.state.cursor = span;
    this.selectCursor();
  },

  /** Select the span of the cursor and show its details. */
  selectCursor() {
    const span = this.state.cursor;
    if (!span) {
      this.say("no span chosen: use [ and ] or click one");
      return;
    }
    this.requests.select({ events: [span.event] });
    this.requests.describe(span.event, (content) => this.panels.showDetails(content));
  },

  clearSelection() {
    this.state.cursor = null;
    this.tooltip.hide();
    this.panels.details.hide();
    this.panels.showSelection("");
    this.requests.select({});
  },

  /** Move the keyboard's cursor to the next (+1) or previous (-1) span of its row. */
  moveCursor(way) {
    const { state, geometry } = this;
    const win = state.window;
    if (!win) return;
    let i = -1;
    if (state.cursor) {
      const now = win.find(state.cursor.event);
      i = now >= 0 ? win.neighbour(now, way, state.hidden) : win.nearest(state.cursor.row, this.middle(), state.hidden);
    } else {
      const [first, last] = geometry.visibleRows(state.scroll);
      for (let row = first; row < last && i < 0; row++) i = win.nearest(row, this.middle(), state.hidden);
    }
    if (i >= 0) this.putCursor(win.span(i));
    else this.say("no further span here: zoom in or move to reach more");
  },

  /** Move the cursor to the nearest span of another row. */
  moveCursorRow(way) {
    const { state } = this;
    const win = state.window;
    if (!win || !state.cursor) {
      this.moveCursor(way);
      return;
    }
    const middle = state.cursor.start + state.cursor.duration / 2;
    for (let row = state.cursor.row + way; row >= win.row0 && row < win.row1; row += way) {
      const i = win.nearest(row, middle, state.hidden);
      if (i >= 0) {
        this.putCursor(win.span(i));
        return;
      }
    }
    this.say("no span in a further row here");
  },

  middle() {
    return (this.state.target.t0 + this.state.target.t1) / 2;
  },

  /** Show a span as the keyboard's choice, and say it. */
  putCursor(span) {
    const { state, geometry } = this;
    state.cursor = span;
    this.revealRow(span.row);
    this.revealTime(span.start, span.start + span.duration);
    const x = Math.max(geometry.plot.x, geometry.xOf(span.start, state.target));
    const y = geometry.yOf(span.row, state.scroll) + geometry.rowHeight;
    this.tipOfSpan(span, { x: Math.min(x, geometry.plot.x + geometry.plot.w), y }, () => state.cursor);
    this.say(this.spanText(span));
    this.drawOverlay();
  },

  /** One line about a span, as it is read out. */
  spanText(span) {
    const { meta } = this.state;
    const category = this.categoryOf(span.cat).name;
    const block = meta.blocks[this.geometry.blockOf(meta, span.row)];
    const at = formatInstant(Math.round(meta.origin_s * 1e9) + span.start, Math.max(1, span.duration / 100));
    return [span.label || category, block && block.label, category, formatDuration(span.duration), `at ${at}`].filter(Boolean).join(", ");
  },

  /** Move the view if a range lies outside; keep the zoom. */
  revealTime(t0, t1) {
    const { state } = this;
    const length = state.target.t1 - state.target.t0;
    if (t1 > state.target.t0 + 0.02 * length && t0 < state.target.t1 - 0.02 * length) return;
    const middle = (t0 + t1) / 2;
    state.glide(middle - length / 2, middle + length / 2);
  },

  /** A hit of the search: make it the cursor and bring it into view. */
  showHit(content) {
    const { state } = this;
    const { event, row, start, duration } = content;
    state.cursor = { event, row, start, duration, cat: 0, flag: 0, label: "", hit: true };
    this.revealRow(row);
    const length = state.target.t1 - state.target.t0;
    if (duration < length / 400 && duration > 0) {
      const half = duration * 30;
      state.glide(start + duration / 2 - half, start + duration / 2 + half);
    } else {
      this.revealTime(start, start + duration);
    }
    this.requests.describe(event, (known) => this.say(`hit ${content.position} of ${content.hits}: ${known.title}`));
  },

  /** Double click: the span fills most of the view, or a busy place comes closer. */
  zoomInto(at) {
    const { span, cell, t } = this.hitAt(at);
    if (span) this.state.glide(span.start - span.duration * 0.1, span.start + span.duration * 1.1);
    else if (cell) this.state.zoom(4, t, true);
  },

  showStepAt(t) {
    const { number, start, end } = this.state.meta.steps;
    const i = number.findIndex((_, k) => start[k] <= t && t <= end[k]);
    if (i < 0) return;
    const air = (end[i] - start[i]) * 0.02;
    this.state.glide(start[i] - air, end[i] + air);
    this.say(`step ${number[i]}, ${formatDuration(end[i] - start[i])}`);
  },

  /** From and to of what is selected, or of the chosen span; null if there is none. */
  selectedRange() {
    const { selected, cursor } = this.state;
    if (selected.range) return selected.range;
    if (selected.box) return selected.box.slice(0, 2);
    return cursor && cursor.duration > 0 ? [cursor.start, cursor.start + cursor.duration] : null;
  },

  /** Fit the selection, the measured range, or all. */
  fit() {
    const { state } = this;
    const range = this.selectedRange() || (state.measure && [state.measure.t0, state.measure.t1]);
    if (!range) {
      state.glide(...state.wholeView());
      return;
    }
    const air = (range[1] - range[0]) * 0.05;
    state.glide(range[0] - air, range[1] + air);
  },

  /** Measure a range; null takes it away. */
  measure(range) {
    this.state.measure = range;
    this.setMeasureMode(false);
    if (range) this.requests.range(range.t0, range.t1);
    else this.panels.clearRange();
    this.drawOverlay();
  },

  measureSelection() {
    const range = this.selectedRange();
    if (range) this.measure({ t0: range[0], t1: range[1] });
    else this.setMeasureMode(!this.measureMode);
  },

  setMeasureMode(on) {
    if (on) this.say("drag over the rows to measure a range");
    this.measureMode = on;
    this.panels.measureButton.setAttribute("aria-pressed", String(on));
  },

  toggleFlows() {
    const { state } = this;
    state.flowsOn = !state.flowsOn;
    this.panels.flowButton.setAttribute("aria-pressed", String(state.flowsOn));
    const [event] = state.selected.events;
    if (state.flowsOn && state.selected.events.size === 1) this.requests.flowsOf(event);
    this.requests.options({ flows: state.flowsOn });
    this.drawOverlay();
  },

  toggleCategory(index) {
    const { state } = this;
    state.hidden[index] = state.hidden[index] ? 0 : 1;
    const names = state.meta.categories.filter((_, i) => state.hidden[i]).map((c) => c.name);
    state.meta.hidden = names;
    this.restyle();
    this.requests.options({ hidden: names });
  },

  copyCode() {
    this.requests.code(async (content) => {
      const copied = await copyText(content.text, this.panels.code);
      this.say(copied ? "code copied" : "the code is selected: copy it with Ctrl+C");
    });
  },

  /** Esc: put away the nearest thing; with nothing left, leave the canvas. */
  escape() {
    const { state, panels } = this;
    if (this.measureMode) this.setMeasureMode(false);
    else if (panels.table.open) panels.toggleTable();
    else if (state.selected.count || state.selected.box || state.cursor) this.clearSelection();
    else if (state.measure) this.measure(null);
    else if (state.search.text) panels.clearSearch();
    else this.canvas.blur();
  },
};
