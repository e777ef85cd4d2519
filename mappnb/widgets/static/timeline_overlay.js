/* The upper canvas: what follows the pointer and the selection. Cheap to redraw; CSS pixels, scaled by dpr. */

/** Draws hover, cursor, selection, measured ranges and flow lines. */
class OverlayPainter {
  constructor(context) {
    this.context = context;
  }

  paint(geometry, state, look) {
    const { context } = this;
    const { plot } = geometry;
    context.setTransform(look.dpr, 0, 0, look.dpr, 0, 0);
    context.clearRect(0, 0, geometry.width, geometry.height);
    context.save();
    context.beginPath();
    context.rect(plot.x, plot.y, plot.w, plot.h);
    context.clip();
    this.paintBox(geometry, state, look);
    this.paintSelected(geometry, state, look);
    if (state.flows && state.flowsOn) this.paintFlows(geometry, state, look);
    if (state.hover && state.hover.span) this.spanFrame(geometry, state, state.hover.span, look.text, 1);
    if (state.cursor) this.spanFrame(geometry, state, state.cursor, look.accent, 2);
    context.restore();
    this.paintRanges(geometry, state, look);
    this.paintPointer(geometry, state, look);
  }

  /** The box of a drag, or of the last box selection. */
  paintBox(geometry, state, look) {
    const drag = state.drag && state.drag.kind === "box" ? state.drag.box : null;
    const box = drag || state.selected.box;
    if (!box) return;
    const { context } = this;
    const [t0, t1, row0, row1] = box;
    const x = geometry.xOf(t0, state.view);
    const w = Math.max(1, geometry.xOf(t1, state.view) - x);
    const y = geometry.yOf(row0, state.scroll) - 1;
    const h = geometry.yOf(row1 - 1, state.scroll) + geometry.rowHeight + 1 - y;
    context.fillStyle = cssColour(look.colours.accent, drag ? 0.16 : 0.08);
    context.fillRect(x, y, w, h);
    context.strokeStyle = cssColour(look.colours.accent, 0.9);
    context.lineWidth = 1;
    context.setLineDash(drag ? [] : [4, 3]);
    context.strokeRect(x + 0.5, y + 0.5, w - 1, h - 1);
    context.setLineDash([]);
  }

  paintSelected(geometry, state, look) {
    const win = state.window;
    if (!win) return;
    const width = state.selected.events.size > 12 ? 1 : 1.5;
    for (const event of state.selected.events) {
      const i = win.find(event);
      if (i >= 0) this.spanFrame(geometry, state, win.span(i), look.text, width);
    }
  }

  /** A frame round one span. */
  spanFrame(geometry, state, span, colour, width) {
    if (span.row >= geometry.rowTop.length) return;
    const { context } = this;
    const { plot } = geometry;
    const a = Math.max(geometry.xOf(span.start, state.view), plot.x - 4);
    const b = Math.min(geometry.xOf(span.start + span.duration, state.view), plot.x + plot.w + 4);
    if (b < plot.x || a > plot.x + plot.w) return;
    const y = geometry.yOf(span.row, state.scroll);
    const h = geometry.rowHeight - (geometry.rowHeight >= 6 ? 1 : 0);
    const w = Math.max(b - a, 3);
    context.strokeStyle = colour;
    context.lineWidth = width;
    context.strokeRect(a - width / 2, y - width / 2, w + width, h + width);
  }

  paintFlows(geometry, state, look) {
    const { context } = this;
    const { x0, row0, x1, row1, kind } = state.flows;
    for (let i = 0; i < x0.length; i++) {
      if (row0[i] >= geometry.rowTop.length || row1[i] >= geometry.rowTop.length) continue;
      const from = this.rowPoint(geometry, state, x0[i], row0[i]);
      const to = this.rowPoint(geometry, state, x1[i], row1[i]);
      const colour = kind[i] === 1 ? look.accent : look.text;
      this.curve(from, to, cssColour(look.colours.background, 0.75), 4);
      context.setLineDash(kind[i] === 1 ? [] : [5, 3]);
      this.curve(from, to, colour, 1.5);
      context.setLineDash([]);
      if (kind[i] === 1) this.arrow(to, look.accent);
    }
  }

