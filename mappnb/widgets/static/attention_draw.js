/* Attention: draws the overview and one head out of what is there. */

/** A number of things. */
function counted(number, word) {
  return `${number} ${word}${number === 1 ? "" : "s"}`;
}

/** The thumbnails, their caption, and the scores. */
function drawAttentionOverview(view, now, look) {
  const { state, where } = view;
  view.title.textContent = `Attention · ${counted(state.layers.length, "layer")} × ${counted(state.heads.length, "head")} · ${counted(now.texts.length, "token")}`;
  const scores = view.scoreValues();
  if (scores && scores !== view.lastScores) view.bar.takeScores(scores.list);
  view.lastScores = scores || view.lastScores;
  const known = view.lastScores && view.lastScores.values[where.order];
  const byLayer = where.order === "layer" || !known;
  const count = state.layers.length * state.heads.length;
  const order = byLayer ? Array.from({ length: count }, (_, i) => i) : rankedHeads(view.lastScores, where.order);
  view.grid.arrange({ layers: state.layers, heads: state.heads, order, values: known, byLayer });
  if (view.which !== "a" && where.compare === null) view.which = "a";
  if (view.which === "d" && !view.alike) view.which = "b";
  const sample = view.which === "b" ? where.compare : where.sample;
  const compare = view.which === "d" ? where.compare : null;
  const atlas = view.atlas(sample, compare) || (view.which === "a" ? view.lastAtlas : null);
  if (view.which === "a" && atlas) view.lastAtlas = atlas;
  const hidden = view.overview.offsetWidth === 0;
  if (!hidden) {
    view.grid.draw(atlas, look, { signed: view.which === "d", open: view.index, width: view.overview.clientWidth - 2 });
    view.scores.show(view.lastScores, state, where.order);
    view.caption.textContent = overviewCaption(view, now, atlas);
  }
}

function overviewCaption(view, now, atlas) {
  const { where } = view;
  const count = now.texts.length;
  const size = atlas ? atlas.size : count;
  const what = { a: "", b: "sample B: ", d: "A − B, orange where A is more: " }[view.which];
  const per = shortNumber(count / size, 2);
  const cell = count > size ? `; a cell of about ${per} × ${per} tokens shows their ${where.pool === "max" || view.which === "d" ? "largest" : "mean"} weight` : "";
  const every = atlas && atlas.every > 1 ? `, of one query in ${atlas.every}` : "";
  return `${what}${count} tokens, queries downwards, keys to the right${cell}${every}. Colours: ${view.state.options.scale.find(([key]) => key === where.scale)[1]}, 0 to 1.`;
}

/** One head: pictures, key, tokens. Returns whether its picture is there. */
function drawAttentionDetail(view, now, other, look) {
  const { where } = view;
  view.headTitle.textContent = `Layer ${where.layer}, head ${where.head}`;
  view.drawnTokens = now;
  view.root.classList.toggle("mappnb-attn-compared", Boolean(other));
  view.modes.forEach((button, i) => button.setAttribute("aria-pressed", String(where.mode === ["heat", "lines"][i])));
  view.axes.forEach((button, i) => button.setAttribute("aria-pressed", String(view.axis === ["query", "key"][i])));
  const fields = view.headWords(view.index).fields.filter(([name]) => !name.startsWith("diagonal"));
  view.facts.textContent = fields.map(([name, value]) => `${name} ${value}`).join(" · ");
  view.facts.hidden = !fields.length;
  const count = now.texts.length;
  const window = where.window || [0, count, 0, count];
  view.zoomOut.hidden = !where.window;
  view.boxNames = where.compare === null ? null : { a: "A", b: "B", d: "A − B" };
  const drawn = drawBoxes(view, { now, other, window }, look);
  drawTokens(view, { now, other, window }, look);
  return drawn;
}

function drawBoxes(view, { now, other, window }, look) {
  const { where } = view;
  const sources = [{ name: "a", tokens: now, sample: where.sample, compare: null }];
  if (other) sources.push({ name: "b", tokens: other, sample: where.compare, compare: null });
  if (other && view.alike) sources.push({ name: "d", tokens: now, sample: where.sample, compare: where.compare });
  const kind = where.mode === "lines" ? "lines" : "heat";
  const nodes = [];
  const room = view.detail.clientWidth;
  const abreast = sources.length > 1 && room >= sources.length * 280 ? sources.length : sources.length > 1 && room >= 580 ? 2 : 1;
  const width = Math.floor((room - 14 * (abreast - 1)) / abreast) - 2;
  let top = 0;
  for (const box of view.boxes) {
    const source = sources.find(({ name }) => name === box.name);
    box.shown = Boolean(source);
    if (!source) continue;
    const fitted = source.name === "a" || source.name === "d" || view.alike ? window : fittedWindow(window, source.tokens.texts.length);
    const range = kind === "lines" ? LineBox.range(fitted, where.query) : null;
    const asked = range ? [range[0], range[1], range[0], range[1]] : where.window;
    box.pictures = view.pictures(source.name, source.sample, source.compare, asked);
    Object.assign(box, { source, fitted });
    top = Math.max(top, ...box.pictures.map(({ largest }) => largest));
    nodes.push(box[kind].node);
  }
  look.top = where.fit && top > 0 ? top : 1;
  if (view.figures.children.length !== nodes.length || nodes.some((node, i) => view.figures.children[i] !== node)) view.figures.replaceChildren(...nodes);
  const shown = view.boxes.filter((box) => box.shown);
  const labels = kind === "heat" ? HeatBox.layout(shown.map(({ source, fitted }) => ({ texts: source.tokens.texts, window: fitted })), width, look.colours.font) : null;
  for (const box of shown) drawBox(view, box, box[kind], look, { width, labels });
  view.keys[0].draw(look, false, where.fit ? `attention, up to the largest: ${shortNumber(look.top, 3)}` : "attention");
  view.keys[1].node.hidden = sources.length < 3;
  if (sources.length > 2) view.keys[1].draw(look, true, "A − B");
  return view.boxes.every((box) => !box.shown || box.pictures.length > 0);
}

