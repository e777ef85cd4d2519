/* The plots of the schedule lab, drawn by bokeh. BokehJS comes from the kernel over the view's own channel, once a page. */

const PLOT_MS = 250; // between two redraws of the plots: they cost more than all lanes and the table together

/** Run BokehJS in the page; resolves to it. */
async function loadBokeh(version, packed) {
  if (window.Bokeh && window.Bokeh.version === version) return window.Bokeh;
  if (window.Bokeh && window.Bokeh[version]) return window.Bokeh[version];
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
  script.remove();
  if (!window.Bokeh || !(window.Bokeh[version] || window.Bokeh.version === version)) throw new Error("BokehJS did not start: plots are left out");
  return window.Bokeh[version] || window.Bokeh;
}

/** Go on once a view has BokehJS: from the page, else from the kernel. */
function withBokeh(view, then) {
  if (view.bokeh) return then();
  const version = window.Bokeh ? String(window.Bokeh.version) : "";
  view.connection.request("bokeh", { version }, async (content, arrays) => {
    try {
      const parts = ["js0", "js1"].filter((n) => arrays[n]).map((n) => arrays[n]);
      view.bokeh = await loadBokeh(content.version, parts.length ? new Blob(parts) : new Blob([]));
    } catch (err) {
      view.errors.show("bokeh", `no plots: ${err.message || err}`);
      return;
    }
    then();
  });
  return undefined;
}

/** Columns as bokeh takes them, out of what the kernel packed. */
function unpackColumns(told, arrays) {
  const out = {};
  for (const [source, columns] of Object.entries(told)) {
    out[source] = {};
    for (const [name, where] of Object.entries(columns)) {
      if (where.list) out[source][name] = where.list;
      else if (where.array) out[source][name] = Array.from(arrays[where.array]);
      else out[source][name] = unpackRagged(arrays[where.ragged], arrays[`${where.ragged}.ends`]);
    }
  }
  return out;
}

function unpackRagged(values, ends) {
  return Array.from(ends, (end, i) => Array.from(values.subarray(i ? ends[i - 1] : 0, end)));
}

/** Three figures in three boxes; data are patched into their sources. */
class LabPlots {
  /** @param {object} on hovered(t or null), pick(label), shine(label or null) */
  constructor(on) {
    this.on = on;
    this.boxes = {};
    this.views = {};
    this.columns = {};
    this.range = null;
    this.making = 0;
    this.due = {};
    this.timer = 0;
    this.patched = -Infinity;
    this.memory = this.box("memory", "Memory of the selected schedule over time, by rank");
    this.pareto = this.box("pareto", "Step time against peak memory of each schedule");
    this.bars = this.box("bars", "Time in actions and idle time by phase of each schedule");
  }

  box(name, label) {
    const target = make("div", { class: "mappnb-lab-figure", role: "img", "aria-label": label });
    this.boxes[name] = target;
    return target;
  }

  /** Draw all figures anew: first time, or other theme. */
  async draw(bokeh, figures) {
    const turn = ++this.making;
    this.bokeh = bokeh;
    for (const name of Object.keys(this.boxes)) {
      const made = await bokeh.embed.embed_item(figures[name], this.emptied(name));
      if (turn !== this.making) return;
      this.views[name] = made;
    }
    this.listen();
    this.due = { ...this.columns };
    this.apply();
    if (this.range) this.showRange(...this.range);
  }

  emptied(name) {
    if (this.views[name]) this.views[name].clear();
    delete this.views[name];
    const inner = make("div", { class: "mappnb-lab-bokeh" });
    this.boxes[name].replaceChildren(inner);
    return inner;
  }

  document(name) {
    const view = this.views[name] && [...this.views[name]][0];
    return view ? view.model.document : null;
  }

  find(figure, name) {
    const doc = this.document(figure);
    return doc ? doc.get_model_by_name(name) : null;
  }

  /** Put new columns into the sources, only what came; while a knob moves not more often than every PLOT_MS. */
  patch(columns) {
    Object.assign(this.columns, columns);
    Object.assign(this.due, columns);
    if (this.timer) return;
    const wait = Math.max(0, this.patched + PLOT_MS - performance.now());
    if (wait === 0) this.apply();
    else this.timer = setTimeout(() => this.apply(), wait);
  }

  apply() {
    clearTimeout(this.timer);
    this.timer = 0;
    this.patched = performance.now();
    const columns = this.due;
    this.due = {};
    for (const figure of Object.keys(this.views)) {
      const doc = this.document(figure);
      if (!doc) continue;
      for (const [name, data] of Object.entries(columns)) {
        if (figure === "bars" && name === "bars") this.name(data.name);
        const source = doc.get_model_by_name(name);
        if (source) source.data = { ...data };
      }
    }
  }

  name(names) {
    const range = this.find("bars", "names");
    const wanted = [...names].reverse();
    if (range && range.factors.join("|") !== wanted.join("|")) this.rename(range, wanted);
  }

  rename(range, names) {
    range.factors = names.length ? names : ["none"];
    for (const figure of ["bars", "pareto"]) {
      const doc = this.document(figure);
      for (const root of doc ? doc.roots() : []) root.height = Math.max(250, 70 + 22 * names.length);
    }
  }

  /** The memory plot shows what the lanes show. */
  showRange(t0, t1) {
    this.range = [t0, t1];
    const range = this.find("memory", "time");
    if (range) range.setv({ start: t0, end: t1 });
  }

  /** A line in the memory plot. */
  markTime(t) {
    const source = this.find("memory", "cursor");
    if (source) source.data = { x: t === null ? [] : [t] };
  }

  /** Linked hover: what bokeh's tools find, the lanes and the table show. (`inspected` itself changes silently.) */
  listen() {
    for (const figure of ["pareto", "bars"]) {
      const doc = this.document(figure);
      for (const tool of doc ? doc.roots().flatMap((root) => root.toolbar.tools) : []) {
        if (tool.name !== "hover") continue;
        const { data_source: source } = tool.renderers[0];
        source.inspect.connect(() => {
          const [at] = source.inspected.indices;
          this.on.shine(at === undefined ? null : source.data.name[at]);
        });
      }
      this.boxes[figure].onclick = () => this.on.pick(null);
    }
    const box = this.boxes.memory;
    box.onpointermove = (event) => this.on.hovered(this.timeAt(event));
    box.onpointerleave = () => this.on.hovered(null);
  }

  timeAt(event) {
    const view = [...this.views.memory][0];
    const { left } = this.boxes.memory.getBoundingClientRect();
    const x = event.clientX - left - view.frame.bbox.left;
    if (!this.range || x < 0 || x > view.frame.bbox.width) return null;
    return this.range[0] + (x / view.frame.bbox.width) * (this.range[1] - this.range[0]);
  }

  clear() {
    this.making += 1;
    clearTimeout(this.timer);
    for (const name of Object.keys(this.views)) this.emptied(name);
    this.columns = {};
  }
}
