// A canvas of given height that is as wide as its place and as sharp as the screen, with text to show where the pointer is.

const hover = document.getElementById("hover");

export function prepare(canvas, height) {
  const scale = window.devicePixelRatio || 1;
  const width = canvas.parentElement.clientWidth;
  canvas.style.height = `${height}px`;
  const [w, h] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== w || canvas.height !== h) { canvas.width = w; canvas.height = h; }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = '11px system-ui, "Segoe UI", "DejaVu Sans", sans-serif';
  return { context, width, height };
}

// `tell(x, y)` returns what to say of a place, or null.
export function explain(canvas, tell) {
  canvas.tell = tell;
  if (canvas.explained) return;
  canvas.explained = true;
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const text = canvas.tell(event.clientX - box.left, event.clientY - box.top);
    hover.hidden = !text;
    if (!text) return;
    hover.textContent = text;
    const { offsetWidth: w, offsetHeight: h } = hover;
    hover.style.left = `${event.clientX + 14 + w > innerWidth ? event.clientX - w - 10 : event.clientX + 14}px`;
    hover.style.top = `${event.clientY + 16 + h > innerHeight ? event.clientY - h - 10 : event.clientY + 16}px`;
  });
  canvas.addEventListener("pointerleave", () => { hover.hidden = true; });
}

const mix = (a, b, t) => a.map((v, i) => Math.round(v + (b[i] - v) * t));
const css = (rgb) => `rgb(${rgb.join(" ")})`;
const SCALES = {
  light: { middle: [232, 235, 240], slow: [[253, 200, 110], [235, 120, 20], [140, 45, 4]], fast: [[150, 190, 225], [40, 110, 175]] },
  dark: { middle: [44, 51, 62], slow: [[130, 84, 30], [240, 140, 30], [255, 226, 150]], fast: [[40, 80, 120], [100, 175, 235]] },
};

const theme = () => document.documentElement.dataset.theme || "light";

function along(stops, t) {
  const at = Math.min(Math.max(t, 0), 1) * (stops.length - 1);
  const low = Math.min(Math.floor(at), stops.length - 2);
  return css(mix(stops[low], stops[low + 1], at - low));
}

// From the usual (recedes into the page) to twice the usual and more; blue where faster.
export function relative(ratio) {
  const scale = SCALES[theme()];
  const t = Math.log2(ratio);
  return t >= 0 ? along([scale.middle, ...scale.slow], t) : along([scale.middle, ...scale.fast], -t);
}

// From nothing to the most there is.
export const amount = (share) => along([SCALES[theme()].middle, ...SCALES[theme()].slow], share);

export function ramp(element, of) {
  element.style.background = `linear-gradient(90deg, ${Array.from({ length: 13 }, (_, i) => of(i / 12)).join(", ")})`;
}
