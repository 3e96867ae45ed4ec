"use strict";
// Stages in the curves: their boundaries, and the metrics whose scale differs so much between stages that each gets its own chart.

const OWN_SCALE = 10; // ranges of stages that differ by more than this factor get charts of their own

/** Returns the least and the largest drawable number of a column's rows [first, last); null without one. */
function extent(column, first, last) {
  let low = Infinity;
  let high = -Infinity;
  for (let i = first; i < last; i++) {
    const value = drawable(column[i]);
    if (value === null) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  return low <= high ? [low, high] : null;
}

/** Returns the names of the stages that get charts of their own for a metric; [] if one chart does for all. */
function stagesApart(runs, metric) {
  const extents = new Map();
  for (const run of runs) {
    for (const { name, first, last } of run.columns[metric] ? run.stages : []) {
      const ofRun = extent(run.columns[metric], first, last);
      const ofEarlierRuns = extents.get(name) ?? [Infinity, -Infinity];
      if (ofRun) extents.set(name, [Math.min(ofEarlierRuns[0], ofRun[0]), Math.max(ofEarlierRuns[1], ofRun[1])]);
    }
  }
  const ranges = [...extents.values()].map(([low, high]) => high - low).filter((range) => range > 0);
  return ranges.length > 1 && Math.max(...ranges) > OWN_SCALE * Math.min(...ranges) ? [...extents.keys()] : [];
}

/** Returns where the stages after the first begin, as {x, name, color}. If all runs have the same boundaries, these are grey. */
function boundaries(runs, axis) {
  const all = runs.map((run) => {
    const xs = run.axis(axis);
    return run.stages.slice(1).map(({ name, first }) => ({ x: xs[first], name, color: run.color }));
  });
  const place = (marks) => JSON.stringify(marks.map(({ x, name }) => [x, name]));
  const distinct = [...new Map(all.filter((marks) => marks.length).map((marks) => [place(marks), marks])).values()];
  if (distinct.length === 1) return distinct[0].map((mark) => ({ ...mark, color: "var(--muted)" }));
  return distinct.flat();
}

/** Draws boundaries in a chart: a thin line, and the name of the stage that begins there. */
function drawBoundaries(u, marks) {
  const { ctx } = u;
  const { left, top, width, height } = u.bbox;
  const ratio = devicePixelRatio;
  ctx.save();
  ctx.font = `${10 * ratio}px system-ui, sans-serif`;
  ctx.textAlign = "left";
  ctx.textBaseline = "top";
  ctx.lineWidth = ratio;
  ctx.setLineDash([3 * ratio, 3 * ratio]);
  let free = -Infinity; // the end of the last drawn name, so that names do not cover each other
  for (const { x, name, color } of marks.toSorted((a, b) => a.x - b.x)) {
    const at = Math.round(u.valToPos(x, "x", true));
    if (!(at > left + ratio && at <= left + width)) continue; // outside of the chart, or at its edge, where it would separate nothing
    ctx.strokeStyle = ctx.fillStyle = ink(color)();
    ctx.beginPath();
    ctx.moveTo(at + ratio / 2, top); // a line of one pixel is sharp in the middle of pixels
    ctx.lineTo(at + ratio / 2, top + height);
    ctx.stroke();
    const size = ctx.measureText(name).width + 6 * ratio;
    const start = at + size <= left + width ? at + 3 * ratio : at - size + 3 * ratio;
    if (start < free) continue;
    ctx.fillText(name, start, top + 2 * ratio);
    free = start + size;
  }
  ctx.restore();
}
