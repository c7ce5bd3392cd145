// Draws the panels of text and tables: facts, verdicts, ranks, nodes.
import { bytes, clock, make, percent, seconds } from "./format.js";
import { noteForm, noteText } from "./notes.js";

const GRAVE = new Set([
  "communication hang",
  "non-communication hang",
  "mismatched collectives",
  "dead process",
  "device error",
  "silent data corruption",
  "loss not finite",
]);

// Rebuilds a panel only if its values have changed, so that opened and selected elements remain.
const drawn = new Map();
export function ifChanged(key, value, build) {
  const text = JSON.stringify(value);
  if (drawn.get(key) === text) return;
  drawn.set(key, text);
  build();
}

function threadText(thread) {
  const name = `${thread.name}${thread.owns_gil ? " (holds the GIL)" : ""}`;
  return [name, ...thread.frames.map((frame) => `    ${frame}`)].join("\n");
}

function stacksOf(entry) {
  return Object.entries(entry.stacks).map(([rank, stacks]) => {
    const text = stacks.error ? stacks.error : stacks.threads.map(threadText).join("\n\n");
    return make(
      "details",
      {},
      make("summary", {}, `stacks of rank ${rank}`),
      make("pre", {}, text),
    );
  });
}

function verdictBox(entry, now) {
  const { verdict } = entry;
  const over = entry.closed_at_s !== null;
  const grave = GRAVE.has(verdict.syndrome);
  const cost =
    verdict.cost_s_per_step === null
      ? "stands still"
      : verdict.cost_s_per_step > 0
        ? `costs ${seconds(verdict.cost_s_per_step)} a step`
        : "";
  const when = over
    ? `${clock(entry.since_s)}, for ${seconds(entry.closed_at_s - entry.since_s)}`
    : `for ${seconds(now - entry.since_s)}, since ${clock(entry.since_s)}`;
  const box = make(
    "article",
    { class: `verdict ${over ? "over" : entry.note ? "noted" : grave ? "grave" : ""}` },
    make(
      "div",
      { class: "line" },
      make("span", { class: "quiet" }, `#${entry.number}`),
      make("span", { class: "what" }, verdict.syndrome),
      make("span", { class: "who" }, entry.subject),
      make(
        "span",
        { class: "quiet" },
        make("span", { class: "when" }, when),
        cost ? ` · ${cost}` : "",
        ` · confidence ${percent(verdict.confidence)}`,
      ),
      make(
        "span",
        { class: "advice" },
        over ? "ended" : entry.note ? entry.note.kind : verdict.advice,
      ),
    ),
  );
  if (entry.note) box.append(make("div", { class: "note" }, noteText(entry.note)));
  if (!over && entry.to_do)
    box.append(make("div", { class: "todo" }, make("b", {}, "What to do: "), entry.to_do));
  const evidence = make("ul", {}, ...verdict.evidence.map((sentence) => make("li", {}, sentence)));
  if (over)
    box.append(make("details", {}, make("summary", {}, "evidence"), evidence, ...stacksOf(entry)));
  else box.append(evidence, ...stacksOf(entry), noteForm(entry.number, entry.note));
  return box;
}

