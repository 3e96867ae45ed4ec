"use strict";
// The time of each step by phase, and the use of the machine.

const PHASE = /^time\/(.+)(?<!_per)_s$/;
const NOT_PHASES = new Set(["time/step_s", "time/processor_s"]);
const PHASE_NAMES = { sample: "Drawing groups and rollouts", score: "Scoring passes", update: "Optimizer steps", sync: "Weights to the generator", other: "Everything else" };
const WORK = [
  ["time/mfu", "FLOP utilisation (MFU)", percent], ["time/idle_share", "Idle: no generation, no training", percent],
  ["time/tflop_per_s", "Model TFLOP/s", short], ["time/tokens_per_s", "Tokens/s", short], ["time/samples_per_s", "Samples/s", short],
];
const MACHINE = {
  cpu_cores: "Processor cores kept busy", rss_gib: "Memory of the run's processes, GiB", ram_used_gib: "Memory in use, GiB", ram_used_share: "Memory in use",
  disk_free_gib: "Free on the run's disk, GiB", disk_used_share: "Used of the run's disk",
};
const GPU = { busy_share: "busy", memory_gib: "memory, GiB", power_w: "power, W" };

/** Returns the readable name of a metric of the machine; an unknown metric keeps its name. */
function machineName(name) {
  const gpu = /^gpu\/(\d+)\/(\w+)$/.exec(name);
  return gpu ? `GPU ${gpu[1]}: ${GPU[gpu[2]] ?? gpu[2]}` : MACHINE[name] ?? name;
}

const Timeline = {
  title: "Time",
  plots: [],

  async show(host, app) {
    refill(host, app.shown.map((run) => {
      const heading = el("h2", {}, runDot(run), run.name);
      if (!run.columns["time/step_s"]) return el("section", { className: "panel" }, heading, el("p", { className: "note" }, "No times."));
      return el(
        "section",
        { className: "panel", dataset: { run: run.index } },
        heading,
        el("div", { className: "legend wide" }),
        el("div", { className: "plot" }),
        el("div", { className: "tables" }, phaseTable(phases(run)), machineTable(run), predictedTable(run.facts.predicted)),
      );
    }));
    for (const panel of host.querySelectorAll("[data-run]")) {
      const { xs, parts } = phases(app.runs[panel.dataset.run]);
      this.plots.push(areaChart(panel.querySelector(".plot"), panel.querySelector(".legend"), { xs, parts, height: 240, format: duration }));
    }
  },

  hide() {
    for (const plot of this.plots) remove(plot);
    this.plots = [];
  },
};

/** Returns the seconds of each phase by step. Time in no phase is "other". */
function phases(run) {
  const total = run.columns["time/step_s"];
  const rows = Array.from(run.steps.keys()).filter((i) => !Number.isNaN(total[i]));
  const names = run.names.filter((name) => PHASE.test(name) && !NOT_PHASES.has(name));
  const parts = names.map((name, i) => ({
    label: PHASE_NAMES[PHASE.exec(name)[1]] ?? PHASE.exec(name)[1],
    color: `var(--run-${i % 8})`,
    ys: rows.map((row) => run.columns[name][row] || 0),
  }));
  const otherTime = rows.map((row, i) => Math.max(0, total[row] - parts.reduce((sum, { ys }) => sum + ys[i], 0)));
  parts.push({ label: PHASE_NAMES.other, color: "var(--run-5)", ys: otherTime });
  parts.sort((a, b) => sum(b.ys) - sum(a.ys));
  return { xs: rows.map((row) => run.steps[row]), parts };
}

function sum(values) {
  return values.reduce((total, x) => total + x, 0);
}

/** Returns a table of the predictions of `ratchet plan` and the measurements; null without a plan. */
function predictedTable(lines) {
  if (!lines?.length) return null;
  const number = (x, unit) => (x === null ? "–" : `${short(Number(x.toPrecision(3)))} ${unit}`);
  const rows = lines.map(({ what, unit, predicted, measured }) => [
    what,
    number(predicted, unit),
    number(measured, unit),
    measured ? percent(predicted / measured) : "–",
  ]);
  return table(["Planned", "Predicted", "Measured", "Predicted of measured"], rows, "numbers predicted");
}

function phaseTable({ xs, parts }) {
  const all = sum(parts.map(({ ys }) => sum(ys)));
  const rows = parts.map(({ label, color, ys }) => [
    el("span", {}, el("i", { className: "dot", style: { background: color } }), label),
    percent(sum(ys) / all),
    duration(sum(ys) / xs.length),
    duration(Math.max(0, ...ys)),
    duration(sum(ys)),
  ]);
  return table(["Phase", "Share", "Mean a step", "Longest", "Together"], rows, "numbers");
}

/** Returns a table of the run's throughput and its use of the machine; null if nothing was measured. */
function machineTable(run) {
  const system = run.names.filter((name) => name.startsWith("system/"));
  const named = system.map((name) => [name, machineName(name.slice("system/".length)), name.endsWith("_share") ? percent : short]);
  const rows = [...WORK, ...named].filter(([name]) => run.columns[name]).map(([name, label, format]) => {
    const values = Array.from(run.columns[name]).filter((x) => Number.isFinite(x));
    return [label, format(sum(values) / values.length), format(Math.min(...values)), format(Math.max(...values)), format(run.last(name))];
  });
  return rows.length ? table(["Work and machine", "Mean", "Least", "Most", "Last"], rows, "numbers machine") : null;
}
