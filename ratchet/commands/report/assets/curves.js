"use strict";
// The curves of every metric of all visible runs, grouped by the first part of the metric's name.

const HIGHLIGHTS = [
  "rollout/reward", "eval/accuracy", "eval/loss", "policy/entropy/entropy", "policy/kl/kl", "policy/policy_gradient/old_kl",
  "policy/policy_gradient/clipped", "policy/loss", "policy/grad_norm", "rollout/length_mean", "time/tokens_per_s",
];
const MAX_HIGHLIGHTS = 8;
const CHART_HEIGHT = 150;
const AXES = [["step", "step"], ["tokens", "trained tokens"], ["time", "time in steps, s"]];
const SHARES = /(_share|accuracy|clipped|sampled)$/; // metrics whose axis includes 0

const Curves = {
  title: "Curves",
  options: { smoothing: 0.6, axis: "step", logarithmic: false, byStage: true, filter: "" },
  plots: new Map(), // card -> plot
  folds: new Map(), // group -> whether it is open

  show(host, app) {
    this.app = app;
    this.host = host;
    this.groups = el("div");
    this.runs = el("div");
    const set = (name) => (value) => {
      this.options[name] = value;
      this.draw();
    };
    const o = this.options;
    const drawLater = debounce(() => this.draw());
    refill(
      host,
      fill(this.runs, runTable(app.shown), alarmList(app.shown)),
      el(
        "div",
        { className: "toolbar" },
        field("Metrics", { type: "search", placeholder: "name or /pattern/", value: o.filter, id: "metric-filter" }, (box) => {
          o.filter = box.value;
          drawLater();
        }),
        field("Smoothing", { type: "range", min: 0, max: 0.99, step: 0.01, value: o.smoothing, id: "smoothing" }, (box) => {
          o.smoothing = Number(box.value);
          drawLater();
        }),
        select("Over", o.axis, AXES, set("axis")),
        toggle("logarithmic", o.logarithmic, set("logarithmic")),
        app.shown.some((run) => run.stages.length > 1) && toggle("by stage, where scales differ", o.byStage, set("byStage")),
        el("span", { className: "hint" }, "Drag to zoom, double-click to see all."),
      ),
      this.groups,
    );
    this.draw();
  },

  /** Redraws the drawn charts in place after new steps arrived. */
  refresh(app) {
    refill(this.runs, runTable(app.shown), alarmList(app.shown));
    const drawn = new Set([...this.groups.querySelectorAll(".card")].map((each) => JSON.stringify([each.dataset.metric, each.dataset.stage])));
    const names = new Set(app.shown.flatMap((run) => run.names).filter(matcher(this.options.filter)));
    if ([...names].some((name) => this.stagesOf(name).some((stage) => !drawn.has(JSON.stringify([name, stage]))))) return this.draw();
    for (const [target, plot] of [...this.plots]) {
      remove(plot);
      this.plot(target);
    }
  },

  hide() {
    this.observer?.disconnect();
    for (const plot of this.plots.values()) remove(plot);
    this.plots.clear();
  },

  /** Draws the charts that are in view. The others are drawn when they come into view. */
  draw() {
    const filtered = Boolean(this.options.filter); // a filter opens all groups; afterwards they are folded as before
    if (!this.filtered) for (const each of this.groups.querySelectorAll("details")) this.folds.set(each.dataset.name, each.open);
    this.filtered = filtered;
    this.hide();
    this.observer = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) if (isIntersecting && !this.plots.has(target)) this.plot(target);
    }, { rootMargin: "300px" });
    const names = new Set(this.app.shown.flatMap((run) => run.names));
    const matching = [...names].filter(matcher(this.options.filter)).sort();
    const groups = new Map();
    const highlights = HIGHLIGHTS.filter((name) => names.has(name)).slice(0, MAX_HIGHLIGHTS);
    if (!filtered && highlights.length) groups.set("highlights", highlights);
    for (const name of matching) {
      const group = name.split("/")[0];
      groups.set(group, [...(groups.get(group) || []), name]);
    }
    refill(
      this.groups,
      [...groups].map(([name, metrics], index) => {
        const cards = el("div", { className: "grid" }, metrics.map((metric) => this.stagesOf(metric).map((stage) => card(metric, stage))));
        const heading = el("summary", {}, name, el("span", { className: "count" }, metrics.length));
        const unfolded = filtered || (this.folds.get(name) ?? index < 2);
        return el("details", { className: "group", open: unfolded, dataset: { name } }, heading, cards);
      }),
      !groups.size && el("p", { className: "note" }, "No metric has this name."),
    );
    for (const each of this.groups.querySelectorAll(".card")) this.observer.observe(each);
  },

  /** Returns the stages that get a card of their own for a metric; [""] if one card does for all. */
  stagesOf(metric) {
    const stages = this.options.byStage ? stagesApart(this.app.shown, metric) : [];
    return stages.length ? stages : [""];
  },

  plot(target) {
    const { metric: name, stage } = target.dataset;
    const runs = this.app.shown.filter((run) => run.columns[name]);
    const marks = stage ? [] : boundaries(runs, this.options.axis);
    const lines = runs.flatMap((run) => {
      const rows = stage ? run.stages.find((other) => other.name === stage) : { first: 0, last: run.steps.length };
      if (!rows) return [];
      const cut = (column) => column.slice(rows.first, rows.last);
      const ys = drawableValues(cut(run.columns[name]), this.options.logarithmic);
      return [{ label: run.name, color: run.color, dash: run.dash, xs: cut(run.axis(this.options.axis)), ys }];
    });
    const [body, legend] = [target.querySelector(".plot"), target.querySelector(".legend")];
    if (!lines.some(({ ys }) => ys.some((y) => y !== null))) {
      refill(body, el("p", { className: "note" }, this.options.logarithmic ? "No number above 0." : "No finite number."));
      return;
    }
    const { smoothing, logarithmic } = this.options;
    const span = SHARES.test(name) ? [0, 0] : null;
    this.plots.set(target, lineChart(body, legend, { lines, smoothing, logarithmic, height: CHART_HEIGHT, span, marks }));
  },
};

