/*
 * Shared by every mappnb canvas widget: clean-up, decoding of binary answers, and the talk with the kernel.
 * The parts are joined into one module by Python; there is no build step.
 */

/** Collects what must be undone when a view goes: listeners, timers, observers. */
class Disposer {
  constructor() {
    this.undo = new Set();
    this.done = false;
  }

  /** Keep a function for the end; returns one that runs it earlier (once). */
  add(fn) {
    const entry = () => {
      if (this.undo.delete(entry)) fn();
    };
    this.undo.add(entry);
    return entry;
  }

  /** addEventListener that is taken back at the end. */
  listen(target, type, fn, options) {
    target.addEventListener(type, fn, options);
    return this.add(() => target.removeEventListener(type, fn, options));
  }

  /** setTimeout that is cleared at the end. */
  timer(fn, ms) {
    const id = setTimeout(() => {
      this.undo.delete(cancel);
      fn();
    }, ms);
    const cancel = this.add(() => clearTimeout(id));
    return cancel;
  }

  /** requestAnimationFrame that is cancelled at the end. */
  frame(fn) {
    const id = requestAnimationFrame((now) => {
      this.undo.delete(cancel);
      fn(now);
    });
    const cancel = this.add(() => cancelAnimationFrame(id));
    return cancel;
  }

  /** A Mutation-, Resize- or other observer that is disconnected at the end. */
  observe(observer, target, options) {
    observer.observe(target, options);
    this.add(() => observer.disconnect());
    return observer;
  }

  /** Undo everything, the newest first. */
  dispose() {
    this.done = true;
    for (const entry of [...this.undo].reverse()) entry();
  }
}

const ARRAY_TYPES = {
  f32: Float32Array,
  f64: Float64Array,
  u8: Uint8Array,
  u16: Uint16Array,
  u32: Uint32Array,
  i32: Int32Array,
};

/** Bytes of a base64 text. */
function bytesFromBase64(text) {
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return bytes;
}

/** Bytes of what a comm hands over: a DataView, a typed array or an ArrayBuffer. */
function bytesOfBuffer(buffer) {
  if (buffer instanceof ArrayBuffer) return new Uint8Array(buffer);
  if (ArrayBuffer.isView(buffer)) return new Uint8Array(buffer.buffer, buffer.byteOffset, buffer.byteLength);
  throw new Error("a binary part of the answer is missing");
}

/** The typed array that lies in the bytes; copied only where it is not aligned. */
function typedView(Type, bytes) {
  const size = Type.BYTES_PER_ELEMENT;
  const aligned = bytes.byteOffset % size === 0 ? bytes : bytes.slice();
  return new Type(aligned.buffer, aligned.byteOffset, aligned.byteLength / size);
}

/**
 * The arrays of a message by name.
 * @param {{arrays?: {name: string, dtype: string, shape: number[]}[], base64?: string[]}} content
 * @param {(DataView|ArrayBuffer)[]} buffers
 */
function decodeArrays(content, buffers) {
  const out = {};
  (content.arrays || []).forEach((spec, i) => {
    const Type = ARRAY_TYPES[spec.dtype];
    if (!Type) throw new Error(`array ${spec.name}: unknown type ${spec.dtype}`);
    const bytes = content.base64 ? bytesFromBase64(content.base64[i]) : bytesOfBuffer((buffers || [])[i]);
    const count = spec.shape.reduce((a, b) => a * b, 1);
    if (bytes.byteLength !== count * Type.BYTES_PER_ELEMENT) {
      throw new Error(`array ${spec.name}: ${bytes.byteLength} bytes came, ${count} × ${spec.dtype} were promised`);
    }
    out[spec.name] = typedView(Type, bytes);
  });
  return out;
}

/** Puts messages that came in several parts together again. */
class PartJoiner {
  constructor() {
    this.open = new Map();
  }

  /** The whole message, or null while parts are missing. */
  take(content, buffers) {
    if (!content.part) return { content, buffers: buffers || [] };
    const [index, count] = content.part;
    let entry = this.open.get(content.kind);
    if (!entry || entry.seq !== content.seq) {
      entry = { seq: content.seq, parts: new Array(count), missing: count };
      this.open.set(content.kind, entry);
    }
    if (!entry.parts[index]) entry.missing -= 1;
    entry.parts[index] = { content, buffers: buffers || [] };
    if (entry.missing > 0) return null;
    this.open.delete(content.kind);
    return PartJoiner.merge(entry.parts);
  }

  static merge(parts) {
    const content = Object.assign({}, ...parts.map((p) => p.content));
    content.arrays = parts.flatMap((p) => p.content.arrays || []);
    if (parts.some((p) => p.content.base64)) content.base64 = parts.flatMap((p) => p.content.base64 || []);
    delete content.part;
    return { content, buffers: parts.flatMap((p) => p.buffers) };
  }
}

