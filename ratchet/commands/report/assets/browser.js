"use strict";
// The rollout browser: a filtered and sorted list, the open rollout, and the same prompt at other steps or in other runs.

const ROW_HEIGHT = 28;
const MAX_ROWS = 500_000; // browsers limit the height of an element
const MAX_COLUMNS = 4; // rollouts side by side
const ORDERS = {
  "step": ["step, first to last", null],
  "-step": ["step, last to first", (r) => (a, b) => b - a],
  "-reward": ["highest reward", (r) => (a, b) => number(r.reward[b]) - number(r.reward[a])],
  "reward": ["lowest reward", (r) => (a, b) => number(r.reward[a], Infinity) - number(r.reward[b], Infinity)],
  "-advantage": ["largest |advantage|", (r) => (a, b) => Math.abs(number(r.advantage[b], 0)) - Math.abs(number(r.advantage[a], 0))],
  "-length": ["longest", (r) => (a, b) => r.length[b] - r.length[a]],
};

function number(x, otherwise = -Infinity) {
  return Number.isNaN(x) ? otherwise : x;
}

const Browser = {
  title: "Rollouts",
  filters: { run: null, from: "", to: "", least: "", most: "", stage: "", outcome: "", fate: "", environment: "", tag: "", task: "", text: "", readable: true },
  order: "step",
  view: { mode: "conversation", colouring: "logprob" },
  opened: null, // {run, step, rowIndex}
  aside: [], // rollouts of the same prompt beside the open one, like `opened`
  hits: null, // rows that the text search found; null without a search

  async show(host, app) {
    this.app = app;
    this.host = host;
    const runs = app.shown;
    if (!runs.length) return void refill(host, el("p", { className: "note" }, "Choose a run above."));
    this.run = runs.find((run) => run.name === this.filters.run) || runs[0];
    for (const run of app.source.live ? [this.run] : runs) await app.source.rollouts(run);
    this.rollouts = this.run.rollouts;
    if (!this.rollouts.count) {
      const reason = this.run.facts.state === "running" ? "No step is recorded yet." : "This run has no record (steps/): record.every is 0, or an older version made the run.";
      return void refill(host, runs.length > 1 && this.runSelect(runs), el("p", { className: "note" }, reason));
    }
    this.summary = el("div", { className: "hint", id: "found" });
    this.list = el("div", { className: "rows", tabIndex: 0, role: "listbox", onscroll: () => this.paint(), onkeydown: (event) => this.walk(event) });
    this.spacer = fill(this.list, el("div")).firstChild;
    this.detail = el("section", { className: "detail" });
    refill(host, el("div", { className: "browser" }, el("aside", {}, this.filterBar(runs), this.summary, this.list), this.detail));
    this.select();
    if (!this.opened || !runs.includes(this.opened.run)) {
      this.opened = null;
      if (this.rows.length) await this.open(this.run, this.rows[0]);
      else refill(this.detail, el("p", { className: "note" }, "Nothing fits these filters."));
    } else await this.paintDetail();
  },

  hide() {
    unhover();
  },

  runSelect(runs) {
    return select("Run", this.run.name, runs.map((run) => run.name), (name) => {
      this.filters.run = name;
      this.hits = null;
      this.filters.text = "";
      this.app.render();
    });
  },

  filterBar(runs) {
    const f = this.filters;
    const selectLater = debounce(() => this.select());
    const set = (name) => (value) => {
      f[name] = value;
      this.select();
    };
    const box = (label, name, props) =>
      field(label, { value: f[name], ...props }, (input) => {
        f[name] = input.value;
        selectLater();
      });
    const words = (label, name) => {
      const options = this.rollouts.words[name].filter((word) => word !== "");
      return options.length > 1 && select(label, f[name], [["", "all"], ...options.sort()], set(name));
    };
    return el(
      "div",
      { className: "filters" },
      runs.length > 1 && el("div", { className: "run" }, this.runSelect(runs)),
      box("Step", "from", { type: "number", id: "from" }),
      box("up to", "to", { type: "number", id: "to" }),
      box("Reward", "least", { type: "number", step: "any", id: "least" }),
      box("up to", "most", { type: "number", step: "any", id: "most" }),
      words("Stage", "stage"),
      words("Outcome", "outcome"),
      select("Became", f.fate, [["", "all"], ...FATES.filter(([name]) => name !== "masked").map(([name, label]) => [name, label])], set("fate")),
      words("Environment", "environment"),
      words("Tag", "tag"),
      box("Task", "task", { type: "search", placeholder: "part of its id", id: "task" }),
      field("Text", { type: "search", value: f.text, placeholder: "in messages", id: "text" }, debounce((input) => this.search(input.value), 350)),
      select("Order", this.order, Object.entries(ORDERS).map(([name, [label]]) => [name, label]), (value) => {
        this.order = value;
        this.select();
      }),
      !this.app.source.live && toggle("only with texts", f.readable, set("readable")),
    );
  },

  async search(text) {
    this.filters.text = text;
    this.hits = null;
    if (text) {
      const { found, since } = await this.app.source.search(this.run, text);
      if (text !== this.filters.text) return; // the user has typed more
      this.hits = new Set(found.map(([step, rowIndex]) => this.rollouts.at(step, rowIndex)));
      this.since = since;
    }
    this.select();
  },

  /** Selects the rows that match the filters, in the chosen order, and shows them. */
  select() {
    const r = this.rollouts;
    const f = this.filters;
    const [from, to] = [f.from === "" ? -Infinity : Number(f.from), f.to === "" ? Infinity : Number(f.to)];
    const [least, most] = [f.least === "" ? -Infinity : Number(f.least), f.most === "" ? Infinity : Number(f.most)];
    const hasRewardFilter = f.least !== "" || f.most !== "";
    const codes = ["stage", "outcome", "environment", "tag"].filter((name) => f[name] !== "").map((name) => [r[name], r.code(name, f[name])]);
    const tasks = f.task && new Set(r.words.task.flatMap((word, code) => (word.includes(f.task) ? [code] : [])));
    const readable = f.readable && !this.app.source.live;
    const rows = new Uint32Array(r.count);
    let n = 0;
    for (let i = 0; i < r.count; i++) {
      if (r.step[i] < from || r.step[i] > to) continue;
      if (hasRewardFilter && !(r.reward[i] >= least && r.reward[i] <= most)) continue;
      if (f.fate !== "" && r.fate[i] !== FATE[f.fate]) continue;
      if (codes.some(([column, code]) => column[i] !== code)) continue;
      if (tasks && !tasks.has(r.task[i])) continue;
      if (this.hits && !this.hits.has(i)) continue;
      if (readable && !this.app.source.has(this.run, i)) continue;
      rows[n++] = i;
    }
    this.rows = rows.subarray(0, n);
    const compare = ORDERS[this.order][1];
    if (compare) this.rows.sort(compare(r));
    this.describe(n);
    this.spacer.style.height = `${Math.min(n, MAX_ROWS) * ROW_HEIGHT}px`;
    this.list.scrollTop = 0;
    refill(this.list, this.spacer);
    this.painted = new Map(); // position in the list -> element
    this.paint();
  },

  describe(n) {
    const facts = this.run.facts;
    const sampled = this.run.sample && this.run.sample.size < this.rollouts.count && `; ${whole(this.run.sample.size)} have their texts in this file, ratchet ui shows all`;
    const partial = Object.values(this.rollouts.steps).some(([, groups, drawn]) => groups < drawn) && "; the record has a sample of each step's groups";
    const every = facts.every > 1 && `; of every ${facts.every}th step`;
    const since = this.hits && this.since !== null && `; texts were searched from step ${this.since} on`;
    this.summary.textContent = [`${whole(n)} of ${whole(this.rollouts.count)} rollouts`, every, sampled, partial, since].filter(Boolean).join("");
  },

  /** Creates elements for the rows in view only. A row that stays in view keeps its element: scroll events may come late, and
   * the browser drops a click if its element is replaced between press and release. */
  paint() {
    const first = Math.max(0, Math.floor(this.list.scrollTop / ROW_HEIGHT) - 5);
    const last = Math.min(this.rows.length, MAX_ROWS, first + Math.ceil((this.list.clientHeight || 600) / ROW_HEIGHT) + 10);
    for (const [at, node] of this.painted) {
      if (at >= first && at < last) continue;
      node.remove();
      this.painted.delete(at);
    }
    const chosen = this.opened?.run === this.run ? this.rollouts.at(this.opened.step, this.opened.rowIndex) : -1;
    let before = this.spacer;
    for (let at = first; at < last; at++) {
      const node = this.painted.get(at) ?? this.row(at);
      node.classList.toggle("chosen", this.rows[at] === chosen);
      if (before.nextSibling !== node) before.after(node);
      this.painted.set(at, node);
      before = node;
    }
  },

  row(at) {
    const r = this.rollouts;
    const row = this.rows[at];
    return el(
      "div",
      { className: "row", role: "option", style: { top: `${at * ROW_HEIGHT}px` }, onclick: () => this.open(this.run, row) },
      el("span", { className: "c-step" }, r.step[row]),
      rewardChip(r.reward[row], r.word("outcome", row)),
      el("span", { className: "c-fate", title: FATES[r.fate[row]][2] }, FATES[r.fate[row]][1]),
      el("span", { className: "c-length" }, `${whole(r.length[row])} tok`),
      el("span", { className: "c-task", title: r.word("task", row) }, el("bdi", {}, r.word("task", row))),
    );
  },

  walk(event) {
    const offset = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!offset || !this.opened) return;
    event.preventDefault();
    const current = this.rows.indexOf(this.rollouts.at(this.opened.step, this.opened.rowIndex));
    const next = Math.min(this.rows.length - 1, Math.max(0, current + offset));
    const top = next * ROW_HEIGHT;
    if (top < this.list.scrollTop) this.list.scrollTop = top;
    if (top + ROW_HEIGHT > this.list.scrollTop + this.list.clientHeight) this.list.scrollTop = top + ROW_HEIGHT - this.list.clientHeight;
    this.open(this.run, this.rows[next]);
  },

  async open(run, row) {
    const r = run.rollouts;
    this.opened = { run, step: r.step[row], rowIndex: r.rowIndex[row] };
    this.aside = [];
    this.paint();
    await this.paintDetail();
  },

  async paintDetail() {
    const { run, step, rowIndex } = this.opened;
    const selection = [this.opened, ...this.aside];
    const details = [];
    for (const item of selection) details.push((await this.app.source.details(item.run, item.step, [item.rowIndex]))[0]);
    if (this.opened.run !== run || this.opened.step !== step || this.opened.rowIndex !== rowIndex) return; // another was opened meanwhile
    const shown = selection.map((item, i) => (details[i] ? rolloutView(item.run, details[i], this.view) : this.absent(item)));
    refill(
      this.detail,
      this.siblings(run, step, rowIndex),
      this.viewBar(details[0]),
      el("div", { className: "columns", style: { "--n": shown.length } }, shown),
      this.occurrences(run, step, rowIndex),
    );
  },

  absent({ run, step }) {
    return el("article", { className: "rollout" }, el("p", { className: "note" }, `The texts of this rollout (${run.name}, step ${step}) are not in this file: open the run with \`ratchet ui\`, or write a report with more --rollouts.`));
  },

  viewBar(detail) {
    const modes = [["conversation", "Conversation"], ["tokens", "Tokens"]];
    const tabs = modes.map(([mode, label]) =>
      el("button", { className: this.view.mode === mode ? "on" : "", id: `view-${mode}`, onclick: () => this.setView({ mode }) }, label),
    );
    const colouring = COLOURINGS[this.view.colouring];
    const colours = this.view.mode === "tokens" && detail && select("Colour by", this.view.colouring, colourings(detail.tokens), (chosen) => this.setView({ colouring: chosen }));
    const legend = colours && colouring.scale?.map(([hue, label]) => el("span", { className: "value" }, el("i", { style: { background: `var(${hue})` } }), label));
    return el("div", { className: "view-bar" }, el("div", { className: "buttons" }, tabs), colours, legend && el("div", { className: "legend" }, legend));
  },

  setView(view) {
    Object.assign(this.view, view);
    this.paintDetail();
  },

  /** Shows the attempts of the group with their rewards. */
  siblings(run, step, rowIndex) {
    const r = run.rollouts;
    const row = r.at(step, rowIndex);
    const [begin, end] = r.group(row);
    const chips = [];
    for (let i = begin; i < end; i++) {
      const chip = rewardChip(r.reward[i], r.word("outcome", i));
      chip.classList.toggle("chosen", i === row);
      chips.push(el("button", { className: "plain", title: `attempt ${r.attempt[i] + 1}: ${FATES[r.fate[i]][2]}`, onclick: () => this.open(run, i) }, chip));
    }
    return el("div", { className: "siblings" }, el("b", {}, r.word("task", row)), el("span", { className: "hint" }, "attempts of the group:"), chips);
  },

  /** Shows where the same task was drawn, in all visible runs. A click puts an attempt beside the open one. */
  occurrences(run, step, rowIndex) {
    const task = run.rollouts.word("task", run.rollouts.at(step, rowIndex));
    const lines = this.app.shown.filter((each) => each.rollouts?.count).map((each) => {
      const chips = this.draws(each, task).map(([begin, end]) => this.occurrence(each, begin, end));
      return chips.length > 0 && el("div", { className: "siblings" }, runDot(each), each.name, chips);
    });
    const unread = this.app.shown.filter((run) => !run.rollouts); // only in a live page; each takes some megabytes
    return el(
      "section",
      { className: "occurrences" },
      el("h3", {}, "The same prompt, at other steps and in other runs"),
      el("p", { className: "hint" }, `A click puts an attempt beside this one (at most ${MAX_COLUMNS - 1}); a second click removes it.`),
      lines,
      unread.length > 0 && el("button", { onclick: () => this.readAll(unread) }, `Look in ${unread.map((each) => each.name).join(", ")}`),
    );
  },

  async readAll(runs) {
    for (const each of runs) await this.app.source.rollouts(each);
    await this.paintDetail();
  },

  /** Returns the groups of a task as row ranges [begin, end). */
  draws(run, task) {
    const r = run.rollouts;
    const code = r.code("task", task);
    const groups = [];
    for (let i = code < 0 ? r.count : 0; i < r.count; i = r.group_end[i]) if (r.task[i] === code) groups.push([i, r.group_end[i]]);
    return groups;
  },

  occurrence(run, begin, end) {
    const r = run.rollouts;
    const rewards = Array.from(r.reward.subarray(begin, end)).filter((x) => !Number.isNaN(x));
    const mean = rewards.length ? `, reward ${short(rewards.reduce((sum, x) => sum + x, 0) / rewards.length)}` : "";
    const isRow = (item, row) => item.run === run && r.at(item.step, item.rowIndex) === row;
    const rows = Array.from({ length: end - begin }, (_, i) => begin + i);
    const chosen = rows.find((row) => this.aside.some((item) => isRow(item, row)));
    // A click opens an attempt whose texts are available, and not the one that is already open.
    const readable = rows.filter((row) => this.app.source.has(run, row) && !isRow(this.opened, row));
    const row = chosen ?? readable[0] ?? rows[0];
    return el(
      "button",
      {
        className: chosen === undefined ? "draw" : "draw on",
        disabled: !readable.length,
        title: readable.length ? "" : "no texts in this file",
        onclick: () => this.toggleAside({ run, step: r.step[row], rowIndex: r.rowIndex[row] }),
      },
      `step ${r.step[begin]}: ${end - begin}${mean}`,
    );
  },

  toggleAside(other) {
    const isSame = (item) => item.run === other.run && item.step === other.step && item.rowIndex === other.rowIndex;
    if (this.aside.some(isSame)) this.aside = this.aside.filter((item) => !isSame(item));
    else this.aside = [...this.aside, other].slice(-(MAX_COLUMNS - 1));
    this.paintDetail();
  },
};
