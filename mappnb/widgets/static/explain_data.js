/* The explain view: a table that came from the kernel, filtered and ranked here; names, numbers and colours. */

const SVG_NAMESPACE = "http://www.w3.org/2000/svg";

/** An SVG element with attributes; "text" is set as text. */
function makeSvg(tag, attributes = {}, children = []) {
  const node = document.createElementNS(SVG_NAMESPACE, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined) continue;
    if (name === "text") node.textContent = value;
    else node.setAttribute(name, String(value));
  }
  node.append(...children);
  return node;
}

/** A component in words; the kernel's side is component_name in _expl_levels.py. */
function componentName(component, layer, unit) {
  const where = layer >= 0 ? `L${layer} ` : "";
  if (component === "head" || component === "neuron") return `${where}${component} ${unit}`;
  return where + ({ embed: "embedding", mlp: "MLP" }[component] || component.replaceAll("_", " "));
}

/** Digits behind the point for numbers up to `top`. */
function digitsFor(top) {
  return top > 0 ? Math.min(9, Math.max(0, 4 - Math.ceil(Math.log10(top)))) : 3;
}

/** A number with its sign; "–" where it is not defined. */
function signedText(value, digits) {
  if (!Number.isFinite(value)) return "–";
  const text = Math.abs(value).toFixed(digits);
  if (Number(text) === 0) return "0";
  return `${value < 0 ? "−" : "+"}${text}`;
}

/** One table. */
class ExplainTable {
  constructor(told, arrays) {
    Object.assign(this, { path: told.path, crumbs: told.crumbs, components: told.components, measures: told.measures, left: told.left });
    this.waterfall = told.waterfall || null;
    this.arrays = arrays;
    this.ablated = new Map(told.ablated);
    this.predicted = new Map();
    this.measure();
  }

  measure() {
    const { arrays } = this;
    this.count = arrays.row.length;
    this.place = new Map(Array.from(arrays.row, (label, i) => [label, i]));
    this.top = 0;
    for (const name of this.measures) for (const v of arrays[name]) this.top = Math.max(this.top, Math.abs(v) || 0);
    this.digits = digitsFor(this.top);
  }

  /** Add rows that had stayed in the kernel; true if any was new. */
  merge(told, arrays) {
    for (const [label, real] of told.ablated) this.ablated.set(label, real);
    const fresh = Array.from(arrays.row || [], (label, i) => [label, i]).filter(([label]) => !this.place.has(label));
    if (!fresh.length) return false;
    for (const name of ["row", "component", "layer", "unit", "position", ...this.measures]) {
      const old = this.arrays[name];
      const whole = new old.constructor(old.length + fresh.length);
      whole.set(old);
      fresh.forEach(([, from], i) => {
        whole[old.length + i] = arrays[name][from];
      });
      this.arrays[name] = whole;
    }
    this.left -= fresh.length;
    this.measure();
    return true;
  }

  get root() {
    return this.path.length === 0;
  }

  component(i) {
    return this.components[this.arrays.component[i]][0];
  }

  name(i) {
    return componentName(this.component(i), this.arrays.layer[i], this.arrays.unit[i]);
  }

  value(i, measure) {
    const values = this.arrays[measure];
    return values ? values[i] : NaN;
  }

  text(value) {
    return signedText(value, this.digits);
  }

  /** Positions of the rows that are listed, the largest first. */
  ranked({ by, component, layer, position }) {
    const { arrays } = this;
    const values = arrays[by];
    const code = this.components.findIndex(([name]) => name === component);
    const found = [];
    for (let i = 0; i < this.count; i++) {
      if (component !== "all" && arrays.component[i] !== code) continue;
      if (layer !== null && arrays.layer[i] !== layer) continue;
      if (position !== null && arrays.position[i] !== position) continue;
      found.push(i);
    }
    const size = (i) => (Number.isNaN(values[i]) ? -1 : Math.abs(values[i]));
    return found.sort((a, b) => size(b) - size(a) || a - b);
  }

  /** Sums by token: of one component, or of all that are not parts of another. */
  strip({ by, component }) {
    const values = this.arrays[`strip_${by}`];
    const width = values.length / Math.max(1, this.components.length);
    const out = new Float64Array(width);
    this.components.forEach(([name], code) => {
      if (component === "all" ? name === "neuron" : name !== component) return;
      for (let t = 0; t < width; t++) out[t] += values[code * width + t];
    });
    return out;
  }
}

/** Largest absolute value. */
function largestOf(values) {
  let top = 0;
  for (const v of values) top = Math.max(top, Math.abs(v) || 0);
  return top;
}

const EFFECT_SHADES = 128;
const effectTables = new Map();

/** Colours from one end of the stops to the other, worked out once. */
function effectTable(stops) {
  const key = stops.join(" ");
  if (!effectTables.has(key)) effectTables.set(key, Array.from({ length: 2 * EFFECT_SHADES + 1 }, (_, i) => rampColour(stops, i / (2 * EFFECT_SHADES))));
  return effectTables.get(key);
}

/** [r, g, b] of a value: blue below zero, orange above, the ground at zero. */
function effectColour(value, top, stops) {
  const share = top > 0 && Number.isFinite(value) ? Math.sign(value) * Math.sqrt(Math.min(1, Math.abs(value) / top)) : 0;
  return effectTable(stops)[Math.round(EFFECT_SHADES * (1 + share))];
}

/** "for" or "against", for the class of a bar. */
function effectClass(value) {
  return value < 0 ? "mappnb-expl-against" : "mappnb-expl-for";
}
