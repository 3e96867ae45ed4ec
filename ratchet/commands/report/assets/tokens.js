"use strict";
// The tokens of a rollout, coloured by one of their numbers.

const OWNERS = ["prompt", "policy", "environment"];
const MAX_TOKENS = 6000; // drawn tokens of a rollout

const COLOURINGS = {
  none: { label: "nothing", of: () => null },
  logprob: {
    label: "log-probability (sampler)", of: (t, i) => (t.owner[i] === 1 ? mix("--hot", -(t.logprob[i] ?? 0) / 5) : null),
    scale: [["--hot", "unlikely: -5 nats and below"]],
  },
  advantage: {
    label: "advantage", of: (t, i, most) => diverging(t.advantage[i], most), needs: "advantage",
    scale: [["--good", "above 0"], ["--bad", "below 0"]],
  },
  ratio: {
    label: "importance ratio", of: (t, i) => diverging(Math.log(t.ratio[i] ?? 1), 0.5), needs: "ratio",
    scale: [["--good", "learner above sampler"], ["--bad", "learner below sampler; full colour at a factor of 1.6"]],
  },
  version: {
    label: "version of the weights",
    of: (t, i, most, low) => (t.version[i] < 0 ? null : `color-mix(in srgb, var(--run-${(t.version[i] - low) % 8}) 32%, transparent)`),
  },
  share: {
    label: "share of the loss", of: (t, i, most) => mix("--share", (t.share[i] ?? 0) / most), needs: "share",
    scale: [["--share", "the largest of the rollout"]],
  },
  value: {
    label: "value (critic)", of: (t, i, most) => diverging(t.value[i], most), needs: "value",
    scale: [["--good", "above 0"], ["--bad", "below 0"]],
  },
};

function mix(color, amount) {
  const part = Math.round(100 * Math.min(1, Math.max(0, amount)) * 0.75);
  return part ? `color-mix(in srgb, var(${color}) ${part}%, transparent)` : null;
}

function diverging(x, most) {
  if (!x || !most) return null;
  return mix(x > 0 ? "--good" : "--bad", Math.abs(x) / most);
}

/** Returns the colourings whose numbers a rollout has, as [name, label]. */
function colourings(tokens) {
  return Object.entries(COLOURINGS).filter(([, { needs }]) => !needs || tokens[needs]).map(([name, { label }]) => [name, label]);
}

function largest(values) {
  return (values || []).reduce((most, x) => Math.max(most, Math.abs(x ?? 0)), 0);
}

/** Shows the tokens in sections by their owner. A token under the pointer shows its numbers. */
function tokenView(detail, colouring) {
  const tokens = detail.tokens;
  const { of } = COLOURINGS[colouring];
  const most = largest(tokens[colouring]);
  const low = Math.min(...new Set(tokens.version.filter((version) => version >= 0)));
  const box = el("div", { className: "tokens", onmouseover: (event) => hover(event, tokens), onmouseleave: unhover });
  const end = Math.min(tokens.id.length, MAX_TOKENS);
  const special = new Set(tokens.special);
  let stretch = null;
  for (let i = 0; i < end; i++) {
    if (!stretch || tokens.owner[i] !== tokens.owner[i - 1]) {
      stretch = el("div", { className: "text" });
      const owner = OWNERS[tokens.owner[i]];
      fill(box, el("div", { className: `stretch ${owner}` }, el("div", { className: "who" }, owner), stretch));
    }
    const span = el("span", { className: ["t", tokens.trained[i] && "trained", special.has(i) && "special"].filter(Boolean).join(" "), dataset: { i } }, visible(tokens.text[i]));
    const color = of(tokens, i, most, low);
    if (color) span.style.backgroundColor = color;
    fill(stretch, span);
  }
  const wasCut = detail.facts.truncated && end === tokens.id.length && tokens.owner[end - 1] === 1 && !special.has(end - 1);
  if (wasCut) fill(stretch, el("span", { className: "cut" }, "cut off: no end token"));
  if (end < tokens.id.length) fill(box, el("p", { className: "note" }, `${whole(tokens.id.length - end)} more tokens are not drawn.`));
  return box;
}

/** Returns a visible form of a token's text: line breaks get a sign, and an empty text (part of a character) becomes a dot. */
function visible(text) {
  return text === "" ? "·" : text.replaceAll("\n", "⏎\n");
}

const TIPS = ["logprob", "old_logprob", "ratio", "ref_logprob", "teacher_logprob", "advantage", "return", "value", "version", "share"];

function hover(event, tokens) {
  const i = event.target.dataset?.i;
  if (i === undefined) return;
  const tip = document.getElementById("tip") || document.body.appendChild(el("div", { id: "tip" }));
  const rows = TIPS.filter((name) => tokens[name] && tokens[name][i] !== null).map((name) => [
    name.replaceAll("_", " "),
    name === "share" ? percent(tokens.share[i]) : name === "version" ? tokens.version[i] : short(tokens[name][i]),
  ]);
  const owned = tokens.owner[i] === 1 ? rows : rows.filter(([name]) => name === "share");
  const heading = el("div", { className: "tip-head" }, JSON.stringify(tokens.text[i]), el("span", {}, ` #${i}, id ${tokens.id[i]}`));
  refill(tip, heading, table([], [...owned, ["trained", tokens.trained[i] ? "yes" : "no"]]));
  const box = event.target.getBoundingClientRect();
  tip.style.left = `${Math.min(box.left, innerWidth - 240)}px`;
  tip.style.top = box.bottom + 190 > innerHeight ? `${box.top - tip.offsetHeight - 6}px` : `${box.bottom + 6}px`;
  tip.classList.add("on");
}

function unhover() {
  document.getElementById("tip")?.classList.remove("on");
}
