/* Stands in for the kernel in a self-contained page of an activation view: answers that were made when the page was. */

class StaticActivations extends StaticAnswers {
  answer({ kind, seq, ground, theme, where, changes, ...body }) {
    if (kind === "ready") return { ...this.data.state, kind: "state" };
    if (kind === "bokeh") return this.bokeh();
    if (kind === "code") return { text: this.data.code };
    const key = kind === "show" ? { where: { ...where, ...changes }, theme } : { where, theme, pick: body };
    const found = this.data.answers[`${kind} ${canonical(key)}`] || this.data.answers[`${kind} ${canonical({ ...key, theme: "light" })}`];
    if (found) return found;
    return { kind: "error", of: kind, text: "this page does not hold that; open the notebook for the rest" };
  }
}
