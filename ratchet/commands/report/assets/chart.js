"use strict";
// Charts by uPlot, in the page's colours: lines of several runs over common steps, and areas that lie on one another.

const charts = new Set();
const CURSOR = uPlot.sync("steps");
const FONT = "11px system-ui, sans-serif";
const SPARSE = 60; // points up to which each is drawn
const LARGEST = 1e100; // size of a number that is drawn
const MOST_TICKS = 100; // of an axis

/** Moving average by weight in [0, 1), without the bias of its beginning; gaps stay gaps. */
function smoothed(ys, weight) {
  let average = 0;
  let mass = 0;
  return ys.map((y) => {
    if (y === null) return null;
    average = weight * average + (1 - weight) * y;
    mass = weight * mass + (1 - weight);
    return average / mass;
  });
}

/** What an axis can hold of a number, null for none: beyond these sizes uPlot's arithmetic overflows. */
function drawable(y) {
  if (!(Math.abs(y) <= LARGEST)) return null; // NaN too
  return Math.abs(y) < 1 / LARGEST ? 0 : y;
}

/** positive: for an axis that has no others. */
function gaps(column, positive = false) {
  return Array.from(column, (y) => {
    const value = drawable(y);
    return positive && value <= 0 ? null : value;
  });
}

/** Ticks at multiples of a step, counted first: where numbers are too close to be told apart, adding the step never ends. */
function ticks(u, index, low, high, step) {
  const first = Math.ceil(low / step);
  const count = Math.floor(high / step) - first + 1;
  if (!(count > 0 && count <= MOST_TICKS)) return [low];
  return Array.from({ length: count }, (_, i) => Number(((first + i) * step).toPrecision(15)));
}

/** Columns of several lines over the union of their steps. lines: {xs, ys, ...}, each with its own steps. */
function aligned(lines) {
  const tables = lines.map(({ xs, ys }) => {
    const there = Array.from(xs.keys()).filter((i) => ys[i] !== null && drawable(xs[i]) !== null);
    return [there.map((i) => xs[i]), there.map((i) => ys[i])];
  });
  return lines.length === 1 ? tables[0] : uPlot.join(tables);
}

function axis(options = {}) {
  const grid = { stroke: () => css("--grid"), width: 1 };
  return { stroke: () => css("--muted"), font: FONT, grid, ticks: { show: false }, ...options };
}

/** A colour of the page for the canvas, which knows no variables. */
function ink(color) {
  return () => (color.startsWith("var(") ? css(color.slice(4, -1)) : color);
}

function faded(color) {
  return () => `${ink(color)()}40`; // all colours of the page are #rrggbb
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
      hooks: { setCursor: [(u) => onhover(u, u.cursor.idx)] },
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

/** The last number of a column at an index or before it. */
function at(column, index) {
  for (let i = index ?? column.length - 1; i >= 0; i--) if (column[i] !== null && column[i] !== undefined) return [i, column[i]];
  return [-1, NaN];
}

/** lines: {label, color, xs, ys}. Shows in `legend` what each line has where the cursor is, else at its end. */
function lineChart(host, legend, { lines, smoothing, logarithmic, height, span }) {
  const series = [];
  const columns = [];
  const measured = []; // of each line the column without smoothing
  for (const { color, xs, ys } of lines) {
    const dense = ys.filter((y) => y !== null).length > SPARSE;
    const points = { show: !dense, size: 5, fill: ink(color) };
    measured.push(columns.length + 1);
    if (smoothing > 0 && dense) {
      columns.push({ xs, ys });
      series.push({ stroke: faded(color), width: 1, spanGaps: true, points: { show: false } });
    }
    columns.push({ xs, ys: dense && smoothing > 0 ? smoothed(ys, smoothing) : ys });
    series.push({ stroke: ink(color), width: 1.75, spanGaps: true, points });
  }
  const y = logarithmic ? { distr: 3 } : span ? { range: (_, low, high) => [Math.min(low, span[0]), Math.max(high, span[1])] } : {};
  const onhover = (u, index) =>
    refill(
      legend,
      measured.map((column, i) => {
        const [where, value] = at(u.data[column], index);
        const title = `${lines[i].label}, ${short(u.data[0][where])}`;
        return el("span", { className: "value", title }, el("i", { style: { background: lines[i].color } }), short(value));
      }),
    );
  return draw(host, { height, series, y }, aligned(columns), onhover);
}

/** parts: {label, color, ys} over the same xs, drawn as areas one upon the other. */
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
  settled(() => {
    for (const plot of charts) plot.setSize({ width: Math.max(plot.host.clientWidth, 120), height: plot.height });
  }),
);
