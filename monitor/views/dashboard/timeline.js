// Draws the timeline of one step for every rank: phases above, operations of torch.distributed
// below. A span that has not ended is hatched up to the time it was read. If that is long after all
// other spans, the axis is broken, so that the step itself remains readable.
import { explain, prepare } from "./canvas.js";
import { bytes, color, make, seconds } from "./format.js";

// Okabe and Ito's colours, which are distinct for every kind of colour vision.
export const PHASES = {
  "data wait": "#e69f00",
  forward: "#56b4e9",
  backward: "#2a78c2",
  optimizer: "#009e73",
  checkpoint: "#cc79a7",
  "garbage collection": "#d55e00",
  evaluation: "#f0e442",
};
const LEFT = 58,
  RIGHT = 4,
  TOP = 6,
  BAND = 13,
  ROW = 31,
  BOTTOM = 20;
const READABLE = 3,
  KNEE = 0.75;

export function drawKeys() {
  const keys = Object.entries(PHASES).map(([name, fill]) =>
    make("span", { class: "key" }, make("span", { class: "swatch", color: fill }), name),
  );
  document
    .getElementById("timeline-keys")
    .replaceChildren(
      ...keys,
      make(
        "span",
        { class: "key" },
        make("span", { class: "swatch", color: color("--quiet") }),
        "operation",
      ),
    );
}

function hatch(context, fill) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const inside = tile.getContext("2d");
  inside.fillStyle = fill;
  inside.globalAlpha = 0.35;
  inside.fillRect(0, 0, 8, 8);
  inside.globalAlpha = 1;
  inside.strokeStyle = fill;
  inside.lineWidth = 2;
  for (const shift of [-8, 0, 8]) {
    inside.beginPath();
    inside.moveTo(shift, 8);
    inside.lineTo(shift + 8, 0);
    inside.stroke();
  }
  return context.createPattern(tile, "repeat");
}

function ticks(span) {
  const rough = span / 8,
    power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
}

export function drawTimeline(step) {
  const canvas = document.getElementById("timeline");
  document.getElementById("step-number").textContent = step.step ? `step ${step.step}` : "–";
  const lines = step.ranks.filter((rank) => rank.spans.length);
  if (!lines.length) {
    const { context, width } = prepare(canvas, 90);
    context.fillStyle = color("--quiet");
    context.textAlign = "center";
    context.fillText(
      "No records of this step: it has not begun, or was too long ago.",
      width / 2,
      45,
    );
    explain(canvas, () => null);
    return;
  }
  const all = lines.flatMap((rank) => rank.spans);
  const isOpen = all.some((span) => span.end_s === null);
  const recorded_s = Math.max(...all.map((span) => span.end_s ?? span.begin_s), 1e-6);
  const last = isOpen ? Math.max(step.until_s, recorded_s) : recorded_s;
  const broken = last > READABLE * recorded_s;
  const knee = broken ? recorded_s * 1.1 : last;
  const { context, width, height } = prepare(canvas, TOP + lines.length * ROW + BOTTOM);
  const wide = width - LEFT - RIGHT,
    bend = broken ? KNEE * wide : wide;
  const x = (at) =>
    LEFT + (at <= knee ? (at / knee) * bend : bend + ((at - knee) / (last - knee)) * (wide - bend));
  context.textBaseline = "middle";
  const apart = ticks(knee);
  context.textAlign = "center";
  for (let at = 0; at <= knee; at += apart) {
    if (broken && x(at) > LEFT + bend - 30) break;
    context.fillStyle = color("--line");
    context.fillRect(x(at), 0, 1, height - BOTTOM);
    context.fillStyle = color("--quiet");
    context.fillText(at === 0 ? "0" : seconds(at), Math.min(x(at), width - 22), height - 9);
  }
  const placed = [];
  lines.forEach((rank, place) => {
    const top = TOP + place * ROW;
    context.fillStyle = color("--quiet");
    context.textAlign = "right";
    context.fillText(`rank ${rank.rank}`, LEFT - 9, top + BAND);
    for (const span of rank.spans) {
      // An ended step is not drawn: its phases are. An open one shows where none continues.
      if (span.name === "step" && span.end_s !== null) continue;
      const phase = span.kind === "phase";
      const fill =
        !phase || span.name === "step" ? color("--quiet") : PHASES[span.name] || "#999999";
      const from = x(span.begin_s),
        to = x(span.end_s ?? last);
      const y = top + (phase ? 0 : BAND + 1),
        tall = phase ? BAND : 9;
      context.fillStyle =
        span.end_s === null ? hatch(context, phase ? fill : color("--bad")) : fill;
      context.fillRect(from, y, Math.max(to - from - 0.5, 1), tall);
      placed.push({ span, rank: rank.rank, from, to: Math.max(to, from + 2), y, tall });
    }
  });
  if (broken) {
    const at = LEFT + bend + 14;
    context.strokeStyle = color("--panel");
    context.lineWidth = 5;
    context.beginPath();
    context.moveTo(at - 5, height - BOTTOM + 4);
    context.lineTo(at + 5, 0);
    context.stroke();
    context.fillStyle = color("--quiet");
    context.textAlign = "right";
    context.fillText(`${seconds(last)}, still open`, width - RIGHT, height - 9);
  }
  canvas.dataset.broken = broken ? "yes" : "no";
  explain(canvas, (px, py) => {
    const hit = placed.findLast(
      (bar) => px >= bar.from && px <= bar.to && py >= bar.y && py <= bar.y + bar.tall,
    );
    if (!hit) return null;
    const { span } = hit;
    const took =
      span.end_s === null
        ? `has not ended in ${seconds(last - span.begin_s)}, from ${seconds(span.begin_s)}`
        : `${seconds(span.end_s - span.begin_s)}, from ${seconds(span.begin_s)}`;
    const facts = span.facts;
    const more =
      span.kind === "phase"
        ? ""
        : `\nno. ${facts.number} of group ${facts.group}, ` +
          `${bytes(facts.nbytes)} of ${facts.dtype}` +
          (facts.peer === undefined ? "" : `, peer ${facts.peer}`) +
          (facts.failed ? "\nfailed" : "") +
          (facts.end ? `\nend ${facts.end}` : "");
    return `rank ${hit.rank}: ${span.name}\n${took}${more}`;
  });
}
