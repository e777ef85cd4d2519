/* The explain view: the row that is picked, and what can be done with it. */

const TRACEABLE = ["head", "mlp", "neuron"];
const ABLATABLE = ["embed", ...TRACEABLE];

/** The picked row. */
class PickedPanel {
  /** @param {{ablate: (label: number) => void, upstream: (label: number) => void}} on */
  constructor(on, disposer) {
    this.on = on;
    this.title = make("div", { class: "mappnb-expl-title", dir: "auto" });
    this.fields = make("div", {});
    this.bars = make("div", { class: "mappnb-expl-two" });
    this.ablate = toolButton("Ablate", "Set this component to its baseline for real, and see what the metric loses (key: a)", disposer, () => this.on.ablate(this.label));
    this.upstream = toolButton("Upstream", "What made this component, by attribution along all paths into it (key: u)", disposer, () => this.on.upstream(this.label));
    this.why = make("span", { class: "mappnb-muted" });
    const buttons = make("div", { class: "mappnb-expl-buttons" }, [this.ablate, this.upstream, this.why]);
    this.inner = make("div", {}, [this.fields, this.bars, buttons]);
    this.node = make("section", { class: "mappnb-expl-panel", "aria-label": "Picked row" }, [this.title, this.inner]);
  }

  take({ table, where, state, busy, traced }) {
    const i = where.row === null ? undefined : table.place.get(where.row);
    this.inner.hidden = i === undefined;
    if (i === undefined) {
      this.title.className = "mappnb-expl-title mappnb-muted";
      this.title.textContent = where.row === null ? (state.readonly ? "Pick a row to see what is known of it." : "Pick a row to ablate it or to trace it upstream.") : "The picked row is not here; it is one of the small ones.";
      return;
    }
    this.label = where.row;
    const position = table.arrays.position[i];
    const component = table.component(i);
    this.title.className = "mappnb-expl-title";
    this.title.textContent = `${table.name(i)} at ${position} “${state.tokens[position]}”`;
    this.fields.replaceChildren(fieldList(this.numbers(table, i, state)));
    this.compare(table, i, state);
    const known = table.ablated.has(this.label);
    const seen = traced.has([...table.path, this.label].join("/"));
    this.button(this.ablate, busy.ablate === this.label ? "Ablating…" : "Ablate", busy.ablate !== null, ABLATABLE.includes(component) && !known && !state.readonly);
    this.button(this.upstream, busy.level ? "Tracing…" : "Upstream", busy.level, TRACEABLE.includes(component) && (seen || !state.readonly));
    this.why.textContent = ABLATABLE.includes(component) ? "" : "A bias of the model: it is always there.";
    if (component === "embed" && !state.readonly) this.why.textContent = "Nothing of the model is before an embedding.";
  }

  button(node, text, busy, able) {
    node.textContent = text;
    node.disabled = busy || !able;
    node.setAttribute("aria-busy", String(Boolean(busy)));
  }

  numbers(table, i, state) {
    const out = [];
    const share = (v) => (state.metric && Number.isFinite(v) ? ` (${((100 * v) / state.metric).toFixed(0).replace("-", "−").replace(/^−0$/, "0")} % of the metric)` : "");
    const attribution = table.value(i, "attribution");
    if (table.root) {
      const direct = table.value(i, "direct_effect");
      out.push(["direct effect", `${table.text(direct)}${share(direct)}`], ["attribution", `${table.text(attribution)}${share(attribution)}`]);
    } else out.push(["share in the component's effect", table.text(attribution)]);
    return out;
  }

  /** Predicted and real, as two bars. */
  compare(table, i, state) {
    const real = table.ablated.get(this.label);
    this.bars.hidden = real === undefined;
    if (real === undefined) return;
    const predicted = table.root ? table.value(i, "attribution") : table.predicted.get(this.label);
    const pairs = [["predicted", predicted], ["real", real]].filter(([, v]) => Number.isFinite(v));
    const top = Math.max(...pairs.map(([, v]) => Math.abs(v)), 1e-300);
    const rows = pairs.map(([name, v]) => {
      const row = make("tr", {}, [make("th", { scope: "row", text: name }), barCell(v, top, table.text(v))]);
      return row;
    });
    const after = `Without it the metric is ${table.text(state.metric - real)} instead of ${table.text(state.metric)}.`;
    const caption = make("caption", { class: "mappnb-hidden-text", text: "Predicted and real change of the metric" });
    this.bars.replaceChildren(make("table", { class: "mappnb-expl-pair" }, [caption, make("tbody", {}, rows)]), make("p", { class: "mappnb-expl-said", text: after }));
  }
}
