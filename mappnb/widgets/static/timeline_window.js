/* One answer of kind `window`: spans in the order of rows and time, for drawing and finding, and the busy grid. */

const FLAG = { MATCH: 1, SELECTED: 2, OPEN: 4, FAILED: 8, CLIPPED: 16 };
const NO_LABEL = 65535;
const EMPTY_CELL = 255;

/** Stable counting sort: the order of 0..n-1 by key, and where each key begins. */
function countingSort(keys, numKeys) {
  const starts = new Uint32Array(numKeys + 1);
  for (let i = 0; i < keys.length; i++) starts[keys[i] + 1] += 1;
  for (let k = 0; k < numKeys; k++) starts[k + 1] += starts[k];
  const next = starts.slice(0, numKeys);
  const sorted = new Uint32Array(keys.length);
  for (let i = 0; i < keys.length; i++) sorted[next[keys[i]]++] = i;
  return { sorted, starts };
}

/** What the kernel answered for a part of the plane; row numbers are relative to `row0`. */
class SpanWindow {
  constructor(content, arrays) {
    this.t0 = content.t0;
    this.t1 = content.t1;
    this.row0 = content.row0;
    this.row1 = content.row1;
    this.numRows = Math.max(0, content.row1 - content.row0);
    this.columns = content.pixels || 0;
    this.labels = content.labels || [];
    this.numEvents = content.num_events || 0;
    const none = new Uint8Array(0);
    for (const name of ["row", "x", "w", "cat", "flag", "label", "event"]) this[name] = arrays[name] || none;
    this.size = this.row.length;
    this.checkSizes();
    this.busy = arrays.busy || null;
    this.cats = arrays.cats || null;
    this.hasGrid = Boolean(this.busy && this.cats && this.columns && this.numRows);
    this.index();
  }

  checkSizes() {
    for (const name of ["x", "w", "cat", "flag", "label", "event"]) {
      if (this[name].length !== this.size) throw new Error(`window: ${name} has ${this[name].length} of ${this.size} values`);
    }
    for (let i = 0; i < this.size; i++) {
      if (this.row[i] >= this.numRows) throw new Error(`window: row ${this.row[i]} of ${this.numRows}`);
    }
  }

  /** The order by row, then time. */
  index() {
    const { sorted, starts } = countingSort(this.row, this.numRows);
    const x = this.x;
    for (let r = 0; r < this.numRows; r++) {
      const slice = sorted.subarray(starts[r], starts[r + 1]);
      let ordered = true;
      for (let k = 1; k < slice.length && ordered; k++) ordered = x[slice[k - 1]] <= x[slice[k]];
      if (!ordered) slice.sort((a, b) => x[a] - x[b]);
    }
    this.byRow = sorted;
    this.rowStarts = starts;
    this.positions = null;
  }

  /** Whether the window holds this part of the plane. */
  covers(t0, t1, row0, row1) {
    return this.t0 <= t0 && this.t1 >= t1 && this.row0 <= row0 && this.row1 >= row1;
  }

  /** Index of an event, or -1. */
  find(event) {
    if (!this.positions) {
      this.positions = new Map();
      for (let i = 0; i < this.size; i++) this.positions.set(this.event[i], i);
    }
    const i = this.positions.get(event);
    return i === undefined ? -1 : i;
  }

  /** Index of the span at time `t` of an absolute row, `slack` ns beside it allowed; -1 if there is none. */
  hit(row, t, slack, hidden) {
    const r = row - this.row0;
    if (r < 0 || r >= this.numRows) return -1;
    const begin = this.rowStarts[r];
    const at = t - this.t0;
    let k = this.upperBound(r, at + slack) - 1;
    let best = -1;
    let distance = Infinity;
    for (let tries = 0; k >= begin && tries < 24; k--, tries++) {
      const i = this.byRow[k];
      if (hidden[this.cat[i]]) continue;
      const gap = Math.max(this.x[i] - at, at - this.x[i] - this.w[i], 0);
      if (gap <= slack && gap < distance) {
        best = i;
        distance = gap;
      }
      if (gap === 0) break;
    }
    return best;
  }

  /** Position in `byRow` after the last span of relative row `r` that starts at or before `x`. */
  upperBound(r, x) {
    let low = this.rowStarts[r];
    let high = this.rowStarts[r + 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.x[this.byRow[middle]] <= x) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  /** The next (+1) or previous (-1) visible span in the row of span `i`; -1 at the end. */
  neighbour(i, direction, hidden) {
    const r = this.row[i];
    let k = this.rowStarts[r];
    while (this.byRow[k] !== i) k += 1;
    for (k += direction; k >= this.rowStarts[r] && k < this.rowStarts[r + 1]; k += direction) {
      if (!hidden[this.cat[this.byRow[k]]]) return this.byRow[k];
    }
    return -1;
  }

  /** The span of an absolute row that lies nearest to `t`; -1 if the row has none. */
  nearest(row, t, hidden) {
    const r = row - this.row0;
    if (r < 0 || r >= this.numRows) return -1;
    let best = -1;
    let distance = Infinity;
    for (let k = this.rowStarts[r]; k < this.rowStarts[r + 1]; k++) {
      const i = this.byRow[k];
      if (hidden[this.cat[i]]) continue;
      const middle = this.t0 + this.x[i] + this.w[i] / 2;
      if (Math.abs(middle - t) < distance) {
        best = i;
        distance = Math.abs(middle - t);
      }
    }
    return best;
  }

  /** A plain object about span `i`. */
  span(i) {
    return {
      event: this.event[i],
      row: this.row0 + this.row[i],
      start: this.t0 + this.x[i],
      duration: this.w[i],
      cat: this.cat[i],
      flag: this.flag[i],
      label: this.text(i),
    };
  }

  text(i) {
    return this.label[i] === NO_LABEL ? "" : String(this.labels[this.label[i]] || "");
  }

  /** Busy share and category of the grid cell at a place; null where there is none. */
  cell(row, t) {
    const r = row - this.row0;
    if (!this.hasGrid || r < 0 || r >= this.numRows || t < this.t0 || t >= this.t1) return null;
    const column = Math.floor(((t - this.t0) / (this.t1 - this.t0)) * this.columns);
    const k = r * this.columns + Math.min(column, this.columns - 1);
    if (this.cats[k] === EMPTY_CELL || this.busy[k] === 0) return null;
    return { cat: this.cats[k], share: this.busy[k] / 255 };
  }
}
