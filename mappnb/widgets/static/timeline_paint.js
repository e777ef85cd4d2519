/*
 * Draws the spans of a window. The browser's cost of a rectangle would be 2 µs, too much for 20,000 in a frame; so each
 * row is first put together as one line of device pixels, all lines are one small picture, and each line of that is
 * stretched to its row's height. Only hatched spans, names and marks are drawn one by one. Device pixels throughout.
 */

const HATCH_FROM = 5; // CSS px a span must be wide to show its hatch
const MARKED = FLAG.MATCH | FLAG.SELECTED | FLAG.OPEN | FLAG.FAILED;

/** Where a window's spans fall on the canvas in one frame. */
class SpanProjection {
  constructor(win, geometry, view, scroll, dpr) {
    const { plot, rowHeight } = geometry;
    this.left = Math.round(plot.x * dpr);
    this.right = Math.round((plot.x + plot.w) * dpr);
    this.scale = (plot.w * dpr) / (view.t1 - view.t0);
    this.offset = (win.t0 - view.t0) * this.scale + plot.x * dpr;
    this.from = (this.left - this.offset) / this.scale; // ns since the window's t0
    this.until = (this.right - this.offset) / this.scale;
    this.height = Math.max(1, Math.round(rowHeight * dpr) - (rowHeight >= 6 ? Math.round(dpr) : 0));
    this.gap = Math.max(1, Math.round(dpr));
    const [first, last] = geometry.visibleRows(scroll);
    this.rows = [];
    for (let row = Math.max(first, win.row0); row < Math.min(last, win.row1); row++) {
      this.rows.push({ row: row - win.row0, top: Math.round(geometry.yOf(row, scroll) * dpr) });
    }
    this.minText = rowHeight >= 11 ? TEXT_FROM * dpr : Infinity;
    this.minHatch = HATCH_FROM * dpr;
    this.dpr = dpr;
  }
}

/** Flat lists of (index, x, width, top) of what is drawn one by one. */
class SpanFinds {
  constructor() {
    this.texts = [];
    this.marks = [];
    this.hatched = [];
  }
}

/** The lines of pixels of a frame: one picture line a visible row. */
class RowLines {
  constructor() {
    this.canvas = document.createElement("canvas");
    this.width = this.height = 0;
  }

  /** Room for a frame, emptied. */
  begin(width, height) {
    if (width !== this.width || height > this.height || height < this.height / 4) {
      this.width = this.canvas.width = width;
      this.height = this.canvas.height = Math.max(1, height);
      this.context = this.canvas.getContext("2d");
      this.image = this.context.createImageData(this.width, this.height);
      this.pixels = new Uint32Array(this.image.data.buffer);
    } else {
      this.pixels.fill(0);
    }
  }

  line(k) {
    return this.pixels.subarray(k * this.width, (k + 1) * this.width);
  }

  /** Stretch each line to its row on the canvas. */
  show(context, to) {
    this.context.putImageData(this.image, 0, 0, 0, 0, this.width, to.rows.length);
    context.imageSmoothingEnabled = false;
    to.rows.forEach(({ top }, k) => {
      context.drawImage(this.canvas, 0, k, this.width, 1, to.left, top, this.width, to.height);
    });
  }
}

/** A coarse picture of a whole window, one line of pixels a row; at most `most` rows, evenly picked. */
function miniaturePicture(win, look, t0, t1, width, most) {
  const scale = width / (t1 - t0);
  const offset = (win.t0 - t0) * scale;
  const to = { left: 0, scale, offset, from: -offset / scale, until: (width - offset) / scale, gap: Infinity, minText: Infinity, minHatch: Infinity };
  const stride = Math.max(1, Math.ceil(win.numRows / most));
  const lines = new RowLines();
  lines.begin(width, Math.ceil(win.numRows / stride));
  const finds = new SpanFinds();
  for (let row = 0, k = 0; row < win.numRows; row += stride, k++) {
    if (win.hasGrid) lineOfCells(lines.line(k), win, to, row, look.rgba, 1);
    lineOfSpans(lines.line(k), win, to, { row, top: 0 }, look.rgba, 0, 0, look.noHatch, finds);
  }
  lines.context.putImageData(lines.image, 0, 0);
  return lines.canvas;
}