export function drawVerdicts(overview) {
  const holding = overview.verdicts.filter((entry) => entry.closed_at_s === null);
  const past = overview.verdicts.filter((entry) => entry.closed_at_s !== null);
  const stable = overview.verdicts.map((entry) => ({
    ...entry,
    reported_at_s: 0,
    verdict: {
      ...entry.verdict,
      evidence: entry.closed_at_s === null ? entry.verdict.evidence.length : 0,
    },
  }));
  const blind = [
    ...Object.entries(overview.missing).map(([url, reason]) => `${url}: ${reason}`),
    ...Object.entries(overview.faults).map(
      ([part, count]) => `the monitor's ${part} failed ${count} times`,
    ),
  ];
  const place = document.getElementById("verdicts");
  const status = overview.job_status;
  const paused = status?.paused ? { paused: status.paused, paused_at_s: status.paused_at_s } : null;
  ifChanged(
    "verdicts",
    [stable, overview.notes, blind.length, overview.diagnoses, overview.ranks_total, overview.absence, paused],
    () => {
      const parts = holding.map((entry) => verdictBox(entry, overview.now_s));
      if (paused)
        parts.unshift(
          make(
            "div",
            { class: "calm blind", id: "paused" },
            make(
              "span",
              {},
              `Paused since ${clock(paused.paused_at_s)}: ${paused.paused}. `,
              make("code", {}, `keepstep resume ${overview.job}`),
              " goes on.",
            ),
          ),
        );
      else if (!holding.length) {
        const plural = overview.ranks_total === 1 ? "rank" : "ranks";
        const calm = overview.diagnoses
          ? `No verdict holds. ${overview.ranks_total} ${plural} monitored.`
          : "This daemon only relays; the daemon above it diagnoses.";
        parts.push(
          make(
            "div",
            { class: overview.ranks_total && overview.diagnoses ? "calm" : "calm blind" },
            overview.ranks_total
              ? calm
              : `${overview.absence[0].toUpperCase()}${overview.absence.slice(1)}. ` +
                  "Is it running under this name, with the monitor attached?",
          ),
        );
      }
      const noted = new Set(holding.map((entry) => entry.note?.number));
      for (const note of overview.notes.filter((one) => !noted.has(one.number)))
        parts.push(
          make(
            "div",
            { class: "calm blind" },
            make("span", {}, `#${note.number} ${note.syndrome}: ${note.whom}. ${noteText(note)}`),
            noteForm(note.number, note),
          ),
        );
      for (const sentence of blind) parts.push(make("div", { class: "calm blind" }, sentence));
      if (past.length)
        parts.push(
          make(
            "details",
            { class: "past" },
            make("summary", {}, `${past.length} that ${past.length === 1 ? "has" : "have"} ended`),
            ...past.map((entry) => verdictBox(entry, overview.now_s)),
          ),
        );
      place.replaceChildren(...parts);
    },
  );
  holding.forEach((entry, index) => {
    const box = place.querySelectorAll(":scope > article")[index];
    if (!box) return;
    box.querySelector(".when").textContent =
      `for ${seconds(overview.now_s - entry.since_s)}, since ${clock(entry.since_s)}`;
    entry.verdict.evidence.forEach((sentence, at) => {
      const item = box.querySelectorAll(":scope > ul > li")[at];
      if (item && item.textContent !== sentence) item.textContent = sentence;
    });
  });
}

// An address that only its own machine reaches is opened at the host by which this page was.
function pageAddress(url) {
  const page = new URL(url);
  if (["127.0.0.1", "[::1]", "0.0.0.0", "[::]"].includes(page.hostname))
    page.hostname = location.hostname;
  return page.href;
}

function drawJobs(overview) {
  const choice = document.getElementById("jobs");
  const others = Object.entries(overview.other_pages);
  choice.hidden = !others.length;
  ifChanged("jobs", others, () =>
    choice.replaceChildren(
      make("option", { value: "" }, "other jobs here …"),
      ...others.map(([job, url]) => make("option", { value: pageAddress(url) }, job)),
    ),
  );
  choice.onchange = () => choice.value && location.assign(choice.value);
}

export function drawFacts(overview) {
  drawJobs(overview);
  document.getElementById("job").textContent = overview.job;
  document.getElementById("where").textContent = `monitor on ${overview.node}`;
  const holds = overview.verdicts.some((entry) => entry.closed_at_s === null);
  document.title = `${holds ? "⚠ " : ""}${overview.job} · keepstep`;
  const alive = overview.ranks.filter((rank) => rank.state === "alive").length;
  const unheard = overview.ranks.filter((rank) => rank.state === "unheard").length;
  const status = overview.job_status;
  const { pace, reported } = overview;
  const facts = [
    ["step", `${Math.max(0, ...overview.ranks.map((rank) => rank.step))}`],
    [pace.name, pace.seconds === null && pace.name !== "a step takes" ? "·" : seconds(pace.seconds)],
    ...(reported.loss === null ? [] : [["loss", reported.loss.toPrecision(4)]]),
    ...(reported.gradient_norm === null
      ? []
      : [["gradient norm", reported.gradient_norm.toPrecision(3)]]),
    ...(reported.tokens_per_s === null
      ? []
      : [["tokens a second", Math.round(reported.tokens_per_s).toLocaleString()]]),
    [
      "ranks alive",
      overview.ranks_total > overview.ranks.length
        ? `${overview.ranks_total}`
        : `${alive} of ${overview.ranks_total}`,
    ],
    ...(unheard ? [["ranks not reporting", `${unheard}`]] : []),
    ["hosts", `${overview.nodes.length}`],
    ...(status ? [["nodes", `${status.members.length}`]] : []),
  ];
  if (overview.job_status)
    facts.push(
      ["generation", `${overview.job_status.generation}`],
      ["goodput", percent(overview.job_status.goodput.share)],
    );
  document
    .getElementById("facts")
    .replaceChildren(
      ...facts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))),
    );
}

export function table(element, columns, rows) {
  const head = make(
    "tr",
    {},
    ...columns.map(([name, number]) => make("th", { class: number ? "n" : "" }, name)),
  );
  const lines = rows.map((cells) =>
    make(
      "tr",
      {},
      ...cells.map((cell, place) => {
        const [text, sick] = Array.isArray(cell) ? cell : [cell, false];
        return make("td", { class: `${columns[place][1] ? "n" : ""}${sick ? " sick" : ""}` }, text);
      }),
    ),
  );
  element.replaceChildren(make("thead", {}, head), make("tbody", {}, ...lines));
}

