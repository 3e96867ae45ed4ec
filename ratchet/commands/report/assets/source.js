"use strict";
// Where the page's data come from: the page itself, or the server on this machine. Both have the same methods.

const MOST_SHOWN = 4; // runs of a live page, before somebody chooses

function mediaParts(detail) {
  return detail.messages.flatMap((message) => message.parts || []).filter((part) => part.media);
}

/** The detail, with the `data:` URL of each medium that there is. */
function withMedia(detail, media) {
  for (const part of mediaParts(detail)) part.url = media[part.media];
  return detail;
}

class EmbeddedSource {
  live = false;

  async read() {} // all of them are

  async load() {
    const packed = [];
    for (let index = 0, buffer; (buffer = await embedded(`run-${index}`)); index++) packed.push(unpack(buffer));
    return packed.map((each, index) => new Run(each, index));
  }

  async rollouts(run) {
    if (run.rollouts) return;
    run.takeRollouts(unpack(await embedded(`rollouts-${run.index}`)));
    const details = JSON.parse(new TextDecoder().decode(await embedded(`sample-${run.index}`)));
    const media = JSON.parse(new TextDecoder().decode(await embedded(`media-${run.index}`)));
    for (const detail of details) withMedia(detail, media);
    run.sample = new Map(details.map((detail) => [`${detail.facts.step}/${detail.place}`, detail]));
  }

  /** Details of rollouts of a step, null for those that the file has no texts of. */
  async details(run, step, places) {
    return places.map((place) => run.sample.get(`${step}/${place}`) || null);
  }

  has(run, row) {
    return run.sample.has(`${run.rollouts.step[row]}/${run.rollouts.place[row]}`);
  }

  /** {found: [step, place] of rollouts whose messages have the text, since: the first step that was looked at, or null}. */
  async search(run, text) {
    const wanted = text.toLowerCase();
    const says = (message) => (message.content || "").toLowerCase().includes(wanted);
    const hits = [...run.sample.values()].filter((detail) => detail.messages.some(says));
    return { found: hits.map((detail) => [detail.facts.step, detail.place]), since: null };
  }
}

class LiveSource {
  live = true;
  held = new Map(); // details that were asked for

  async ask(path, query = {}) {
    const answer = await fetch(`api/${path}?${new URLSearchParams(query)}`);
    if (!answer.ok) throw new Error(await answer.text());
    return answer;
  }

  /** Steps that the run does not have yet, in as many answers as they take. */
  async takeNew(run) {
    do {
      const answer = await this.ask("run", { run: run.name, after: run.steps.at(-1) ?? -1 });
      run.take(unpack(await answer.arrayBuffer()));
    } while (run.facts.has_more);
  }

  async listed() {
    return (await this.ask("runs")).json();
  }

  /** All runs, of which those that changed last are read and shown, the others when they are chosen. */
  async load() {
    const listed = Object.entries(await this.listed());
    const runs = listed.map(([name, version], index) => this.unread(name, version, index));
    const newest = runs.toSorted((a, b) => b.version.changed - a.version.changed).slice(0, MOST_SHOWN);
    await Promise.all(newest.map((run) => this.read(run)));
    for (const run of newest) run.visible = true;
    return runs;
  }

  unread(name, version, index) {
    const run = new Run({ facts: { name, state: version.state, config: {}, path: name }, arrays: { step: new Float64Array(0) } }, index);
    return Object.assign(run, { version, visible: false, known: false });
  }

  async read(run) {
    if (run.known) return;
    run.known = true;
    await this.takeNew(run);
  }

  async rollouts(run) {
    if (run.rollouts && run.recorded === run.version.record) return;
    const known = run.rollouts ? run.rollouts.files.join(",") : "";
    const answer = await this.ask("rollouts", { run: run.name, known });
    run.takeRollouts(unpack(await answer.arrayBuffer()));
    run.recorded = run.version.record;
  }

  async details(run, step, places) {
    const key = (place) => `${run.name}/${step}/${place}`;
    const missing = places.filter((place) => !this.held.has(key(place)));
    if (missing.length) {
      if (this.held.size > 500) this.held.clear();
      const answer = await this.ask("details", { run: run.name, step, places: missing.join(",") });
      const details = await answer.json();
      const some = details.filter((detail) => mediaParts(detail).length);
      const shown = { run: run.name, step, places: some.map((detail) => detail.place).join(",") };
      const media = some.length ? await (await this.ask("media", shown)).json() : {};
      for (const detail of details) this.held.set(key(detail.place), withMedia(detail, media));
    }
    return places.map((place) => this.held.get(key(place)));
  }

  has() {
    return true;
  }

  async search(run, text) {
    return (await this.ask("search", { run: run.name, text })).json();
  }

  /** Brings the runs up to date; whether there was anything new. Runs that began meanwhile are added. */
  async refresh(runs) {
    const listed = await this.listed();
    let changed = false;
    for (const [name, version] of Object.entries(listed)) {
      const run = runs.find((each) => each.name === name);
      if (!run) {
        const begun = this.unread(name, version, runs.length);
        await this.read(begun);
        runs.push(Object.assign(begun, { visible: true }));
        changed = true;
      } else if (!run.known) {
        run.version = version;
      } else if (JSON.stringify(version) !== JSON.stringify(run.version)) {
        if (version.metrics < run.version.metrics) run.forget(); // it went on from a checkpoint, and does some steps again
        await this.takeNew(run);
        run.version = version;
        this.held.clear();
        if (run.rollouts) await this.rollouts(run);
        changed = true;
      }
    }
    return changed;
  }
}
