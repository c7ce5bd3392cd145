// Formats numbers for people, and makes elements from text only: no data of a job is ever parsed as
// HTML.

export function seconds(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size < 1e-3) return `${(value * 1e6).toPrecision(3)} µs`;
  if (size < 1) return `${(value * 1e3).toPrecision(3)} ms`;
  if (size < 100) return `${value.toPrecision(3)} s`;
  if (size < 5400) return `${(value / 60).toPrecision(3)} min`;
  return size < 172800
    ? `${(value / 3600).toPrecision(3)} h`
    : `${(value / 86400).toPrecision(3)} d`;
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let place = 0;
  while (Math.abs(value) >= 1024 && place < units.length - 1) {
    value /= 1024;
    place += 1;
  }
  return `${place === 0 ? value : value.toPrecision(3)} ${units[place]}`;
}

export const percent = (value) =>
  value === null || value === undefined
    ? "–"
    : `${(value * 100).toFixed(value > 0.9995 || value < 0.1 ? 1 : 0)} %`;

export const clock = (wall) => new Date(wall * 1000).toLocaleTimeString([], { hour12: false });

export function ranks(list) {
  const runs = [];
  for (const rank of list) {
    const last = runs[runs.length - 1];
    if (last && rank === last[1] + 1) last[1] = rank;
    else runs.push([rank, rank]);
  }
  return runs.map(([a, b]) => (a === b ? `${a}` : `${a}–${b}`)).join(", ");
}

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") element.className = value;
    else if (name === "color") element.style.background = value;
    else if (value !== false && value !== null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export const color = (name) =>
  getComputedStyle(document.documentElement).getPropertyValue(name).trim();
