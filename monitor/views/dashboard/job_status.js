// Draws the panel of the job's status: goodput, membership, snapshots, recoveries.
import { bytes, clock, make, percent, ranks, seconds } from "./format.js";
import { ifChanged, table } from "./panels.js";

const PARTS = {
  "steps that were kept": "#2a78c2",
  "steps done again": "#d55e00",
  "members settling": "#cc79a7",
  "process groups forming": "#e69f00",
  "state coming back": "#56b4e9",
  "first step after": "#999999",
};

// Returns the ranks that a verdict names for a standstill.
function hangsIn(overview) {
  return new Set(
    overview.verdicts
      .filter((entry) => entry.closed_at_s === null && entry.verdict.cost_s_per_step === null)
      .flatMap((entry) => entry.verdict.subject.ranks),
  );
}

// Returns what has happened to the job, the newest first.
function eventsOf(overview) {
  const { job_status: status, verdicts } = overview;
  const events = status.recoveries.map((recovery) => [
    recovery.detected_at_s,
    `generation ${recovery.generation}: ${recovery.reason.split("\n")[0]}`,
    recovery.stepped_at_s > 0
      ? `${recovery.world_size} ranks went on after step ${recovery.resumed_step} ` +
        `within ${seconds(recovery.stepped_at_s - recovery.detected_at_s)}; ` +
        `${recovery.lost_steps} steps computed again`
      : "",
  ]);
  for (const entry of verdicts) {
    const end = entry.closed_at_s === null ? "" : `, ended at ${clock(entry.closed_at_s)}`;
    events.push([entry.since_s, `${entry.verdict.syndrome}: ${entry.subject}${end}`, ""]);
  }
  for (const event of overview.events) events.push([event.at_s, event.what, event.then]);
  return events.sort((a, b) => b[0] - a[0]).slice(0, 50);
}

function statusPanel(overview) {
  const status = overview.job_status;
  const { goodput } = status;
  const parts = Object.entries(goodput.parts);
  const bar = make(
    "div",
    { class: "bar" },
    ...parts
      .filter(([, spent]) => spent > 0)
      .map(([name, spent]) => {
        const piece = make("span", {
          color: PARTS[name] || "#999999",
          title: `${name}: ${seconds(spent)}`,
        });
        piece.style.flexGrow = `${spent / goodput.wall_s}`;
        return piece;
      }),
  );
  const rows = parts.flatMap(([name, spent]) => [
    make("span", { class: "swatch", color: PARTS[name] || "#999999" }),
    make("span", {}, name),
    make("span", { class: "n" }, seconds(spent)),
    make("span", { class: "quiet" }, percent(spent / goodput.wall_s)),
  ]);
  const saved = [
    [
      "newest snapshot in memory",
      status.snapshot_step === null ? "none" : `step ${status.snapshot_step}`,
    ],
    [
      "newest checkpoint in storage",
      status.checkpoint_step === null ? "none" : `step ${status.checkpoint_step}`,
    ],
    [
      "memory survives the loss of",
      `${status.parity} node${status.parity === 1 ? "" : "s"} of each group`,
    ],
  ];
  const left = make(
    "div",
    {},
    make("h3", {}, "Where wall time went"),
    make("div", { class: "goodput" }, `${percent(goodput.share)} kept`),
    bar,
    make("div", { class: "parts" }, ...rows),
    make(
      "div",
      { class: "saved" },
      ...saved.map(([name, value]) =>
        make("div", {}, make("span", { class: "quiet" }, name), make("b", {}, value)),
      ),
    ),
    status.checkpoint_url ? make("code", { class: "quiet" }, status.checkpoint_url) : null,
  );
  const members = make("table", {});
  const recoveries = make("table", {});
  const standing = hangsIn(overview);
  table(
    members,
    [["node"], ["ranks"], ["doing"], ["step", true], ["snapshots", true]],
    status.members.map((member) => [
      member.node,
      member.ranks.length ? ranks(member.ranks) : "spare",
      status.paused
        ? "paused"
        : member.ranks.some((rank) => standing.has(rank))
          ? "stands still"
          : member.phase,
      `${member.step}`,
      bytes(member.snapshot_nbytes),
    ]),
  );
  const events = make("table", { id: "events" });
  table(
    events,
    [["when"], ["what"], ["then"]],
    eventsOf(overview).map(([at, what, then]) => [clock(at), what, then]),
  );
  const after = (recovery, at) => (at > 0 ? seconds(at - recovery.detected_at_s) : "…");
  table(
    recoveries,
    [
      ["when"],
      ["why"],
      ["ranks", true],
      ["members", true],
      ["ready", true],
      ["state", true],
      ["stepped", true],
      ["from step", true],
      ["lost", true],
      ["state from"],
    ],
    [...status.recoveries]
      .reverse()
      .map((recovery) => [
        clock(recovery.detected_at_s),
        recovery.reason,
        `${recovery.world_size}`,
        after(recovery, recovery.opened_at_s),
        after(recovery, recovery.ready_at_s),
        after(recovery, recovery.restored_at_s),
        after(recovery, recovery.stepped_at_s),
        `${recovery.resumed_step}`,
        `${recovery.lost_steps}`,
        recovery.source,
      ]),
  );
  const right = make(
    "div",
    {},
    make("h3", {}, "Members"),
    make("div", { class: "scroll" }, members),
  );
  const below = make(
    "div",
    { class: "wide" },
    make("h3", {}, "Recoveries, in time after detection"),
    status.recoveries.length
      ? make("div", { class: "scroll" }, recoveries)
      : make("div", { class: "quiet" }, "none so far"),
    make("h3", {}, "Events"),
    make("div", { class: "scroll events" }, events),
  );
  return make("div", { class: "job-status" }, left, right, below);
}

export function drawJobStatus(overview) {
  const place = document.getElementById("job-status");
  const head = make(
    "div",
    { class: "head" },
    make("h2", {}, "The job: goodput, membership, snapshots"),
  );
  if (!overview.job_status) {
    ifChanged("job-status", null, () =>
      place.replaceChildren(
        head,
        make(
          "div",
          { class: "empty" },
          "Not a keepstep job, or its coordinator is not known here: " +
            "keepstep's own runtime reports membership, recoveries and snapshots.",
        ),
      ),
    );
    return;
  }
  const known = overview.verdicts.map((entry) => [entry.number, entry.closed_at_s]);
  ifChanged("job-status", [overview.job_status, known], () =>
    place.replaceChildren(head, statusPanel(overview)),
  );
}
