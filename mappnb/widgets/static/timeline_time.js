/* Times as text: durations, instants on the run clock, and round axis ticks from hours to nanoseconds. */

const TIME_UNITS = [
  ["s", 1e9],
  ["ms", 1e6],
  ["µs", 1e3],
  ["ns", 1],
];

/** A number with at most `digits` significant digits, without trailing zeros and exponent. */
function shortNumber(value, digits = 4) {
  if (!Number.isFinite(value)) return String(value);
  if (value === 0) return "0";
  const before = Math.max(1, Math.floor(Math.log10(Math.abs(value))) + 1);
  const text = value.toFixed(Math.max(0, Math.min(12, digits - before)));
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

/** "3.2 ms", "2 min 5 s", "10 h 2 min" of ns. */
function formatDuration(ns) {
  const size = Math.abs(ns);
  const sign = ns < 0 ? "−" : "";
  if (size >= 3600e9) {
    const minutes = Math.round(size / 60e9);
    return `${sign}${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  }
  if (size >= 120e9) {
    const seconds = Math.round(size / 1e9);
    return `${sign}${Math.floor(seconds / 60)} min ${seconds % 60} s`;
  }
  const [name, unit] = TIME_UNITS.find(([, u]) => size >= u) || TIME_UNITS[3];
  return `${sign}${shortNumber(size / unit)} ${name}`;
}

/** An instant of the run clock in s, with as many decimals as `resolution` ns asks for. */
function formatInstant(ns, resolution) {
  const decimals = Math.max(0, Math.min(9, Math.ceil(9 - Math.log10(Math.max(resolution, 1)))));
  const sign = ns < 0 ? "−" : "";
  const whole = Math.floor(Math.abs(ns) / 1e9);
  const rest = Math.abs(ns) - whole * 1e9;
  const factor = 10 ** (9 - decimals);
  let part = Math.round(rest / factor);
  let seconds = whole;
  if (part >= 10 ** decimals) {
    part = 0;
    seconds += 1;
  }
  return `${sign}${seconds}${decimals ? `.${String(part).padStart(decimals, "0")}` : ""} s`;
}

/** The smallest of 1, 2, 5 × 10^k that is at least `least`. */
function roundStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  for (const factor of [1, 2, 5]) if (factor * power >= least * (1 - 1e-9)) return factor * power;
  return 10 * power;
}

/**
 * Round ticks of an axis from `from` to `to` (ns of the run clock).
 * At deep zoom the labels are offsets ("+120 µs") to a base that is shown once.
 * @returns {{step: number, minor: number, base: string, ticks: {at: number, text: string}[]}}
 */
function timeTicks(from, to, pixels, spacing = 110) {
  const step = Math.max(1, roundStep(((to - from) * spacing) / Math.max(pixels, 1)));
  const largest = Math.max(Math.abs(from), Math.abs(to));
  const [name, unit] = tickUnit(step, largest);
  const needsBase = unit < 1e9 && largest / unit >= 1e4;
  const base = needsBase ? Math.floor(from / (unit * 1e3)) * unit * 1e3 : 0;
  const decimals = Math.max(0, Math.ceil(-Math.log10(step / unit) - 1e-9));
  const first = Math.ceil((from - base) / step);
  const last = Math.floor((to - base) / step);
  const ticks = [];
  for (let k = first; k <= last; k++) {
    const offset = k * step;
    ticks.push({ at: base + offset, text: tickText(offset / unit, decimals, name, needsBase) });
  }
  const digit = step / 10 ** Math.floor(Math.log10(step) + 1e-9);
  return { step, minor: step / (Math.round(digit) === 2 ? 4 : 5), base: needsBase ? formatInstant(base, unit * 1e3) : "", ticks };
}

/** The unit of ticks: that of the step, or a larger one if that reads better ("1.05 s", not "1050 ms"). */
function tickUnit(step, largest) {
  let k = TIME_UNITS.findIndex(([, u]) => step >= u / 10);
  if (k < 0) k = 3;
  const larger = k > 0 ? TIME_UNITS[k - 1][1] : 0;
  const better = larger && largest >= larger && largest < 1e4 * larger && step * 1000 >= larger;
  return TIME_UNITS[better ? k - 1 : k];
}

function tickText(value, decimals, unit, offset) {
  const [whole, part] = Math.abs(value).toFixed(decimals).split(".");
  const grouped = whole.replace(/\B(?=(\d{3})+$)/g, "\u202f");
  return `${value < 0 ? "−" : offset ? "+" : ""}${grouped}${part ? `.${part}` : ""} ${unit}`;
}
