"use strict";
// Held-out answers: the tasks of two evaluations side by side, and which tasks became right or wrong.

const MAX_ANSWERS = 100; // tasks in the table, and tasks that "Show more" adds
const CHANGES = [
  ["right", "became right"], ["wrong", "became wrong"], ["still-wrong", "still wrong"], ["still-right", "still right"], ["unjudged", "not judged in one"],
];

/** Returns the change of a task between two evaluations, one of CHANGES. a, b: true if the reward reaches the threshold (right), false if
 * it does not (wrong), null without a reward. */
function describeChange(a, b) {
  if (a === null || b === null) return "unjudged";
  return a ? (b ? "still-right" : "wrong") : b ? "right" : "still-wrong";
}

function evaluationLabel({ name, stage, step }) {
  return step === null ? name : `${stage}, step ${step}`;
}

/** Pairs the tasks of two evaluations, as {id, tag, prompt, sides: [a, b], change}. Tasks form a pair if their ids and digests are equal. */
function pairTasks(a, b) {
  const key = (row) => JSON.stringify([row[0], row[2]]);
  const others = new Map(b.rows.map((row) => [key(row), row]));
  const side = ([, , , , end, reward, text], { threshold }) => ({ end, reward, text, isRight: reward === null ? null : reward >= threshold });
  return a.rows.filter((row) => others.has(key(row))).map((row) => {
    const other = others.get(key(row));
    const sides = [side(row, a), side(other, b)];
    return { id: row[0], tag: row[1], prompt: row[3] || other[3], sides, change: describeChange(sides[0].isRight, sides[1].isRight) };
  });
}

const Answers = {
  title: "Answers",
  chosen: [{}, {}], // {run, name} of each side; by default the first and the last evaluation of the first shown run
  change: "",
  text: "",

  async show(host, app) {
    this.app = app;
    this.lists = new Map();
    for (const run of app.shown) {
      const evaluations = await app.source.evaluations(run);
      if (evaluations.length) this.lists.set(run, evaluations);
    }
    if (!this.lists.size) {
      const note = app.shown.length ? "No evaluation of the shown runs has answers (evals/): evaluation.tasks is 0, or no reward judges them." : "Choose a run above.";
      return void refill(host, el("p", { className: "note" }, note));
    }
    this.sides = this.chosen.map((chosen, i) => this.resolve(chosen, i));
    const contents = [];
    for (const { run, evaluation } of this.sides) contents.push(await app.source.answers(run, evaluation.name));
    this.tasks = pairTasks(...contents);
    this.limit = MAX_ANSWERS;
    this.body = el("div");
    refill(host, el("div", { className: "toolbar" }, this.sideSelects(0, "From"), this.sideSelects(1, "to")), this.body);
    this.draw();
  },

  hide() {},

  /** Returns {run, evaluation} of a side: as chosen, or else by default. */
  resolve(chosen, side) {
    const runs = [...this.lists.keys()];
    const run = runs.find((each) => each.name === chosen.run) ?? runs[0];
    const evaluations = this.lists.get(run);
    const ofTraining = evaluations.filter(({ step }) => step !== null);
    const byDefault = (ofTraining.length ? ofTraining : evaluations).at(side ? -1 : 0);
    return { run, evaluation: evaluations.find(({ name }) => name === chosen.name) ?? byDefault };
  },

  sideSelects(side, label) {
    const { run, evaluation } = this.sides[side];
    const runs = [...this.lists.keys()].map((each) => each.name);
    const choose = (chosen) => {
      this.chosen[side] = chosen;
      this.app.render();
    };
    const evaluations = this.lists.get(run).map((each) => [each.name, evaluationLabel(each)]);
    return [
      runs.length > 1 && select(label, run.name, runs, (name) => choose({ run: name })),
      select(runs.length > 1 ? (side ? "there" : "at") : label, evaluation.name, evaluations, (name) => choose({ run: run.name, name })),
    ];
  },

  draw() {
    const counts = new Map(CHANGES.map(([change]) => [change, this.tasks.filter((task) => task.change === change).length]));
    const button = (change, label, count) => {
      const choose = () => {
        this.change = change;
        this.limit = MAX_ANSWERS;
        this.draw();
      };
      return el("button", { className: this.change === change ? "on" : "", dataset: { change }, onclick: choose }, label, el("span", { className: "count" }, whole(count)));
    };
    const search = field("Text", { type: "search", placeholder: "in prompts and answers", value: this.text, id: "answer-filter" }, debounce((box) => {
      this.text = box.value;
      this.limit = MAX_ANSWERS;
      this.fill();
    }));
    this.rows = el("div");
    refill(
      this.body,
      el(
        "div",
        { className: "toolbar" },
        el("div", { className: "buttons" }, button("", "all", this.tasks.length), CHANGES.filter(([change]) => counts.get(change)).map(([change, label]) => button(change, label, counts.get(change)))),
        search,
        this.sampleNote(),
      ),
      this.rows,
    );
    this.fill();
  },

  sampleNote() {
    const [inFile, all] = this.sides[0].run.heldOut?.task_counts ?? [0, 0];
    return inFile < all && el("span", { className: "hint" }, `This file has ${whole(inFile)} of ${whole(all)} tasks; ratchet ui shows all.`);
  },

  /** Shows the tasks that match the filters. */
  fill() {
    const text = this.text.toLowerCase();
    const matches = (task) => [task.id, task.prompt, ...task.sides.map((side) => side.text)].some((part) => part.toLowerCase().includes(text));
    const tasks = this.tasks.filter((task) => (!this.change || task.change === this.change) && (!text || matches(task)));
    const labels = Object.fromEntries(CHANGES);
    const rows = tasks.slice(0, this.limit).map((task) => [
      [el("div", {}, task.id), el("div", { className: "hint" }, [labels[task.change], task.tag].filter(Boolean).join(" · "))],
      el("div", { className: "long" }, task.prompt),
      ...task.sides.map((side) => [answerChip(side), el("div", { className: "long" }, side.text)]),
    ]);
    const headings = this.sides.map(({ run, evaluation }) => el("span", {}, this.lists.size > 1 && [runDot(run), `${run.name}, `], evaluationLabel(evaluation)));
    const more = el("button", { onclick: () => ((this.limit += MAX_ANSWERS), this.fill()) }, `Show more of ${whole(tasks.length)}`);
    refill(
      this.rows,
      el("div", { className: "panel" }, table(["Task", "Prompt", ...headings], rows, "answers"), !tasks.length && el("p", { className: "note" }, this.tasks.length ? "No task fits these filters." : "These evaluations have no task in common.")),
      tasks.length > this.limit && more,
    );
  },
};

function answerChip({ reward, end, isRight }) {
  const tone = isRight === null ? "none" : isRight ? "good" : "bad";
  const ended = end === "scored" || reward === null ? "" : ` ${end}`;
  return el("span", { className: `chip ${tone}` }, reward === null ? end : `${short(reward)}${ended}`);
}
