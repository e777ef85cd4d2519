/* Attention: codes of one byte, values, colours. The kernel's side is _attn_codes.py. */

const CODE_MISSING = 255;
const CODE_TOP = 254;
const CODE_MIDDLE = 127;
const LOG_LEAST = 1e-4;

/** The weight of a code, or the difference that it stands for; NaN where nothing was recorded. */
function codeValue(code, signed) {
  if (code === CODE_MISSING) return NaN;
  if (!signed) return (code / CODE_TOP) ** 2;
  const share = (code - CODE_MIDDLE) / CODE_MIDDLE;
  return Math.sign(share) * share * share;
}

/** The code of a weight. */
function weightCode(value) {
  return Number.isNaN(value) ? CODE_MISSING : Math.round(CODE_TOP * Math.sqrt(Math.min(1, Math.max(0, value))));
}

/** The code of a difference of two weights. */
function differenceCode(value) {
  if (Number.isNaN(value)) return CODE_MISSING;
  return CODE_MIDDLE + Math.round(CODE_MIDDLE * Math.sign(value) * Math.sqrt(Math.min(1, Math.abs(value))));
}

/** How far along the colours a weight (or the size of a difference) is, 0 to 1. */
function weightShare(size, { scale, threshold, top }) {
  if (!(size > 0) || size < threshold) return 0;
  const share = Math.min(1, size / top);
  if (scale === "linear") return share;
  if (scale === "log") return Math.min(1, Math.max(0, 1 - Math.log(share) / Math.log(LOG_LEAST)));
  return Math.sqrt(share);
}

/** The weight at a place along the colours: the inverse, for the key. */
function shareWeight(share, { scale, top }) {
  if (scale === "linear") return share * top;
  if (scale === "log") return top * LOG_LEAST ** (1 - share);
  return share * share * top;
}

/** A weight in words. */
function weightText(value, signed = false) {
  if (!Number.isFinite(value)) return "not recorded";
  const size = Math.abs(value);
  const text = size === 0 ? "0" : size < 0.001 ? size.toExponential(1).replace("e-", "e−") : size.toFixed(3);
  return signed && size ? `${value < 0 ? "−" : "+"}${text}` : text;
}

/** Colours through the stops of a ramp. */
function rampColour(stops, share) {
  const at = Math.min(1, Math.max(0, share)) * (stops.length - 1);
  const low = Math.min(stops.length - 2, Math.floor(at));
  return mixColours(parseColour(stops[low]), parseColour(stops[low + 1]), at - low);
}

/** [r, g, b] of a weight or a difference. */
function weightColour(value, look, signed) {
  const { palette, theme } = look;
  if (Number.isNaN(value)) return theme === "dark" ? [92, 92, 92] : [176, 176, 176];
  const share = weightShare(Math.abs(value), look);
  if (!signed) return rampColour(palette.rising[theme], share);
  return rampColour(palette.diverging[theme], 0.5 + (Math.sign(value) * share) / 2);
}

/** The colour of each code as the bytes of a picture. */
function codeTable(look, signed) {
  const bytes = new Uint8ClampedArray(1024);
  for (let code = 0; code < 256; code++) bytes.set([...weightColour(codeValue(code, signed), look, signed), 255], 4 * code);
  return new Uint32Array(bytes.buffer);
}

/** What decides a colour, as a key. */
function lookKey({ scale, threshold, top, theme }) {
  return `${scale} ${threshold} ${top} ${theme}`;
}

/** A canvas of one pixel a code. */
function paintCodes(codes, width, height, table) {
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = height;
  const picture = new ImageData(width, height);
  const pixels = new Uint32Array(picture.data.buffer);
  for (let i = 0; i < codes.length; i++) pixels[i] = table[codes[i]];
  canvas.getContext("2d").putImageData(picture, 0, 0);
  return canvas;
}

/** Set a canvas to a size in CSS pixels, sharp on the screen; returns its cleared context. */
function sizedContext(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [w, h] = [Math.max(1, Math.round(width * ratio)), Math.max(1, Math.round(height * ratio))];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const g = canvas.getContext("2d");
  g.setTransform(w / width, 0, 0, h / height, 0, 0);
  g.clearRect(0, 0, width, height);
  return g;
}

/** Keeps the newest values of a limited number. */
class NewestMap {
  constructor(most) {
    this.most = most;
    this.map = new Map();
  }

  get(key) {
    const value = this.map.get(key);
    if (value !== undefined) {
      this.map.delete(key);
      this.map.set(key, value);
    }
    return value;
  }

  set(key, value) {
    this.map.delete(key);
    this.map.set(key, value);
    if (this.map.size > this.most) this.map.delete(this.map.keys().next().value);
    return value;
  }
}
