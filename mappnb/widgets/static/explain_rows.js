/* The explain view: choices, and the ranked rows with their bars. */

const ROWS_AT_ONCE = 40;

/** Choices above the list. */
class ExplainChoices {
  /** @param {{change: (changes: object) => void}} on */
  constructor(on, disposer) {
    this.on = on;
    this.fields = {};
    this.node = make("div", { class: "mappnb-expl-choices" });
    for (const [name, words] of [["by", "Rank by"], ["component", "Components"], ["layer", "Layer"], ["position", "Token"]]) {
      const select = make("select", { class: "mappnb-input", name });
      const label = make("label", { class: "mappnb-expl-field" }, [make("span", { class: "mappnb-muted", text: words }), select]);
      disposer.listen(select, "change", () => {
        const { value } = select;
        const plain = name === "by" || name === "component";
        this.on.change({ [name]: plain ? value : value === "" ? null : Number(value) });
      });
      this.fields[name] = { label, select };
      this.node.append(label);
    }
    this.all = toolButton("All rows", "Rows of every component, layer and token", disposer, () => this.on.change({ component: "all", layer: null, position: null }));
    this.node.append(this.all);
  }

  take(state, table, where) {
    const layers = Array.from({ length: state.layers }, (_, i) => [i, String(i)]);
    const tokens = state.tokens.map((text, i) => [i, `${i} ${shortText(text, 14)}`]);
    this.fill("by", state.by.filter(([key]) => table.measures.includes(key)), where.by);
    this.fill("component", [["all", "all"], ...table.components], where.component);
    this.fill("layer", [["", "all"], ...(where.layer === -1 ? [[-1, "none"]] : []), ...layers], where.layer === null ? "" : where.layer);
    this.fill("position", [["", "all"], ...tokens], where.position === null ? "" : where.position);
    this.fields.by.label.hidden = table.measures.length < 2;
    this.all.hidden = where.component === "all" && where.layer === null && where.position === null;
  }

  fill(name, options, value) {
    const { select } = this.fields[name];
    const key = JSON.stringify(options);
    if (select.dataset.key !== key) {
      select.replaceChildren(...options.map(([k, text]) => make("option", { value: k, text })));
      select.dataset.key = key;
    }
    select.value = String(value);
  }
}

/** A value as a bar from the middle, with its number. */
function barCell(value, top, text) {
  const track = make("span", { class: "mappnb-expl-track", "aria-hidden": "true" });
  if (Number.isFinite(value) && value !== 0 && top > 0) {
    const bar = make("span", { class: `mappnb-expl-fill ${effectClass(value)}` });
    const share = Math.min(1, Math.abs(value) / top) * 50;
    bar.style.width = `${Math.max(share, 0.6)}%`;
    bar.style[value < 0 ? "right" : "left"] = "50%";
    track.append(bar);
  }
  return make("td", {}, [make("span", { class: "mappnb-expl-value" }, [track, make("span", { class: "mappnb-expl-number", text })])]);
}

/** The list. */
class RankedRows {
  /** @param {{pick: (label: number) => void, ablate: (label) => void, upstream: (label) => void, back: () => void}} on */
  constructor(on, disposer, fixed) {
    this.on = on;
    this.fixed = fixed;
    this.body = make("tbody", {});
    this.head = make("tr", {});
    const table = make("table", { class: "mappnb-table mappnb-expl-table" }, [make("caption", { class: "mappnb-hidden-text", text: "Components, the largest first" }), make("thead", {}, [this.head]), this.body]);
    this.scroll = make("div", { class: "mappnb-scroll mappnb-expl-scroll", tabindex: "0", role: "region", "aria-label": "Ranked components" }, [table]);
    this.more = toolButton("More", "List more rows", disposer, () => {
      this.limit += ROWS_AT_ONCE * 2;
      this.draw();
    });
    this.caption = make("span", { class: "mappnb-muted" });
    this.node = make("div", {}, [this.scroll, make("div", { class: "mappnb-expl-foot" }, [this.more, this.caption])]);
    disposer.listen(this.body, "click", (event) => {
      const row = event.target.closest("tr");
      if (row) this.on.pick(Number(row.dataset.row));
    });
    disposer.listen(this.body, "keydown", (event) => this.key(event));
  }

