/* Stands in for the kernel in a self-contained page of the explain view: the tables that it had when the page was made. */

class StaticExplain extends StaticAnswers {
  answer({ kind, path }) {
    if (kind === "ready") return { ...this.data.state, kind: "state" };
    if (kind === "code") return { text: this.data.code };
    if (kind === "go" || kind === "probed") return null;
    const found = kind === "level" ? this.data.levels[path.join("/")] : null;
    if (found) return found;
    return { kind: "error", of: kind, text: "this page holds no model; open the notebook to ablate, trace and check" };
  }
}
