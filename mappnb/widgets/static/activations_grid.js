/* Grids of tokens and tables of the activation views: HTML, one cell in the tab order, arrow keys between them. */

/** Visible forms of what cannot be seen. */
function visibleToken(text) {
  return text.replace(/ /g, "·").replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g, (c) => `\\u${c.codePointAt(0).toString(16).padStart(4, "0")}`);
}

/** Texts in coloured cells. */
class TokenGrid {
  constructor(on, disposer, told, theme) {
    Object.assign(this, { on, told, theme });
    this.at = [told.rows.length - 1, 0];
    this.table = make("table", { class: "mappnb-acts-tokens", role: "grid", "aria-label": told.title }, [this.head(), this.body()]);
    const scroll = make("div", { class: "mappnb-acts-scroll" }, [this.table]);
    this.node = make("div", { class: "mappnb-acts-grid" }, [scroll, this.key()]);
    disposer.listen(this.table, "click", (event) => this.click(event));
    disposer.listen(this.table, "keydown", (event) => this.press(event));
    this.focusable(this.at);
  }

  head() {
    const cells = this.told.columns.map((text) => make("th", { scope: "col", role: "columnheader", text: visibleToken(text), title: text, dir: "auto" }));
    return make("thead", { role: "rowgroup" }, [make("tr", { role: "row" }, [make("th", { scope: "col", role: "columnheader", class: "mappnb-acts-corner", text: this.told.x_label }), ...cells])]);
  }

  body() {
    const { rows, texts, levels, titles, palette } = this.told;
    this.cells = [];
    const lines = rows.map((name, r) => {
      const line = texts[r].map((text, c) => {
        const cell = make("td", { role: "gridcell", text: visibleToken(text) || "\u00a0", title: titles[r][c], tabindex: "-1", "aria-selected": "false", dir: "auto" });
        const level = levels[r][c];
        if (level >= 0) {
          cell.style.background = palette[level];
          cell.style.color = luminance(parseColour(palette[level])) > 0.179 ? "#000" : "#fff"; // at least 4.5 : 1, whatever the colour
        } else cell.classList.add("mappnb-acts-none");
        cell.dataset.at = `${r} ${c}`;
        return cell;
      });
      this.cells.push(line);
      return make("tr", { role: "row" }, [make("th", { scope: "row", role: "rowheader", text: name }), ...line]);
    });
    return make("tbody", { role: "rowgroup" }, lines);
  }

  /** The colours with their ends. */
  key() {
    const { palette, limits, title } = this.told;
    const strip = make("span", { class: "mappnb-acts-strip", "aria-hidden": "true" });
    strip.style.background = `linear-gradient(to right, ${palette.filter((_, i) => i % 23 === 0).join(", ")})`;
    return make("div", { class: "mappnb-acts-key mappnb-muted" }, [make("span", { text: `${title}: ${cellText(limits[0])}` }), strip, make("span", { text: cellText(limits[1]) })]);
  }

  show() {
    return Promise.resolve();
  }

  focusable(at) {
    const cell = (p) => this.cells[p[0]] && this.cells[p[0]][p[1]];
    if (cell(this.at)) cell(this.at).tabIndex = -1;
    this.at = at;
    if (cell(at)) cell(at).tabIndex = 0;
  }

  mark(pick) {
    for (const old of this.table.querySelectorAll('[aria-selected="true"]')) old.setAttribute("aria-selected", "false");
    if (!pick || pick.panel !== this.told.key || pick.row === undefined) return;
    const cell = this.cells[pick.row] && this.cells[pick.row][pick.col];
    if (!cell) return;
    cell.setAttribute("aria-selected", "true");
    this.focusable([pick.row, pick.col]);
  }

  click(event) {
    const cell = event.target.closest("td");
    if (!cell) return;
    const [row, col] = cell.dataset.at.split(" ").map(Number);
    this.focusable([row, col]);
    this.on.pick(this.told.key, { row, col });
  }

  press(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const arrow = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (arrow) {
      const to = [this.at[0] + arrow[0], this.at[1] + arrow[1]];
      if (this.cells[to[0]] && this.cells[to[0]][to[1]]) {
        this.focusable(to);
        this.cells[to[0]][to[1]].focus();
      }
    } else if (event.key === "Enter" || event.key === " ") this.on.pick(this.told.key, { row: this.at[0], col: this.at[1] });
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  clear() {}
}

/** A table whose rows may be chosen. */
function activationTable(told, jump) {
  const right = new Set(told.numeric);
  const head = make("tr", {}, told.columns.map((c, i) => make("th", { scope: "col", text: c, class: right.has(i) ? "mappnb-acts-number" : null })));
  const lines = told.rows.map((row, r) => {
    const cells = row.map((text, i) => make("td", { text: visibleSpaces(text), dir: "auto", class: right.has(i) ? "mappnb-acts-number" : null }));
    const pick = told.picks[r];
    if (pick && jump) {
      const button = make("button", { type: "button", class: "mappnb-acts-jump", text: row[0], dir: "auto" });
      button.onclick = () => jump(pick);
      cells[0].replaceChildren(button);
    }
    return make("tr", {}, cells);
  });
  const table = make("table", { class: "mappnb-table mappnb-acts-table" }, [make("caption", { class: "mappnb-hidden-text", text: told.title }), make("thead", {}, [head]), make("tbody", {}, lines)]);
  const scroll = make("div", { class: "mappnb-scroll", tabindex: "0", role: "region", "aria-label": told.title }, [table]);
  const note = told.note ? [make("p", { class: "mappnb-muted", text: told.note, dir: "auto" })] : [];
  const body = told.rows.length ? [scroll] : [];
  return make("div", { class: "mappnb-acts-list" }, [make("div", { class: "mappnb-acts-label", text: told.title, dir: "auto" }), ...body, ...note]);
}

/** Spaces at the ends and control characters of a text in a table. */
function visibleSpaces(text) {
  return text.replace(/^ +| +$/g, (s) => "·".repeat(s.length)).replace(/\n/g, "↵").replace(/[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g, (c) => `\\u${c.codePointAt(0).toString(16).padStart(4, "0")}`);
}
