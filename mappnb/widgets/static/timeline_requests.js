/* What the timeline asks the kernel, and what it does with the answers. */

const CACHED_DESCRIPTIONS = 400;

/** Requests of one view. `app` is the Timeline. */
class TimelineRequests {
  constructor(app, connection) {
    this.app = app;
    this.connection = connection;
    this.described = new Map();
    this.needsBase = true;
    this.lastView = "";
  }

  get state() {
    return this.app.state;
  }

  /** Say hello; the answers are `probe` and `meta`. */
  ready() {
    const { width, height } = this.app.geometry;
    const theme = this.app.root.dataset.mappnbTheme;
    this.connection.request("ready", { width, height, dpr: window.devicePixelRatio || 1, theme });
  }

  /** Ask for what is visible now, if it was not just asked for; then for the coarse picture of the whole run. */
  pump() {
    const { state } = this;
    if (!state.loaded || state.closed || state.meta.empty || !state.meta.rows.length) return;
    const body = this.visible();
    const key = JSON.stringify(body);
    if (key !== this.lastView) {
      this.lastView = key;
      this.connection.request("window", body, (content, arrays) => this.takeWindow(content, arrays, body));
    } else if (this.needsBase && !this.connection.isBusy("window")) {
      this.requestBase();
    }
  }

  /** The visible part of the plane, as it will be when the motion ends. */
  visible() {
    const { state, app } = this;
    const [row0, row1] = app.geometry.visibleRows(state.scroll);
    return { t0: state.target.t0, t1: state.target.t1, pixels: Math.min(8192, Math.round(app.geometry.plot.w)), row0, row1 };
  }

  requestBase() {
    const [t0, t1] = this.state.wholeView();
    const rows = this.state.meta.rows.length;
    const pixels = Math.max(64, Math.min(Math.round(this.app.geometry.plot.w), Math.floor(1e6 / rows)));
    this.needsBase = false;
    // `overview` tells the kernel that the reader does not look there.
    this.connection.request("window", { t0, t1, pixels, row0: 0, row1: rows, overview: true }, (content, arrays) => {
      this.state.base = new SpanWindow(content, arrays);
      this.app.draw();
    });
  }

  takeWindow(content, arrays, body) {
    const win = new SpanWindow(content, arrays);
    this.state.window = win;
    const [t0, t1] = this.state.meta.extent;
    if (this.needsBase && win.covers(t0, t1, 0, this.state.meta.rows.length) && body.t0 <= t0 && body.t1 >= t1) {
      this.state.base = win;
      this.needsBase = false;
    }
    this.app.panels.refreshTable();
    this.app.draw();
  }

  /** The data have changed: everything is asked for again. */
  refresh(withBase = true) {
    this.lastView = "";
    this.described.clear();
    if (withBase) this.needsBase = true;
    this.app.draw();
  }

  /** Details of an event; `then` may be called at once from the cache. */
  describe(event, then) {
    const known = this.described.get(event);
    if (known) {
      then(known);
      return;
    }
    this.connection.request("describe", { event }, (content) => {
      if (this.described.size >= CACHED_DESCRIPTIONS) this.described.delete(this.described.keys().next().value);
      this.described.set(content.event, content);
      then(content);
    });
  }

  /** Select events, a box, or nothing ({}). */
  select(body) {
    this.state.selected = { events: new Set(body.events || []), count: 0, whole: true, box: body.box || null, range: null };
    this.connection.request("select", body, (content) => this.takeSelection(content, body));
    if (this.state.flowsOn) this.flowsOf(body.events && body.events.length === 1 ? body.events[0] : null);
    this.app.drawOverlay();
  }

  /** Take over a selection: the answer to `select`, or one that was made in Python (no body). */
  takeSelection(content, body = null) {
    const events = new Set(content.events || []);
    const { count, t0, t1, text, rows } = content;
    const range = typeof t0 === "number" && t1 > t0 ? [t0, t1] : null;
    let box = body ? body.box || null : null;
    if (!body && range && rows) box = [t0, t1, rows[0], rows[1] + 1];
    this.state.selected = { events, count, whole: events.size >= count, box, range };
    this.app.panels.showSelection(count ? text : "");
    if (!this.state.selected.whole && !box) this.refresh(false);
    this.app.drawOverlay();
  }

  flowsOf(event) {
    if (event === null) {
      if (!this.state.flows && !this.connection.isBusy("flows")) return;
      this.state.flows = null;
    }
    this.connection.request("flows", { event }, (content, arrays) => {
      this.state.flows = event === null || !arrays.x0 || !arrays.x0.length ? null : arrays;
      this.app.drawOverlay();
    });
  }

  /** Search for a text: "first", "next" or "previous" hit; quiet: mark the hits, but do not go there. */
  search(text, go, quiet = false) {
    const { state, app } = this;
    if (text === "" && state.search.text === "") return;
    const { t0, t1 } = state.target;
    this.connection.request("search", { text, go, at: (t0 + t1) / 2 }, (content) => this.takeSearch(content, text, quiet));
    app.panels.showSearching();
  }

  takeSearch(content, text, quiet) {
    const { app, state } = this;
    const fresh = text !== state.search.text || content.hits !== state.search.hits;
    state.search = { text, hits: content.hits || 0, position: content.position || 0, error: content.error || "" };
    if (text === "" && state.cursor && state.cursor.hit) state.cursor = null;
    app.panels.showSearch();
    if (fresh) this.refresh();
    if (content.position && text !== "" && !quiet) app.showHit(content);
    app.draw();
  }

  step(go) {
    const { t0, t1 } = this.state.target;
    this.connection.request("step", { go, at: (t0 + t1) / 2 });
  }

  /** Options are always sent together: a newer message may replace one that waits. */
  options(changes) {
    const { meta } = this.state;
    this.wanted = { group_by: meta.group_by, hidden: meta.hidden, flows: this.state.flowsOn, ...this.wanted, ...changes };
    this.connection.request("options", this.wanted, (content, arrays) => {
      if (!this.connection.waiting.has("options")) this.wanted = null;
      this.app.onMessage(content, arrays);
    });
  }

  table(then) {
    const { t0, t1, row0, row1 } = this.visible();
    this.connection.request("table", { t0, t1, row0, row1 }, then);
  }

  code(then) {
    const { t0, t1, row0, row1 } = this.visible();
    this.connection.request("code", { t0, t1, row0, row1 }, then);
  }

  range(t0, t1) {
    const { row0, row1 } = this.visible();
    this.connection.request("range", { t0, t1, row0, row1 }, (content) => this.app.panels.showRange(content));
  }
}
