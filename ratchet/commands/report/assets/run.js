"use strict";
// A run in the page: its metrics by column, and the table of its rollouts. Each column is a typed array.

// What became of the policy's tokens: [name, label, explanation], in the order in which the waterfall subtracts them.
const FATES = [
  ["trained", "Trained", "has a gradient"],
  ["masked", "Masked", "tokens without a loss, in rollouts that train"],
  ["filtered", "Filtered", "removed by a filter after scoring"],
  ["zero", "Zero variance", "all rewards of the group are equal: the advantage is 0"],
  ["truncated", "Truncated", "cut off by a limit, and left out"],
  ["failed", "Failed", "the attempt failed or was cancelled"],
  ["aside", "Baseline", "only feeds statistics"],
];
const FATE = Object.fromEntries(FATES.map(([name], index) => [name, index]));

const COLORS = 10; // --run-0 to --run-9
const DASHES = [[], [7, 4], [2, 3]];

/** Gives each shown run the first free colour. A run keeps its colour while it is shown. */
function assignColors(runs) {
  for (const run of runs) if (!run.visible) run.slot = null;
  const taken = new Set(runs.map((run) => run.slot));
  for (const run of runs.filter((each) => each.visible && each.slot === null)) {
    let slot = 0;
    while (taken.has(slot)) slot++;
    taken.add((run.slot = slot));
  }
}

/** Returns the mark of a run in its colour. */
function runDot(run) {
  const style = run.visible && !run.dash.length ? { background: run.color } : { "border-color": run.color };
  return el("i", { className: run.dash.length ? "dot dashed" : "dot", style });
}

class Run {
  constructor(packed, index) {
    this.index = index;
    this.columns = {};
    this.steps = new Float64Array(0);
    this.rollouts = null; // until a view needs them
    this.visible = true;
    this.version = {};
    this.addSteps(packed);
  }

  get name() {
    return this.facts.name;
  }

  /** The number of the run's colour among the shown runs; null while it is hidden. */
  slot = null;

  get color() {
    return this.slot === null ? "var(--muted)" : `var(--run-${this.slot % COLORS})`;
  }

  /** The dashes of the run's lines: the eleventh shown run has the colour of the first one, but dashed lines. */
  get dash() {
    return DASHES[Math.floor((this.slot ?? 0) / COLORS) % DASHES.length];
  }

  get state() {
    return this.version.state ?? this.facts.state;
  }

  /** The run's progress: its stages, its last step, its latest results. */
  get progress() {
    return this.version.progress ?? this.facts.progress ?? {};
  }

  /** Updates the facts, and adds the metrics of further steps. */
  addSteps({ facts, arrays }) {
    this.facts = { ...this.facts, ...facts };
    const { step, ...columns } = arrays;
    const oldLength = this.steps.length;
    const length = oldLength + step.length;
    this.steps = concatenate(this.steps, step);
    for (const name of new Set([...Object.keys(this.columns), ...Object.keys(columns)])) {
      const column = new Float64Array(length).fill(NaN);
      if (this.columns[name]) column.set(this.columns[name]);
      if (columns[name]) column.set(columns[name], oldLength);
      this.columns[name] = column;
    }
  }

  clear() {
    this.steps = new Float64Array(0);
    this.columns = {};
  }

  get names() {
    return Object.keys(this.columns);
  }

  /** The last number of a metric; NaN if it has none. */
  last(name) {
    return (this.columns[name] || []).findLast((x) => !Number.isNaN(x)) ?? NaN;
  }

  first(name) {
    return (this.columns[name] || []).find((x) => !Number.isNaN(x)) ?? NaN;
  }

  /** The x values of the steps: the steps themselves, or the time or trained tokens up to each step. */
  axis(kind) {
    if (kind === "step") return this.steps;
    const column = this.columns[kind === "time" ? "time/step_s" : "rollout/trained_tokens"] || [];
    let sum = 0;
    return Float64Array.from(this.steps, (_, i) => (sum += Math.max(0, drawable(column[i]))));
  }

  /** The stages that the run has begun, as {name, first, last}: their rows [first, last) in the columns. */
  get stages() {
    const stages = [];
    let first = 0;
    let end = 0;
    for (const [name, steps] of this.facts.progress?.stages ?? []) {
      end += steps;
      const next = this.steps.findIndex((step) => step > end);
      const last = next < 0 ? this.steps.length : next;
      if (last > first) stages.push({ name, first, last });
      first = last;
    }
    return stages;
  }

