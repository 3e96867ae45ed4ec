"use strict";
// The recipe of one run, first the keys that it sets, and the end of its log.

const SERIOUS = /^\S+ (WARNING|ERROR|CRITICAL) /;
const DATED = /^\d{4}-\d\d-\d\dT\S+ [A-Z]+ /; // a line without a date, such as one of a traceback, belongs to the dated line before it

const Recipe = {
  title: "Recipe and log",
  run: null,
  onlySerious: false,

  async show(host, app) {
    const runs = app.shown;
    if (!runs.length) return void refill(host, el("p", { className: "note" }, "Choose a run above."));
    const run = runs.find((each) => each.name === this.run) ?? runs[0];
    await app.source.read(run);
    const { config, changed, log } = await app.source.files(run);
    const choose = (name) => {
      this.run = name;
      app.render();
    };
    this.log = log;
    this.lines = el("div");
    refill(
      host,
      runs.length > 1 && el("div", { className: "toolbar" }, select("Run", run.name, runs.map((each) => each.name), choose)),
      el("div", { className: "panels" }, section("Recipe", changedTable(run, changed), wholeRecipe(config)), section("Log", this.logBar(), this.lines)),
    );
    this.drawLog();
  },

  hide() {},

  logBar() {
    const hint = el("span", { className: "hint" }, `the last ${whole(this.log.length)} lines of run.log`);
    return el("div", { className: "toolbar" }, toggle("warnings and errors only", this.onlySerious, (checked) => {
      this.onlySerious = checked;
      this.drawLog();
    }), hint);
  },

  drawLog() {
    let serious = false;
    const lines = [];
    for (const line of this.log) {
      if (DATED.test(line)) serious = SERIOUS.test(line);
      if (serious || !this.onlySerious) lines.push(el("div", { className: serious ? "serious" : "" }, line || " "));
    }
    const none = this.onlySerious ? "No warning and no error in these lines." : "There is no run.log.";
    refill(this.lines, lines.length ? el("pre", { className: "log" }, lines) : el("p", { className: "note" }, none));
    this.lines.firstChild.scrollTop = this.lines.firstChild.scrollHeight;
  },
};

function changedTable(run, changed) {
  const rows = Object.entries(changed).map(([key, value]) => [el("code", {}, key), el("code", {}, typeof value === "string" ? value : JSON.stringify(value))]);
  const command = run.facts.summary?.command;
  return [
    command && el("p", {}, el("code", {}, command)),
    el("p", { className: "hint" }, "Keys that differ from their defaults:"),
    rows.length ? table([], rows, "leaves") : el("p", { className: "note" }, "None."),
  ];
}

function wholeRecipe(config) {
  return el("details", { className: "group" }, el("summary", {}, "config.yaml, with all defaults"), el("pre", {}, config));
}
