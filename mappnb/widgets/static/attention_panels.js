/* Attention: the key to the colours, the scores as a table, and what was asked of the kernel and came. */

/** What the colours mean. */
class ColourKey {
  constructor() {
    this.canvas = make("canvas", { class: "mappnb-attn-key-canvas", role: "img", "aria-label": "Colours" });
    this.node = make("div", { class: "mappnb-attn-key" }, [this.canvas]);
  }

  draw(look, signed, words) {
    const [width, height, left, bar] = [300, 34, 8, 180];
    const g = sizedContext(this.canvas, width, height);
    const { colours } = look;
    for (let x = 0; x < bar; x++) {
      const share = x / (bar - 1);
      const along = signed ? 2 * share - 1 : share;
      g.fillStyle = cssColour(weightColour(Math.sign(along) * shareWeight(Math.abs(along), look), { ...look, threshold: 0 }, signed));
      g.fillRect(left + x, 2, 1.5, 11);
    }
    g.strokeStyle = cssColour(colours.line);
    g.strokeRect(left - 0.5, 1.5, bar + 1, 12);
    g.font = `11px ${colours.font}`;
    g.textBaseline = "middle";
    g.fillStyle = cssColour(colours.muted);
    const ticks = signed ? [-1, -0.5, 0, 0.5, 1] : [0, 0.5, 1];
    for (const t of ticks) {
      const value = Math.sign(t) * shareWeight(Math.abs(t), look);
      const shown = t === 0 && !signed ? (look.scale === "log" ? shareWeight(0, look) : 0) : value;
      const x = left + (signed ? (t + 1) / 2 : t) * bar;
      g.fillRect(x - 0.5, 13, 1, 4);
      g.textAlign = t === ticks[0] && !signed ? "left" : "center";
      const text = shown !== 0 && Math.abs(shown) < 0.001 ? shown.toExponential(0) : shortNumber(shown, 3);
      g.fillText(`${signed && shown > 0 ? "+" : ""}${text.replace("-", "−").replace("e-", "e−")}`, t === ticks[0] && !signed ? left : x, 25);
    }
    g.textAlign = "left";
    g.fillText(words, left + bar + 14, 8);
    this.canvas.setAttribute("aria-label", `Colours: ${words}, ${look.scale} scale, up to ${shortNumber(look.top, 3)}`);
  }
}

/** Scores of the heads, the largest of the chosen one first. */
class ScorePanel {
  /** @param {object} on open(index), order(name), wanted() */
  constructor(on) {
    this.on = on;
    this.body = make("div", {});
    this.node = make("details", { class: "mappnb-attn-scores" }, [make("summary", { text: "Head scores" }), this.body]);
    this.node.ontoggle = () => this.node.open && this.on.wanted();
  }

  show(scores, { layers, heads }, order, most = 40) {
    if (!scores || !this.node.open || (this.drawn && this.drawn.scores === scores && this.drawn.order === order)) return;
    this.drawn = { scores, order };
    if (!scores.list.length) {
      this.body.replaceChildren(make("p", { class: "mappnb-muted", text: "No scores here: view.scores works them out, from queries and keys." }));
      return;
    }
    const by = scores.list.some(({ name }) => name === order) ? order : scores.list[0].name;
    const ranked = rankedHeads(scores, by).slice(0, most);
    const columns = scores.list.map(({ name, label, unit, what }) => {
      const button = make("button", { type: "button", class: "mappnb-attn-sort", text: unit ? `${label}, ${unit}` : label, title: `${what ? `${what}. ` : ""}Order the heads by this`, "aria-pressed": String(name === order) });
      button.onclick = () => this.on.order(name);
      return make("th", { scope: "col" }, [button]);
    });
    const lines = ranked.map((index) => {
      const [layer, head] = [layers[Math.floor(index / heads.length)], heads[index % heads.length]];
      const button = make("button", { type: "button", class: "mappnb-attn-sort", text: `L${layer} H${head}`, title: `Open layer ${layer}, head ${head}` });
      button.onclick = () => this.on.open(index);
      const cells = scores.list.map(({ name }) => make("td", { text: shortNumber(scores.values[name][index], 3) }));
      return make("tr", {}, [make("th", { scope: "row" }, [button]), ...cells]);
    });
    const table = make("table", { class: "mappnb-table" }, [
      make("caption", { class: "mappnb-hidden-text", text: "Scores of the heads" }),
      make("thead", {}, [make("tr", {}, [make("th", { scope: "col", text: "head" }), ...columns])]),
      make("tbody", {}, lines),
    ]);
    const more = layers.length * heads.length - ranked.length;
    const scroll = make("div", { class: "mappnb-scroll", tabindex: "0", role: "region", "aria-label": "Scores of the heads" }, [table]);
    this.body.replaceChildren(scroll, ...(more > 0 ? [make("p", { class: "mappnb-muted", text: `${more} more in view.scores` })] : []));
  }
}

/** Indices of heads, the largest score first (of entropy the least), what is not known last. */
function rankedHeads(scores, order) {
  const values = scores.values[order];
  const { ascending } = scores.list.find(({ name }) => name === order);
  const key = (v) => (Number.isFinite(v) ? (ascending ? -v : v) : -Infinity);
  return Array.from(values.keys()).sort((a, b) => key(values[b]) - key(values[a]) || a - b);
}

/** Asks for what is missing, each thing once, and keeps the newest answers. */
class AnswerStore {
  /** @param {Connection} connection @param {() => void} came */
  constructor(connection, came) {
    this.connection = connection;
    this.came = came;
    this.held = new NewestMap(160);
    this.asked = new Map();
    this.refused = new Set();
    this.times = [];
  }

  static key(kind, body) {
    return `${kind === "other" || kind === "difference" ? "detail" : kind} ${JSON.stringify(body)}`;
  }

  /** The answer to a request, or null after asking for it; `made` turns content and arrays into what is kept. */
  want(kind, body, made) {
    const key = AnswerStore.key(kind, body);
    const found = this.held.get(key);
    if (found !== undefined) return found;
    if (this.refused.has(key) || this.asked.get(kind) === key) return null;
    this.asked.set(kind, key);
    const begun = performance.now();
    this.connection.request(kind, body, (content, arrays, sent) => {
      const own = AnswerStore.key(kind, sent);
      this.held.set(own, made(content, arrays));
      if (this.asked.get(kind) === own) this.asked.delete(kind);
      this.times.push([kind, performance.now() - begun]);
      if (this.times.length > 50) this.times.shift();
      this.came();
    });
    return null;
  }

  /** A request failed: it is not made again by itself. */
  failed(kind) {
    const slot = this.connection.flying.get(kind);
    if (!slot) return;
    const key = AnswerStore.key(kind, slot.body);
    this.refused.add(key);
    if (this.asked.get(kind) === key) this.asked.delete(kind);
  }

  get idle() {
    return this.asked.size === 0;
  }
}
