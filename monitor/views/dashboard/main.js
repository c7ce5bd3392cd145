// Requests the daemon's state every second and draws it. A hidden page requests nothing.
import { drawHeat } from "./heat.js";
import { drawMatrix } from "./matrix.js";
import { drawJobStatus } from "./job_status.js";
import { drawFacts, drawNodes, drawRanks, drawVerdicts } from "./panels.js";
import { drawKeys, drawTimeline } from "./timeline.js";
import { make, seconds } from "./format.js";
import { sendNotesBy } from "./notes.js";

const KINDS = [
  ["waiting", "waits"],
  ["transfer", "messages"],
];
const PHASES = [
  ["step", "whole"],
  ["data wait", "data"],
  ["forward", "forward"],
  ["backward", "backward"],
  ["optimizer", "optimizer"],
  ["checkpoint", "checkpoint"],
];
const state = {
  token: null,
  overview: null,
  heat: null,
  delays: null,
  timeline: null,
  step: null,
  phase: "step",
  kind: "waiting",
  answeredAt: 0,
};

function takeToken() {
  const token = new URLSearchParams(location.hash.slice(1)).get("token");
  if (token) {
    sessionStorage.setItem("keepstep-token", token);
    history.replaceState(null, "", location.pathname + location.search);
  }
  state.token = sessionStorage.getItem("keepstep-token");
}

async function request(path) {
  const response = await fetch(path, {
    headers: state.token ? { Authorization: `Bearer ${state.token}` } : {},
    signal: AbortSignal.timeout(8000),
    cache: "no-store",
  });
  if (response.status === 401) throw new Refused();
  if (!response.ok) throw new Error(`status ${response.status}`);
  return response.json();
}
class Refused extends Error {}

// Posts a note on a verdict; returns what failed, for people, or an empty text.
async function postNote(number, note) {
  try {
    const response = await fetch(`/v1/verdicts/${number}/note`, {
      method: "POST",
      headers: state.token ? { Authorization: `Bearer ${state.token}` } : {},
      body: JSON.stringify(note),
      signal: AbortSignal.timeout(8000),
    });
    if (response.status === 401) return "This needs the job's token, also with --open-page.";
    if (!response.ok) return (await response.text()).trim();
  } catch (error) {
    return `The daemon did not answer: ${error.message}`;
  }
  setTimeout(refresh, 1000);
  return "";
}

function showSignIn(wanted) {
  document.getElementById("sign-in").hidden = !wanted;
  document.getElementById("board").hidden = wanted;
}

function choose(id, options, get, set) {
  const place = document.getElementById(id);
  const buttons = options.map(([value, name]) => {
    const button = make("button", { type: "button", "aria-pressed": `${get() === value}` }, name);
    button.addEventListener("click", () => {
      set(value);
      buttons.forEach((other) => other.setAttribute("aria-pressed", `${other === button}`));
      refresh();
    });
    return button;
  });
  place.replaceChildren(...buttons);
}

function draw() {
  if (!state.overview) return;
  drawFacts(state.overview);
  drawVerdicts(state.overview);
  drawJobStatus(state.overview);
  drawRanks(state.overview);
  drawNodes(state.overview);
  if (state.heat) drawHeat(state.heat);
  if (state.delays) drawMatrix(state.delays, state.kind, state.overview.typical_step_s);
  if (state.timeline) drawTimeline(state.timeline);
  document.body.dataset.drawn = "yes";
}

function drawFreshness() {
  const age = (Date.now() - state.answeredAt) / 1000;
  const fresh = state.answeredAt && age < 5;
  document.getElementById("pulse").className =
    `pulse ${state.answeredAt ? (fresh ? "on" : "off") : ""}`;
  document.getElementById("freshness").textContent = !state.answeredAt
    ? "connecting"
    : fresh
      ? "live"
      : `no answer for ${seconds(age)}`;
}

let requesting = false,
  again = false;
async function refresh() {
  if (document.hidden) return;
  if (requesting) {
    again = true;
    return;
  }
  requesting = true;
  try {
    const columns = Math.max(
      40,
      Math.min(400, Math.floor(document.getElementById("heat").parentElement.clientWidth / 5)),
    );
    const [overview, heat, delays, timeline] = await Promise.all([
      request("/v1/overview"),
      request(`/v1/heat?rows=64&columns=${columns}&phase=${encodeURIComponent(state.phase)}`),
      request("/v1/delays?rows=32"),
      request(`/v1/steps/${state.step ?? "newest"}?count=64`),
    ]);
    Object.assign(state, { overview, heat, delays, timeline, answeredAt: Date.now() });
    showSignIn(false);
    draw();
  } catch (error) {
    if (error instanceof Refused) showSignIn(true);
    else console.warn("the daemon did not answer:", error.message);
  } finally {
    requesting = false;
    drawFreshness();
    if (again) {
      again = false;
      refresh();
    }
  }
}

function applyTheme(theme) {
  document.documentElement.dataset.theme = theme;
  drawKeys();
  draw();
}

function moveTo(step) {
  state.step = step;
  document.getElementById("step-newest").setAttribute("aria-pressed", `${step === null}`);
  refresh();
}

takeToken();
sendNotesBy(postNote);
const dark = matchMedia("(prefers-color-scheme: dark)");
applyTheme(localStorage.getItem("keepstep-theme") || (dark.matches ? "dark" : "light"));
dark.addEventListener("change", () => {
  if (!localStorage.getItem("keepstep-theme")) applyTheme(dark.matches ? "dark" : "light");
});
document.getElementById("theme").addEventListener("click", () => {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("keepstep-theme", theme);
  applyTheme(theme);
});
document.getElementById("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  state.token = document.getElementById("token").value.trim();
  sessionStorage.setItem("keepstep-token", state.token);
  refresh();
});
document
  .getElementById("step-back")
  .addEventListener("click", () => state.timeline && moveTo(Math.max(1, state.timeline.step - 1)));
document
  .getElementById("step-on")
  .addEventListener("click", () => state.timeline && moveTo(state.timeline.step + 1));
document
  .getElementById("step-newest")
  .addEventListener("click", () =>
    moveTo(state.step === null && state.timeline ? state.timeline.step : null),
  );
choose(
  "heat-phase",
  PHASES,
  () => state.phase,
  (value) => {
    state.phase = value;
  },
);
choose(
  "matrix-kind",
  KINDS,
  () => state.kind,
  (value) => {
    state.kind = value;
  },
);
document.getElementById("heat").addEventListener("click", (event) => {
  // A click on a step shows it in the timeline.
  const text = document.getElementById("heat").tooltip?.(event.offsetX, event.offsetY);
  const match = /^step (\d+)/.exec(text || "");
  if (match) moveTo(Number(match[1]));
});
addEventListener("resize", draw);
document.addEventListener("visibilitychange", refresh);
refresh();
setInterval(refresh, 1000);
setInterval(drawFreshness, 1000);
