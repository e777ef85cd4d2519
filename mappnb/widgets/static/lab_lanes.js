/* The timelines of the schedule lab: the Timeline's canvas code, one lane per schedule, without its toolbar, on one time axis. */

const LAB_GUTTER = 64;
const LAB_KEYS = ["w", "s", "a", "d", "arrowleft", "arrowright", "home", "end", "f", "0", "[", "]", ",", ".", "{", "}", " ", "enter", "escape"];

/** What the model of one lane looks like to a Timeline: its messages carry the lane's name over the lab's channel. */
class LaneModel extends ModelStandIn {
  constructor(parent, label) {
    super();
    this.parent = parent;
    this.label = label;
    this.sent = new Set();
    this.receive = (content, buffers) => {
      if (!content || !(content.lane === this.label || this.sent.has(content.seq))) return;
      if (!content.part || content.part[0] === content.part[1] - 1) this.sent.delete(content.seq);
      this.emit(content, buffers);
    };
    parent.on("msg:custom", this.receive);
  }

  send(content) {
    this.sent.add(content.seq);
    this.parent.send({ ...content, lane: this.label }, undefined, []);
  }

  close() {
    this.parent.off("msg:custom", this.receive);
  }
}

/** Rows below each other without overview and steps; the first lane has the axis. */
class LabGeometry extends TimelineGeometry {
  constructor(withAxis) {
    super();
    this.withAxis = withAxis;
  }

  layOut(meta, width) {
    this.width = width;
    const top = this.withAxis ? HEIGHTS.axis : 1;
    this.stepsTop = 0;
    this.axisTop = 0;
    const rows = Math.max(1, meta.rows.length);
    this.rowHeight = rows <= 4 ? 18 : rows <= 8 ? 13 : rows <= 16 ? 9 : Math.max(3, Math.floor(150 / rows));
    this.placeRows(meta);
    this.height = Math.round(top + Math.max(this.contentHeight, 22));
    this.plot = { x: LAB_GUTTER, y: top, w: Math.max(20, width - LAB_GUTTER), h: this.height - top };
  }

  placeRows(meta) {
    this.rowTop = Float64Array.from({ length: meta.rows.length }, (_, i) => i * (this.rowHeight + 1) + 1);
    this.bands = meta.rows.map((_, i) => ({ y: i * (this.rowHeight + 1), h: this.rowHeight + 1 }));
    this.groupTops = [];
    this.contentHeight = meta.rows.length * (this.rowHeight + 1) + 1;
  }
}

/** The frame without overview, step strip and clock. */
class LabFrame extends FramePainter {
  paintTop(geometry, state, look, ticks) {
    const { context } = this;
    const { plot } = geometry;
    context.fillStyle = look.background;
    context.fillRect(0, 0, geometry.width, plot.y);
    if (geometry.withAxis) {
      const end = plot.x + plot.w - 34; // a number further right would be cut
      this.paintAxis(geometry, state, look, { ...ticks, ticks: ticks.ticks.filter(({ at }) => geometry.xOf(at - ticks.origin, state.view) < end) });
      context.fillStyle = look.background;
      context.fillRect(0, 0, plot.x, plot.y);
      this.label("time", plot.x - 8, HEIGHTS.axis / 2, look.muted, look.fontOf(11), plot.x - 12, look, "right");
    }
    context.fillStyle = look.line;
    context.fillRect(0, plot.y - 1, geometry.width, 1);
  }

  paintBlock(geometry, state, look, block, i) {
    const every = Math.ceil(11 / (geometry.rowHeight + 1));
    if (i % every) return;
    const y = geometry.yOf(block.row0, state.scroll) + geometry.rowHeight / 2;
    const text = geometry.rowHeight >= 12 ? block.label : String(block.row0);
    this.label(text, geometry.plot.x - 8, y, look.text, look.fontOf(Math.min(11, Math.max(9, geometry.rowHeight))), geometry.plot.x - 10, look, "right");
  }
}

/** The line at the pointer's time; its time in words only on the axis. */
class LabOverlay extends OverlayPainter {
  pill(geometry, ...rest) {
    if (geometry.withAxis) super.pill(geometry, ...rest);
  }
}

