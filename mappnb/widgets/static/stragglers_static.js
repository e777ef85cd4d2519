/* Stands in for the kernel in a self-contained page of the stragglers view: answers that were made when the page was. */

class StaticStragglers extends StaticAnswers {
  answer({ kind, seq, ground, ...body }) {
    if (kind === "ready") return { ...this.data.state, kind: "state" };
    if (kind === "bokeh") return this.bokeh();
    if (kind === "code") return { text: this.data.code };
    const found = this.data.answers[`${kind} ${canonical(body)}`];
    if (found) return found;
    return { kind: "error", of: kind, text: "this page holds the heatmaps of all ranks, and the verdicts with their evidence; open the notebook for the rest" };
  }
}
