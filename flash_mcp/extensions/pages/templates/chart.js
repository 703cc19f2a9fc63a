"use strict";
// A number as the tables of the page write it.
const numberText = value => {
  if (value === null || value === undefined) return "-";
  if (Math.abs(value) >= 100) return Math.round(value).toLocaleString("en-US");
  return Number(value.toPrecision(4)).toString();
};
// One large chart with values under the pointer. Dragging zooms, a double click shows all again.
const drawChart = (() => {
  const choice = { title: null, smooth: 0, log: false };
  let plot = null;
  const colour = name => {
    const place = document.getElementById("plot");
    place.style.color = `var(${name})`;
    const shown = getComputedStyle(place).color;
    place.style.color = "";
    return shown;
  };
  const smoothed = (values, weight) => {
    let mean = null;
    return values.map(value => {
      if (value === null) return null;
      mean = mean === null ? value : weight * mean + (1 - weight) * value;
      return mean;
    });
  };
  const field = (label, input) => {
    const box = document.createElement("label");
    box.append(label, " ", input);
    return box;
  };
  const controls = charts => {
    const bar = document.createElement("div");
    bar.className = "controls";
    const titles = document.createElement("select");
    for (const chart of charts) titles.add(new Option(chart.title, chart.title, false, chart.title === choice.title));
    titles.onchange = () => { choice.title = titles.value; draw(); };
    const smooth = document.createElement("input");
    Object.assign(smooth, { type: "range", min: 0, max: 0.95, step: 0.05, value: choice.smooth });
    smooth.oninput = () => { choice.smooth = Number(smooth.value); plotNow(); };
    const log = document.createElement("input");
    Object.assign(log, { type: "checkbox", checked: choice.log });
    log.onchange = () => { choice.log = log.checked; plotNow(); };
    bar.append(field("Chart", titles), field("Smooth", smooth), field("Log scale", log));
    return bar;
  };
  // A flat line is drawn from zero.
  const span = (_, low, high) => low === high
    ? [Math.min(0, low), Math.max(0, high) || 1] : uPlot.rangeNum(low, high, 0.1, true);
  const read = () => JSON.parse(document.getElementById("chart-data").textContent);
  const plotNow = () => {
    const place = document.getElementById("plot");
    const chart = read().find(item => item.title === choice.title);
    if (plot) plot.destroy();
    const axis = { stroke: colour("--dim"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } };
    const lines = chart.lines.map((line, index) => ({
      label: line.name, spanGaps: true, width: 2, stroke: colour(`--c${index % 6 + 1}`),
      points: { show: line.points || chart.steps.length < 40, size: line.points ? 9 : undefined },
      ...(line.points && { paths: () => null }),
      value: (_, value) => numberText(value),
    }));
    const values = chart.lines.map(line => (line.points ? line.values : smoothed(line.values, choice.smooth))
      .map(value => choice.log && value !== null && value <= 0 ? null : value));
    plot = new uPlot({
      width: place.clientWidth, height: Math.min(420, Math.max(240, place.clientWidth * 0.4)),
      scales: { x: { time: false }, y: choice.log ? { distr: 3 } : { range: span } },
      axes: [{ ...axis, incrs: [1, 2, 5].flatMap(each => [1, 10, 100, 1e3, 1e4].map(power => each * power)).sort((a, b) => a - b) }, { ...axis, size: 60 }], series: [{ label: "step" }, ...lines],
      cursor: { drag: { x: true, y: false } },
    }, [chart.steps, ...values], place);
  };
  const draw = () => {
    const section = document.getElementById("chart");
    if (!section) return;
    const charts = read();
    if (!charts.some(chart => chart.title === choice.title)) choice.title = charts[0].title;
    const place = document.createElement("div");
    place.id = "plot";
    section.replaceChildren(controls(charts), place);
    plot = null;
    plotNow();
  };
  for (const kind of ["resize", "change"]) // of a tab, too: a hidden chart has no width
    addEventListener(kind, event => { if (document.getElementById("plot") && (kind === "resize" || event.target.name === "tab")) plotNow(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  addEventListener("theme", draw);
  return draw;
})();
drawChart();
