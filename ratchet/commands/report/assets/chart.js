"use strict";
// Charts drawn with uPlot in the page's colours: lines of several runs over common steps, and stacked areas.

const charts = new Set();
const CURSOR = uPlot.sync("steps");
const FONT = "11px system-ui, sans-serif";
const SPARSE = 60; // a line with at most this number of points shows each point
const MAX_DRAWN = 1e100; // larger numbers are not drawn
const MAX_TICKS = 100; // ticks of an axis

/** Returns the exponential moving average with a weight in [0, 1), corrected for its initial bias. Gaps stay gaps. */
function smooth(ys, weight) {
  let average = 0;
  let mass = 0;
  return ys.map((y) => {
    if (y === null) return null;
    average = weight * average + (1 - weight) * y;
    mass = weight * mass + (1 - weight);
    return average / mass;
  });
}

/** Returns the number, 0 if it is tiny, or null if it can't be drawn: uPlot's arithmetic overflows beyond these sizes. */
function drawable(y) {
  if (!(Math.abs(y) <= MAX_DRAWN)) return null; // NaN too
  return Math.abs(y) < 1 / MAX_DRAWN ? 0 : y;
}

/** Returns a column with null for numbers that can't be drawn. positive: also null for 0 and numbers below (a logarithmic axis). */
function drawableValues(column, positive = false) {
  return Array.from(column, (y) => {
    const value = drawable(y);
    return positive && value <= 0 ? null : value;
  });
}

/** Returns ticks at multiples of a step. Their number is computed first: a loop that adds the step would never end between two
 * numbers so close that adding it changes nothing. */
function ticks(u, index, low, high, step) {
  const first = Math.ceil(low / step);
  const count = Math.floor(high / step) - first + 1;
  if (!(count > 0 && count <= MAX_TICKS)) return [low];
  return Array.from({ length: count }, (_, i) => Number(((first + i) * step).toPrecision(15)));
}

/** Returns the columns of several lines over the union of their steps. lines: {xs, ys, ...}, each with its own steps. */
function align(lines) {
  const tables = lines.map(({ xs, ys }) => {
    const present = Array.from(xs.keys()).filter((i) => ys[i] !== null && drawable(xs[i]) !== null);
    return [present.map((i) => xs[i]), present.map((i) => ys[i])];
  });
  return lines.length === 1 ? tables[0] : uPlot.join(tables);
}

function axis(options = {}) {
  const grid = { stroke: () => css("--grid"), width: 1 };
  return { stroke: () => css("--muted"), font: FONT, grid, ticks: { show: false }, ...options };
}

/** Resolves a colour for the canvas, which does not support CSS variables. */
function ink(color) {
  return () => (color.startsWith("var(") ? css(color.slice(4, -1)) : color);
}

function faded(color) {
  return () => `${ink(color)()}40`; // all colours of the page are #rrggbb
}

/** Returns the limits of an axis, wide enough to show a constant line, which has no range of its own. */
function limits(low, high, span) {
  if (low === null || high === null) return [low, high];
  const [least, most] = span ? [Math.min(low, span[0]), Math.max(high, span[1])] : [low, high];
  if (least < most) return span ? [least, most] : uPlot.rangeNum(least, most, 0.1, true);
  if (least === 0) return span ? [-0.05, 1] : [-1, 1];
  return [least - Math.abs(least) / 2, least + Math.abs(least) / 2];
}

function draw(host, options, data, onhover) {
  const plot = new uPlot(
    {
      width: Math.max(host.clientWidth, 120),
      height: options.height,
      legend: { show: false },
      cursor: { y: false, sync: { key: CURSOR.key, setSeries: false }, points: { size: 7 }, drag: { x: true, y: false } },
      padding: [8, 12, 0, 0],
      scales: { x: { time: false }, y: options.y || {} },
      axes: [
        axis({ size: 26, space: 60, splits: ticks, values: (_, xs) => xs.map(short) }),
        axis({ size: 52, ...(options.y?.distr ? {} : { splits: ticks }), values: (_, ys) => ys.map(short) }),
      ],
      series: [{}, ...options.series],
      bands: options.bands || [],
      hooks: { setCursor: [(u) => onhover(u, u.cursor.idx)], draw: options.marks?.length ? [(u) => drawBoundaries(u, options.marks)] : [] },
    },
    data,
    host,
  );
  plot.host = host;
  charts.add(plot);
  onhover(plot, null);
  return plot;
}

function remove(plot) {
  charts.delete(plot);
  plot.destroy();
}

/** Returns [index, number] of the last number of a column at or before an index. */
function lastNumberAt(column, index) {
  for (let i = index ?? column.length - 1; i >= 0; i--) if (column[i] !== null && column[i] !== undefined) return [i, column[i]];
  return [-1, NaN];
}

/** Draws lines: {label, color, dash, xs, ys}. `legend` shows the value of each line at the cursor, or else at its end. */
function lineChart(host, legend, { lines, smoothing, logarithmic, height, span, marks }) {
  const series = [];
  const columns = [];
  const measured = []; // the index of each line's column without smoothing
  for (const { color, dash = [], xs, ys } of lines) {
    const dense = ys.filter((y) => y !== null).length > SPARSE;
    const points = { show: !dense, size: 5, fill: ink(color) };
    measured.push(columns.length + 1);
    if (smoothing > 0 && dense) {
      columns.push({ xs, ys });
      series.push({ stroke: faded(color), width: 1, dash, spanGaps: true, points: { show: false } });
    }
    columns.push({ xs, ys: dense && smoothing > 0 ? smooth(ys, smoothing) : ys });
    series.push({ stroke: ink(color), width: 1.75, dash, spanGaps: true, points });
  }
  const y = logarithmic ? { distr: 3 } : { range: (_, low, high) => limits(low, high, span) };
  const onhover = (u, index) =>
    refill(
      legend,
      measured.map((column, i) => {
        const [position, value] = lastNumberAt(u.data[column], index);
        const title = `${lines[i].label}, ${short(u.data[0][position])}`;
        return el("span", { className: "value", title }, el("i", { style: { background: lines[i].color } }), short(value));
      }),
    );
  return draw(host, { height, series, y, marks }, align(columns), onhover);
}

/** Draws parts, {label, color, ys} over the same xs, as stacked areas. */
function areaChart(host, legend, { xs, parts, height, format = short, top }) {
  const sums = [];
  let sum = new Array(xs.length).fill(0);
  for (const { ys } of parts) {
    sum = sum.map((below, i) => below + (drawable(ys[i]) || 0));
    sums.push(sum);
  }
  const series = parts.map(({ color }) => ({
    stroke: ink(color),
    width: 1,
    fill: () => `${ink(color)()}b0`,
    points: { show: false },
  }));
  const bands = parts.slice(1).map((_, i) => ({ series: [i + 2, i + 1] }));
  const y = { range: (_, low, high) => [0, top ?? high * 1.05] };
  const onhover = (u, index) =>
    refill(
      legend,
      parts.map(({ label, color, ys }) => {
        const value = index === null || index === undefined ? null : ys[index] || 0;
        const text = value === null ? label : `${label} ${format(value)}`;
        return el("span", { className: "value" }, el("i", { style: { background: color } }), text);
      }),
      index !== null && index !== undefined && el("span", { className: "value" }, `step ${whole(xs[index])}`),
    );
  return draw(host, { height, series, bands, y }, [xs, ...sums], onhover);
}

window.addEventListener(
  "resize",
  debounce(() => {
    for (const plot of charts) plot.setSize({ width: Math.max(plot.host.clientWidth, 120), height: plot.height });
  }),
);
