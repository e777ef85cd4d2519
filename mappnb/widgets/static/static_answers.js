/* Stands in for the kernel in a self-contained page: what a subclass's answer(content) returns comes as a message, as from the kernel. */

/** JSON with its keys in order. */
function canonical(value) {
  if (Array.isArray(value)) return `[${value.map(canonical).join(",")}]`;
  if (value && typeof value === "object") return `{${Object.keys(value).sort().map((k) => `${JSON.stringify(k)}:${canonical(value[k])}`).join(",")}}`;
  return JSON.stringify(value);
}

class StaticAnswers extends ModelStandIn {
  constructor(data) {
    super();
    this.data = data;
    this.isStatic = true;
  }

  send(content) {
    setTimeout(() => {
      const reply = this.answer(content);
      if (reply) this.emit({ kind: content.kind, ...reply, seq: content.seq }, []);
    }, 0);
  }

  bokeh() {
    const { version, gzip } = this.data.bokeh;
    const { length } = bytesFromBase64(gzip);
    return { version, arrays: [{ name: "js0", dtype: "u8", shape: [length] }], base64: [gzip] };
  }
}
