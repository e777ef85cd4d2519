/*
 * Stands in for the kernel in a self-contained page: answers from data that the page holds.
 *
 * Data: {meta, labels, arrays, base64, note?, code?}; arrays as in a message: row, x (ns since the view's origin), w (ns),
 * cat, label (beyond the labels: none), and if wanted event, flag, flow_from, flow_to (positions of spans), flow_kind.
 * `code` may hold {start_s}, {end_s}, {row0}, {row1}.
 */

const STATIC_MOST_SPANS = 20000;
const STATIC_MOST_ROWS = 500;

/** The spans of a page and what can be asked about them. */
class StaticData {
  constructor(data) {
    this.meta = { ...EMPTY_META, ...data.meta };
    this.meta.group_options = [this.meta.group_by];
    if (data.note) this.meta.note = [this.meta.note, data.note].filter(Boolean).join("; ");
    this.labels = data.labels || [];
    this.code = data.code || "";
    Object.assign(this, decodeArrays(data, []));
    this.size = this.row.length;
    if (!this.event) this.event = Uint32Array.from({ length: this.size }, (_, i) => i);
    if (!this.flag) this.flag = new Uint8Array(this.size);
    this.position = new Map();
    for (let i = 0; i < this.size; i++) this.position.set(this.event[i], i);
    this.hits = new Uint8Array(this.size);
    this.chosen = new Set();
  }

  text(i) {
    return this.label[i] < this.labels.length ? String(this.labels[this.label[i]]) : "";
  }

  hiddenCats() {
    return this.meta.categories.map((c) => this.meta.hidden.includes(c.name));
  }

  /** Positions of the visible spans in a box, by time. */
  inside(t0, t1, row0, row1) {
    const hidden = this.hiddenCats();
    const found = [];
    for (let i = 0; i < this.size; i++) {
      if (this.row[i] < row0 || this.row[i] >= row1 || hidden[this.cat[i]]) continue;
      if (this.x[i] <= t1 && this.x[i] + this.w[i] >= t0) found.push(i);
    }
    return found;
  }

  blockOf(row) {
    return this.meta.blocks.find((b) => row >= b.row0 && row < b.row0 + b.rows);
  }

  place(row) {
    const block = this.blockOf(row);
    return block ? [block.label, block.title].filter(Boolean).join(" · ") : "";
  }

  instant(t) {
    return formatInstant(Math.round(this.meta.origin_s * 1e9) + t, 1);
  }

  stepOf(t) {
    const { number, start, end } = this.meta.steps;
    const i = number.findIndex((_, k) => start[k] <= t && t <= end[k]);
    return i < 0 ? null : { number: number[i], start: start[i], end: end[i] };
  }

  /** Length of the union of the given spans, which are sorted by start, added up over rows. */
  busyTime(list) {
    const ends = new Map();
    let total = 0;
    for (const i of [...list].sort((a, b) => this.x[a] - this.x[b])) {
      const key = this.blockOf(this.row[i]);
      const from = Math.max(this.x[i], ends.has(key) ? ends.get(key) : -Infinity);
      const to = this.x[i] + this.w[i];
      if (to > from) total += to - from;
      ends.set(key, Math.max(to, ends.has(key) ? ends.get(key) : -Infinity));
    }
    return total;
  }

  /** Seconds of each category among spans, the largest first, as fields. */
  categoryFields(list, clip = null) {
    const sums = new Map();
    for (const i of list) {
      const from = clip ? Math.max(this.x[i], clip[0]) : this.x[i];
      const to = clip ? Math.min(this.x[i] + this.w[i], clip[1]) : this.x[i] + this.w[i];
      const { name } = this.meta.categories[this.cat[i]] || { name: "other" };
      sums.set(name, (sums.get(name) || 0) + Math.max(0, to - from));
    }
    const sorted = [...sums].sort((a, b) => b[1] - a[1]);
    return sorted.map(([name, ns]) => [name, formatDuration(ns)]);
  }
}