/** One schedule's timeline. `lab` hears of zooming, hovering and clicks. */
class LabLane extends Timeline {
  constructor(lab, told, model, withAxis) {
    const host = make("div", { class: "mappnb-lab-canvas" });
    LabLane.making = { lab, told, withAxis };
    super(model, host);
    LabLane.making = null;
    this.host = host;
    for (const key of Object.keys(this.keys.actions)) if (!LAB_KEYS.includes(key)) delete this.keys.actions[key];
    this.shared = null;
    this.describeCanvas();
  }

  build(el) {
    Object.assign(this, LabLane.making);
    this.geometry = new LabGeometry(this.withAxis);
    super.build(el);
    this.frame = new LabFrame(this.baseCanvas.getContext("2d", { alpha: false }));
    this.overlay = new LabOverlay(this.canvas.getContext("2d"));
    const { toolbar, legend, line, details, range, table, code, help } = this.panels;
    for (const node of [toolbar, legend, line, help.node, this.handle]) node.remove();
    for (const panel of [details, range, table, code]) panel.node.remove();
    this.status.node.classList.add("mappnb-hidden-text");
  }

  /** Take over what the lab was told of this lane; keep the zoom, unless all was shown. */
  take(told) {
    const { state } = this;
    this.told = told;
    if (!state.loaded) return;
    const whole = this.isWhole();
    this.takeMeta({ ...told.meta, view: null });
    if (whole) state.jump(...state.wholeView());
    else state.jump(state.target.t0, state.target.t1);
  }

  /** Take over a window that came with the lab's answer. */
  takeSpans(told, arrays) {
    if (!this.state.loaded || told.row1 !== this.state.meta.rows.length) return;
    const body = this.requests.visible();
    this.requests.lastView = JSON.stringify(body);
    this.requests.takeWindow(told, arrays, body);
  }

  takeMeta(meta) {
    super.takeMeta(meta);
    this.resize(); // another number of ranks is another height
  }

  isWhole() {
    const [t0, t1] = this.state.wholeView();
    const { target } = this.state;
    const slack = (t1 - t0) * 1e-6;
    return Math.abs(target.t0 - t0) <= slack && Math.abs(target.t1 - t1) <= slack;
  }

  describeCanvas() {
    const { meta } = this.state;
    const said = meta.empty ? `cannot run: ${meta.empty}` : `${this.told.says}; ${meta.rows.length} ranks, ${meta.num_events} actions`;
    this.canvas.setAttribute("aria-label", `Timeline of ${this.told.label}: ${said}. W, S zoom, A, D move, brackets step through actions.`);
  }

  /** The summary that follows; a message is a block of its own here. */
  showMessage(text) {
    super.showMessage(text && text === this.state.meta.empty ? "cannot run with these settings" : text);
  }

  tick(now) {
    super.tick(now);
    const { target, view } = this.state;
    const key = `${target.t0}|${target.t1}|${view.t0}|${view.t1}`;
    if (key !== this.shared && this.state.loaded) {
      this.shared = key;
      this.lab.zoomed(this);
    }
  }

  /** Show what another lane shows. */
  follow(other) {
    const { state } = this;
    if (!state.loaded) return;
    const { target, view } = other.state;
    if (state.target.t0 === target.t0 && state.target.t1 === target.t1 && state.view.t0 === view.t0) return;
    state.motion = null;
    state.target = { ...target };
    state.view = { ...view };
    this.shared = `${target.t0}|${target.t1}|${view.t0}|${view.t1}`;
    this.draw();
  }

  hoverAt(at, region) {
    super.hoverAt(at, region);
    this.lab.hovered(at && (region === "plot" || region === "axis") ? this.geometry.timeOf(at.x, this.state.view) : null, this);
  }

  /** A line at a time, or none. */
  markTime(t) {
    const at = t === null ? null : this.geometry.xOf(t, this.state.view);
    this.state.hover = at === null || at < this.geometry.plot.x ? null : { x: at, y: -20, t };
    this.drawOverlay();
  }

  clickAt(at) {
    if (this.told.pickable) this.lab.pick(this.told.label);
    const { span } = this.hitAt(at);
    this.state.cursor = span;
    if (span) this.putCursor(span);
    this.drawOverlay();
  }

  selectCursor() {
    if (this.told.pickable) this.lab.pick(this.told.label);
    if (this.state.cursor) this.putCursor(this.state.cursor);
  }

  clearSelection() {
    this.state.cursor = null;
    this.tooltip.hide();
    this.drawOverlay();
  }
}
