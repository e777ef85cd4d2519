/* Draws everything round the spans: background, time axis, steps, overview strip, gutter. CSS pixels, scaled by dpr. */

/** Draws one whole frame on the base canvas. */
class FramePainter {
  constructor(context) {
    this.context = context;
    this.spans = new SpanPainter();
    this.mini = null;
  }

  /** One frame. */
  paint(geometry, state, look) {
    const { context } = this;
    context.setTransform(look.dpr, 0, 0, look.dpr, 0, 0);
    context.fillStyle = look.background;
    context.fillRect(0, 0, geometry.width, geometry.height);
    const ticks = this.ticksOf(geometry, state);
    this.paintGround(geometry, state, look, ticks);
    context.setTransform(1, 0, 0, 1, 0, 0);
    this.paintWindows(geometry, state, look);
    context.setTransform(look.dpr, 0, 0, look.dpr, 0, 0);
    this.paintGutter(geometry, state, look);
    this.paintGroups(geometry, state, look);
    this.paintTop(geometry, state, look, ticks);
    this.paintScrollbar(geometry, state, look);
  }

  ticksOf(geometry, state) {
    const origin = Math.round(state.meta.origin_s * 1e9);
    const { t0, t1 } = state.view;
    return { origin, ...timeTicks(origin + t0, origin + t1, geometry.plot.w) };
  }

  /** Lines that lie under the spans: bands of blocks, ticks, steps, and what is outside the run. */
  paintGround(geometry, state, look, ticks) {
    const { context } = this;
    const { plot } = geometry;
    context.fillStyle = look.zebra;
    geometry.bands.forEach((band, i) => {
      if (i % 2 === 0) context.fillRect(plot.x, plot.y + band.y - state.scroll, plot.w, band.h);
    });
    this.paintOutside(geometry, state, look);
    context.fillStyle = look.gridLine;
    for (const { at } of ticks.ticks) this.vertical(geometry.xOf(at - ticks.origin, state.view), plot.y, plot.h);
    context.fillStyle = look.stepLine;
    this.eachStep(geometry, state, (start, end, i, wide) => {
      if (wide > 12) this.vertical(start, plot.y, plot.h);
    });
  }

  paintOutside(geometry, state, look) {
    const { plot } = geometry;
    const [e0, e1] = state.meta.extent;
    this.context.fillStyle = look.outside;
    const left = Math.min(plot.x + plot.w, geometry.xOf(e0, state.view));
    const right = Math.max(plot.x, geometry.xOf(e1, state.view));
    if (left > plot.x) this.context.fillRect(plot.x, plot.y, left - plot.x, plot.h);
    if (right < plot.x + plot.w) this.context.fillRect(right, plot.y, plot.x + plot.w - right, plot.h);
  }

  /** A line one device pixel wide, on a whole pixel. */
  vertical(x, y, h) {
    const dpr = window.devicePixelRatio || 1;
    this.context.fillRect(Math.round(x * dpr) / dpr, y, 1 / dpr, h);
  }

  /** Call back with x of start and end, index and width of each visible step. */
  eachStep(geometry, state, fn) {
    const { number, start, end } = state.meta.steps;
    const { t0, t1 } = state.view;
    for (let i = 0; i < number.length; i++) {
      if (end[i] < t0 || start[i] > t1) continue;
      const a = geometry.xOf(start[i], state.view);
      const b = geometry.xOf(end[i], state.view);
      fn(a, b, i, b - a);
    }
  }

  /** The last window, and where it does not reach the coarse one of the whole run, or stripes. */
  paintWindows(geometry, state, look) {
    const win = state.window;
    const [row0, row1] = geometry.visibleRows(state.scroll);
    const { t0, t1 } = state.view;
    const [e0, e1] = state.meta.extent;
    const whole = win && win.covers(Math.max(t0, e0), Math.min(t1, e1), row0, row1);
    if (!whole && row1 > row0) this.paintUncovered(geometry, state, look, win);
    if (win) this.spans.paint(this.context, win, geometry, state, look);
  }

  paintUncovered(geometry, state, look, win) {
    const { context } = this;
    context.save();
    context.beginPath();
    for (const [x, y, w, h] of this.uncovered(geometry, state, win)) {
      context.rect(...[x, y, w, h].map((v) => Math.round(v * look.dpr)));
    }
    context.clip();
    if (state.base) {
      this.spans.paint(context, state.base, geometry, state, look);
    } else {
      const { plot } = geometry;
      context.fillStyle = look.loading;
      context.fillRect(plot.x * look.dpr, plot.y * look.dpr, plot.w * look.dpr, plot.h * look.dpr);
    }
    context.restore();
  }

