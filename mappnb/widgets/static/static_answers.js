/* Stands in for the kernel in a self-contained page: what a subclass's answer(content) returns comes as a message, as from the kernel. */

class StaticAnswers {
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

  send(content) {
    setTimeout(() => {
      const reply = this.answer(content);
      if (reply) for (const fn of [...this.listeners]) fn({ kind: content.kind, ...reply, seq: content.seq }, []);
    }, 0);
  }

  bokeh() {
    const { version, gzip } = this.data.bokeh;
    const { length } = bytesFromBase64(gzip);
    return { version, arrays: [{ name: "js0", dtype: "u8", shape: [length] }], base64: [gzip] };
  }
}