function drawBox(view, box, figure, look, { width, labels }) {
  const { where } = view;
  const { source, fitted, pictures } = box;
  const words = { a: "A", b: "B", d: "A − B, orange where A is more" }[box.name];
  const label = box.name === "d" ? words : `${view.boxNames ? `${words}: ` : ""}${source.tokens.label}`;
  figure.title.textContent = label;
  figure.title.hidden = view.boxNames === null && view.state.num_samples < 2;
  figure.canvas.setAttribute("aria-label", `Attention of layer ${where.layer}, head ${where.head}${view.boxNames ? `, ${words}` : ""}: arrow keys move over queries and keys, Enter chooses the query.`);
  const state = { labels, pictures, texts: source.tokens.texts, window: fitted, cursor: view.cursor, query: where.query, padding: source.tokens.padding };
  const inside = view.cursor && (view.cursor[0] >= state.texts.length || view.cursor[1] >= state.texts.length) ? null : view.cursor;
  // The heatmap is kept up to date for its values also where lines are drawn.
  if (figure !== box.heat) Object.assign(box.heat, { pictures, texts: state.texts, window: fitted });
  figure.draw({ ...state, cursor: inside, query: where.query !== null && where.query < state.texts.length ? where.query : null }, { ...look, signed: box.name === "d" }, width);
  const unlike = box.name === "b" && !view.alike ? `no difference: A has ${view.drawnTokens.texts.length} tokens, B ${state.texts.length}` : "";
  figure.note.textContent = [boxNote(pictures, view), unlike].filter(Boolean).join(". ");
  figure.note.hidden = !figure.note.textContent;
}

function boxNote(pictures, view) {
  if (!pictures.length) return "working it out …";
  const last = pictures[pictures.length - 1];
  const said = [];
  if (view.where.mode === "heat" && !last.exact) {
    const per = (last.window[1] - last.window[0]) / last.cells[0];
    said.push(`a cell is ${shortNumber(per, 2)} tokens wide; zoom in for single ones`);
    if (last.every > 1) said.push(`one query in ${last.every} was worked out`);
  }
  if (last.codes.includes(CODE_MISSING)) said.push("grey: queries or keys were not recorded");
  if (view.where.mode === "lines") {
    const { range, texts } = view.boxes[0].lines;
    if (range && range[1] - range[0] < texts.length) said.push(`tokens ${range[0]} to ${range[1] - 1} of ${texts.length}; a chosen token moves this`);
  }
  return said.join(". ");
}

/** The tokens, coloured by the weights of the chosen one, and its largest weights. */
function drawTokens(view, { now, other, window }, look) {
  const { where, axis } = view;
  const { query } = where;
  const compare = other && query !== null && query < other.texts.length ? where.compare : null;
  let rows = null;
  if (query !== null) {
    rows = view.store.want("row", { sample: where.sample, compare, layer: where.layer, head: where.head, at: query, axis }, (_, arrays) => arrays);
  }
  const drawn = [lookKey(look), where.sample, where.compare, where.layer, where.head, query, axis, rows ? 1 : 0, other ? 1 : 0, now.texts.length > STRIP.most ? window.join() : ""].join("|");
  view.cell.textContent = view.cursor && view.cursor[0] < now.texts.length && view.cursor[1] < now.texts.length && where.mode === "heat" ? view.cellText(view.cursor) : "\u00a0";
  if (drawn === view.tokensDrawn) return;
  view.tokensDrawn = drawn;
  const chosen = query === null ? "" : `${now.texts[query]} (${now.slots[query]})`;
  view.stripTitle.textContent = query === null ? "Choose a token to see what it attends to" : chosen;
  for (const node of [...view.axes, view.clear]) node.hidden = query === null;
  [now, other].forEach((tokens, i) => {
    const strip = view.strips[i];
    strip.node.parentElement.hidden = !tokens;
    if (!tokens) return;
    const range = stripRange(tokens.texts.length, fittedWindow(window, tokens.texts.length), query);
    strip.build(tokens, range, `Tokens${other ? ` of ${"AB"[i]}` : ""}, ${range[1] - range[0]} of ${tokens.texts.length}`);
    strip.colour(rows ? (i ? rows.other : rows.row) : null, look, { signed: false, query });
    view.stripNames[i].hidden = !other;
  });
  const table = rows && rows.row ? weightTable(now, { row: rows.row, other: view.alike ? rows.other : null }, axis, ["A", "B"]) : null;
  if (table) view.weights.replaceChildren(table);
  view.weights.hidden = query === null;
}