  /** Rectangles of the plot that a window does not cover. */
  uncovered(geometry, state, win) {
    const { plot } = geometry;
    const bottom = Math.min(plot.y + plot.h, plot.y + geometry.contentHeight - state.scroll);
    if (!win || win.numRows === 0) return [[plot.x, plot.y, plot.w, bottom - plot.y]];
    const limit = (x) => Math.min(Math.max(x, plot.x), plot.x + plot.w);
    const left = limit(geometry.xOf(win.t0, state.view));
    const right = limit(geometry.xOf(win.t1, state.view));
    const top = Math.max(plot.y, geometry.yOf(win.row0, state.scroll));
    const end = Math.min(bottom, geometry.yOf(win.row1 - 1, state.scroll) + geometry.rowHeight);
    const boxes = [
      [plot.x, plot.y, left - plot.x, bottom - plot.y],
      [right, plot.y, plot.x + plot.w - right, bottom - plot.y],
      [left, plot.y, right - left, top - plot.y],
      [left, end, right - left, bottom - end],
    ];
    return boxes.filter(([, , w, h]) => w > 0.01 && h > 0.01);
  }

  paintGroups(geometry, state, look) {
    const { context } = this;
    for (const { y, group } of geometry.groupTops) {
      const top = geometry.plot.y + y - state.scroll;
      if (top > geometry.height || top + HEIGHTS.group < geometry.plot.y) continue;
      context.fillStyle = look.header;
      context.fillRect(0, top, geometry.plot.x + geometry.plot.w, HEIGHTS.group);
      this.label(group.label, 10, top + HEIGHTS.group / 2, look.text, look.fontOf(11, "600"), geometry.width - 20, look);
    }
  }

  /** A text with its middle at y, cut to a width; returns the width it takes. */
  label(text, x, y, colour, font, room, look, align = "left") {
    const { context } = this;
    const fitted = look.fit(context, text, font, room);
    context.font = font;
    context.fillStyle = colour;
    context.textAlign = align;
    context.textBaseline = "middle";
    context.fillText(fitted.text, x, y + 0.5);
    return fitted.width;
  }

  paintTop(geometry, state, look, ticks) {
    const { context } = this;
    const { plot } = geometry;
    context.fillStyle = look.background;
    context.fillRect(0, 0, geometry.width, plot.y);
    this.paintAxis(geometry, state, look, ticks);
    if (state.meta.steps.number.length) this.paintSteps(geometry, state, look);
    context.fillStyle = look.background;
    context.fillRect(0, 0, plot.x, plot.y);
    context.fillRect(plot.x + plot.w, 0, geometry.width, plot.y);
    this.paintOverview(geometry, state, look);
    context.fillStyle = look.line;
    context.fillRect(0, plot.y - 1, geometry.width, 1);
    context.fillRect(plot.x - 1, 0, 1, plot.y);
    const middle = geometry.axisTop + HEIGHTS.axis / 2;
    const base = ticks.base ? `${ticks.base} +` : "run clock";
    this.label(base, plot.x - 8, middle, look.muted, look.fontOf(11), plot.x - 16, look, "right");
    if (state.meta.steps.number.length && geometry.plot.x > 100) {
      this.label("step", plot.x - 8, geometry.stepsTop + HEIGHTS.steps / 2, look.muted, look.fontOf(11), 60, look, "right");
    }
  }

  paintAxis(geometry, state, look, ticks) {
    const { context } = this;
    const bottom = geometry.plot.y - 1;
    context.fillStyle = look.muted;
    const first = Math.ceil((ticks.origin + state.view.t0) / ticks.minor);
    const last = Math.floor((ticks.origin + state.view.t1) / ticks.minor);
    for (let k = first; k <= last; k++) {
      this.vertical(geometry.xOf(k * ticks.minor - ticks.origin, state.view), bottom - 3, 3);
    }
    context.font = look.fontOf(11);
    context.textAlign = "left";
    context.textBaseline = "middle";
    for (const { at, text } of ticks.ticks) {
      const x = geometry.xOf(at - ticks.origin, state.view);
      this.vertical(x, geometry.axisTop + 4, HEIGHTS.axis - 5);
      context.fillText(text, x + 4, geometry.axisTop + HEIGHTS.axis / 2 - 0.5);
    }
  }

  paintSteps(geometry, state, look) {
    const { context } = this;
    const { plot } = geometry;
    const top = geometry.stepsTop + 1;
    const height = HEIGHTS.steps - 2;
    context.font = look.fontOf(11);
    context.textAlign = "center";
    context.textBaseline = "middle";
    this.eachStep(geometry, state, (a, b, i, wide) => {
      const from = Math.max(a, plot.x);
      const to = Math.min(b, plot.x + plot.w);
      context.fillStyle = look.header;
      context.fillRect(from, top, Math.max(to - from - (wide > 4 ? 1 : 0), 0.5), height);
      const text = String(state.meta.steps.number[i]);
      if (to - from < text.length * 7 + 6) return;
      context.fillStyle = look.text;
      context.fillText(text, (from + to) / 2, top + height / 2 + 0.5);
    });
  }