  rowPoint(geometry, state, t, row) {
    return [geometry.xOf(t, state.view), geometry.yOf(row, state.scroll) + geometry.rowHeight / 2];
  }

  curve([ax, ay], [bx, by], colour, width) {
    this.context.strokeStyle = colour;
    this.context.lineWidth = width;
    const bend = Math.min(60, Math.max(18, Math.abs(bx - ax) / 2));
    this.context.beginPath();
    this.context.moveTo(ax, ay);
    this.context.bezierCurveTo(ax + bend, ay, bx - bend, by, bx, by);
    this.context.stroke();
  }

  /** A tip that points right: curves arrive from the left. */
  arrow([x, y], colour) {
    this.context.fillStyle = colour;
    this.context.beginPath();
    this.context.moveTo(x, y);
    this.context.lineTo(x - 7, y - 3.5);
    this.context.lineTo(x - 7, y + 3.5);
    this.context.closePath();
    this.context.fill();
  }

  /** The measured range (with its length) and the range that a linked view marks. */
  paintRanges(geometry, state, look) {
    if (state.mark && state.mark.t0 !== null) this.band(geometry, state, state.mark, look, look.colours.muted, "");
    const drag = state.drag && state.drag.kind === "measure" ? state.drag.range : null;
    const range = drag || state.measure;
    if (range) this.band(geometry, state, range, look, look.colours.accent, formatDuration(range.t1 - range.t0));
  }

  band(geometry, state, { t0, t1 }, look, rgb, text) {
    const { context } = this;
    const { plot } = geometry;
    const limit = (x) => Math.min(Math.max(x, plot.x), plot.x + plot.w);
    const a = limit(geometry.xOf(t0, state.view));
    const b = limit(geometry.xOf(t1, state.view));
    context.fillStyle = cssColour(rgb, 0.08);
    context.fillRect(a, plot.y, b - a, plot.h);
    context.fillStyle = cssColour(rgb);
    context.fillRect(Math.round(a), geometry.axisTop, 1, geometry.height - geometry.axisTop);
    context.fillRect(Math.round(b) - 1, geometry.axisTop, 1, geometry.height - geometry.axisTop);
    context.fillRect(a, plot.y - 3, b - a, 2);
    if (text && b > plot.x && a < plot.x + plot.w) this.pill(geometry, look, text, (a + b) / 2, plot.y + 12, rgb);
  }

  /** A text on a filled ground, kept inside the plot. */
  pill(geometry, look, text, x, y, rgb) {
    const { context } = this;
    const { plot } = geometry;
    context.font = look.fontOf(11, "600");
    const width = context.measureText(text).width + 12;
    const left = Math.min(Math.max(x - width / 2, plot.x + 1), Math.max(plot.x + 1, plot.x + plot.w - width - 1));
    context.fillStyle = cssColour(rgb);
    context.fillRect(left, y - 9, width, 18);
    context.fillStyle = cssColour(inkOn(rgb));
    context.textAlign = "left";
    context.textBaseline = "middle";
    context.fillText(text, left + 6, y + 0.5);
  }

  /** A thin line at the pointer and its time on the axis. */
  paintPointer(geometry, state, look) {
    const at = state.hover;
    if (!at || at.x < geometry.plot.x || state.drag) return;
    const { context } = this;
    context.fillStyle = cssColour(look.colours.text, 0.35);
    context.fillRect(Math.round(at.x), geometry.axisTop, 1, geometry.height - geometry.axisTop);
    const resolution = (state.view.t1 - state.view.t0) / geometry.plot.w;
    const text = formatInstant(Math.round(state.meta.origin_s * 1e9) + at.t, resolution);
    this.pill(geometry, look, text, at.x, geometry.axisTop + HEIGHTS.axis / 2 - 1, mixColours(look.colours.background, look.colours.text, 0.8));
  }
}
