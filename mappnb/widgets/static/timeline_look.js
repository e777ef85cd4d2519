/* Colours, patterns and cut texts of the timeline's canvases; rebuilt when theme, categories or resolution change. */

const TEXT_FROM = 36; // CSS px a span must be wide to carry its name

/** The look of one theme, one set of categories and one resolution. */
class TimelineLook {
  constructor(root, meta, hidden, dpr) {
    const colours = themeColours(root);
    this.colours = colours;
    this.dpr = dpr;
    this.font = colours.font;
    this.key = [colours.dark, dpr, hidden.join(""), meta.categories.map((c) => c.light + c.dark).join()].join("|");
    const { background, text, line, accent } = colours;
    this.background = cssColour(background);
    this.text = cssColour(text);
    this.muted = cssColour(colours.muted);
    this.line = cssColour(line);
    this.gridLine = cssColour(mixColours(background, line, 0.45));
    this.stepLine = cssColour(mixColours(background, colours.muted, 0.45));
    this.zebra = cssColour(mixColours(background, text, 0.028));
    this.header = cssColour(mixColours(background, text, 0.065));
    this.outside = cssColour(mixColours(background, text, 0.045));
    this.accent = cssColour(accent);
    this.danger = cssColour(colours.danger);
    this.cats = meta.categories.map((c) => this.category(c));
    this.rgba = this.pixelColours(hidden, (c) => c.flat);
    this.rgbaDim = this.pixelColours(hidden, (c) => c.dimRgb);
    this.hatch = Uint8Array.from({ length: 256 }, (_, i) => (this.cats[i] && this.cats[i].stripes ? 1 : 0));
    this.noHatch = new Uint8Array(256);
    this.loading = stripes([mixColours(background, text, 0.09)], 8 * dpr, dpr);
    this.cuts = new Map();
    this.spanSize = 0;
  }

  category(entry) {
    const { background, dark, line } = this.colours;
    const rgb = parseColour(dark ? entry.dark : entry.light) || line;
    const pale = mixColours(rgb, background, 0.72);
    const stripe = mixColours(rgb, background, 0.18);
    const dim = mixColours(rgb, background, 0.74);
    const plain = cssColour(rgb);
    return {
      name: entry.name,
      flat: entry.hatch ? mixColours(stripe, pale, 0.45) : rgb,
      dimRgb: dim,
      css: plain,
      stripes: entry.hatch ? stripes([stripe, pale], 6 * this.dpr, this.dpr) : null,
      pale: cssColour(pale),
      ink: cssColour(inkOn(entry.hatch ? pale : rgb)),
      dimInk: cssColour(mixColours(this.colours.text, background, 0.35)),
    };
  }

  /** Little-endian RGBA of each category; 0 where it is hidden. */
  pixelColours(hidden, pick) {
    const out = new Uint32Array(256);
    for (let i = 0; i < 256; i++) {
      const [r, g, b] = this.cats[i] ? pick(this.cats[i]) : this.colours.muted;
      if (!hidden[i]) out[i] = (255 << 24) | (b << 16) | (g << 8) | r;
    }
    return out;
  }

  /** A text cut to a width in a font (null: the one of span names, already set), and the width it takes. */
  fit(context, text, font, room, least = 1) {
    const entry = this.measured(context, text, font);
    if (entry.width <= room) return entry;
    if (!entry.letters) entry.letters = Array.from(text);
    const count = Math.floor((entry.letters.length * room) / entry.width) - 1;
    if (count < least) return { text: "", width: 0 };
    return { text: `${entry.letters.slice(0, count).join("")}…`, width: room };
  }

  measured(context, text, font) {
    const key = font ? `${font}\n${text}` : text;
    let entry = this.cuts.get(key);
    if (!entry) {
      if (this.cuts.size > 20000) this.cuts.clear();
      if (font) context.font = font;
      entry = { text, width: context.measureText(text).width, letters: null };
      this.cuts.set(key, entry);
    }
    return entry;
  }

  /** Font of the span names; widths measured in another size are forgotten. */
  spanFont(size) {
    if (this.spanSize !== size) this.cuts.clear();
    this.spanSize = size;
    return this.fontOf(size);
  }

  /** Font of the canvas texts at a size in CSS pixels. */
  fontOf(size, weight = "") {
    return `${weight} ${size}px ${this.font}`.trim();
  }
}

/** A pattern of diagonal stripes: one colour on nothing, or on a second one. */
function stripes([stripe, ground], size, width) {
  const canvas = document.createElement("canvas");
  const side = Math.max(4, Math.round(size));
  canvas.width = canvas.height = side;
  const context = canvas.getContext("2d");
  if (ground) {
    context.fillStyle = cssColour(ground);
    context.fillRect(0, 0, side, side);
  }
  context.strokeStyle = cssColour(stripe);
  context.lineWidth = width * (ground ? 1.3 : 1);
  context.beginPath();
  for (const shift of [-side, 0, side]) {
    context.moveTo(shift - 1, side + 1);
    context.lineTo(shift + side + 1, -1);
  }
  context.stroke();
  return context.createPattern(canvas, "repeat");
}
