/* Keys of the focused canvas, Perfetto's where it has one. */

const TIMELINE_HELP = [
  ["Move", [
    ["W S", "zoom in, out at the pointer"],
    ["A D", "move left, right"],
    ["↑ ↓ ← →", "scroll rows, move; Shift: faster"],
    ["Home End", "begin, end of the run"],
    ["F", "fit the selection (or all)"],
    ["0", "the whole run"],
    ["+ −", "taller, lower rows"],
  ]],
  ["Steps and search", [
    ["N P", "next, previous step"],
    ["B", "the slowest step"],
    ["/", "search; /…/ is an expression"],
    ["Enter", "next hit; with Shift the previous"],
  ]],
  ["Spans", [
    ["[ ]", "previous, next span in the row"],
    ["{ }", "span in the row above, below"],
    ["Space", "select the span, show its details"],
    ["M", "measure the selection, or by dragging"],
    ["Esc", "clear, then leave"],
  ]],
  ["Other", [
    ["C", "copy the code for this view"],
    ["T", "what is visible, as a table"],
    ["G", "other grouping"],
    ["?", "this help"],
  ]],
  ["Pointer", [
    ["drag", "move"],
    ["Shift+drag", "select a box"],
    ["Alt+drag", "measure; also on the time axis"],
    ["Ctrl+wheel", "zoom"],
    ["wheel", "scroll rows when focused; Shift: move"],
    ["double\u00a0click", "zoom to the span"],
  ]],
];

/** Key input of the canvas. `app` is the Timeline. */
class KeyInput {
  constructor(app, canvas, disposer) {
    this.app = app;
    this.canvas = canvas;
    this.actions = this.buildActions();
    disposer.listen(canvas, "keydown", (event) => this.press(event));
  }

  buildActions() {
    const { app } = this;
    const { state, requests } = app;
    const speed = (event) => (event.shiftKey ? 3 : 1);
    const zoom = (way) => (e) => state.zoom(1.35 ** (way * speed(e)), this.pointerTime(), true);
    const pan = (way) => (e) => state.pan(way * 0.18 * speed(e), true);
    const rows = (way) => (e) => app.scrollTo(state.scroll + way * 3 * app.geometry.rowHeight * speed(e));
    return {
      w: zoom(1),
      s: zoom(-1),
      a: pan(-1),
      d: pan(1),
      arrowleft: pan(-1),
      arrowright: pan(1),
      arrowup: rows(-1),
      arrowdown: rows(1),
      pageup: () => app.scrollTo(state.scroll - app.geometry.plot.h * 0.9),
      pagedown: () => app.scrollTo(state.scroll + app.geometry.plot.h * 0.9),
      home: () => this.end(0),
      end: () => this.end(1),
      f: () => app.fit(),
      0: () => state.glide(...state.wholeView()),
      "+": () => app.changeRowHeight(1),
      "=": () => app.changeRowHeight(1),
      "-": () => app.changeRowHeight(-1),
      n: () => requests.step("next"),
      p: () => requests.step("previous"),
      b: () => requests.step("worst"),
      m: () => app.measureSelection(),
      "/": () => app.panels.focusSearch(),
      enter: (e) => this.enter(e),
      " ": () => app.selectCursor(),
      "[": () => app.moveCursor(-1),
      "]": () => app.moveCursor(1),
      ",": () => app.moveCursor(-1),
      ".": () => app.moveCursor(1),
      "{": () => app.moveCursorRow(-1),
      "}": () => app.moveCursorRow(1),
      c: () => app.copyCode(),
      t: () => app.panels.toggleTable(),
      g: () => app.panels.nextGrouping(),
      "?": () => app.panels.help.toggle(),
      escape: () => app.escape(),
    };
  }

  press(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const action = this.actions[event.key.toLowerCase()];
    if (!action || this.app.state.closed) return;
    event.preventDefault();
    event.stopPropagation();
    action(event);
  }

  /** Time under the pointer if it is over the plot, else the middle. */
  pointerTime() {
    const { hover, target } = this.app.state;
    const { plot } = this.app.geometry;
    if (!hover || hover.x < plot.x) return (target.t0 + target.t1) / 2;
    return target.t0 + ((hover.x - plot.x) / plot.w) * (target.t1 - target.t0);
  }

  /** Show the begin (0) or end (1) of the run at the present zoom. */
  end(which) {
    const { state } = this.app;
    const [e0, e1] = state.wholeView();
    const length = Math.min(state.target.t1 - state.target.t0, e1 - e0);
    if (which === 0) state.glide(e0, e0 + length);
    else state.glide(e1 - length, e1);
  }

  enter(event) {
    const { state, requests } = this.app;
    if (state.searching && (event.shiftKey || !state.cursor || state.cursor.hit)) {
      requests.search(state.search.text, event.shiftKey ? "previous" : "next");
    } else {
      this.app.selectCursor();
    }
  }
}