  take(table, where, tokens) {
    const same = this.table === table && ["by", "component", "layer", "position"].every((n) => this.where[n] === where[n]);
    Object.assign(this, { table, where, tokens });
    if (!same) {
      this.limit = ROWS_AT_ONCE;
      this.order = table.ranked(where);
      this.scroll.scrollTop = 0;
    }
    const at = where.row === null ? -1 : this.order.indexOf(table.place.get(where.row));
    if (at >= this.limit) this.limit = at + 10;
    this.draw();
  }

  draw() {
    const { table, where } = this;
    const focused = this.body.contains(document.activeElement) ? document.activeElement.closest("tr").dataset.row : null;
    const shown = this.order.slice(0, this.limit);
    const real = table.ablated.size > 0;
    this.digits = digitsFor(largestOf(table.ablated.values()));
    const names = { direct_effect: "direct effect", attribution: table.root ? "attribution" : "share" };
    this.measures = ["direct_effect", "attribution"].filter((m) => table.measures.includes(m));
    const heads = ["component", "token", ...this.measures.map((m) => names[m]), ...(real ? ["real ablation"] : [])];
    this.head.replaceChildren(...heads.map((text, k) => make("th", { scope: "col", text, class: k < 2 ? null : "mappnb-expl-number" })));
    const rows = shown.map((i) => this.row(i, real));
    this.body.replaceChildren(...rows);
    const into = rows.find((r) => r.dataset.row === focused) || rows.find((r) => Number(r.dataset.row) === where.row) || rows[0];
    if (into) into.querySelector("button").tabIndex = 0;
    if (into && focused !== null) into.querySelector("button").focus({ preventScroll: true });
    this.more.hidden = shown.length >= this.order.length;
    const parts = this.where.component === "all" && table.components.some(([name]) => name === "neuron") ? " Neurons are parts of their MLPs." : "";
    const left = table.left ? ` ${table.left} smaller rows ${this.fixed ? "are not in this page" : "come when their component, layer or token is chosen"}.` : "";
    this.scroll.hidden = table.count === 0;
    if (table.count === 0) this.caption.textContent = "Nothing: this component has no effect on the metric, so nothing before it has one through it.";
    else this.caption.textContent = `${shown.length} of ${this.order.length} rows.${parts}${left}`;
  }

  row(i, real) {
    const { table, where } = this;
    const { arrays } = table;
    const label = arrays.row[i];
    const picked = label === where.row;
    const button = make("button", { type: "button", class: "mappnb-expl-pick", text: table.name(i), tabindex: "-1", "aria-pressed": String(picked) });
    const at = arrays.position[i];
    const cells = this.measures.map((m) => barCell(table.value(i, m), table.top, table.text(table.value(i, m))));
    if (real) {
      const value = table.ablated.has(label) ? table.ablated.get(label) : NaN;
      cells.push(make("td", { class: "mappnb-expl-real", text: signedText(value, this.digits).replace("–", "") }));
    }
    const row = make("tr", { class: picked ? "mappnb-expl-row mappnb-expl-picked" : "mappnb-expl-row" }, [
      make("th", { scope: "row" }, [button]), make("td", { class: "mappnb-expl-at", dir: "auto", text: `${shortText(this.tokens[at], 10)} ` }, [make("span", { class: "mappnb-muted", text: String(at) })]), ...cells,
    ]);
    row.dataset.row = String(label);
    return row;
  }

  key(event) {
    const row = event.target.closest("tr");
    if (!row || event.ctrlKey || event.metaKey || event.altKey) return;
    const label = Number(row.dataset.row);
    const to = { ArrowDown: row.nextElementSibling, ArrowUp: row.previousElementSibling, Home: this.body.firstElementChild, End: this.body.lastElementChild }[event.key];
    const act = { a: () => this.on.ablate(label), u: () => this.on.upstream(label), Backspace: () => this.on.back(), Escape: () => this.on.back() }[event.key];
    if (to) {
      for (const button of this.body.querySelectorAll("button")) button.tabIndex = -1;
      const button = to.querySelector("button");
      button.tabIndex = 0;
      button.focus();
    } else if (act) act();
    if (to || act || event.key.startsWith("Arrow")) event.preventDefault();
  }
}
