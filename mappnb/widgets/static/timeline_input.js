/* Pointer and wheel: pan, zoom, boxes, measured ranges, overview brush, touch. */

const CLICK_SLOP = 4; // CSS px a pointer may move in a click

/** Pointer input on the upper canvas. `app` is the Timeline. */
class PointerInput {
  constructor(app, canvas, disposer) {
    this.app = app;
    this.canvas = canvas;
    this.pointers = new Map();
    this.pinch = null;
    const on = (type, fn, options) => disposer.listen(canvas, type, fn.bind(this), options);
    on("pointerdown", this.down);
    on("pointermove", this.move);
    on("pointerup", this.up);
    on("pointercancel", this.cancel);
    on("pointerleave", this.leave);
    on("dblclick", this.doubleClick);
    on("wheel", this.wheel, { passive: false });
  }

  get state() {
    return this.app.state;
  }

  get geometry() {
    return this.app.geometry;
  }

  /** Position of an event on the canvas, CSS px. */
  at(event) {
    const box = this.canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  }

  /** The part of the canvas at a place. */
  region({ x, y }) {
    const { plot, axisTop, stepsTop } = this.geometry;
    if (x > plot.x + plot.w) return this.geometry.maxScroll ? "scrollbar" : "none";
    if (y < stepsTop) return x < plot.x ? "none" : "overview";
    if (y < axisTop) return x < plot.x ? "none" : "steps";
    if (y < plot.y) return x < plot.x ? "none" : "axis";
    return x < plot.x ? "gutter" : "plot";
  }

  down(event) {
    if (event.button !== 0 || this.state.closed) return;
    const at = this.at(event);
    this.canvas.focus({ preventScroll: true });
    this.canvas.setPointerCapture(event.pointerId);
    this.pointers.set(event.pointerId, at);
    if (this.pointers.size === 2) {
      this.beginPinch();
      return;
    }
    this.state.drag = this.beginDrag(event, at);
    this.app.tooltip.hide();
  }

  beginDrag(event, at) {
    const { state, geometry } = this;
    const region = this.region(at);
    const drag = { kind: "none", region, from: at, moved: false, view: state.view, scroll: state.scroll };
    const t = geometry.timeOf(at.x, state.view);
    if (region === "overview") return { ...drag, kind: "brush", edge: this.brushEdge(at) };
    if (region === "scrollbar") return { ...drag, kind: "scrollbar" };
    if (region === "axis") return { ...drag, kind: "measure", t };
    if (region === "gutter") return { ...drag, kind: "rows" };
    if (region !== "plot") return drag;
    if (event.shiftKey) return { ...drag, kind: "box", t, row: this.nearestRow(at.y) };
    if (event.altKey || this.app.measureMode) return { ...drag, kind: "measure", t };
    return { ...drag, kind: "pan" };
  }

  /** The row at a y, or the nearest one. */
  nearestRow(y) {
    const { geometry, state } = this;
    const [first, last] = geometry.visibleRows(state.scroll);
    const row = geometry.rowBefore(y - geometry.plot.y + state.scroll);
    return Math.min(Math.max(row, first), last - 1);
  }

  /** Which part of the overview's brush is held: "left", "right", "inside" or "outside". */
  brushEdge({ x }) {
    const [a, b] = this.geometry && this.app.frame.brush(this.geometry, this.state);
    if (Math.abs(x - a) <= 5) return "left";
    if (Math.abs(x - b) <= 5) return "right";
    return x > a && x < b ? "inside" : "outside";
  }

  move(event) {
    const at = this.at(event);
    if (this.pointers.has(event.pointerId)) this.pointers.set(event.pointerId, at);
    if (this.pinch) {
      this.movePinch();
      return;
    }
    const { drag } = this.state;
    if (!drag) {
      this.app.hoverAt(at, this.region(at));
      this.canvas.style.cursor = this.cursorOf(at);
      return;
    }
    if (Math.hypot(at.x - drag.from.x, at.y - drag.from.y) > CLICK_SLOP) drag.moved = true;
    if (drag.moved) this.dragTo(drag, at);
  }

  cursorOf(at) {
    const region = this.region(at);
    if (region === "overview") return { left: "ew-resize", right: "ew-resize", inside: "grab" }[this.brushEdge(at)] || "crosshair";
    if (region === "axis" || (region === "plot" && this.app.measureMode)) return "col-resize";
    if (region === "steps") return "pointer";
    return region === "plot" && this.state.hover && this.state.hover.span ? "pointer" : "default";
  }

  dragTo(drag, at) {
    const { state, geometry, app } = this;
    if (drag.kind === "pan") this.dragPan(drag, at);
    else if (drag.kind === "rows") app.scrollTo(drag.scroll - (at.y - drag.from.y));
    else if (drag.kind === "scrollbar") this.dragScrollbar(drag, at);
    else if (drag.kind === "brush") this.dragBrush(drag, at);
    else if (drag.kind === "measure") drag.range = sortedRange(drag.t, geometry.timeOf(at.x, state.view));
    else if (drag.kind === "box") drag.box = this.boxTo(drag, at);
    app.drawOverlay();
  }

