"use strict";
// Compares two runs: the first step at which they differ, and the differences of their recipes, code and data.

const NOT_COMPARED = /^(time|system|generator)\//; // these metrics depend on the machine

const Differences = {
  title: "Differences",
  pair: [null, null],
  all: false,

  async show(host, app) {
    const runs = app.runs;
    const names = runs.map((run) => run.name);
    const pick = (i) => runs.find((run) => run.name === this.pair[i]) || app.shown[i] || runs[Math.min(i, runs.length - 1)];
    const [a, b] = [pick(0), pick(1)];
    if (!a) return void refill(host, el("p", { className: "note" }, "There is no run."));
    for (const run of new Set([a, b])) {
      await app.source.read(run);
      await app.source.rollouts(run);
    }
    const choose = (i) => (name) => {
      this.pair = [a.name, b.name];
      this.pair[i] = name;
      app.render();
    };
    refill(
      host,
      runs.length > 1 && el("div", { className: "toolbar" }, select("Run", a.name, names, choose(0)), select("against", b.name, names, choose(1)), toggle("all keys", this.all, (all) => {
        this.all = all;
        app.render();
      })),
      a !== b && section("First step that differs", firstDifferences(a, b)),
      section("Recipe", leavesTable(a, b, a.facts.config, b.facts.config, this.all || a === b)),
      section("Code and data", leavesTable(a, b, origin(a), origin(b), true)),
    );
  },

  hide() {},
};

function section(title, ...children) {
  return el("section", { className: "panel" }, el("h2", {}, title), children);
}

/** Returns the code, data and command of a run as {name: value}. */
function origin(run) {
  const leaves = {};
  (run.facts.provenance || []).forEach((start, i) => {
    const prefix = i ? `from step ${start.after_step} on: ` : "";
    for (const [name, value] of Object.entries(start.code || {})) leaves[`${prefix}${name}`] = value;
    for (const change of start.changes || []) leaves[`${prefix}${change.key}`] = `${JSON.stringify(change.from)} -> ${JSON.stringify(change.to)}`;
    for (const [path, value] of Object.entries(start.data || {})) leaves[`${prefix}data ${path}`] = value;
  });
  if (run.facts.summary) leaves.command = run.facts.summary.command;
  return leaves;
}

function leavesTable(a, b, left, right, all) {
  const keys = [...new Set([...Object.keys(left), ...Object.keys(right)])];
  const text = (leaves, key) => (key in leaves ? (typeof leaves[key] === "string" ? leaves[key] : JSON.stringify(leaves[key])) : "absent");
  const rows = keys
    .map((key) => [key, text(left, key), text(right, key)])
    .filter(([, one, other]) => all || one !== other)
    .map(([key, one, other]) => {
      const cell = (value) => el("td", { className: one === other ? "" : "changed" }, el("code", {}, value));
      return a === b ? [el("code", {}, key), cell(one)] : [el("code", {}, key), cell(one), cell(other)];
    });
  if (!rows.length) return el("p", { className: "note" }, keys.length ? "No difference." : "Nothing is recorded.");
  return table(a === b ? ["", a.name] : ["", a.name, b.name], rows, "leaves");
}

/** Returns a table with the first step at which tasks, rollouts, metrics or weights of two runs differ, and how. */
function firstDifferences(a, b) {
  const rows = [
    ["Tasks drawn", differingTasks(a, b)],
    ["What was sampled", differingRollouts(a, b)],
    ["Metrics", differingMetrics(a, b)],
    ["Weights after the step", differingWeights(a, b)],
  ].map(([what, { steps, step, how }]) => {
    if (!steps) return [what, "–", "no common step"];
    return step === null ? [what, "none", `equal at all ${whole(steps)} common steps`] : [what, el("b", {}, whole(step)), how];
  });
  return table(["", "Step", "What differs there"], rows, "firsts");
}

function differingMetrics(a, b) {
  const names = [...new Set([...a.names, ...b.names])].filter((name) => !NOT_COMPARED.test(name)).sort();
  const rows = new Map(Array.from(b.steps, (step, i) => [step, i]));
  const common = Array.from(a.steps.keys()).filter((i) => rows.has(a.steps[i]));
  const value = (run, name, i) => (run.columns[name] ? run.columns[name][i] : NaN);
  for (const i of common) {
    const j = rows.get(a.steps[i]);
    const differ = names.filter((name) => !Object.is(value(a, name, i), value(b, name, j)));
    if (differ.length) {
      const lines = differ.slice(0, 6).map((name) => `${name}: ${exact(value(a, name, i))} and ${exact(value(b, name, j))}`);
      const more = differ.length > 6 ? [`and ${differ.length - 6} more`] : [];
      return { steps: common.length, step: a.steps[i], how: el("ul", {}, [...lines, ...more].map((line) => el("li", {}, line))) };
    }
  }
  return { steps: common.length, step: null };
}

function exact(x) {
  return Number.isNaN(x) ? "none" : String(x);
}

function commonSteps(a, b) {
  if (!a.rollouts || !b.rollouts) return [];
  return [...a.rollouts.starts.keys()].filter((step) => b.rollouts.starts.has(step)).sort((x, y) => x - y);
}

/** Finds the first rollout of common steps with a different value. value(run, column, row): the value of a row. */
function differingRows(a, b, value, columns) {
  const steps = commonSteps(a, b);
  for (const step of steps) {
    const sizes = [a, b].map((run) => run.rollouts.steps[step][0]);
    if (sizes[0] !== sizes[1]) return { steps: steps.length, step, how: `${sizes[0]} and ${sizes[1]} rollouts` };
    for (let rowIndex = 0; rowIndex < sizes[0]; rowIndex++) {
      const [i, j] = [a.rollouts.at(step, rowIndex), b.rollouts.at(step, rowIndex)];
      if (columns.some((name) => !Object.is(value(a, name, i), value(b, name, j)))) {
        const name = columns.find((column) => !Object.is(value(a, column, i), value(b, column, j)));
        return { steps: steps.length, step, how: `rollout ${rowIndex}: ${name} ${exact(value(a, name, i))} and ${exact(value(b, name, j))}` };
      }
    }
  }
  return { steps: steps.length, step: null };
}

function differingTasks(a, b) {
  return differingRows(a, b, (run, name, row) => run.rollouts.word(name, row), ["task"]);
}

function differingRollouts(a, b) {
  return differingRows(a, b, (run, name, row) => run.rollouts[name][row], ["reward", "length", "generated_tokens", "advantage"]);
}

function differingWeights(a, b) {
  const fingerprints = (run, step) => run.rollouts.steps[step][3];
  const steps = commonSteps(a, b).filter((step) => Object.keys(fingerprints(a, step)).length && Object.keys(fingerprints(b, step)).length);
  const step = steps.find((other) => JSON.stringify(fingerprints(a, other)) !== JSON.stringify(fingerprints(b, other)));
  if (step === undefined) return { steps: steps.length, step: null };
  const roles = Object.keys(fingerprints(a, step)).filter((role) => fingerprints(a, step)[role] !== fingerprints(b, step)[role]);
  return { steps: steps.length, step, how: `of ${roles.join(", ")}` };
}
