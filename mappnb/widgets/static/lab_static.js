/* Stands in for the kernel in a self-contained page of the schedule lab: answers from data that the page holds. */

class StaticLab {
  constructor(data) {
    this.data = data;
    this.isStatic = true;
    this.listeners = new Set();
  }

  get() {
    return "";
  }

  on(type, fn) {
    if (type === "msg:custom") this.listeners.add(fn);
  }

  off(type, fn) {
    this.listeners.delete(fn);
  }

  /** A lane's model: the static kernel of the timelines. */
  laneModel(label) {
    return staticModel(this.data.lanes[label]);
  }

  send(content) {
    setTimeout(() => {
      const reply = this.answer(content);
      if (reply) for (const fn of [...this.listeners]) fn({ kind: content.kind, ...reply, seq: content.seq }, []);
    }, 0);
  }

  answer({ kind, theme, label }) {
    const { data } = this;
    if (kind === "ready") return { ...data.state, kind: "state" };
    if (kind === "figures") return { figures: data.figures[theme === "dark" ? "dark" : "light"] };
    if (kind === "pick") return data.memory[label] || { kind: "error", of: "pick", text: `no schedule ${label} in this page` };
    if (kind === "code") return { text: data.code };
    if (kind === "bokeh") return this.bokeh();
    return null;
  }

  bokeh() {
    const { version, gzip } = this.data.bokeh;
    const { length } = bytesFromBase64(gzip);
    return { version, arrays: [{ name: "js0", dtype: "u8", shape: [length] }], base64: [gzip] };
  }
}
