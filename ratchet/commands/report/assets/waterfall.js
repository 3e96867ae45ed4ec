"use strict";
// The waterfall of the policy's tokens: how many have a gradient in the end, and why the others do not.

const SHOWN_FATES = ["trained", "masked", "filtered", "zero", "truncated", "failed", "aside"];
const FATE_COLORS = {
  trained: "--good", masked: "--run-4", filtered: "--run-3", zero: "--run-1", truncated: "--run-6", failed: "--bad", aside: "--run-5",
};
const CLIPPED = "policy/policy_gradient/clipped";

const Waterfall = {
  title: "Tokens",
  range: { from: "", to: "" },
  plots: [],

  async show(host, app) {
    this.app = app;
    const runs = app.shown;
    for (const run of runs) await app.source.rollouts(run);
    const box = (label, name) =>
      field(label, { type: "number", value: this.range[name], id: `waterfall-${name}` }, debounce((input) => {
        this.range[name] = input.value;
        this.draw(panels, runs);
      }));
    const panels = el("div", { className: "panels" });
    refill(host, el("div", { className: "toolbar" }, box("Step from", "from"), box("to", "to"), el("span", { className: "hint" }, "Of the tokens that the policy wrote.")), panels);
    this.draw(panels, runs);
  },

  hide() {
    for (const plot of this.plots) remove(plot);
    this.plots = [];
  },

  draw(panels, runs) {
    this.hide();
    refill(panels, runs.map((run) => {
      const heading = el("h2", {}, runDot(run), run.name);
      if (!run.rollouts.count) return el("section", { className: "panel" }, heading, el("p", { className: "note" }, "This run has no record (steps/)."));
      return el("section", { className: "panel", dataset: { run: run.index } }, heading, waterfallView(this.total(run)), promptLine(run.facts.prompts), el("div", { className: "legend wide" }), el("div", { className: "plot" }));
    }));
    for (const panel of panels.querySelectorAll("[data-run]")) {
      const run = this.app.runs[panel.dataset.run];
      this.plots.push(this.shares(run, panel.querySelector(".plot"), panel.querySelector(".legend")));
    }
  },

  /** Returns the number of tokens by fate in the range of steps. `clipped` counts the trained tokens on which the clip acts. */
  total(run) {
    const steps = fatesByStep(run.rollouts);
    const from = this.range.from === "" ? -Infinity : Number(this.range.from);
    const to = this.range.to === "" ? Infinity : Number(this.range.to);
    const sums = { sampled: 0, clipped: 0, rows: 0 };
    const clippedShare = new Map(Array.from(run.steps, (step, i) => [step, run.columns[CLIPPED]?.[i] || 0]));
    for (const [step, tokens] of steps) {
      if (step < from || step > to) continue;
      for (const name of SHOWN_FATES) {
        sums[name] = (sums[name] || 0) + tokens[FATE[name]];
        sums.sampled += tokens[FATE[name]];
      }
      sums.clipped += tokens[FATE.trained] * (clippedShare.get(step) || 0);
    }
    return sums;
  },

  shares(run, host, legend) {
    const steps = [...fatesByStep(run.rollouts)];
    const sums = steps.map(([, tokens]) => tokens.reduce((sum, x) => sum + x, 0) || 1);
    const presentFates = SHOWN_FATES.filter((name) => steps.some(([, tokens]) => tokens[FATE[name]] > 0));
    const parts = presentFates.map((name) => ({
      label: FATES[FATE[name]][1],
      color: `var(${FATE_COLORS[name]})`,
      ys: steps.map(([, tokens], i) => tokens[FATE[name]] / sums[i]),
    }));
    return areaChart(host, legend, { xs: steps.map(([step]) => step), parts, height: 170, format: percent, top: 1 });
  },
};

/** Returns step -> tokens by fate. The tokens of a rollout that trains have two fates: with a loss (trained), and without (masked). */
function fatesByStep(rollouts) {
  if (rollouts.fates) return rollouts.fates;
  const steps = new Map();
  for (let i = 0, tokens = null, step = null; i < rollouts.count; i++) {
    if (rollouts.step[i] !== step) steps.set((step = rollouts.step[i]), (tokens = new Float64Array(FATES.length)));
    const written = rollouts.generated_tokens[i];
    const fate = rollouts.fate[i];
    if (fate === FATE.trained) {
      const trained = Math.min(written, rollouts.trained_tokens[i]);
      tokens[FATE.trained] += trained;
      tokens[FATE.masked] += written - trained;
    } else tokens[fate] += written;
  }
  return (rollouts.fates = steps);
}

/** Draws the bars from all sampled tokens down to the trained tokens. */
function waterfallView(sums) {
  const bars = [["Sampled", "all that the policy wrote", 0, sums.sampled, "--accent"]];
  let remaining = sums.sampled;
  for (const name of ["aside", "failed", "truncated", "zero", "filtered", "masked"]) {
    if (!sums[name]) continue;
    remaining -= sums[name];
    bars.push([FATES[FATE[name]][1], FATES[FATE[name]][2], remaining, sums[name], FATE_COLORS[name], "−"]);
  }
  bars.push(["Trained", "has a gradient", 0, sums.trained || 0, "--good"]);
  if (sums.clipped) bars.push(["… clipped", "trained tokens on which the clip of the loss acts", 0, sums.clipped, "--run-4"]);
  const scale = (x) => `${(100 * x) / (sums.sampled || 1)}%`;
  return el("div", { className: "waterfall" }, bars.map(([label, title, start, size, color, sign = ""]) => [
    el("span", { className: "label", title }, label),
    el("span", { className: "track" }, el("span", { className: "bar", style: { left: scale(start), width: scale(size), background: `var(${color})` } })),
    el("span", { className: "amount" }, `${sign}${short(size)}`),
    el("span", { className: "amount" }, percent(size / (sums.sampled || 1))),
  ]));
}

const EVENTS = { issued: "issued", trained: "trained", replayed: "trained on again", filtered: "dropped without training", retried: "issued again", deferred: "deferred to a later step" };

/** Shows the number of prompts of the whole run by event, from its ledger. */
function promptLine(prompts) {
  const parts = Object.entries(EVENTS).filter(([event]) => prompts?.[event]).map(([event, label]) => `${whole(prompts[event])} ${label}`);
  return parts.length > 0 && el("p", { className: "hint prompts" }, `Prompts of the whole run: ${parts.join(", ")}.`);
}
