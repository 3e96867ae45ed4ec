"use strict";
// The page: the visible runs, the current view and the colour theme. A live page also polls for new data.

const VIEWS = { runs: RunList, curves: Curves, rollouts: Browser, answers: Answers, tokens: Waterfall, time: Timeline, recipe: Recipe, differences: Differences };
const REFRESH_MS = 3000;
const REDRAWN = ["tokens", "time"]; // views that are redrawn for new data; in other views a redraw would disturb the user
const THEMES = ["auto", "light", "dark"];

const app = {
  runs: [],
  view: "curves",
  source: document.getElementById("run-0") ? new EmbeddedSource() : new LiveSource(),

  get shown() {
    return this.runs.filter((run) => run.visible);
  },

  async start() {
    this.main = document.getElementById("main");
    setTheme(loadTheme() || "auto");
    try {
      this.runs = await this.source.load();
    } catch (error) {
      return void refill(this.main, el("p", { className: "note" }, `The runs can't be read: ${error.message}`));
    }
    addEventListener("hashchange", () => this.follow());
    await this.follow();
    if (this.source.live) setTimeout(() => this.poll(), REFRESH_MS);
  },

  async follow() {
    const name = location.hash.slice(1);
    this.view = name in VIEWS ? name : "curves";
    await this.render();
  },

  async render() {
    this.header();
    for (const view of Object.values(VIEWS)) view.hide();
    const host = el("div", { className: `view view-${this.view}` });
    refill(this.main, host);
    if (!this.runs.length) return void refill(host, el("p", { className: "note" }, "There is no run here yet."));
    try {
      await VIEWS[this.view].show(host, this);
    } catch (error) {
      refill(host, el("p", { className: "note" }, `This can't be shown: ${error.message}`));
      throw error;
    }
    document.body.dataset.ready = this.view;
  },

  header() {
    assignColors(this.runs);
    const views = Object.entries(VIEWS).filter(([name]) => name !== "runs" || this.runs.length > FEW_RUNS);
    const tabs = views.map(([name, { title }]) =>
      el("a", { href: `#${name}`, className: name === this.view ? "on" : "", id: `tab-${name}` }, title),
    );
    const theme = el("button", { id: "theme", title: "light, dark, or as the system", onclick: nextTheme }, "◐ ", document.documentElement.dataset.theme);
    refill(document.getElementById("header"), el("b", { className: "brand" }, "Ratchet"), el("nav", {}, tabs), el("div", { className: "run-chips" }, runChips(this)), theme);
  },

  async showRun(run, visible) {
    await this.source.read(run);
    run.visible = visible;
    await this.render();
  },

  /** Fetches new data, and redraws the parts of the page that show them. */
  async poll() {
    try {
      const changed = await this.source.refresh(this.runs);
      if (changed && !document.hidden) {
        if (REDRAWN.includes(this.view)) await this.render();
        else {
          this.header();
          if (this.view === "curves") VIEWS.curves.refresh(this);
          if (this.view === "runs") VIEWS.runs.draw();
        }
      }
      document.body.classList.remove("lost");
    } catch {
      document.body.classList.add("lost"); // the server does not answer
    }
    setTimeout(() => this.poll(), REFRESH_MS);
  },
};

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  try {
    localStorage.setItem("ratchet-theme", name);
  } catch {
    // a page opened from a file may have no storage
  }
  for (const plot of charts) plot.redraw(false);
}

function loadTheme() {
  try {
    return localStorage.getItem("ratchet-theme");
  } catch {
    return null;
  }
}

function nextTheme() {
  setTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length]);
  app.header();
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const plot of charts) plot.redraw(false);
});

app.start();