  addRollouts({ facts, arrays }) {
    if (!this.rollouts || facts.after === 0) this.rollouts = new Rollouts();
    this.rollouts.add(facts, arrays);
  }
}

function concatenate(a, b) {
  const wider = a.BYTES_PER_ELEMENT >= b.BYTES_PER_ELEMENT ? a : b;
  const both = new wider.constructor(a.length + b.length);
  both.set(a);
  both.set(b, a.length);
  return both;
}

class Rollouts {
  constructor() {
    this.files = [];
    this.steps = {}; // step -> [rows, groups, drawn, fingerprints]
    this.words = {};
    this.codes = {}; // name -> word -> code
    this.count = 0;
  }

  add(facts, arrays) {
    Object.assign(this, { files: facts.files, steps: facts.steps });
    for (const [name, words] of Object.entries(facts.words)) arrays[name] = this.recode(name, words, arrays[name]);
    for (const [name, column] of Object.entries(arrays)) this[name] = this.count ? concatenate(this[name], column) : column;
    this.count = this.step.length;
    this.derive();
  }

  /** Translates a column of codes (indices into `words`) to the codes of this table. */
  recode(name, words, column) {
    if (!this.words[name]) {
      this.words[name] = words;
      return column;
    }
    const codes = (this.codes[name] ??= new Map(this.words[name].map((word, code) => [word, code])));
    const translation = words.map((word) => {
      if (!codes.has(word)) codes.set(word, this.words[name].push(word) - 1);
      return codes.get(word);
    });
    return Uint32Array.from(column, (code) => translation[code]);
  }

  word(name, row) {
    return this.words[name][this[name][row]];
  }

  /** The code of a word; -1 if no row has it. */
  code(name, word) {
    return this.words[name].indexOf(word);
  }

  /** Computes the first row of each step, the index of each row in its step (`rowIndex`), and each row's fate. */
  derive() {
    const { step, group_index, count } = this;
    this.fates = null; // `fatesByStep` computes them again
    this.starts = new Map();
    this.rowIndex = new Int32Array(count);
    this.fate = new Uint8Array(count);
    this.group_end = new Int32Array(count);
    for (let begin = 0, end = 0, rowIndex = 0; begin < count; begin = end) {
      if (begin === 0 || step[begin] !== step[begin - 1]) {
        this.starts.set(step[begin], begin);
        rowIndex = 0;
      }
      for (end = begin; end < count && step[end] === step[begin] && group_index[end] === group_index[begin]; end++) {
        this.rowIndex[end] = rowIndex++;
      }
      this.assignFates(begin, end);
    }
  }

  /** Assigns the fates of a group's rows, [begin, end). */
  assignFates(begin, end) {
    const { reward, fate, outcome, use, truncated, trained_tokens, advantage } = this;
    const outcomes = this.words.outcome;
    let low = Infinity;
    let high = -Infinity;
    for (let i = begin; i < end; i++) {
      if (reward[i] < low) low = reward[i];
      if (reward[i] > high) high = reward[i];
    }
    const equal = end - begin > 1 && low === high;
    for (let i = begin; i < end; i++) {
      this.group_end[i] = end;
      const outcomeName = outcomes[outcome[i]];
      const hasNoGradient = trained_tokens[i] === 0 || advantage[i] === 0;
      if (this.words.use[use[i]] !== "train") fate[i] = FATE.aside;
      else if (outcomeName === "failed" || outcomeName === "cancelled") fate[i] = FATE.failed;
      else if (equal && hasNoGradient) fate[i] = FATE.zero;
      else if (trained_tokens[i] > 0) fate[i] = FATE.trained;
      else fate[i] = truncated[i] ? FATE.truncated : FATE.filtered;
    }
  }

  /** The rows of a row's group, as [begin, end). */
  group(row) {
    let begin = row;
    while (begin > 0 && this.step[begin - 1] === this.step[row] && this.group_index[begin - 1] === this.group_index[row]) begin--;
    return [begin, this.group_end[row]];
  }

  at(step, rowIndex) {
    return this.starts.has(step) ? this.starts.get(step) + rowIndex : -1;
  }
}
