/* Stands in for the kernel in a self-contained page of the attention view: works out thumbnails, cells and rows from the heads it holds. */

const STATIC_CELLS = 180;

/** Codes of all heads of a sample; unpacked when they are first wanted. */
class StaticHeads {
  constructor(told, layers, heads) {
    this.told = told;
    this.count = layers * heads;
  }

  async load() {
    if (!this.loading) this.loading = this.unpack();
    await this.loading;
    return this;
  }

  async unpack() {
    const stream = new Blob([bytesFromBase64(this.told.codes)]).stream().pipeThrough(new DecompressionStream("deflate"));
    this.bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  }

  /** Codes of one head, cells × cells. */
  head(index) {
    const { cells, lower } = this.told;
    if (!lower) return this.bytes.subarray(index * cells * cells, (index + 1) * cells * cells);
    const size = (cells * (cells + 1)) / 2;
    const out = new Uint8Array(cells * cells);
    for (let row = 0, at = index * size; row < cells; row++) {
      out.set(this.bytes.subarray(at, at + row + 1), row * cells);
      at += row + 1;
    }
    return out;
  }
}

/** Codes in fewer cells. `values` are weights or differences, row by row. */
function staticPooled(values, width, [rows, columns], pool, signed) {
  const out = new Uint8Array((rows.length - 1) * (columns.length - 1));
  for (let i = 0; i + 1 < rows.length; i++) {
    for (let j = 0; j + 1 < columns.length; j++) {
      let [best, total, count] = [NaN, 0, 0];
      for (let r = rows[i]; r < rows[i + 1]; r++) {
        for (let c = columns[j]; c < columns[j + 1]; c++) {
          const value = values[r * width + c];
          if (Number.isNaN(value)) continue;
          count += 1;
          total += value;
          if (Number.isNaN(best) || Math.abs(value) > Math.abs(best)) best = value;
        }
      }
      const value = pool === "mean" && !signed ? (count ? total / count : NaN) : best;
      out[i * (columns.length - 1) + j] = signed ? differenceCode(value) : weightCode(value);
    }
  }
  return out;
}

class StaticAttention extends StaticAnswers {
  constructor(data) {
    super(data);
    const { layers, heads } = data.state;
    this.heads = data.samples.map((told) => new StaticHeads(told, layers.length, heads.length));
  }

  send(content) {
    this.reply(content).then((reply) => this.give(content, reply), (err) => this.give(content, { kind: "error", of: content.kind, text: err.message }));
  }

  give(content, reply) {
    if (!reply) return;
    const { buffers = [], ...rest } = reply;
    this.emit({ kind: content.kind, ...rest, seq: content.seq }, buffers);
  }

  async reply(content) {
    const { kind, sample } = content;
    const { state, samples, code } = this.data;
    if (kind === "ready") return state;
    if (kind === "tokens") return samples[sample].tokens;
    if (kind === "scores") return samples[sample].scores;
    if (kind === "code") return { text: code };
    if (kind === "thumbs") return this.thumbs(content);
    if (kind === "detail" || kind === "other" || kind === "difference") return this.detail(content);
    if (kind === "row") return this.row(content);
    return null;
  }

  /** Weights (or differences) of one head. */
  async values(index, sample, compare) {
    const first = await this.heads[sample].load();
    const own = Float32Array.from(first.head(index), (c) => codeValue(c, false));
    if (compare === null || compare === undefined) return own;
    const other = await this.heads[compare].load();
    if (other.told.cells !== first.told.cells) throw new Error("a difference needs as many tokens");
    const codes = other.head(index);
    return own.map((v, i) => v - codeValue(codes[i], false));
  }

  async thumbs({ sample, compare, pool }) {
    const { layers, heads } = this.data.state;
    const { cells, thumb } = this.data.samples[sample];
    const size = Math.min(thumb, cells);
    const edges = cellEdges(0, cells, size);
    const all = new Uint8Array(layers.length * heads.length * size * size);
    for (let index = 0; index < layers.length * heads.length; index++) {
      const values = await this.values(index, sample, compare);
      all.set(staticPooled(values, cells, [edges, edges], pool, compare !== null), index * size * size);
    }
    const arrays = [{ name: "thumbs", dtype: "u8", shape: [layers.length, heads.length, size, size] }];
    return { first: 0, count: layers.length, heads: heads.length, size, every: 1, arrays, buffers: [all] };
  }

  index({ layer, head }) {
    const { layers, heads } = this.data.state;
    return layers.indexOf(layer) * heads.length + heads.indexOf(head);
  }

  async detail(content) {
    const { sample, compare, pool } = content;
    const { cells, num } = this.data.samples[sample];
    const values = await this.values(this.index(content), sample, compare);
    const exact = cells === num;
    const window = exact && content.window ? content.window : [0, num, 0, num];
    const [q0, q1, k0, k1] = exact ? window : [0, cells, 0, cells];
    const rows = cellEdges(q0, q1, Math.min(STATIC_CELLS, q1 - q0));
    const columns = cellEdges(k0, k1, Math.min(STATIC_CELLS, k1 - k0));
    const codes = staticPooled(values, cells, [rows, columns], pool, compare !== null);
    let largest = 0;
    for (const value of values) if (Math.abs(value) > largest) largest = Math.abs(value);
    const shape = [rows.length - 1, columns.length - 1];
    return { window, cells: shape, largest, every: 1, arrays: [{ name: "codes", dtype: "u8", shape }], buffers: [codes] };
  }

  async row(content) {
    const out = {};
    for (const [name, sample] of [["row", content.sample], ["other", content.compare]]) {
      if (sample === null || sample === undefined) continue;
      const { cells, num } = this.data.samples[sample];
      if (cells !== num) throw new Error(`this page holds ${num} tokens in ${cells} cells; open the notebook for single tokens`);
      if (content.at >= num) continue;
      const values = await this.values(this.index(content), sample, null);
      out[name] = Float32Array.from({ length: num }, (_, i) => values[content.axis === "query" ? content.at * num + i : i * num + content.at]);
    }
    const arrays = Object.entries(out).map(([name, values]) => ({ name, dtype: "f32", shape: [values.length] }));
    return { arrays, buffers: Object.values(out) };
  }
}
