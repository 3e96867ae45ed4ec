"use strict";
// The sources of the page's data: the page itself (a report), or the server on this machine (a live page). Both have the same methods.

const INITIAL_RUNS = 4; // visible runs of a live page, until the user chooses

function mediaParts(detail) {
  return detail.messages.flatMap((message) => message.parts || []).filter((part) => part.media);
}

/** Adds the `data:` URLs of media to a detail, and returns it. */
function withMedia(detail, media) {
  for (const part of mediaParts(detail)) part.url = media[part.media];
  return detail;
}

class EmbeddedSource {
  live = false;

  async read() {} // `load` reads all runs

  async load() {
    const packed = [];
    for (let index = 0, buffer; (buffer = await embedded(`run-${index}`)); index++) packed.push(unpack(buffer));
    const runs = packed.map((content, index) => new Run(content, index));
    const withSteps = runs.filter((run) => run.progress.step > 0);
    for (const run of runs) run.visible = !withSteps.length || withSteps.includes(run);
    return runs;
  }

  async rollouts(run) {
    if (run.rollouts) return;
    run.addRollouts(unpack(await embedded(`rollouts-${run.index}`)));
    const details = JSON.parse(new TextDecoder().decode(await embedded(`sample-${run.index}`)));
    const media = JSON.parse(new TextDecoder().decode(await embedded(`media-${run.index}`)));
    for (const detail of details) withMedia(detail, media);
    run.sample = new Map(details.map((detail) => [`${detail.facts.step}/${detail.row_index}`, detail]));
  }

  async files(run) {
    return JSON.parse(new TextDecoder().decode(await embedded(`files-${run.index}`)));
  }

  async evaluations(run) {
    run.heldOut ??= JSON.parse(new TextDecoder().decode(await embedded(`answers-${run.index}`)));
    return run.heldOut.evaluations;
  }

  async answers(run, name) {
    const { tasks, answers } = run.heldOut;
    return { ...answers[name], rows: answers[name].rows.map(([task, ...answer]) => [...tasks[task], ...answer]) };
  }

  /** Details of a step's rollouts; null for a rollout whose texts are not in the file. */
  async details(run, step, rowIndices) {
    return rowIndices.map((rowIndex) => run.sample.get(`${step}/${rowIndex}`) || null);
  }

  has(run, row) {
    return run.sample.has(`${run.rollouts.step[row]}/${run.rollouts.rowIndex[row]}`);
  }

  /** Returns {found, since}. found: [step, rowIndex] of each rollout whose messages contain the text. since: the earliest step that
   * was searched, null if all were. */
  async search(run, text) {
    const lowercase = text.toLowerCase();
    const contains = (message) => (message.content || "").toLowerCase().includes(lowercase);
    const hits = [...run.sample.values()].filter((detail) => detail.messages.some(contains));
    return { found: hits.map((detail) => [detail.facts.step, detail.row_index]), since: null };
  }
}

class LiveSource {
  live = true;
  cachedDetails = new Map(); // key -> detail
  cachedAnswers = new Map(); // run/evaluation -> answers

  async request(path, query = {}) {
    const answer = await fetch(`api/${path}?${new URLSearchParams(query)}`);
    if (!answer.ok) throw new Error(await answer.text());
    return answer;
  }

  /** Fetches the metrics of new steps, which may take several requests. */
  async fetchNewSteps(run) {
    do {
      const answer = await this.request("run", { run: run.name, after: run.steps.at(-1) ?? -1 });
      run.addSteps(unpack(await answer.arrayBuffer()));
    } while (run.facts.has_more);
  }

  async fetchVersions() {
    return (await this.request("runs")).json();
  }

  /** Returns all runs. Of the runs with steps, those that changed last are read and visible; the others are read when the user
   * chooses them. */
  async load() {
    const versions = Object.entries(await this.fetchVersions());
    const runs = versions.map(([name, version], index) => this.makeUnreadRun(name, version, index));
    const withSteps = runs.filter((run) => run.progress.step > 0);
    const newest = (withSteps.length ? withSteps : runs).toSorted((a, b) => b.version.changed - a.version.changed).slice(0, INITIAL_RUNS);
    await Promise.all(newest.map((run) => this.read(run)));
    for (const run of newest) run.visible = true;
    return runs;
  }