/** Answers to each kind of request; each returns {content, arrays} or throws. */
const STATIC_ANSWERS = {
  ready(data) {
    return { kind: "meta", ...data.meta };
  },

  window(data, body) {
    return staticWindow(data, body);
  },

  describe(data, { event }) {
    const i = data.position.get(event);
    if (i === undefined) throw new Error(`no event ${event} in this page`);
    const step = data.stepOf(data.x[i]);
    const fields = [
      ["category", (data.meta.categories[data.cat[i]] || { name: "" }).name],
      ["place", data.place(data.row[i])],
      ["start", data.instant(data.x[i])],
      ["duration", formatDuration(data.w[i])],
    ];
    if (step) {
      const share = (100 * data.w[i]) / Math.max(1, step.end - step.start);
      fields.push(["step", `${step.number} (${shortNumber(share, 3)} % of it)`]);
    }
    const title = data.text(i) || fields[0][1];
    return { kind: "describe", event, title, fields, row: data.row[i], start: data.x[i], duration: data.w[i] };
  },

  select(data, { events, box }) {
    let list = [];
    if (events) list = events.map((e) => data.position.get(e)).filter((i) => i !== undefined);
    else if (box) list = data.inside(...box);
    data.chosen = new Set(list);
    if (!list.length) return { kind: "selection", count: 0, text: box ? "no spans in the box" : "", t0: 0, t1: 0, rows: null, events: [] };
    const t0 = list.reduce((t, i) => Math.min(t, data.x[i]), Infinity);
    const t1 = list.reduce((t, i) => Math.max(t, data.x[i] + data.w[i]), -Infinity);
    const rows = list.map((i) => data.row[i]).sort((a, b) => a - b);
    const text = `${list.length} ${list.length === 1 ? "span" : "spans"}, ${formatDuration(data.busyTime(list))} busy, ` +
      `${formatDuration(t1 - t0)} wide`;
    const ids = list.slice(0, 1000).map((i) => data.event[i]);
    return { kind: "selection", count: list.length, text, t0, t1, rows: [rows[0], rows[rows.length - 1]], events: ids };
  },

  search(data, { text, go, at }) {
    const { list, error } = staticHits(data, text);
    const none = { kind: "search", hits: list.length, position: 0, event: null, row: 0, start: 0, duration: 0, error };
    if (!list.length) return none;
    const now = data.hitPosition || 0;
    let position = list.findIndex((i) => data.x[i] + data.w[i] / 2 >= at) + 1 || 1;
    if (go === "next") position = (now % list.length) + 1;
    if (go === "previous") position = ((now - 2 + list.length) % list.length) + 1;
    data.hitPosition = position;
    const i = list[position - 1];
    return { ...none, position, event: data.event[i], row: data.row[i], start: data.x[i], duration: data.w[i] };
  },

  step(data, { go, at }) {
    const { number, start, end } = data.meta.steps;
    if (!number.length) throw new Error("this page has no steps");
    const last = number.length - 1;
    const passed = start.filter((s) => s <= at).length - 1;
    const slowest = end.reduce((best, e, i) => (e - start[i] > end[best] - start[best] ? i : best), 0);
    const choice = { next: passed + 1, previous: passed - 1, first: 0, last, worst: slowest }[go];
    const i = Math.min(last, Math.max(0, choice));
    const air = (end[i] - start[i]) * 0.02;
    const text = `step ${number[i]}, ${formatDuration(end[i] - start[i])}`;
    return { kind: "goto", t0: start[i] - air, t1: end[i] + air, text };
  },

  options(data, body) {
    if (body.group_by !== undefined && body.group_by !== data.meta.group_by) {
      throw new Error("this page holds one arrangement of rows; other groupings need the notebook");
    }
    if (body.hidden) data.meta = { ...data.meta, hidden: body.hidden };
    return { kind: "meta", ...data.meta, view: null };
  },

  flows(data, { event }) {
    return staticFlows(data, event);
  },

  table(data, { t0, t1, row0, row1 }) {
    const list = data.inside(t0, t1, row0, row1).sort((a, b) => data.x[a] - data.x[b]);
    const rows = list.slice(0, STATIC_MOST_ROWS).map((i) => [
      data.text(i) || "–",
      data.meta.categories[data.cat[i]].name,
      data.place(data.row[i]),
      data.instant(data.x[i]),
      formatDuration(data.w[i]),
    ]);
    const columns = ["name", "category", "place", "start", "duration"];
    return { kind: "table", columns, rows, more: Math.max(0, list.length - STATIC_MOST_ROWS) };
  },

  code(data, { t0, t1, row0, row1 }) {
    if (!data.code) throw new Error("this page has no code for its view; copy it from the notebook");
    const values = { start_s: (data.meta.origin_s + t0 / 1e9).toFixed(9), end_s: (data.meta.origin_s + t1 / 1e9).toFixed(9), row0, row1 };
    return { kind: "code", text: data.code.replace(/\{(start_s|end_s|row0|row1)\}/g, (_, name) => String(values[name])) };
  },

  range(data, { t0, t1, row0, row1 }) {
    const list = data.inside(t0, t1, row0, row1);
    const fields = [["from", data.instant(t0)], ["to", data.instant(t1)], ...data.categoryFields(list, [t0, t1])];
    return { kind: "range", text: `${formatDuration(t1 - t0)}, ${list.length} spans`, fields };
  },
};

