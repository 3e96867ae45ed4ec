"use strict";
// A rollout: its conversation with tool calls, or its tokens, and its reward and other facts.

/** Shows the messages as a conversation. */
function conversationView(detail) {
  const messages = detail.messages.map((message, index) => messageView(message, index));
  return el("div", { className: "conversation" }, messages, !messages.length && el("p", { className: "note" }, "No messages: see the tokens."));
}

function messageView({ role, content, parts, tool_calls: calls, tool_call_id: id }) {
  const texts = parts ? parts.map((part, index) => partView(part, altText(parts, index, role))) : [el("div", { className: "text" }, content || "")];
  return el(
    "div",
    { className: `message ${["system", "user", "assistant", "tool"].includes(role) ? role : "other"}` },
    el("div", { className: "who" }, role, id && el("span", { className: "call-id" }, ` answers ${id}`)),
    content || parts ? texts : null,
    (calls || []).map((call) =>
      el(
        "div",
        { className: "call" },
        el("div", { className: "who" }, "calls ", el("b", {}, call.name), call.id && el("span", { className: "call-id" }, ` ${call.id}`)),
        el("pre", {}, indented(call.arguments)),
      ),
    ),
  );
}

/** Returns the alternative text of a medium: its type and number in the message, and its file name if it has one. */
function altText(parts, index, role) {
  const { type, value } = parts[index];
  const number = parts.slice(0, index + 1).filter((part) => part.type === type).length;
  const file = /^(media|data):/.test(value) ? "" : `: ${value.split("/").at(-1)}`;
  return `${type} ${number} of the ${role}${file}`;
}

function partView({ type, value, url }, alt) {
  if (type === "text") return el("div", { className: "text" }, value);
  if (/^data:image\//.test(url ?? "")) return pictureView(url, alt);
  if (/^data:audio\//.test(url ?? "")) return el("audio", { controls: true, preload: "metadata", src: url, "aria-label": alt });
  if (/^data:video\//.test(url ?? "")) return el("video", { controls: true, preload: "metadata", src: url, "aria-label": alt });
  const location = /^media:/.test(value) ? "not in this page" : value;
  return el("div", { className: "media" }, `${type}: ${location}`);
}

/** Shows a small picture. A click or the Enter key enlarges it. */
function pictureView(url, alt) {
  const enlarge = () => {
    const box = el("dialog", { className: "enlarged", "aria-label": alt, onclose: () => box.remove(), onclick: () => box.close() });
    fill(box, el("img", { src: url, alt }));
    document.body.append(box);
    box.showModal();
  };
  return el("button", { className: "picture", type: "button", title: "Enlarge", onclick: enlarge }, el("img", { src: url, alt }));
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text ?? "";
  }
}

/** Shows the facts of a rollout, such as its reward, advantage and number of tokens. */
function factsView(detail) {
  const facts = detail.facts;
  const parts = Object.entries(detail.reward_parts).map(([name, value]) => `${name} ${short(value)}`);
  const measured = Object.entries(detail.metrics).map(([name, value]) => `${name} ${short(value)}`);
  const versions = facts.oldest_version === facts.newest_version ? facts.newest_version : `${facts.oldest_version} to ${facts.newest_version}`;
  const rows = [
    ["reward", facts.reward === null ? null : [short(facts.reward), parts.length > 1 ? ` = ${parts.join(" + ")}` : ""]],
    ["advantage", facts.advantage === null ? null : short(facts.advantage)],
    ["outcome", [facts.outcome, facts.truncated && facts.outcome !== "truncated" ? "truncated" : null, facts.failure].filter(Boolean).join(", ")],
    ["answer", detail.answer],
    ["tokens", `${whole(facts.length)}, ${whole(facts.generated_tokens)} written, ${whole(facts.trained_tokens)} trained`],
    ["turns", facts.policy_turns > 1 ? facts.policy_turns : null],
    ["turn rewards", detail.turns.some(({ reward }) => reward !== null) ? detail.turns.map(({ reward }) => short(reward)).join(", ") : null],
    ["weights", facts.newest_version === null ? null : `version ${versions}`],
    ["environment", [facts.environment, facts.tag !== facts.environment ? facts.tag : null].filter(Boolean).join(" / ")],
    ["group", facts.group],
    ["measured", measured.join(", ")],
    ["meta", detail.task_meta],
  ].filter(([, value]) => value !== null && value !== undefined && value !== "");
  return el("dl", { className: "facts" }, rows.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

/** Shows a rollout with its heading. view: {mode: "conversation" | "tokens", colouring}. */
function rolloutView(run, detail, view) {
  const body = view.mode === "tokens" ? tokenView(detail, detail.tokens[COLOURINGS[view.colouring].needs ?? "id"] ? view.colouring : "none") : conversationView(detail);
  return el(
    "article",
    { className: "rollout" },
    el(
      "h3",
      {},
      runDot(run),
      `${run.name}, step ${detail.facts.step}, attempt ${detail.facts.attempt + 1}`,
      rewardChip(detail.facts.reward, detail.facts.outcome),
    ),
    factsView(detail),
    detail.failure_detail && el("pre", { className: "failure" }, detail.failure_detail),
    body,
  );
}

function rewardChip(reward, outcome) {
  const known = reward !== null && !Number.isNaN(reward);
  const tone = !known ? "none" : reward > 0 ? "good" : reward < 0 ? "bad" : "zero";
  return el("span", { className: `chip ${tone}` }, known ? short(reward) : outcome || "text");
}
