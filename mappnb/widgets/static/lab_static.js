/* Stands in for the kernel in a self-contained page of the schedule lab: answers from data that the page holds. */

class StaticLab extends StaticAnswers {
  /** A lane's model: the static kernel of the timelines. */
  laneModel(label) {
    return new StaticModel(this.data.lanes[label]);
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
}
