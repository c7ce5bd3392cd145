// Draws a matrix of pairs of ranks: waiting times in collectives, or durations of messages.
import { amount, explain, prepare, ramp } from "./canvas.js";
import { color, make, ranks, seconds } from "./format.js";

const LEFT = 34,
  TOP = 18;

// Returns the end of the color scale: at least a fiftieth of a step for waits and three times the
// usual for messages, so that noise is not highlighted.
function scaleEnd(known, kind, typicalStep) {
  const usual = [...known].sort((a, b) => a - b)[Math.floor(known.length / 2)];
  return Math.max(...known, kind === "waiting" ? (typicalStep || 0) / 50 : 3 * usual, 1e-9);
}

export function drawMatrix(delays, kind, typicalStep) {
  const canvas = document.getElementById("matrix");
  const legend = document.getElementById("matrix-legend");
  document.getElementById("matrix-title").textContent =
    kind === "waiting"
      ? delays.waits_now
        ? "Who waits for whom now"
        : "Who waits for whom"
      : "Messages, from whom to whom";
  const cells = delays[kind],
    count = delays.rows.length;
  const known = cells.flat().filter((value) => value !== null);
  if (!known.length) {
    const { context, width } = prepare(canvas, 120);
    context.fillStyle = color("--quiet");
    context.textAlign = "center";
    context.fillText(
      kind === "waiting" ? "No collective of two ranks yet." : "No messages from rank to rank.",
      width / 2,
      60,
    );
    explain(canvas, () => null);
    legend.replaceChildren();
    return;
  }
  const most = scaleEnd(known, kind, typicalStep);
  const side = Math.max(
    3,
    Math.min(
      31,
      Math.floor((canvas.parentElement.clientWidth - LEFT) / count),
      Math.floor(250 / count),
    ),
  );
  const { context, width } = prepare(canvas, count * side + TOP);
  const left = Math.max(LEFT, (width - count * side) / 2 + LEFT / 2);
  const gap = side > 8 ? 1 : 0,
    every = Math.ceil(16 / side);
  context.textBaseline = "middle";
  delays.rows.forEach((row, place) => {
    if (place % every) return;
    context.fillStyle = color("--quiet");
    context.textAlign = "right";
    context.fillText(`${row[0]}`, left - 7, TOP + (place + 0.5) * side);
    context.textAlign = "center";
    context.fillText(`${row[0]}`, left + (place + 0.5) * side, TOP - 9);
  });
  cells.forEach((line, i) =>
    line.forEach((value, j) => {
      context.fillStyle = value === null ? color("--faint") : amount(value / most);
      if (value === null && i !== j)
        context.fillRect(left + j * side + side / 2 - 1, TOP + i * side + side / 2 - 1, 2, 2);
      else if (value !== null)
        context.fillRect(left + j * side, TOP + i * side, side - gap, side - gap);
    }),
  );
  explain(canvas, (px, py) => {
    const j = Math.floor((px - left) / side),
      i = Math.floor((py - TOP) / side);
    if (i < 0 || j < 0 || i >= count || j >= count || cells[i][j] === null) return null;
    const [from, to] = [ranks(delays.rows[i]), ranks(delays.rows[j])];
    return kind === "waiting"
      ? `rank ${from} waits for rank ${to}\n${seconds(cells[i][j])} ` +
          (delays.waits_now ? "so far" : "on average in each collective")
      : `from rank ${from} to rank ${to}\n${seconds(cells[i][j])} on average for each message`;
  });
  const bar = make("span", { class: "ramp" });
  ramp(bar, amount);
  const note =
    kind === "waiting"
      ? "the rank of a row waits for that of a column"
      : "the rank of a row sends to that of a column";
  legend.replaceChildren("0", bar, seconds(most), make("span", { class: "note" }, note));
}