const ENDINGS = { finished: " (ended)", raised: " (failed)", failed: " (failed)" };

const endingText = (rank, status) =>
  status?.paused ? " (ended: paused)" : ENDINGS[rank.ending] || " (dead)";

const operationText = ({ name, number, group, age_s }) =>
  `${name} no. ${number} of group ${group}, ${seconds(age_s)}`;

export function drawRanks(overview) {
  const sick = new Set(
    overview.verdicts
      .filter((entry) => entry.closed_at_s === null)
      .flatMap((entry) => entry.verdict.subject.ranks),
  );
  document.getElementById("ranks-note").textContent =
    overview.ranks_total > overview.ranks.length
      ? `the ${overview.ranks.length} most silent of ${overview.ranks_total}`
      : "";
  table(
    document.getElementById("ranks"),
    [
      ["rank"],
      ["node"],
      ["process", true],
      ["step", true],
      ["last step", true],
      ["phase"],
      ["waits in"],
      ["no progress for", true],
    ],
    overview.ranks.map((rank) => [
      [`${rank.rank}`, sick.has(rank.rank)],
      rank.node,
      `${rank.pid}${rank.state === "gone" ? endingText(rank, overview.job_status) : ""}`,
      `${rank.step}`,
      seconds(rank.last_step_s),
      rank.state === "unheard"
        ? [`no report for ${seconds(rank.unheard_s)}`, true]
        : rank.phase
          ? `${rank.phase.name} ${seconds(rank.phase.age_s)}`
          : "",
      rank.operation ? operationText(rank.operation) : "",
      [seconds(rank.silent_s), rank.silent_s > Math.max(3, 3 * (overview.typical_step_s || 0))],
    ]),
  );
}

function gpuText(gpu) {
  const xids = gpu.xids.length ? ` Xid ${gpu.xids.slice(-8).join(", ")}` : "";
  const hbm = gpu.memory_celsius ? ` (HBM ${gpu.memory_celsius} °C)` : "";
  const parts = [
    `${gpu.celsius || "–"} °C${hbm}`,
    `${Math.round(gpu.clock_hz / 1e6)} MHz`,
    gpu.power_watts
      ? `${Math.round(gpu.power_watts)}${gpu.power_limit_watts ? ` of ${Math.round(gpu.power_limit_watts)}` : ""} W`
      : null,
    gpu.memory_total ? `${bytes(gpu.memory_used)} of ${bytes(gpu.memory_total)}` : null,
    `busy ${percent(gpu.busy_share)}, memory ${percent(gpu.memory_busy_share)}`,
    gpu.nvlink_sent_nbytes
      ? `NVLink ↑ ${bytes(Math.round(gpu.nvlink_sent_per_s))}/s ↓ ${bytes(Math.round(gpu.nvlink_received_per_s))}/s`
      : null,
    gpu.nvlink_errors ? `${gpu.nvlink_errors} NVLink errors` : null,
    gpu.remapped_rows ? `${gpu.remapped_rows} rows remapped` : null,
  ];
  return `${gpu.index}: ${parts.filter((part) => part !== null).join(", ")}${xids}`;
}

function nicText(nic) {
  const errors = nic.errors ? `, ${nic.errors} errors and drops` : "";
  return `${nic.name} ↑ ${bytes(Math.round(nic.sent_per_s))}/s ↓ ${bytes(Math.round(nic.received_per_s))}/s${errors}`;
}

export function drawNodes(overview) {
  document.getElementById("nodes-note").textContent =
    `the monitor on ${overview.node} has used ${seconds(overview.monitor_cpu_s)} of processor time`;

  table(
    document.getElementById("nodes"),
    [
      ["node"],
      ["processor", true],
      ["throttled", true],
      ["clock", true],
      ["load", true],
      ["memory free", true],
      ["swapped", true],
      ["disk request", true],
      ["network"],
      ["GPUs"],
      ["last report", true],
    ],
    overview.nodes.map((facts) => {
      const m = facts.metrics;
      return [
        facts.node,
        percent(m.cpu_share),
        seconds(m.throttled_s),
        m.cpu_hz ? `${(m.cpu_hz / 1e9).toFixed(2)} GHz` : "–",
        m.load?.toFixed(2) ?? "–",
        `${bytes(m.memory_available)} of ${bytes(m.memory_total)}`,
        bytes(m.swap_used),
        seconds(m.disk_latency_s),
        (m.nics || []).map(nicText).join("\n") || "–",
        (m.gpus || []).map(gpuText).join("\n") || "none",
        [`${seconds(facts.age_s)} ago`, facts.age_s > 10],
      ];
    }),
  );
}