function card(metric, stage) {
  return el(
    "div",
    { className: "card", dataset: { metric, stage } },
    el("div", { className: "card-head" }, el("span", { className: "metric", title: metric }, el("bdi", {}, metric)), stage && el("span", { className: "stage" }, stage), el("span", { className: "legend" })),
    el("div", { className: "plot", style: { "min-height": `${CHART_HEIGHT}px` } }),
  );
}

/** Returns a function that tests whether a name contains the text, or matches it if it is a /pattern/. */
function matcher(text) {
  const pattern = /^\/(.+)\/$/.exec(text);
  if (pattern) {
    try {
      const regex = new RegExp(pattern[1], "i");
      return (name) => regex.test(name);
    } catch {
      return () => false; // the pattern is incomplete
    }
  }
  return (name) => name.toLowerCase().includes(text.toLowerCase());
}

/** Returns a table with a line for each run: its progress and results. */
function runTable(runs) {
  const losses = runs.some((run) => !Number.isNaN(run.last("eval/loss"))); // a column only where one is measured
  const rows = runs.map((run) => {
    const [first, last] = [run.first("eval/accuracy"), run.last("eval/accuracy")];
    const accuracy = Number.isNaN(last) ? "–" : `${meanReward(run, first)} → ${meanReward(run, last)}`;
    const [lossFirst, lossLast] = [run.first("eval/loss"), run.last("eval/loss")];
    const loss = Number.isNaN(lossLast) ? "–" : `${short(lossFirst)} → ${short(lossLast)}`;
    const seconds = (run.columns["time/step_s"] || []).reduce((sum, x) => sum + (x || 0), 0);
    const tokens = (run.columns["rollout/trained_tokens"] || []).reduce((sum, x) => sum + (x || 0), 0);
    const stages = run.progress.stages?.map(([name]) => `${name} (${run.facts.config[`stages.${name}.algorithm.kind`] ?? "?"})`).join(", ");
    const left = remaining(run) === null ? "" : `, ${duration(remaining(run))} left`;
    return [
      el("span", {}, runDot(run), run.name),
      el("span", { className: `state ${run.state}` }, run.state, left),
      stepsText({ ...run.progress, step: run.steps.at(-1) }),
      short(run.last("rollout/reward")),
      accuracy,
      ...(losses ? [loss] : []),
      duration(seconds),
      short(tokens),
      stages || run.facts.config["name"],
    ];
  });
  const accuracies = runs.every(hasShares) ? "Held-out accuracy" : "Held-out accuracy or reward";
  const headings = ["Run", "State", "Step", "Reward", accuracies, ...(losses ? ["Held-out loss"] : [])];
  return table([...headings, "Time in steps", "Trained tokens", "Stages"], rows, "runs");
}

/** Returns a folded list of the sentinels' alarms; null without alarms. */
function alarmList(runs) {
  const alarms = runs.flatMap((run) => (run.facts.alarms || []).map((alarm) => ({ run, ...alarm })));
  if (!alarms.length) return null;
  const rows = alarms.map(({ run, step, sentinel, message }) => [
    el("span", {}, runDot(run), run.name),
    whole(step),
    el("b", {}, sentinel),
    message,
  ]);
  const heading = el("summary", {}, "alarms", el("span", { className: "count" }, alarms.length));
  return el("details", { className: "group alarms" }, heading, table(["Run", "Step", "Sentinel", "What it said"], rows));
}
