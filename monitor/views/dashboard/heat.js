// Draws the heat map of step durations, ranks by steps: slow cells are orange, fast ones blue.
import { explain, prepare, ramp, relative } from "./canvas.js";
import { color, make, ranks, seconds } from "./format.js";

const LEFT = 52,
  TOP = 5,
  BOTTOM = 18;
const nameOf = (row) => (row.length === 1 ? `${row[0]}` : `${row[0]}–${row[row.length - 1]}`);

export function drawHeat(heat) {
  const canvas = document.getElementById("heat");
  const legend = document.getElementById("heat-legend");
  const rows = heat.rows.length,
    columns = heat.steps.length;
  if (!rows || !columns || heat.typical_s === null) {
    const { context, width } = prepare(canvas, 120);
    context.fillStyle = color("--quiet");
    context.textAlign = "center";
    context.fillText(
      columns ? "This phase of the step is not recorded." : "No rank has completed a step yet.",
      width / 2,
      60,
    );
    explain(canvas, () => null);
    legend.replaceChildren();
    return;
  }
  const cell = Math.max(6, Math.min(30, Math.floor(250 / rows)));
  const { context, width, height } = prepare(canvas, TOP + rows * cell + BOTTOM);
  const step = (width - LEFT) / columns,
    gap = cell > 9 ? 1 : 0;
  context.textBaseline = "middle";
  context.textAlign = "right";
  const every = Math.ceil(13 / cell);
  heat.rows.forEach((row, y) => {
    context.fillStyle = color("--quiet");
    if (y % every === 0)
      context.fillText(
        cell > 12 && row.length === 1 ? `rank ${nameOf(row)}` : nameOf(row),
        LEFT - 8,
        TOP + y * cell + cell / 2,
      );
    heat.seconds[y].forEach((value, x) => {
      if (value === null) return;
      context.fillStyle = relative(value / heat.typical_s);
      const from = LEFT + x * step;
      context.fillRect(
        from,
        TOP + y * cell,
        Math.ceil(LEFT + (x + 1) * step) - from - (step > 5 ? 1 : 0),
        cell - gap,
      );
    });
  });
  context.fillStyle = color("--quiet");
  context.textAlign = "center";
  const apart = Math.max(1, Math.ceil(70 / step / 10) * 10);
  heat.steps.forEach((number, x) => {
    if (number % apart === 0)
      context.fillText(`${number}`, Math.min(LEFT + (x + 0.5) * step, width - 14), height - 7);
  });
  explain(canvas, (px, py) => {
    const x = Math.floor((px - LEFT) / step),
      y = Math.floor((py - TOP) / cell);
    if (x < 0 || x >= columns || y < 0 || y >= rows) return null;
    const value = heat.seconds[y][x];
    const who =
      heat.rows[y].length === 1
        ? `rank ${heat.rows[y][0]}`
        : `slowest of ranks ${ranks(heat.rows[y])}`;
    const duration =
      value === null
        ? "not known"
        : `${seconds(value)}, ${(value / heat.typical_s).toFixed(2)} × the usual`;
    return `step ${heat.steps[x]}, ${who}\n${duration}`;
  });
  const bar = make("span", { class: "ramp" });
  ramp(bar, (t) => relative(2 ** (t * 2 - 1)));
  legend.replaceChildren(
    "½ ×",
    bar,
    "2 × the usual and more",
    make("span", { class: "note" }, `usual: ${seconds(heat.typical_s)}`),
  );
}
