/* Panels of the stragglers view: the tool bar, the list of verdicts, the evidence, the prices. */

/** Breadcrumb and choices above the heatmap. */
class StragglerBar {
  /** @param {object} on go(changes) */
  constructor(on, disposer) {
    this.on = on;
    this.disposer = disposer;
    this.crumbs = make("nav", { class: "mappnb-strag-crumbs", "aria-label": "Place" });
    this.choices = make("div", { class: "mappnb-strag-choices" });
    this.selects = {};
  }

  /** Make the lists anew. */
  build(options) {
    const words = { metric: "Colour", order: "Order", rows: "Rows", cell: "Cell", against: "Show" };
    this.selects = {};
    const fields = Object.entries(words).flatMap(([name, label]) => {
      if (!options[name] || options[name].length < 2) return [];
      const select = make("select", { class: "mappnb-input", "aria-label": label }, options[name].map(([value, text]) => make("option", { value, text })));
      select.onchange = () => this.on.go({ [name]: select.value });
      const field = make("label", { class: "mappnb-strag-field" }, [make("span", { class: "mappnb-muted", text: label, "aria-hidden": "true" }), select]);
      this.selects[name] = { select, field };
      return [field];
    });
    this.choices.replaceChildren(...fields);
  }

  take(told) {
    for (const [name, { select, field }] of Object.entries(this.selects)) {
      select.value = told.where[name];
      const there = { all: ["metric", "order", "rows", "cell"], host: ["metric", "order", "cell"], rank: ["against", "cell"], step: [] }[told.level];
      field.hidden = !there.includes(name) || (name === "cell" && !told.merged);
    }
    const parts = told.crumbs.flatMap(({ label, to }, i) => {
      const last = i === told.crumbs.length - 1;
      const crumb = make("button", { type: "button", class: "mappnb-strag-crumb", text: label, dir: "auto", "aria-current": last ? "page" : null, disabled: last });
      crumb.onclick = () => this.on.go(to);
      return i ? [make("span", { class: "mappnb-muted", text: "›", "aria-hidden": "true" }), crumb] : [crumb];
    });
    this.crumbs.replaceChildren(...parts);
  }
}

/** Sign of a verdict: shape and colour. */
function verdictSign(verdict) {
  return make("span", { class: `mappnb-strag-sign mappnb-strag-${verdict}`, "aria-hidden": "true" });
}

/** The list of verdicts. */
class VerdictList {
  constructor(on) {
    this.on = on;
    this.rows = [];
    this.node = make("section", { class: "mappnb-strag-verdicts", "aria-label": "Verdicts" }, [make("p", { class: "mappnb-muted", text: "Judging …" })]);
  }

  take(told) {
    this.rows = told.rows;
    const counts = ["culprit", "victim", "undecided"].map((v) => [v, told.rows.filter((r) => r.verdict === v).length]);
    const said = counts.flatMap(([v, n]) => (n ? [`${n} ${v}${n > 1 && v !== "undecided" ? "s" : ""}`] : []));
    const head = make("div", { class: "mappnb-strag-subhead", text: said.length ? `Verdicts: ${said.join(", ")}` : "Verdicts" });
    const notes = told.notes.length ? [make("p", { class: "mappnb-strag-notes", text: `Note: ${told.notes.join(". ")}.`, dir: "auto" })] : [];
    const clear = told.clear ? `${told.clear} ${told.clear === 1 ? "rank is" : "ranks are"} clear.` : "";
    const left = told.left ? ` ${told.left} more rows are in view.verdicts.` : "";
    const end = make("p", { class: "mappnb-muted mappnb-strag-clear", text: `${clear}${left}` || "" });
    if (!told.rows.length) {
      const none = told.clear ? "Nobody is slow." : "No verdict.";
      this.node.replaceChildren(head, make("p", { class: "mappnb-strag-none", text: none }), end, ...notes);
      return;
    }
    const table = make("table", { class: "mappnb-table" }, [
      make("caption", { class: "mappnb-hidden-text", text: "Verdicts, the largest effect first" }),
      make("thead", {}, [make("tr", {}, told.columns.map((c) => make("th", { scope: "col", text: c })))]),
      make("tbody", {}, told.rows.map((row) => this.row(row))),
    ]);
    const scroll = make("div", { class: "mappnb-scroll mappnb-strag-scroll", tabindex: "0", role: "region", "aria-label": "Verdicts, table" }, [table]);
    this.node.replaceChildren(head, scroll, end, ...notes);
  }

  row({ index, verdict, cells }) {
    const button = make("button", { type: "button", class: "mappnb-strag-pick", title: "Show its evidence" }, [verdictSign(verdict), make("span", { text: cells[0], dir: "auto" })]);
    const tr = make("tr", {}, [make("th", { scope: "row" }, [button]), ...cells.slice(1).map((text) => make("td", { text, dir: "auto", title: text.length > 60 ? text : null }))]);
    tr.dataset.index = index;
    tr.onclick = () => this.on.verdict(index);
    return tr;
  }

  mark(index) {
    for (const tr of this.node.querySelectorAll("tbody tr")) {
      const here = index !== null && tr.dataset.index === String(index);
      tr.classList.toggle("mappnb-strag-picked", here);
      tr.querySelector("button").setAttribute("aria-pressed", String(here));
    }
  }
}

