// What is told in words and tables: verdicts, the job's status, ranks, nodes.
import { bytes, clock, make, percent, ranks, seconds } from "./format.js";

const GRAVE = new Set(["communication hang", "non-communication hang", "mismatched collectives", "dead process", "device error", "silent data corruption", "loss not finite"]);
const PARTS = {
  "steps that were kept": "#2a78c2", "steps done again": "#d55e00", "members settling": "#cc79a7", "process groups forming": "#e69f00",
  "state coming back": "#56b4e9", "first step after": "#999999",
};

// Rebuilt only when what it shows has changed, so that what a person has opened or selected stays.
const shown = new Map();
function once(key, value, build) {
  const text = JSON.stringify(value);
  if (shown.get(key) === text) return;
  shown.set(key, text);
  build();
}

function stacksOf(entry) {
  return Object.entries(entry.stacks).map(([rank, found]) => {
    const text = found.error ? found.error
      : found.threads.map((thread) => `${thread.name}${thread.owns_gil ? " (holds the GIL)" : ""}\n${thread.frames.map((frame) => `    ${frame}`).join("\n")}`).join("\n\n");
    return make("details", {}, make("summary", {}, `stacks of rank ${rank}`), make("pre", {}, text));
  });
}

function verdict(entry, now) {
  const { verdict: told } = entry;
  const over = entry.closed_at_s !== null;
  const cost = told.cost_s_per_step === null ? "stands still" : told.cost_s_per_step > 0 ? `costs ${seconds(told.cost_s_per_step)} a step` : "";
  const when = over ? `${clock(entry.since_s)}, for ${seconds(entry.closed_at_s - entry.since_s)}` : `for ${seconds(now - entry.since_s)}, since ${clock(entry.since_s)}`;
  const box = make("article", { class: `verdict ${over ? "over" : GRAVE.has(told.syndrome) ? "grave" : ""}` },
    make("div", { class: "line" }, make("span", { class: "what" }, told.syndrome), make("span", { class: "who" }, entry.subject),
      make("span", { class: "quiet" }, make("span", { class: "when" }, when), cost ? ` · ${cost}` : "", ` · confidence ${percent(told.confidence)}`),
      make("span", { class: "advice" }, over ? "over" : told.advice === "observe" ? "observe" : `advice: ${told.advice}`)));
  const evidence = make("ul", {}, ...told.evidence.map((sentence) => make("li", {}, sentence)));
  if (over) box.append(make("details", {}, make("summary", {}, "evidence"), evidence, ...stacksOf(entry)));
  else box.append(evidence, ...stacksOf(entry));
  return box;
}

export function drawVerdicts(told) {
  const holding = told.verdicts.filter((entry) => entry.closed_at_s === null);
  const past = told.verdicts.filter((entry) => entry.closed_at_s !== null);
  const stable = told.verdicts.map((entry) => ({ ...entry, told_at_s: 0, verdict: { ...entry.verdict, evidence: entry.closed_at_s === null ? entry.verdict.evidence.length : 0 } }));
  const blind = [...Object.entries(told.missing).map(([url, reason]) => `${url}: ${reason}`), ...Object.entries(told.faults).map(([part, count]) => `the monitor's ${part} failed ${count} times`)];
  const place = document.getElementById("verdicts");
  once("verdicts", [stable, blind.length, told.diagnoses, told.ranks_total, told.absence], () => {
    const parts = holding.map((entry) => verdict(entry, told.now_s));
    if (!holding.length) {
      const calm = told.diagnoses ? `No verdict holds. ${told.ranks_total} rank${told.ranks_total === 1 ? "" : "s"} watched.`
        : "This daemon passes on what it hears; the one above it diagnoses.";
      parts.push(make("div", { class: told.ranks_total && told.diagnoses ? "calm" : "calm blind" }, told.ranks_total ? calm : `${told.absence[0].toUpperCase()}${told.absence.slice(1)}. Is it running under this name, with the monitor attached?`));
    }
    for (const sentence of blind) parts.push(make("div", { class: "calm blind" }, sentence));
    if (past.length) parts.push(make("details", { class: "past" }, make("summary", {}, `${past.length} that ${past.length === 1 ? "is" : "are"} over`), ...past.map((entry) => verdict(entry, told.now_s))));
    place.replaceChildren(...parts);
  });
  holding.forEach((entry, index) => {
    const box = place.querySelectorAll(":scope > article")[index];
    if (!box) return;
    box.querySelector(".when").textContent = `for ${seconds(told.now_s - entry.since_s)}, since ${clock(entry.since_s)}`;
    entry.verdict.evidence.forEach((sentence, at) => { const item = box.querySelectorAll(":scope > ul > li")[at]; if (item && item.textContent !== sentence) item.textContent = sentence; });
  });
}

