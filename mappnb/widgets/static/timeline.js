/* The timeline widget: puts the parts together and is what they call back. */

const DEFAULT_HEIGHT = 560;

/** One timeline in one element. */
class Timeline {
  constructor(model, el) {
    this.model = model;
    this.disposer = new Disposer();
    this.geometry = new TimelineGeometry();
    this.state = new TimelineState(() => this.draw());
    this.fixedHeight = 0;
    this.measureMode = false;
    this.look = null;
    this.stats = { frames: 0, lastMs: 0 };
    this.build(el);
    this.connection = new Connection(model, {
      message: (content, arrays) => this.onMessage(content, arrays),
      busy: (busy) => this.status.setBusy(busy),
      error: (kind, text) => this.errors.show(kind, text),
      success: (kind) => this.errors.clear(kind),
    });
    this.requests = new TimelineRequests(this, this.connection);
    this.pointer = new PointerInput(this, this.canvas, this.disposer);
    this.keys = new KeyInput(this, this.canvas, this.disposer);
    this.watch();
    this.resize();
    this.requests.ready();
  }

  build(el) {
    this.root = make("div", { class: "mappnb-root mappnb-timeline", "data-lm-suppress-shortcuts": "true" });
    this.errors = new ErrorLine(this.disposer);
    this.status = new StatusLine();
    this.panels = new TimelinePanels(this, this.disposer);
    this.baseCanvas = make("canvas", { class: "mappnb-canvas", "aria-hidden": "true" });
    this.canvas = make("canvas", {
      class: "mappnb-canvas mappnb-canvas-top", tabindex: "0", role: "img", "aria-label": "Timeline, loading",
      "data-lm-suppress-shortcuts": "true",
    });
    this.message = make("div", { class: "mappnb-message", dir: "auto", hidden: true });
    this.stage = make("div", { class: "mappnb-stage" }, [this.baseCanvas, this.canvas, this.message]);
    this.tooltip = new Tooltip(this.stage);
    this.handle = make("div", {
      class: "mappnb-handle", role: "separator", tabindex: "0", "aria-orientation": "horizontal", "aria-label": "Height of the timeline",
      "aria-valuemin": "160", "aria-valuemax": "2000", "aria-valuenow": String(DEFAULT_HEIGHT),
    });
    const { toolbar, legend, line, details, range, table, code, help } = this.panels;
    const panels = [details, range, table, code].map((p) => p.node);
    this.root.append(toolbar, this.errors.node, this.stage, this.handle, legend, line, this.status.node, ...panels, help.node);
    el.append(this.root);
    this.frame = new FramePainter(this.baseCanvas.getContext("2d", { alpha: false }));
    this.overlay = new OverlayPainter(this.canvas.getContext("2d"));
  }

  watch() {
    watchTheme(this.root, this.disposer, () => this.restyle());
    this.disposer.observe(new ResizeObserver(() => this.resize()), this.root);
    this.disposer.listen(window, "resize", () => this.resize());
    this.disposer.listen(this.canvas, "focus", () => this.root.classList.add("mappnb-focused"));
    this.disposer.listen(this.canvas, "blur", () => this.root.classList.remove("mappnb-focused"));
    watchHandle(this.handle, this.disposer, () => this.geometry.height, (height) => {
      this.fixedHeight = height;
      this.resize();
    });
  }

  /** A message of the kernel that is not the answer to a request with a handler of its own. */
  onMessage(content) {
    const { state } = this;
    if (content.kind === "meta") this.takeMeta(content);
    else if (content.kind === "goto") this.goTo(content);
    else if (content.kind === "mark") state.mark = content.t0 === null || content.t0 === undefined ? null : content;
    else if (content.kind === "selection") this.requests.takeSelection(content);
    else if (content.kind === "note") this.say(content.text);
    else if (content.kind === "stale") this.requests.refresh();
    else if (content.kind === "close") this.close();
    this.drawOverlay();
  }

  takeMeta(meta) {
    const { state } = this;
    state.cursor = state.hover = state.flows = null;
    state.selected.box = null;
    this.layOut(meta);
    state.setMeta(meta);
    this.restyle();
    this.panels.setMeta(state.meta);
    this.requests.refresh();
    if (state.base && state.base.row1 !== meta.rows.length) state.base = state.window = null;
    this.showMessage(meta.empty || "");
    if (meta.search && meta.search !== state.search.text) {
      this.panels.search.input.value = meta.search;
      this.requests.search(meta.search, "first", true);
    }
    this.describeCanvas();
  }

  goTo(content) {
    if (typeof content.t0 === "number" && typeof content.t1 === "number") this.state.glide(content.t0, content.t1);
    if (typeof content.row0 === "number") this.revealRow(content.row0);
    if (content.text) this.say(content.text);
  }

  showMessage(text) {
    this.message.textContent = text;
    this.message.hidden = text === "";
  }

  /** The summary that a screen reader says for the canvas. */
  describeCanvas() {
    const { meta } = this.state;
    const { length } = meta.blocks;
    const span = formatDuration(meta.extent[1] - meta.extent[0]);
    const text = meta.empty ? `Timeline: ${meta.empty}` : `Timeline of ${length} ${length === 1 ? "block" : "blocks"} of rows, ` +
      `${meta.num_events} events in ${span}. Press ? for the keys.`;
    this.canvas.setAttribute("aria-label", text);
  }

  say(text) {
    this.status.say(text);
  }