/** Positions that a search finds, by time; also sets the hits that windows flag. */
function staticHits(data, text) {
  data.hits.fill(0);
  if (!text) return { list: [], error: "" };
  let matches;
  const expression = /^\/(.*)\/$/s.exec(text);
  try {
    const regex = expression && new RegExp(expression[1], "i");
    matches = regex ? (s) => regex.test(s) : (s) => s.toLowerCase().includes(text.toLowerCase());
  } catch (err) {
    return { list: [], error: `not an expression: ${err.message}` };
  }
  const verdicts = data.labels.map((s) => matches(String(s)));
  const hidden = data.hiddenCats();
  const list = [];
  for (let i = 0; i < data.size; i++) {
    if (!verdicts[data.label[i]] || hidden[data.cat[i]]) continue;
    data.hits[i] = 1;
    list.push(i);
  }
  return { list: list.sort((a, b) => data.x[a] - data.x[b] || data.row[a] - data.row[b]), error: "" };
}

/** Three times the visible width; what is too much goes into the grid, the shortest first. */
function staticWindow(data, { t0, t1, pixels, row0, row1 }) {
  const [e0, e1] = data.meta.extent;
  const air = t1 - t0;
  const from = Math.max(Math.min(e0, t0), t0 - air);
  const to = Math.min(Math.max(e1, t1), t1 + air);
  const columns = Math.max(1, Math.round((pixels * (to - from)) / (t1 - t0)));
  const list = data.inside(from, to, row0, row1);
  let threshold = 0;
  if (list.length > STATIC_MOST_SPANS) {
    const widths = Float64Array.from(list, (i) => data.w[i]).sort();
    threshold = widths[list.length - STATIC_MOST_SPANS];
  }
  const raw = threshold ? list.filter((i) => data.w[i] > threshold) : list;
  const rest = threshold ? list.filter((i) => data.w[i] <= threshold) : [];
  const place = { from, to, row0, row1, columns };
  const { specs, values, labels } = staticSpans(data, raw, place);
  if (rest.length) staticGrid(data, rest, place, specs, values);
  const common = { kind: "window", t0: from, t1: to, row0, row1, pixels: columns, threshold_px: (threshold * pixels) / air };
  return { ...common, num_events: list.length, arrays: specs, labels, buffers: values };
}

function staticSpans(data, raw, { from, row0 }) {
  const labels = [];
  const known = new Map();
  const label = Uint16Array.from(raw, (i) => {
    if (data.label[i] >= data.labels.length) return NO_LABEL;
    if (!known.has(data.label[i])) {
      if (labels.length >= NO_LABEL) return NO_LABEL;
      known.set(data.label[i], labels.length);
      labels.push(data.labels[data.label[i]]);
    }
    return known.get(data.label[i]);
  });
  const values = [
    Uint16Array.from(raw, (i) => data.row[i] - row0),
    Float32Array.from(raw, (i) => data.x[i] - from),
    Float32Array.from(raw, (i) => data.w[i]),
    Uint8Array.from(raw, (i) => data.cat[i]),
    Uint8Array.from(raw, (i) => data.flag[i] | (data.hits[i] ? FLAG.MATCH : 0) | (data.chosen.has(i) ? FLAG.SELECTED : 0)),
    label,
    Uint32Array.from(raw, (i) => data.event[i]),
  ];
  const names = [["row", "u16"], ["x", "f32"], ["w", "f32"], ["cat", "u8"], ["flag", "u8"], ["label", "u16"], ["event", "u32"]];
  const specs = names.map(([name, dtype]) => ({ name, dtype, shape: [raw.length] }));
  return { specs, values, labels };
}