/** What is known of the selected subject. */
class EvidencePanel {
  constructor(on) {
    this.on = on;
    this.node = make("section", { class: "mappnb-strag-evidence", "aria-label": "Evidence" });
    this.empty();
  }

  empty() {
    this.node.replaceChildren(
      make("div", { class: "mappnb-strag-subhead", text: "Evidence" }),
      make("p", { class: "mappnb-muted", text: "Select a verdict, a row or a cell: its numbers beside its peers' and its telemetry come here. Double click or Enter looks inside." }),
    );
  }

  take(told, still) {
    const parts = [make("div", { class: "mappnb-strag-subhead", text: told.title, dir: "auto" })];
    if (told.verdict) {
      parts.push(make("p", { class: "mappnb-strag-verdict" }, [verdictSign(told.verdict.kind), make("strong", { text: told.verdict.text, dir: "auto" })]));
      parts.push(make("p", { class: "mappnb-strag-sentence", text: told.verdict.evidence, dir: "auto" }));
    }
    parts.push(this.buttons(told, still));
    const telemetry = told.telemetry.length ? [make("div", {}, [this.telemetry(told), this.key()])] : [];
    const numbers = told.numbers.length ? [make("div", {}, [this.numbers(told)])] : [];
    parts.push(make("div", { class: "mappnb-strag-tables" }, [...numbers, ...telemetry]));
    for (const note of told.notes) parts.push(make("p", { class: "mappnb-muted", text: note, dir: "auto" }));
    this.node.replaceChildren(...parts);
  }

  key() {
    const entry = (cls, text) => make("span", { class: "mappnb-strag-key-entry" }, [make("span", { class: `mappnb-strag-line ${cls}`, "aria-hidden": "true" }), make("span", { text })]);
    return make("div", { class: "mappnb-strag-key" }, [entry("mappnb-strag-own", "this"), entry("", "others, median")]);
  }

  buttons(told, still) {
    const inside = make("button", { type: "button", class: "mappnb-button", text: "Look inside", title: "Its parts by step" });
    inside.onclick = () => this.on.inside(told);
    const timeline = make("button", { type: "button", class: "mappnb-button", text: "Show in timeline", title: "The line that opens a timeline here; linked timelines go there" });
    timeline.onclick = () => this.on.timeline();
    const shown = [...(told.ranks.length === 1 ? [inside] : []), ...(still ? [] : [timeline])];
    return make("div", { class: "mappnb-strag-buttons" }, shown);
  }

  numbers({ numbers, beside }) {
    const lines = numbers.map(([label, own, peers, change, key]) => {
      const button = make("button", { type: "button", class: "mappnb-strag-metric", text: label.trim(), title: "Colour the heatmap by this" });
      button.onclick = () => this.on.metric(key);
      const head = make("th", { scope: "row", class: label.startsWith(" ") ? "mappnb-strag-inner" : null }, [button]);
      return make("tr", {}, [head, ...[own, peers, change].map((text) => make("td", { text }))]);
    });
    return EvidencePanel.frame("Medians per step", ["per step, median", "this", beside, ""], lines);
  }

  telemetry(told) {
    const lines = told.telemetry.map(([label, ...rest], i) => {
      const line = make("td", {}, [sparkline(told.lines[i], told.span, `${label} over time`)]);
      return make("tr", {}, [make("th", { scope: "row", text: label }), ...rest.map((text) => make("td", { text })), line]);
    });
    return EvidencePanel.frame("Telemetry", ["telemetry", "this", "others", ""], lines);
  }

  static frame(caption, columns, lines) {
    return make("table", { class: "mappnb-table mappnb-strag-numbers" }, [
      make("caption", { class: "mappnb-hidden-text", text: caption }),
      make("thead", {}, [make("tr", {}, columns.map((text) => (text ? make("th", { scope: "col", text }) : make("td", {}))))]),
      make("tbody", {}, lines),
    ]);
  }
}

/** What-if bars, worked out when they are asked for. */
class PricePanel {
  constructor(on) {
    this.on = on;
    this.figure = new FigureBox("How much longer steps are with only one part as measured");
    this.told = null;
    this.ask = make("button", { type: "button", class: "mappnb-button", text: "Replay: what would fixing it buy?" });
    this.ask.onclick = () => this.want("");
    this.node = make("section", { class: "mappnb-strag-prices", "aria-label": "What if" }, [make("div", { class: "mappnb-strag-subhead", text: "What if" }), this.ask]);
  }

  want(by) {
    this.ask.disabled = true;
    this.ask.textContent = "Replaying …";
    this.on.prices(by);
  }

  /** It could not be worked out. */
  failed() {
    this.ask.disabled = false;
    this.ask.textContent = "Replay: what would fixing it buy?";
  }

  async take(told, bokeh) {
    this.told = told;
    const select = make("select", { class: "mappnb-input", "aria-label": "By" }, told.options.map(([value, text]) => make("option", { value, text, selected: value === told.by })));
    select.onchange = () => this.on.prices(select.value);
    const head = make("div", { class: "mappnb-strag-subhead mappnb-strag-price-head" }, [make("span", { text: "What if" }), make("label", { class: "mappnb-strag-field" }, [make("span", { class: "mappnb-muted", text: "by", "aria-hidden": "true" }), select])]);
    this.node.replaceChildren(head, make("p", { text: told.says, dir: "auto" }), this.figure.node, make("p", { class: "mappnb-muted", text: told.caption }));
    if (bokeh) await this.figure.draw(bokeh, told.figure);
  }
}