  dragPan(drag, at) {
    const { state, geometry, app } = this;
    this.canvas.style.cursor = "grabbing";
    const by = ((drag.from.x - at.x) / geometry.plot.w) * (drag.view.t1 - drag.view.t0);
    state.jump(drag.view.t0 + by, drag.view.t1 + by);
    app.scrollTo(drag.scroll - (at.y - drag.from.y));
  }

  dragScrollbar(drag, at) {
    const [, thumb] = this.app.frame.thumb(this.geometry, this.state);
    const track = Math.max(1, this.geometry.plot.h - thumb);
    this.app.scrollTo(drag.scroll + ((at.y - drag.from.y) / track) * this.geometry.maxScroll);
  }

  dragBrush(drag, at) {
    const { state, geometry } = this;
    const [e0, e1] = state.wholeView();
    const perPixel = (e1 - e0) / geometry.plot.w;
    const by = (at.x - drag.from.x) * perPixel;
    const { t0, t1 } = drag.view;
    if (drag.edge === "inside") state.jump(t0 + by, t1 + by);
    else if (drag.edge === "left") state.jump(Math.min(t0 + by, t1 - SHORTEST_VIEW), t1);
    else if (drag.edge === "right") state.jump(t0, Math.max(t1 + by, t0 + SHORTEST_VIEW));
    else {
      const { t0: a, t1: b } = sortedRange(this.overviewTime(drag.from.x), this.overviewTime(at.x));
      state.jump(a, b);
    }
  }

  overviewTime(x) {
    const [e0, e1] = this.state.wholeView();
    return e0 + ((x - this.geometry.plot.x) / this.geometry.plot.w) * (e1 - e0);
  }

  boxTo(drag, at) {
    const { t0, t1 } = sortedRange(drag.t, this.geometry.timeOf(at.x, this.state.view));
    const row = this.nearestRow(at.y);
    return [t0, t1, Math.min(drag.row, row), Math.max(drag.row, row) + 1];
  }

  up(event) {
    const at = this.at(event);
    this.pointers.delete(event.pointerId);
    if (this.pinch) {
      if (this.pointers.size === 0) this.pinch = null;
      return;
    }
    const { drag } = this.state;
    this.state.drag = null;
    if (!drag) return;
    if (drag.moved) this.endDrag(drag);
    else this.click(drag, at);
    this.canvas.style.cursor = this.cursorOf(at);
    this.app.drawOverlay();
  }

  endDrag(drag) {
    if (drag.kind === "box" && drag.box) this.app.requests.select({ box: drag.box });
    if (drag.kind === "measure" && drag.range) this.app.measure(drag.range);
  }

  click(drag, at) {
    const { app, state, geometry } = this;
    if (drag.region === "plot") app.clickAt(at);
    else if (drag.region === "steps") app.showStepAt(geometry.timeOf(at.x, state.view));
    else if (drag.region === "axis") app.measure(null);
    else if (drag.region === "overview" && drag.edge === "outside") {
      const half = (state.target.t1 - state.target.t0) / 2;
      const t = this.overviewTime(at.x);
      state.glide(t - half, t + half);
    }
  }

  cancel(event) {
    this.pointers.delete(event.pointerId);
    this.pinch = null;
    this.state.drag = null;
    this.app.drawOverlay();
  }

  leave() {
    if (!this.state.drag) this.app.hoverAt(null, "none");
  }

  beginPinch() {
    const [a, b] = [...this.pointers.values()];
    const { state, geometry } = this;
    state.drag = null;
    this.pinch = {
      apart: Math.max(20, Math.abs(a.x - b.x)),
      t: geometry.timeOf((a.x + b.x) / 2, state.view),
      length: state.view.t1 - state.view.t0,
    };
  }

  movePinch() {
    if (this.pointers.size < 2) return;
    const [a, b] = [...this.pointers.values()];
    const { state, geometry, pinch } = this;
    const length = (pinch.length * pinch.apart) / Math.max(20, Math.abs(a.x - b.x));
    const share = ((a.x + b.x) / 2 - geometry.plot.x) / geometry.plot.w;
    state.jump(pinch.t - share * length, pinch.t + (1 - share) * length);
  }

  doubleClick(event) {
    const at = this.at(event);
    if (this.region(at) === "plot") this.app.zoomInto(at);
  }

  wheel(event) {
    const { app, state, geometry } = this;
    const focused = document.activeElement === this.canvas || this.canvas.getRootNode().activeElement === this.canvas;
    const unit = event.deltaMode === 1 ? 16 : event.deltaMode === 2 ? 400 : 1;
    const dx = event.deltaX * unit;
    const dy = event.deltaY * unit;
    if (event.ctrlKey || event.metaKey) {
      const t = geometry.timeOf(Math.max(this.at(event).x, geometry.plot.x), state.view);
      state.zoom(Math.exp(-Math.max(-120, Math.min(120, dy)) * 0.004), t, false);
    } else if (event.shiftKey || (focused && Math.abs(dx) > Math.abs(dy))) {
      state.pan((dx || dy) / geometry.plot.w, false);
    } else if (!focused || !app.scrollTo(state.scroll + dy)) {
      return; // the page scrolls
    }
    event.preventDefault();
    app.hoverAt(this.at(event), this.region(this.at(event)));
  }
}

/** {t0, t1} with t0 <= t1. */
function sortedRange(a, b) {
  return { t0: Math.min(a, b), t1: Math.max(a, b) };
}