  makeUnreadRun(name, version, index) {
    const run = new Run({ facts: { name, state: version.state, config: {}, path: name }, arrays: { step: new Float64Array(0) } }, index);
    return Object.assign(run, { version, visible: false, isRead: false });
  }

  async read(run) {
    if (run.isRead) return;
    run.isRead = true;
    await this.fetchNewSteps(run);
  }

  async rollouts(run) {
    if (run.rollouts && run.recordVersion === run.version.record) return;
    const known = run.rollouts ? run.rollouts.files.join(",") : "";
    const answer = await this.request("rollouts", { run: run.name, known });
    run.addRollouts(unpack(await answer.arrayBuffer()));
    run.recordVersion = run.version.record;
  }

  async details(run, step, rowIndices) {
    const key = (rowIndex) => `${run.name}/${step}/${rowIndex}`;
    const missing = rowIndices.filter((rowIndex) => !this.cachedDetails.has(key(rowIndex)));
    if (missing.length) {
      if (this.cachedDetails.size > 500) this.cachedDetails.clear();
      const answer = await this.request("details", { run: run.name, step, row_indices: missing.join(",") });
      const details = await answer.json();
      const withParts = details.filter((detail) => mediaParts(detail).length);
      const query = { run: run.name, step, row_indices: withParts.map((detail) => detail.row_index).join(",") };
      const media = withParts.length ? await (await this.request("media", query)).json() : {};
      for (const detail of details) this.cachedDetails.set(key(detail.row_index), withMedia(detail, media));
    }
    return rowIndices.map((rowIndex) => this.cachedDetails.get(key(rowIndex)));
  }

  has() {
    return true;
  }

  async files(run) {
    return (await this.request("files", { run: run.name })).json();
  }

  async evaluations(run) {
    return (await this.request("evaluations", { run: run.name })).json();
  }

  async answers(run, name) {
    const key = `${run.name}/${name}`;
    if (!this.cachedAnswers.has(key)) {
      if (this.cachedAnswers.size > 20) this.cachedAnswers.clear();
      this.cachedAnswers.set(key, await (await this.request("answers", { run: run.name, name })).json());
    }
    return this.cachedAnswers.get(key);
  }

  async search(run, text) {
    return (await this.request("search", { run: run.name, text })).json();
  }

  /** Shows a run that began after the page was opened, once it has a step. */
  async showNew(run) {
    if (!run.isNew || !(run.progress.step > 0)) return;
    run.isNew = false;
    await this.read(run);
    run.visible = true;
  }

  /** Updates the runs and adds new ones. Returns true if anything changed. */
  async refresh(runs) {
    const versions = await this.fetchVersions();
    let changed = false;
    for (const [name, version] of Object.entries(versions)) {
      const run = runs.find((other) => other.name === name);
      if (!run) {
        const newRun = this.makeUnreadRun(name, version, runs.length);
        runs.push(Object.assign(newRun, { isNew: true }));
        changed = true;
        await this.showNew(newRun);
      } else if (!run.isRead) {
        changed ||= JSON.stringify(version) !== JSON.stringify(run.version);
        run.version = version;
        await this.showNew(run);
      } else if (JSON.stringify(version) !== JSON.stringify(run.version)) {
        // It resumed from a checkpoint, and repeats some steps, or another run has taken its place.
        const isOther = version.progress.started !== run.version.progress.started;
        if (isOther || version.metrics < run.version.metrics) run.clear();
        await this.fetchNewSteps(run);
        run.version = version;
        this.cachedDetails.clear();
        this.cachedAnswers.clear();
        if (run.rollouts) await this.rollouts(run);
        changed = true;
      }
    }
    return changed;
  }
}
