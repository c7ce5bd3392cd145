// Asks the daemon again and again, and draws what it tells. While the page is hidden it asks nothing.
import { drawHeat } from "./heat.js";
import { drawMatrix } from "./matrix.js";
import { drawFacts, drawNodes, drawRanks, drawStory, drawVerdicts } from "./panels.js";
import { drawKeys, drawTimeline } from "./timeline.js";
import { make, seconds } from "./format.js";

const KINDS = [["waiting", "waits"], ["transfer", "messages"]];
const PHASES = [["step", "whole"], ["data wait", "data"], ["forward", "forward"], ["backward", "backward"], ["optimizer", "optimizer"], ["checkpoint", "checkpoint"]];
const state = { token: null, overview: null, heat: null, delays: null, timeline: null, step: null, phase: "step", kind: "waiting", answeredAt: 0 };

function takeToken() {
  const told = new URLSearchParams(location.hash.slice(1)).get("token");
  if (told) {
    sessionStorage.setItem("keepstep-token", told);
    history.replaceState(null, "", location.pathname + location.search);
  }
  state.token = sessionStorage.getItem("keepstep-token");
}

async function ask(path) {
  const response = await fetch(path, { headers: state.token ? { Authorization: `Bearer ${state.token}` } : {}, signal: AbortSignal.timeout(8000), cache: "no-store" });
  if (response.status === 401) throw new Refused();
  if (!response.ok) throw new Error(`status ${response.status}`);
  return response.json();
}
class Refused extends Error {}

function showDoor(wanted) {
  document.getElementById("door").hidden = !wanted;
  document.getElementById("board").hidden = wanted;
}

function choose(id, options, get, set) {
  const place = document.getElementById(id);
  const buttons = options.map(([value, name]) => {
    const button = make("button", { type: "button", "aria-pressed": `${get() === value}` }, name);
    button.addEventListener("click", () => {
      set(value);
      buttons.forEach((other) => other.setAttribute("aria-pressed", `${other === button}`));
      turn();
    });
    return button;
  });
  place.replaceChildren(...buttons);
}

function draw() {
  if (!state.overview) return;
  drawFacts(state.overview);
  drawVerdicts(state.overview);
  drawStory(state.overview);
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
  document.getElementById("pulse").className = `pulse ${state.answeredAt ? (fresh ? "on" : "off") : ""}`;
  document.getElementById("freshness").textContent = !state.answeredAt ? "connecting" : fresh ? "live" : `no answer for ${seconds(age)}`;
}

let asking = false, again = false;
async function turn() {
  if (document.hidden) return;
  if (asking) { again = true; return; }
  asking = true;
  try {
    const columns = Math.max(40, Math.min(400, Math.floor(document.getElementById("heat").parentElement.clientWidth / 5)));
    const [overview, heat, delays, timeline] = await Promise.all([
      ask("/v1/overview"), ask(`/v1/heat?rows=64&columns=${columns}&phase=${encodeURIComponent(state.phase)}`), ask("/v1/delays?rows=32"), ask(`/v1/steps/${state.step ?? "newest"}?count=64`),
    ]);
    Object.assign(state, { overview, heat, delays, timeline, answeredAt: Date.now() });
    showDoor(false);
    draw();
  } catch (error) {
    if (error instanceof Refused) showDoor(true);
    else console.warn("the daemon did not answer:", error.message);
  } finally {
    asking = false;
    drawFreshness();
    if (again) { again = false; turn(); }
  }
}

function dress(theme) {
  document.documentElement.dataset.theme = theme;
  drawKeys();
  draw();
}

function moveTo(step) {
  state.step = step;
  document.getElementById("step-newest").setAttribute("aria-pressed", `${step === null}`);
  turn();
}

takeToken();
const dark = matchMedia("(prefers-color-scheme: dark)");
dress(localStorage.getItem("keepstep-theme") || (dark.matches ? "dark" : "light"));
dark.addEventListener("change", () => { if (!localStorage.getItem("keepstep-theme")) dress(dark.matches ? "dark" : "light"); });
document.getElementById("theme").addEventListener("click", () => {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("keepstep-theme", theme);
  dress(theme);
});
document.getElementById("door").addEventListener("submit", (event) => {
  event.preventDefault();
  state.token = document.getElementById("token").value.trim();
  sessionStorage.setItem("keepstep-token", state.token);
  turn();
});
document.getElementById("step-back").addEventListener("click", () => state.timeline && moveTo(Math.max(1, state.timeline.step - 1)));
document.getElementById("step-on").addEventListener("click", () => state.timeline && moveTo(state.timeline.step + 1));
document.getElementById("step-newest").addEventListener("click", () => moveTo(state.step === null && state.timeline ? state.timeline.step : null));
choose("heat-phase", PHASES, () => state.phase, (value) => { state.phase = value; });
choose("matrix-kind", KINDS, () => state.kind, (value) => { state.kind = value; });
document.getElementById("heat").addEventListener("click", (event) => {
  // A click on a step shows it below.
  const text = document.getElementById("heat").tell?.(event.offsetX, event.offsetY);
  const match = /^step (\d+)/.exec(text || "");
  if (match) moveTo(Number(match[1]));
});
addEventListener("resize", draw);
document.addEventListener("visibilitychange", turn);
turn();
setInterval(turn, 1000);
setInterval(drawFreshness, 1000);