/**
 * Requests and answers: one of a kind in flight, the newest further one waits, older answers are dropped.
 */
class Connection {
  /**
   * @param {object} model the widget's model (send, on, off)
   * @param {object} on callbacks: message(content, arrays) without a request, busy(isBusy), error(kind, text), success(kind)
   * @param {number} busyMs after how long the kernel counts as busy
   */
  constructor(model, on, busyMs = 10000) {
    this.model = model;
    this.on = on;
    this.busyMs = busyMs;
    // A random start keeps two views of one model from taking each other's answers.
    this.seq = Math.floor(Math.random() * 1e6) * 1000;
    this.flying = new Map();
    this.waiting = new Map();
    this.joiner = new PartJoiner();
    this.disposer = new Disposer();
    this.late = new Set();
    this.receive = this.receive.bind(this);
    model.on("msg:custom", this.receive);
    this.disposer.add(() => model.off("msg:custom", this.receive));
  }

  /** Send a request, or keep it while one of its kind is in flight (the newest stays). */
  request(kind, body = {}, then = null) {
    if (this.disposer.done) return;
    if (this.flying.has(kind)) this.waiting.set(kind, { body, then });
    else this.launch(kind, body, then);
  }

  /** Send a message that has no answer. */
  notify(kind, body = {}) {
    if (!this.disposer.done) this.post({ kind, seq: ++this.seq, ...body });
  }

  /** Whether a request of this kind is in flight or waits. */
  isBusy(kind) {
    return this.flying.has(kind) || this.waiting.has(kind);
  }

  launch(kind, body, then) {
    const seq = ++this.seq;
    const cancel = this.disposer.timer(() => this.markLate(kind), this.busyMs);
    this.flying.set(kind, { seq, body, then, cancel });
    this.post({ kind, seq, ...body });
  }

  post(content) {
    try {
      this.model.send(content, undefined, []);
    } catch (err) {
      this.on.error(content.kind, `not sent to the kernel: ${err.message || err}`);
    }
  }

  markLate(kind) {
    this.late.add(kind);
    this.on.busy(true);
  }

  /** Free the slot of a kind and send what waited. */
  settle(kind) {
    const slot = this.flying.get(kind);
    if (!slot) return;
    slot.cancel();
    this.flying.delete(kind);
    if (this.late.delete(kind) && this.late.size === 0) this.on.busy(false);
    const next = this.waiting.get(kind);
    this.waiting.delete(kind);
    if (next) this.launch(kind, next.body, next.then);
  }

  kindOf(seq) {
    for (const [kind, slot] of this.flying) if (slot.seq === seq) return kind;
    return null;
  }

  receive(content, buffers) {
    if (this.disposer.done || !content || typeof content !== "object") return;
    const whole = this.joiner.take(content, buffers);
    if (whole) this.route(whole.content, whole.buffers);
  }

  route(content, buffers) {
    const asked = this.kindOf(content.seq);
    if (content.kind === "probe") return this.answerProbe(content, buffers);
    if (content.kind === "error") return this.takeError(content, asked);
    // An answer that nobody waits for is old, or belongs to another view of the model. Only meta concerns all views.
    const pushed = content.seq === undefined || content.seq === null || content.kind === "meta";
    if (!asked && !pushed) return undefined;
    return this.deliver(content, buffers, asked);
  }

  deliver(content, buffers, asked) {
    const slot = asked ? this.flying.get(asked) : null;
    let failure = null;
    try {
      const arrays = decodeArrays(content, buffers);
      if (slot && slot.then) slot.then(content, arrays, slot.body);
      else this.on.message(content, arrays);
    } catch (err) {
      failure = `the answer could not be shown: ${err.message || err}`;
    }
    if (asked) this.settle(asked);
    if (content.kind === "meta") this.settle("ready"); // the answer to `ready` may come by way of `probed`
    const kind = asked || content.kind;
    if (failure) this.on.error(kind, failure);
    else this.on.success(kind);
  }

  takeError(content, asked) {
    const kind = asked || content.of || "";
    this.on.error(kind, String(content.text || "the kernel reports an error without a text"));
    if (asked) this.settle(asked);
  }

  answerProbe(content, buffers) {
    let binary = false;
    try {
      const [bytes] = Object.values(decodeArrays(content, buffers));
      binary = !content.base64 && bytes.length === 256 && bytes.every((b, i) => b === i);
    } catch (err) {
      binary = false; // that is the answer: buffers do not come through here
    }
    this.notify("probed", { token: content.token, binary });
  }

  /** Stop: no further message in or out. */
  close() {
    this.disposer.dispose();
    this.flying.clear();
    this.waiting.clear();
    this.joiner.open.clear();
  }
}

/** Stands in for a widget's model: keeps who listens, and tells them. */
class ModelStandIn {
  constructor() {
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

  emit(content, buffers) {
    for (const fn of [...this.listeners]) fn(content, buffers);
  }
}