/** Put the cells of the busy grid into a line: the colour of the main category, the busier the stronger. */
function lineOfCells(line, win, to, row, colours, strength) {
  const perPixel = win.columns / ((win.t1 - win.t0) * to.scale);
  const first = Math.max(0, Math.ceil(to.offset - to.left));
  const last = Math.min(line.length, Math.floor(to.offset - to.left + (win.t1 - win.t0) * to.scale));
  const begin = row * win.columns;
  for (let p = first; p < last; p++) {
    const k = begin + Math.min(win.columns - 1, Math.floor((p + 0.5 + to.left - to.offset) * perPixel));
    const cat = win.cats[k];
    if (cat === EMPTY_CELL || win.busy[k] === 0 || colours[cat] === 0) continue;
    line[p] = (colours[cat] & 0xffffff) | (((56 + win.busy[k] * (199 / 255)) * strength) << 24);
  }
}

/**
 * Put the spans of a row into a line; the hot loop of every frame.
 * @param {number} mask and @param {number} wanted: only spans whose flag & mask equals wanted
 */
function lineOfSpans(line, win, to, { row, top }, colours, mask, wanted, hatch, finds) {
  const { x, w, cat, flag, label, byRow } = win;
  const { scale, offset, left, from, until, gap, minText, minHatch } = to;
  const limit = line.length;
  const last = win.rowStarts[row + 1];
  for (let k = win.rowStarts[row]; k < last; k++) {
    const i = byRow[k];
    const start = x[i];
    if (start > until) break;
    const colour = colours[cat[i]];
    if (start + w[i] < from || colour === 0 || (flag[i] & mask) !== wanted) continue;
    const a = Math.max(0, Math.round(offset + start * scale) - left);
    let b = Math.min(limit, Math.round(offset + (start + w[i]) * scale) - left);
    if (b - a > 3 * gap) b -= gap;
    else if (b <= a) b = Math.min(limit, a + 1);
    for (let p = a; p < b; p++) line[p] = colour;
    const width = b - a;
    if (hatch[cat[i]] && width >= minHatch) finds.hatched.push(i, a + left, width, top);
    if (width >= minText && label[i] !== NO_LABEL) finds.texts.push(i, a + left, width, top);
    if (flag[i] & MARKED) finds.marks.push(i, a + left, width, top);
  }
}

/** Draws windows on the base canvas. */
class SpanPainter {
  constructor() {
    this.lines = new RowLines();
  }

  /** Draw one window: its grid, its spans, their names and marks. */
  paint(context, win, geometry, state, look) {
    const to = new SpanProjection(win, geometry, state.view, state.scroll, look.dpr);
    if (!to.rows.length || to.right <= to.left) return;
    const finds = new SpanFinds();
    this.lines.begin(to.right - to.left, to.rows.length);
    to.rows.forEach((row, k) => this.fillLine(this.lines.line(k), win, to, row, state, look, finds));
    this.lines.show(context, to);
    this.paintHatched(context, win, to, look, finds.hatched);
    this.paintTexts(context, win, to, state, look, finds.texts);
    this.paintMarks(context, win, to, state, look, finds.marks);
  }

  fillLine(line, win, to, row, state, look, finds) {
    const { searching } = state;
    if (win.hasGrid) lineOfCells(line, win, to, row.row, look.rgba, searching ? 0.3 : 1);
    if (searching) {
      lineOfSpans(line, win, to, row, look.rgbaDim, FLAG.MATCH, 0, look.noHatch, finds);
      lineOfSpans(line, win, to, row, look.rgba, FLAG.MATCH, FLAG.MATCH, look.hatch, finds);
    } else {
      lineOfSpans(line, win, to, row, look.rgba, 0, 0, look.hatch, finds);
    }
  }