  /** The strip of the whole run with the visible range. */
  paintOverview(geometry, state, look) {
    const { context } = this;
    const { plot } = geometry;
    const height = HEIGHTS.overview - 4;
    const picture = this.miniature(state, look, plot.w);
    context.fillStyle = look.zebra;
    context.fillRect(plot.x, 1, plot.w, height);
    context.imageSmoothingEnabled = true;
    if (picture) context.drawImage(picture, plot.x, 1, plot.w, height);
    const [a, b] = this.brush(geometry, state);
    context.fillStyle = cssColour(look.colours.background, 0.62);
    context.fillRect(plot.x, 1, a - plot.x, height);
    context.fillRect(b, 1, plot.x + plot.w - b, height);
    context.strokeStyle = look.accent;
    context.lineWidth = 1;
    context.strokeRect(a + 0.5, 1.5, Math.max(b - a - 1, 1), height - 1);
    context.fillStyle = look.accent;
    context.fillRect(a - 1, 9, 3, height - 16);
    context.fillRect(b - 2, 9, 3, height - 16);
    this.label("whole run", plot.x - 8, 1 + height / 2, look.muted, look.fontOf(11), plot.x - 16, look, "right");
  }

  /** x of both ends of the visible range in the overview strip. */
  brush(geometry, state) {
    const { plot } = geometry;
    const [e0, e1] = state.wholeView();
    const at = (t) => plot.x + Math.min(1, Math.max(0, (t - e0) / (e1 - e0))) * plot.w;
    const a = Math.round(at(state.view.t0));
    return [a, Math.max(Math.round(at(state.view.t1)), a + 3)];
  }

  /** The coarse window of the whole run as a small picture; made once per data and look. */
  miniature(state, look, w) {
    const win = state.base;
    if (!win) return null;
    const key = `${look.key}|${w}`;
    if (this.mini && this.mini.win === win && this.mini.key === key) return this.mini.canvas;
    const canvas = miniaturePicture(win, look, ...state.wholeView(), Math.max(1, Math.round(w * look.dpr)), 400);
    this.mini = { win, key, canvas };
    return canvas;
  }

  paintGutter(geometry, state, look) {
    const { context } = this;
    const { plot } = geometry;
    context.save();
    context.beginPath();
    context.rect(0, plot.y, plot.x, plot.h);
    context.clip();
    context.fillStyle = look.background;
    context.fillRect(0, plot.y, plot.x, plot.h);
    state.meta.blocks.forEach((block, i) => this.paintBlock(geometry, state, look, block, i));
    context.restore();
    context.fillStyle = look.line;
    context.fillRect(plot.x - 1, plot.y, 1, plot.h);
  }

  paintBlock(geometry, state, look, block, i) {
    if (!block.rows) return;
    const top = geometry.yOf(block.row0, state.scroll);
    const bottom = geometry.yOf(block.row0 + block.rows - 1, state.scroll) + geometry.rowHeight;
    const { plot } = geometry;
    if (bottom < plot.y || top > plot.y + plot.h) return;
    if (bottom - top < 9 && i % Math.ceil(11 / Math.max(1, bottom - top + 1)) !== 0) return;
    const height = Math.max(geometry.rowHeight, 11);
    const y = Math.min(Math.max(top, plot.y), Math.max(bottom - height, top)) + height / 2;
    const size = Math.min(12, Math.max(9, geometry.rowHeight - 2));
    const [name, ...rest] = String(block.label).split(" · ");
    const title = block.title && block.title !== block.label ? block.title : rest.join(" · ");
    const used = this.label(name, 10, y, look.text, look.fontOf(size, "600"), plot.x - 20, look);
    const room = plot.x - used - 26;
    if (title && room > 30) this.label(title, 16 + used, y, look.muted, look.fontOf(size - 1), room, look);
    if (geometry.rowHeight >= 11) this.paintRowLabels(geometry, state, look, block, y);
  }

  paintRowLabels(geometry, state, look, block, taken) {
    const { plot } = geometry;
    let said = "";
    for (let row = block.row0; row < block.row0 + block.rows; row++) {
      const entry = state.meta.rows[row];
      const y = geometry.yOf(row, state.scroll) + geometry.rowHeight / 2;
      if (!entry || !entry.label || entry.label === said) continue;
      if (y < plot.y - 8 || y > plot.y + plot.h + 8 || Math.abs(y - taken) < 10) continue;
      said = entry.label;
      this.label(entry.label, plot.x - 8, y, look.muted, look.fontOf(10.5), plot.x - 30, look, "right");
    }
  }

  paintScrollbar(geometry, state, look) {
    if (!geometry.maxScroll) return;
    const [y, h] = this.thumb(geometry, state);
    const x = geometry.plot.x + geometry.plot.w;
    this.context.fillStyle = look.background;
    this.context.fillRect(x, geometry.plot.y, HEIGHTS.scrollbar, geometry.plot.h);
    this.context.fillStyle = look.stepLine;
    this.context.fillRect(x + 2, y, HEIGHTS.scrollbar - 4, h);
  }

  /** y and height of the scroll bar's thumb. */
  thumb(geometry, state) {
    const { plot } = geometry;
    const h = Math.max(24, (plot.h * plot.h) / geometry.contentHeight);
    return [plot.y + ((plot.h - h) * state.scroll) / Math.max(1, geometry.maxScroll), h];
  }
}
