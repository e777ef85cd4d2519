/* What the timeline shows: meta, view, windows, selection; and where things lie on the canvas. */

const SHORTEST_VIEW = 20; // ns
const HEIGHTS = { overview: 30, steps: 17, axis: 20, group: 19, blockGap: 5, scrollbar: 9 };
const ROW_HEIGHTS = [2, 3, 4, 6, 8, 10, 12, 14, 16, 18, 22, 28];
const EMPTY_META = {
  extent: [0, 1],
  view: null,
  num_events: 0,
  rows: [],
  blocks: [],
  groups: [],
  categories: [],
  steps: { number: [], start: [], end: [] },
  group_by: null,
  group_options: [],
  hidden: [],
  origin_s: 0,
  note: "",
  empty: "",
};

/** State without any drawing; `changed` is called whenever a new frame is due. */
class TimelineState {
  constructor(changed) {
    this.changed = changed;
    this.loaded = false;
    this.meta = EMPTY_META;
    this.view = { t0: 0, t1: 1 };
    this.target = this.view;
    this.motion = null;
    this.scroll = 0;
    this.window = null;
    this.base = null;
    this.hidden = new Uint8Array(256);
    this.selected = { events: new Set(), count: 0, whole: false, box: null, range: null };
    this.cursor = null;
    this.hover = null;
    this.search = { text: "", hits: 0, position: 0, error: "" };
    this.measure = null;
    this.mark = null;
    this.drag = null;
    this.flows = null;
    this.flowsOn = true;
    this.rowHeight = 0; // 0: chosen by the number of rows
    this.closed = false;
  }

  setMeta(meta) {
    const first = !this.loaded;
    if (first && meta.flows === false) this.flowsOn = false;
    this.meta = { ...EMPTY_META, ...meta };
    this.loaded = true;
    this.hidden.fill(0);
    this.meta.categories.forEach((c, i) => {
      this.hidden[i] = this.meta.hidden.includes(c.name) ? 1 : 0;
    });
    if (meta.view) this.jump(meta.view[0], meta.view[1]);
    else if (first) this.jump(...this.wholeView());
    this.changed();
  }

  /** The extent with a little air at both ends. */
  wholeView() {
    const [t0, t1] = this.meta.extent;
    const air = Math.max(t1 - t0, SHORTEST_VIEW) * 0.004;
    return [t0 - air, t1 + air];
  }

  /** Keep a view inside the run: its middle lies in the extent, its length in the allowed range. */
  clamp(t0, t1) {
    const [e0, e1] = this.wholeView();
    const length = Math.min(Math.max(t1 - t0, SHORTEST_VIEW), Math.max((e1 - e0) * 1.05, SHORTEST_VIEW));
    const grown = (length - (t1 - t0)) / 2;
    let from = t0 - grown;
    from = Math.min(Math.max(from, this.meta.extent[0] - length / 2), this.meta.extent[1] - length / 2);
    return Math.abs(from - t0) < 1e-6 && grown === 0 ? { t0, t1 } : { t0: from, t1: from + length };
  }

  /** Show another range at once. */
  jump(t0, t1) {
    this.motion = null;
    this.view = this.target = this.clamp(t0, t1);
    this.changed();
  }

  /** Show another range, gliding there unless the reader wants no motion. */
  glide(t0, t1) {
    this.target = this.clamp(t0, t1);
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) {
      this.jump(t0, t1);
      return;
    }
    this.motion = { from: this.view, begin: performance.now(), length: 130 };
    this.changed();
  }

  /** Advance a glide; true while it goes on. */
  advance(now) {
    if (!this.motion) return false;
    const share = Math.min(1, Math.max(0, (now - this.motion.begin) / this.motion.length));
    const eased = 1 - (1 - share) ** 3;
    const { from } = this.motion;
    const to = this.target;
    this.view = { t0: from.t0 + (to.t0 - from.t0) * eased, t1: from.t1 + (to.t1 - from.t1) * eased };
    if (share === 1) {
      this.view = to;
      this.motion = null;
    }
    return this.motion !== null;
  }

  /** Zoom by a factor (above 1: closer) around time `t`. */
  zoom(factor, t, smooth) {
    const { t0, t1 } = this.target;
    const from = t - (t - t0) / factor;
    const to = t + (t1 - t) / factor;
    if (to - from < SHORTEST_VIEW && factor > 1) return;
    if (smooth) this.glide(from, to);
    else this.jump(from, to);
  }

  /** Move by a share of the view's length. */
  pan(share, smooth) {
    const { t0, t1 } = this.target;
    const by = (t1 - t0) * share;
    if (smooth) this.glide(t0 + by, t1 + by);
    else this.jump(t0 + by, t1 + by);
  }

  get searching() {
    return this.search.text !== "" && this.search.hits > 0;
  }

  /** Drop everything that holds data. */
  clear() {
    this.window = this.base = this.flows = this.cursor = this.hover = null;
    this.selected.events.clear();
  }
}