/** Busy share of each cell, and the category that takes most of it. */
function staticGrid(data, list, { from, to, row0, row1, columns }, specs, values) {
  const cell = (to - from) / columns;
  const shape = [row1 - row0, columns];
  const total = new Float32Array(shape[0] * columns);
  const most = new Float32Array(total.length);
  const cats = new Uint8Array(total.length).fill(EMPTY_CELL);
  for (const i of list) {
    const first = Math.max(0, Math.floor((data.x[i] - from) / cell));
    const last = Math.min(columns - 1, Math.floor((data.x[i] + data.w[i] - from) / cell));
    for (let c = first; c <= last; c++) {
      const part = Math.min(data.x[i] + data.w[i], from + (c + 1) * cell) - Math.max(data.x[i], from + c * cell);
      const k = (data.row[i] - row0) * columns + c;
      total[k] += part;
      if (part >= most[k]) {
        most[k] = part;
        cats[k] = data.cat[i];
      }
    }
  }
  specs.push({ name: "busy", dtype: "u8", shape }, { name: "cats", dtype: "u8", shape });
  values.push(Uint8Array.from(total, (v) => Math.min(255, Math.ceil((255 * v) / cell))), cats);
}

/** Ends of the lines from and to an event. */
function staticFlows(data, event) {
  const picked = [];
  const i = event === null ? -1 : data.position.get(event);
  for (let k = 0; data.flow_from && i >= 0 && k < data.flow_from.length; k++) {
    if (data.flow_from[k] === i || data.flow_to[k] === i) picked.push(k);
  }
  const end = (k) => data.x[data.flow_from[k]] + (data.flow_kind[k] === 1 ? data.w[data.flow_from[k]] : 0);
  const values = [
    Float64Array.from(picked, end),
    Uint32Array.from(picked, (k) => data.row[data.flow_from[k]]),
    Float64Array.from(picked, (k) => data.x[data.flow_to[k]] + (data.flow_kind[k] === 1 ? data.w[data.flow_to[k]] : 0)),
    Uint32Array.from(picked, (k) => data.row[data.flow_to[k]]),
    Uint8Array.from(picked, (k) => data.flow_kind[k]),
  ];
  const names = [["x0", "f64"], ["row0", "u32"], ["x1", "f64"], ["row1", "u32"], ["kind", "u8"]];
  return { kind: "flows", arrays: names.map(([name, dtype]) => ({ name, dtype, shape: [picked.length] })), buffers: values };
}

/** Looks like a widget's model; answers in the next task, as a kernel does. */
class StaticModel extends ModelStandIn {
  /**
   * @param {object} data see the head of this file
   * @param {object} [values] what `get` returns, such as twin_id
   */
  constructor(data, values = {}) {
    super();
    this.data = new StaticData(data);
    this.values = values;
  }

  get(name) {
    return this.values[name];
  }

  set(name, value) {
    this.values[name] = value;
  }

  save_changes() {}

  send(content) {
    setTimeout(() => this.answer(content), 0);
  }

  answer(content) {
    let reply;
    const handler = Object.prototype.hasOwnProperty.call(STATIC_ANSWERS, content.kind) && STATIC_ANSWERS[content.kind];
    if (!handler) return;
    try {
      reply = handler(this.data, content);
    } catch (err) {
      reply = { kind: "error", of: content.kind, text: err.message };
    }
    const { buffers = [], ...rest } = reply;
    this.emit({ ...rest, seq: content.seq }, buffers);
  }
}