  paintHatched(context, win, to, look, hatched) {
    let cat = -1;
    for (let k = 0; k < hatched.length; k += 4) {
      if (win.cat[hatched[k]] !== cat) {
        cat = win.cat[hatched[k]];
        context.fillStyle = look.cats[cat].stripes;
      }
      context.fillRect(hatched[k + 1], hatched[k + 3], hatched[k + 2], to.height);
    }
  }

  paintTexts(context, win, to, state, look, texts) {
    if (!texts.length) return;
    const size = Math.min(11.5, to.height / to.dpr - 2.5);
    context.font = look.spanFont(size * to.dpr);
    context.textBaseline = "middle";
    context.textAlign = "left";
    const pad = Math.round(4 * to.dpr);
    const byInk = new Map();
    for (let k = 0; k < texts.length; k += 4) {
      const entry = look.cats[win.cat[texts[k]]];
      const dim = state.searching && !(win.flag[texts[k]] & FLAG.MATCH);
      const ink = entry ? (dim ? entry.dimInk : entry.ink) : look.background;
      if (!byInk.has(ink)) byInk.set(ink, []);
      byInk.get(ink).push(k);
    }
    for (const [ink, list] of byInk) {
      context.fillStyle = ink;
      for (const k of list) this.paintText(context, win, to, look, texts, k, pad);
    }
  }

  paintText(context, win, to, look, texts, k, pad) {
    const { text, width } = look.fit(context, win.text(texts[k]), null, texts[k + 2] - 2 * pad, 2);
    if (!text) return;
    const top = texts[k + 3];
    const entry = look.cats[win.cat[texts[k]]];
    if (entry && entry.stripes) this.plate(context, entry, texts[k + 1], top, width + 2 * pad, to.height);
    context.fillText(text, texts[k + 1] + pad, top + to.height / 2 + 0.5);
  }

  /** A plain ground for a name on a hatched span. */
  plate(context, entry, x, y, width, height) {
    const ink = context.fillStyle;
    context.fillStyle = entry.pale;
    context.fillRect(x, y, width, height);
    context.fillStyle = ink;
  }

  paintMarks(context, win, to, state, look, marks) {
    for (let k = 0; k < marks.length; k += 4) {
      const i = marks[k];
      const flag = win.flag[i];
      const box = [marks[k + 1], marks[k + 3], marks[k + 2], to.height];
      if (flag & FLAG.OPEN && box[0] + box[2] < to.right) tornEdge(context, box, to.dpr, look.background);
      if (flag & FLAG.FAILED) outline(context, box, 1.5 * to.dpr, look.danger);
      if (flag & FLAG.MATCH && state.searching) outline(context, box, to.dpr, look.text);
      if (flag & FLAG.SELECTED && !state.selected.whole) outline(context, box, 1.5 * to.dpr, look.text);
    }
  }
}

/** A frame just inside a box; a filled bar where the box is too narrow for one. */
function outline(context, [x, y, w, h], width, colour) {
  const line = Math.max(1, Math.round(width));
  if (w <= 2 * line + 1) {
    context.fillStyle = colour;
    context.fillRect(x, y, w, line);
    context.fillRect(x, y + h - line, w, line);
    return;
  }
  context.strokeStyle = colour;
  context.lineWidth = line;
  context.strokeRect(x + line / 2, y + line / 2, w - line, h - line);
}

/** Teeth in the background's colour at the right edge: the span has not ended. */
function tornEdge(context, [x, y, w, h], dpr, background) {
  const tooth = Math.min(Math.max(2 * dpr, h / 4), w);
  const right = x + w;
  context.fillStyle = background;
  context.beginPath();
  context.moveTo(right + 1, y);
  for (let top = y; top < y + h; top += tooth) {
    context.lineTo(right - tooth, Math.min(top + tooth / 2, y + h));
    context.lineTo(right + 1, Math.min(top + tooth, y + h));
  }
  context.closePath();
  context.fill();
}
