"use strict";
// Functions that format numbers.

/** Formats a number with at most four digits: 0.1235, 12.35, 1,235, 12.3k, 1.23M, 1.2e-5; a missing number is a dash. */
function short(x) {
  if (x === null || x === undefined || Number.isNaN(x)) return "–";
  const size = Math.abs(x);
  if (size === 0) return "0";
  if (size < 1e-3 || size >= 1e12) return x.toExponential(1);
  for (const [unit, sign] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= unit) return `${Number((x / (sign === "k" ? 1e3 : unit)).toPrecision(3))}${sign}`;
  }
  return Number(x.toPrecision(4)).toLocaleString("en-US", { maximumFractionDigits: 6 });
}

function whole(x) {
  return x.toLocaleString("en-US", { maximumFractionDigits: 0 });
}

function percent(share) {
  if (!Number.isFinite(share)) return "–";
  const digits = share !== 0 && Math.abs(share) < 0.01 ? 2 : 1;
  return `${(100 * share).toFixed(digits)} %`;
}

function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  const s = Math.round(seconds);
  if (seconds < 1) return `${short(Number((1000 * seconds).toPrecision(3)))} ms`;
  if (seconds < 10) return `${short(Number(seconds.toPrecision(3)))} s`;
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
  return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
}