  focus() {
    if (!this.disposer.done) this.canvas.focus({ preventScroll: true });
  }

  // Size, look, frames

  layOut(meta = this.state.meta) {
    const width = Math.floor(this.stage.clientWidth) || 960;
    const options = { rowHeight: this.state.rowHeight, maxHeight: DEFAULT_HEIGHT, fixedHeight: this.fixedHeight };
    this.geometry.layOut(meta, width, options);
    this.state.scroll = Math.min(this.state.scroll, this.geometry.maxScroll);
  }

  resize() {
    if (this.disposer.done) return;
    this.layOut();
    const { width, height } = this.geometry;
    const dpr = window.devicePixelRatio || 1;
    for (const canvas of [this.baseCanvas, this.canvas]) {
      const [w, h] = [Math.round(width * dpr), Math.round(height * dpr)];
      if (canvas.width !== w || canvas.height !== h) {
        canvas.width = w;
        canvas.height = h;
        canvas.style.width = `${width}px`;
        canvas.style.height = `${height}px`;
      }
    }
    this.stage.style.height = `${height}px`;
    this.handle.setAttribute("aria-valuenow", String(height));
    if (!this.look || this.look.dpr !== dpr) this.restyle();
    this.drawNow();
  }

  /** New colours: theme, categories or resolution have changed. */
  restyle() {
    this.look = new TimelineLook(this.root, this.state.meta, this.state.hidden, window.devicePixelRatio || 1);
    this.panels.paintLegend();
    this.draw();
  }

  /** Draw in the next frame. */
  draw() {
    this.dirty = true;
    this.drawOverlay();
  }

  drawOverlay() {
    if (this.pending || this.disposer.done) return;
    this.pending = this.disposer.frame((now) => {
      this.pending = null;
      this.tick(now);
    });
  }

  tick(now) {
    const moving = this.state.advance(now);
    if (this.dirty || moving) this.drawNow();
    else this.paintOverlay();
    this.requests.pump();
    if (moving) this.draw();
  }

  /** Draw at once; the time it takes is kept in `stats`. */
  drawNow() {
    if (!this.look || this.geometry.width === 0) return;
    this.dirty = false;
    const begin = performance.now();
    this.frame.paint(this.geometry, this.state, this.look);
    this.paintOverlay();
    this.stats.lastMs = performance.now() - begin;
    this.stats.frames += 1;
  }

  paintOverlay() {
    if (this.look) this.overlay.paint(this.geometry, this.state, this.look);
  }

  // Rows

  /** Scroll the rows; false if they stay where they are. */
  scrollTo(y) {
    const next = Math.min(Math.max(0, y), this.geometry.maxScroll);
    if (next === this.state.scroll) return false;
    this.state.scroll = next;
    this.draw();
    return true;
  }

  revealRow(row) {
    if (row < 0 || row >= this.geometry.rowTop.length) return;
    const top = this.geometry.rowTop[row];
    const { scroll } = this.state;
    const { rowHeight, plot } = this.geometry;
    if (top < scroll) this.scrollTo(top - 2 * rowHeight);
    else if (top + rowHeight > scroll + plot.h) this.scrollTo(top + 3 * rowHeight - plot.h);
  }

  changeRowHeight(way) {
    const now = this.geometry.rowHeight;
    const next = way > 0 ? ROW_HEIGHTS.find((h) => h > now) : [...ROW_HEIGHTS].reverse().find((h) => h < now);
    if (!next) return;
    this.state.rowHeight = next;
    this.resize();
    this.draw();
  }

  /** Stop: undo all listeners, drop all data. Nothing of the view works afterwards. */
  dispose() {
    removeView(this);
    this.state.clear();
    this.requests.described.clear();
    this.frame.mini = null;
    for (const canvas of [this.baseCanvas, this.canvas]) canvas.width = canvas.height = 0;
  }

  /** The kernel has closed the view: it says so, and holds nothing any more. */
  close() {
    this.state.closed = true;
    this.state.clear();
    this.requests.described.clear();
    this.frame.mini = null;
    this.tooltip.hide();
    this.connection.close();
    this.drawNow();
    this.disposer.dispose();
    disableControls(this.root);
    this.showMessage("closed: run the cell again to open the timeline");
    this.canvas.setAttribute("aria-label", "Timeline, closed");
  }
}

Object.assign(Timeline.prototype, TimelineActions);

/** Let a handle change a height by pointer and by arrow keys. */
function watchHandle(handle, disposer, height, change) {
  let from = null;
  const set = (value) => change(Math.min(2000, Math.max(160, Math.round(value))));
  disposer.listen(handle, "pointerdown", (event) => {
    from = { y: event.clientY, height: height() };
    handle.setPointerCapture(event.pointerId);
  });
  disposer.listen(handle, "pointermove", (event) => {
    if (from) set(from.height + event.clientY - from.y);
  });
  for (const type of ["pointerup", "pointercancel"]) disposer.listen(handle, type, () => (from = null));
  disposer.listen(handle, "keydown", (event) => {
    const by = { ArrowDown: 20, ArrowUp: -20 }[event.key];
    if (!by) return;
    event.preventDefault();
    event.stopPropagation();
    set(height() + by);
  });
}

/**
 * Entry point: draw a timeline for a model into an element.
 * @returns {() => void} what undoes it
 */
function renderTimeline({ model, el }) {
  return showView(new Timeline(model, el), model);
}