/** Where rows, blocks and groups lie; rebuilt when meta, size or row height change. CSS pixels. */
class TimelineGeometry {
  constructor() {
    this.width = 0;
    this.height = 0;
    this.plot = { x: 0, y: 0, w: 1, h: 1 };
    this.rowTop = new Float64Array(0);
    this.rowHeight = 18;
    this.contentHeight = 0;
    this.bands = [];
    this.groupTops = [];
  }

  /** Lay rows out for a width; `maxHeight` bounds the plot unless `fixedHeight` is given. */
  layOut(meta, width, { rowHeight, maxHeight, fixedHeight }) {
    this.width = width;
    const gutter = width < 520 ? 96 : width < 900 ? 148 : 188;
    const steps = meta.steps.number.length ? HEIGHTS.steps : 0;
    const top = HEIGHTS.overview + steps + HEIGHTS.axis;
    const room = (fixedHeight || maxHeight) - top;
    this.stepsTop = HEIGHTS.overview;
    this.axisTop = HEIGHTS.overview + steps;
    this.rowHeight = rowHeight || this.chooseRowHeight(meta, room);
    this.placeRows(meta);
    const content = Math.max(this.contentHeight, 40);
    this.height = Math.round(fixedHeight || Math.min(maxHeight, top + content));
    const scrolls = this.contentHeight > this.height - top + 0.5;
    this.plot = { x: gutter, y: top, w: Math.max(20, width - gutter - (scrolls ? HEIGHTS.scrollbar : 0)), h: this.height - top };
  }

  /** The largest comfortable row height at which all rows fit; 12 if none does. */
  chooseRowHeight(meta, room) {
    const groups = meta.groups.filter((g) => g.label).length;
    const fixed = groups * HEIGHTS.group + meta.blocks.length * HEIGHTS.blockGap;
    const fits = (room - fixed) / Math.max(meta.rows.length, 1);
    if (fits >= 22) return 22;
    return fits >= 18 ? 18 : Math.max(12, Math.floor(fits));
  }

  placeRows(meta) {
    const gap = this.rowHeight >= 8 ? HEIGHTS.blockGap : this.rowHeight >= 4 ? 2 : 1;
    const headed = new Map(meta.groups.filter((g) => g.label).map((g) => [g.row0, g]));
    this.rowTop = new Float64Array(meta.rows.length);
    this.bands = [];
    this.groupTops = [];
    let y = 0;
    for (const block of meta.blocks) {
      const group = headed.get(block.row0);
      if (group) {
        this.groupTops.push({ y, group });
        y += HEIGHTS.group;
      }
      const top = y;
      y += gap / 2;
      for (let r = 0; r < block.rows; r++, y += this.rowHeight) this.rowTop[block.row0 + r] = y;
      y += gap / 2;
      this.bands.push({ y: top, h: y - top });
    }
    this.contentHeight = y;
  }

  get maxScroll() {
    return Math.max(0, this.contentHeight - this.plot.h);
  }

  /** x of a time. */
  xOf(t, view) {
    return this.plot.x + ((t - view.t0) / (view.t1 - view.t0)) * this.plot.w;
  }

  /** Time of an x. */
  timeOf(x, view) {
    return view.t0 + ((x - this.plot.x) / this.plot.w) * (view.t1 - view.t0);
  }

  /** y of a row's top on the canvas. */
  yOf(row, scroll) {
    return this.plot.y + this.rowTop[row] - scroll;
  }

  /** The row at a y of the canvas; the nearest one above if between rows, -1 if outside or on a header. */
  rowAt(y, scroll) {
    const row = this.rowBefore(y - this.plot.y + scroll);
    if (row < 0 || y < this.plot.y || y >= this.plot.y + this.plot.h) return -1;
    return y - this.yOf(row, scroll) <= this.rowHeight + 1 ? row : -1;
  }

  /** The last row whose top is at or above a y of the content; -1 if none. */
  rowBefore(y) {
    let low = 0;
    let high = this.rowTop.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.rowTop[middle] <= y) low = middle + 1;
      else high = middle;
    }
    return low - 1;
  }

  /** Visible rows, end exclusive. */
  visibleRows(scroll) {
    const count = this.rowTop.length;
    if (!count) return [0, 0];
    let first = Math.max(0, this.rowBefore(scroll));
    if (this.rowTop[first] + this.rowHeight <= scroll && first + 1 < count) first += 1;
    const last = Math.max(first, this.rowBefore(scroll + this.plot.h - 0.5));
    return [first, last + 1];
  }

  /** Index of the block that holds a row. */
  blockOf(meta, row) {
    return meta.blocks.findIndex((b) => row >= b.row0 && row < b.row0 + b.rows);
  }
}
