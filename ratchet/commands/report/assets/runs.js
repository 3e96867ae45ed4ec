"use strict";
// The list of all runs: which are shown, and the progress and results of each. Up to FEW_RUNS runs are listed in the page's head instead.

const FEW_RUNS = 6;
const RUN_COLUMNS = [
  // [heading, value to sort by, text]
  ["Run", (run) => run.name, (run) => run.name],
  ["State", (run) => run.state, (run) => el("span", { className: `state ${run.state}` }, run.state)],
  ["Steps", ({ progress }) => progress.step, ({ progress }) => stepsText(progress)],
  ["Remaining", (run) => remaining(run), (run) => (remaining(run) === null ? "–" : duration(remaining(run)))],
  ["Started (UTC)", ({ progress }) => progress.started, ({ progress }) => (progress.started ? progress.started.slice(0, 16).replace("T", " ") : "–")],
  ["Held-out accuracy", ({ progress }) => progress.accuracy, (run) => meanReward(run, run.progress.accuracy)],
  ["Held-out loss", ({ progress }) => progress.loss, ({ progress }) => short(progress.loss)],
];

function stepsText({ step, steps }) {
  return steps ? `${whole(step ?? 0)} of ${whole(steps)}` : whole(step ?? 0);
}

/** True if all rewards of a run's evaluations lie within 0 and 1, so that their mean is a percentage. */
function hasShares({ progress }) {
  return progress.is_share ?? true;
}

/** Formats a mean of rewards: in per cent, or as a plain number if the run has rewards below 0 or above 1. */
function meanReward(run, mean) {
  return hasShares(run) ? percent(mean ?? NaN) : short(mean);
}

/** The estimated seconds until a running run ends; null for other runs. */
function remaining(run) {
  return run.state === "running" ? run.progress.seconds_left ?? null : null;
}

/** Compares two values of a column in descending order. Missing values come last. */
function descending(a, b) {
  if ((a ?? null) === null || (b ?? null) === null) return ((a ?? null) === null) - ((b ?? null) === null);
  return a < b ? 1 : a > b ? -1 : 0;
}

const RunList = {
  title: "Runs",
  text: "",
  order: { column: "Started (UTC)", upwards: false },
  onlyShown: false,

  show(host, app) {
    this.app = app;
    this.body = el("div", { className: "panel" });
    refill(
      host,
      el(
        "div",
        { className: "toolbar" },
        field("Runs", { type: "search", placeholder: "part of a name or state", value: this.text, id: "run-filter" }, (box) => {
          this.text = box.value;
          this.draw();
        }),
        toggle("only shown runs", this.onlyShown, (checked) => {
          this.onlyShown = checked;
          this.draw();
        }),
        el("button", { id: "hide-all", onclick: () => this.hideAll() }, "Hide all"),
        el("span", { className: "hint" }, "A tick shows a run in all views."),
      ),
      this.body,
    );
    this.draw();
  },

  hide() {},

  hideAll() {
    for (const run of this.app.runs) run.visible = false;
    this.app.render();
  },

  /** Returns the runs that match the search, in the chosen order; among equal runs the newest comes first. */
  select() {
    const words = this.text.toLowerCase().split(/\s+/).filter(Boolean);
    const text = (run) => `${run.name} ${run.state}`.toLowerCase();
    const runs = this.app.runs.filter((run) => words.every((word) => text(run).includes(word)) && (run.visible || !this.onlyShown));
    const value = RUN_COLUMNS.find(([heading]) => heading === this.order.column)[1];
    const isMissing = (run) => (value(run) ?? null) === null;
    return runs.toSorted((a, b) => {
      const order = descending(value(a), value(b));
      const upwards = this.order.upwards && !isMissing(a) && !isMissing(b);
      return (upwards ? -order : order) || descending(a.progress.started, b.progress.started);
    });
  },

  draw() {
    const runs = this.select();
    const headings = RUN_COLUMNS.map(([heading]) => this.heading(heading));
    const rows = runs.map((run) => [this.box(run), ...RUN_COLUMNS.map(([, , text]) => text(run))]);
    refill(this.body, table(["", ...headings], rows, "list"), !runs.length && el("p", { className: "note" }, "No run has this name."));
  },

  heading(heading) {
    const isChosen = heading === this.order.column;
    const sign = isChosen ? (this.order.upwards ? " ▲" : " ▼") : "";
    const choose = () => {
      this.order = { column: heading, upwards: isChosen ? !this.order.upwards : heading === "Run" };
      this.draw();
    };
    return el("button", { className: "plain", onclick: choose }, heading, sign);
  },

  box(run) {
    const box = el("input", { type: "checkbox", checked: run.visible, "aria-label": `show ${run.name}`, onchange: () => this.app.showRun(run, box.checked) });
    return el("label", { className: "toggle" }, box, run.visible && runDot(run));
  },
};

/** The runs at the head of the page: a button for each, or with many runs a link to their list and the marks of the shown ones. */
function runChips(app) {
  if (app.runs.length > FEW_RUNS) {
    const marks = app.shown.slice(0, 2 * COLORS).map((run) => el("span", { title: run.name }, runDot(run)));
    return el("a", { href: "#runs", className: "run-count" }, marks, `${app.shown.length} of ${app.runs.length} runs shown`);
  }
  return app.runs.map((run) =>
    el(
      "button",
      { className: run.visible ? "run on" : "run", title: run.facts.path, onclick: () => app.showRun(run, !run.visible) },
      run.visible ? runDot(run) : el("i", { className: "dot", style: { "border-color": run.color } }),
      run.name,
      run.state === "running" && el("span", { className: "pulse", title: `in progress: step ${stepsText(run.progress)}` }),
    ),
  );
}