export function drawFacts(told) {
  document.getElementById("job").textContent = told.job;
  document.getElementById("where").textContent = `seen from ${told.node}`;
  document.title = `${told.verdicts.some((entry) => entry.closed_at_s === null) ? "⚠ " : ""}${told.job} · keepstep`;
  const alive = told.ranks.filter((rank) => rank.state === "alive").length;
  const unheard = told.ranks.filter((rank) => rank.state === "unheard").length;
  const facts = [
    ["step", `${Math.max(0, ...told.ranks.map((rank) => rank.step))}`],
    ["a step takes", seconds(told.typical_step_s)],
    ["ranks alive", told.ranks_total > told.ranks.length ? `${told.ranks_total}` : `${alive} of ${told.ranks_total}`],
    ...(unheard ? [["ranks not heard of", `${unheard}`]] : []),
    ["nodes", `${told.nodes.length}`],
  ];
  if (told.job_status) facts.push(["generation", `${told.job_status.generation}`], ["goodput", percent(told.job_status.goodput.share)]);
  document.getElementById("facts").replaceChildren(...facts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
}

function table(element, columns, rows) {
  const head = make("tr", {}, ...columns.map(([name, number]) => make("th", { class: number ? "n" : "" }, name)));
  const lines = rows.map((cells) => make("tr", {}, ...cells.map((cell, place) => {
    const [text, sick] = Array.isArray(cell) ? cell : [cell, false];
    return make("td", { class: `${columns[place][1] ? "n" : ""}${sick ? " sick" : ""}` }, text);
  })));
  element.replaceChildren(make("thead", {}, head), make("tbody", {}, ...lines));
}

function story(told, now) {
  const { goodput } = told;
  const parts = Object.entries(goodput.parts);
  const bar = make("div", { class: "bar" }, ...parts.filter(([, spent]) => spent > 0).map(([name, spent]) => {
    const piece = make("span", { color: PARTS[name] || "#999999", title: `${name}: ${seconds(spent)}` });
    piece.style.flexGrow = `${spent / goodput.wall_s}`;
    return piece;
  }));
  const rows = parts.flatMap(([name, spent]) => [make("span", { class: "swatch", color: PARTS[name] || "#999999" }), make("span", {}, name),
    make("span", { class: "n" }, seconds(spent)), make("span", { class: "quiet" }, percent(spent / goodput.wall_s))]);
  const saved = [
    ["newest snapshot in memory", told.snapshot_step === null ? "none" : `step ${told.snapshot_step}${told.snapshot_at_s ? `, ${seconds(now - told.snapshot_at_s)} ago` : ""}`],
    ["newest checkpoint in storage", told.checkpoint_step === null ? "none" : `step ${told.checkpoint_step}`],
    ["memory survives the loss of", `${told.parity} node${told.parity === 1 ? "" : "s"} of a group`],
  ];
  const left = make("div", {}, make("h3", {}, "Where wall time went"), make("div", { class: "goodput" }, `${percent(goodput.share)} kept`), bar, make("div", { class: "parts" }, ...rows),
    make("div", { class: "saved" }, ...saved.map(([name, value]) => make("div", {}, make("span", { class: "quiet" }, name), make("b", {}, value)))),
    told.checkpoint_url ? make("code", { class: "quiet" }, told.checkpoint_url) : null);
  const members = make("table", {}), recoveries = make("table", {});
  table(members, [["node"], ["ranks"], ["doing"], ["step", true], ["snapshots", true]],
    told.members.map((member) => [member.node, member.ranks.length ? ranks(member.ranks) : "spare", member.phase, `${member.step}`, bytes(member.snapshot_nbytes)]));
  const since = (recovery, at) => (at > 0 ? seconds(at - recovery.detected_at_s) : "…");
  table(recoveries, [["when"], ["why"], ["ranks", true], ["members", true], ["ready", true], ["state", true], ["stepped", true], ["from step", true], ["lost", true], ["state from"]],
    [...told.recoveries].reverse().map((one) => [clock(one.detected_at_s), one.reason, `${one.world_size}`, since(one, one.opened_at_s), since(one, one.ready_at_s),
      since(one, one.restored_at_s), since(one, one.stepped_at_s), `${one.resumed_step}`, `${one.lost_steps}`, one.source]));
  const right = make("div", {}, make("h3", {}, "Members"), make("div", { class: "scroll" }, members));
  const below = make("div", { class: "wide" }, make("h3", {}, "Recoveries, in time after detection"),
    told.recoveries.length ? make("div", { class: "scroll" }, recoveries) : make("div", { class: "quiet" }, "none so far"));
  return make("div", { class: "story" }, left, right, below);
}

export function drawStory(told) {
  const place = document.getElementById("story");
  const head = make("div", { class: "head" }, make("h2", {}, "The job: goodput, membership, snapshots"));
  if (!told.job_status) {
    once("story", null, () => place.replaceChildren(head, make("div", { class: "empty" }, "Not a keepstep job, or its coordinator is not known here: membership, recoveries and snapshots are told by keepstep's own runtime.")));
    return;
  }
  once("story", [told.job_status, Math.round(told.now_s)], () => place.replaceChildren(head, story(told.job_status, told.now_s)));
}

export function drawRanks(told) {
  const sick = new Set(told.verdicts.filter((entry) => entry.closed_at_s === null).flatMap((entry) => entry.verdict.subject.ranks));
  document.getElementById("ranks-note").textContent = told.ranks_total > told.ranks.length ? `the ${told.ranks.length} most silent of ${told.ranks_total}` : "";
  table(document.getElementById("ranks"), [["rank"], ["node"], ["process", true], ["step", true], ["last step", true], ["phase"], ["operation under way"], ["no progress for", true]],
    told.ranks.map((rank) => [[`${rank.rank}`, sick.has(rank.rank)], rank.node, `${rank.pid}${rank.state !== "gone" ? "" : { finished: " (ended)", raised: " (failed)", failed: " (failed)" }[rank.ending] || " (dead)"}`, `${rank.step}`, seconds(rank.last_step_s),
      rank.state === "unheard" ? [`not heard of for ${seconds(rank.unheard_s)}`, true] : rank.phase ? `${rank.phase.name} ${seconds(rank.phase.age_s)}` : "", rank.operation ? `${rank.operation.name} no. ${rank.operation.number} of group ${rank.operation.group}, ${seconds(rank.operation.age_s)}` : "",
      [seconds(rank.silent_s), rank.silent_s > Math.max(3, 3 * (told.typical_step_s || 0))]]));
}

export function drawNodes(told) {
  document.getElementById("nodes-note").textContent = `the monitor on ${told.node} has used ${seconds(told.monitor_cpu_s)} of processor time`;
  const gpu = (facts) => (facts.metrics.gpus || []).map((one) => `${one.index}: ${one.celsius || "–"} °C ${Math.round(one.clock_hz / 1e6)} MHz${one.xids.length ? ` Xid ${one.xids.join(", ")}` : ""}`).join("; ");
  table(document.getElementById("nodes"), [["node"], ["processor", true], ["throttled", true], ["clock", true], ["load", true], ["memory free", true], ["swapped", true], ["disk request", true], ["GPUs"], ["heard", true]],
    told.nodes.map((facts) => { const m = facts.metrics; return [facts.node, percent(m.cpu_share), seconds(m.throttled_s), m.cpu_hz ? `${(m.cpu_hz / 1e9).toFixed(2)} GHz` : "–", m.load?.toFixed(2) ?? "–",
      `${bytes(m.memory_available)} of ${bytes(m.memory_total)}`, bytes(m.swap_used), seconds(m.disk_latency_s), gpu(facts) || "none", [`${seconds(facts.age_s)} ago`, facts.age_s > 10]]; }));
}
