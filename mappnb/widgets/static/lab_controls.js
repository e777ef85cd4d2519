/* The knobs of the schedule lab: sliders, numbers, choices; each with a name, a value in words and a help text. */

let labIds = 0;

/** The side bar. `changed(name, value)` hears of each change. */
class LabControls {
  constructor(disposer, changed, chosen) {
    this.disposer = disposer;
    this.changed = changed;
    this.chosen = chosen;
    this.fields = new Map();
    this.node = make("form", { class: "mappnb-lab-controls", "aria-label": "Costs and what-ifs" });
    this.help = make("p", { class: "mappnb-lab-help", "aria-hidden": "true" });
    this.prefix = `mappnb-lab-${++labIds}-${Math.floor(Math.random() * 1e6)}`;
    disposer.listen(this.node, "submit", (event) => event.preventDefault());
    for (const type of ["focusin", "pointerover"]) disposer.listen(this.node, type, (event) => this.showHelp(event.target));
  }

  /** Build once: controls, then the schedules to choose from. */
  build(specs, choices, enabled) {
    const groups = new Map();
    for (const spec of specs) {
      if (!groups.has(spec.group)) {
        groups.set(spec.group, make("fieldset", { class: "mappnb-lab-group" }, [make("legend", { text: spec.group })]));
      }
      groups.get(spec.group).append(this.field(spec, enabled));
    }
    this.node.replaceChildren(...groups.values(), this.help);
    this.help.textContent = this.idle = enabled
      ? "Move a knob: the schedules are simulated anew while it moves."
      : "This page has no kernel: the knobs show where they stood.";
    this.chooser = this.buildChooser(choices, enabled);
  }

  field(spec, enabled) {
    const id = `${this.prefix}-${spec.name}`;
    const off = !enabled || spec.disabled;
    const input = spec.kind === "select"
      ? make("select", { class: "mappnb-input" }, spec.options.map((o) => make("option", { value: o, text: o })))
      : make("input", { type: spec.kind === "check" ? "checkbox" : spec.kind, min: spec.min, max: spec.max, step: spec.step });
    if (spec.kind === "number") input.className = "mappnb-input";
    Object.assign(input, { id, disabled: Boolean(off) });
    input.setAttribute("aria-describedby", `${id}-help`);
    const value = make("output", { class: "mappnb-lab-value", for: id });
    const label = make("label", { for: id, text: spec.label });
    const help = make("span", { id: `${id}-help`, class: "mappnb-hidden-text", text: spec.help });
    const row = make("div", { class: `mappnb-lab-field mappnb-lab-${spec.kind}` }, [label, value, input, help]);
    row.dataset.help = spec.help;
    if (spec.kind === "number") value.textContent = spec.unit || "";
    const said = spec.kind === "range" || spec.kind === "number" ? "input" : "change";
    this.disposer.listen(input, said, () => {
      const now = this.read(spec, input);
      if (now === undefined) return;
      this.say(spec.name, now);
      this.changed(spec.name, now);
    });
    this.fields.set(spec.name, { spec, input, value, row });
    return row;
  }

  read(spec, input) {
    if (spec.kind === "check") return input.checked;
    if (spec.kind === "select") return input.value;
    if (input.value === "") return spec.name === "memory_limit" ? null : undefined;
    const number = Number(input.value);
    if (!Number.isFinite(number)) return undefined;
    return spec.name === "slow_which" ? Math.round(number) : number;
  }

  /** Take over values; a control that is being moved keeps its own. */
  take(values, busy) {
    for (const [name, field] of this.fields) {
      if (busy.has(name) || !(name in values)) continue;
      const value = values[name];
      if (field.spec.kind === "check") field.input.checked = value;
      else if (document.activeElement !== field.input || field.spec.kind !== "number") field.input.value = value === null ? "" : String(value);
      this.say(name, value);
    }
    const slow = values.slow_kind !== "none";
    for (const name of ["slow_which", "slow_factor"]) if (this.fields.has(name)) this.fields.get(name).row.hidden = !slow;
  }

  say(name, value) {
    const { spec, value: node, input } = this.fields.get(name);
    if (spec.kind !== "range") return;
    const text = `${shortNumber(Number(value), 3)}${spec.unit ? ` ${spec.unit}` : ""}`;
    node.textContent = text;
    input.setAttribute("aria-valuetext", text);
  }

  showHelp(target) {
    const row = target.closest && target.closest(".mappnb-lab-field");
    this.help.textContent = row ? row.dataset.help : this.idle;
  }

  buildChooser(choices, enabled) {
    const boxes = choices.map((name) => {
      const box = make("input", { type: "checkbox", value: name });
      box.disabled = !enabled;
      return make("label", { class: "mappnb-lab-choice" }, [box, make("span", { text: name })]);
    });
    const group = make("fieldset", { class: "mappnb-lab-choices" }, [make("legend", { class: "mappnb-hidden-text", text: "Schedules to compare" }), ...boxes]);
    this.disposer.listen(group, "change", () => {
      this.chosen([...group.querySelectorAll("input:checked")].map((b) => b.value));
    });
    this.summary = make("summary", { text: "Schedules" });
    this.choices = group;
    const details = make("details", { class: "mappnb-lab-chooser" }, [this.summary, group]);
    this.disposer.listen(details, "keydown", (event) => {
      if (event.key !== "Escape") return;
      details.open = false;
      this.summary.focus();
    });
    return details;
  }

  takeChosen(names) {
    const boxes = [...this.choices.querySelectorAll("input")];
    for (const box of boxes) box.checked = names.includes(box.value);
    this.summary.textContent = `Schedules: ${names.length} of ${boxes.length}`;
  }
}
