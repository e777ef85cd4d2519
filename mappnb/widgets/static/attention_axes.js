/* Attention: one head's pictures, whole and of a window, and the labels of tokens along them. */

/** First token of each of some cells over [from, to), and the end: as the kernel's bins(). */
function cellEdges(from, to, cells) {
  return Array.from({ length: cells + 1 }, (_, i) => from + Math.floor((i * (to - from)) / cells));
}

/** Position of the cell that holds a token. */
function cellOf(token, from, to, cells) {
  if (cells === to - from) return token - from;
  let cell = Math.min(cells - 1, Math.floor(((token - from) * cells) / (to - from)));
  const start = (i) => from + Math.floor((i * (to - from)) / cells);
  while (cell + 1 < cells && start(cell + 1) <= token) cell += 1;
  while (cell > 0 && start(cell) > token) cell -= 1;
  return cell;
}

/** A pattern in cells: codes over a window of queries and keys. */
class PatternPicture {
  constructor({ window, cells, largest, every }, codes, signed) {
    Object.assign(this, { window, cells, largest, every, codes, signed });
    this.painted = null;
  }

  /** Whether each cell is one token. */
  get exact() {
    const [q0, q1, k0, k1] = this.window;
    return this.cells[0] === q1 - q0 && this.cells[1] === k1 - k0 && this.every <= 1;
  }

  covers(q, k) {
    const [q0, q1, k0, k1] = this.window;
    return q >= q0 && q < q1 && k >= k0 && k < k1;
  }

  value(q, k) {
    const [q0, q1, k0, k1] = this.window;
    const row = cellOf(q, q0, q1, this.cells[0]);
    return codeValue(this.codes[row * this.cells[1] + cellOf(k, k0, k1, this.cells[1])], this.signed);
  }

  canvas(look) {
    const key = lookKey(look);
    if (!this.painted || this.painted.key !== key) {
      this.painted = { key, canvas: paintCodes(this.codes, this.cells[1], this.cells[0], codeTable(look, this.signed)) };
    }
    return this.painted.canvas;
  }
}

/** Text cut to a width. */
function cutText(g, text, width) {
  if (g.measureText(text).width <= width) return text;
  let cut = Array.from(text);
  while (cut.length > 1 && g.measureText(`${cut.join("")}…`).width > width) cut = cut.slice(0, -1);
  return `${cut.join("")}…`;
}

/** The tokens of [from, to) that have room for a label, so that none is nearer than `least` pixels. */
function labelledTokens(from, to, pixels, least) {
  const step = Math.max(1, Math.ceil((least * (to - from)) / pixels));
  const out = [];
  for (let i = Math.ceil(from / step) * step; i < to; i += step) out.push(i);
  return out;
}

/** Widest label among some tokens, in pixels, limited. */
function labelRoom(g, texts, tokens, most) {
  return Math.min(most, tokens.reduce((w, i) => Math.max(w, g.measureText(texts[i]).width), 12));
}

/** A window moved and sized so that it lies within 0 .. count; never smaller than two tokens. */
function fittedWindow([q0, q1, k0, k1], count) {
  const fit = (from, to) => {
    const length = Math.min(count, Math.max(Math.min(2, count), Math.round(to - from)));
    const start = Math.min(count - length, Math.max(0, Math.round(from)));
    return [start, start + length];
  };
  return [...fit(q0, q1), ...fit(k0, k1)];
}

/** A window zoomed around a place (a query and a key, in tokens). */
function zoomedWindow([q0, q1, k0, k1], factor, q, k, count) {
  const one = (from, to, at) => [at - (at - from) * factor, at + (to - at) * factor];
  return fittedWindow([...one(q0, q1, q), ...one(k0, k1, k)], count);
}
