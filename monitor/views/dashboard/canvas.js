// Prepares canvases: a given height, the width of their container, the resolution of the screen,
// and a tooltip at the pointer.

const hover = document.getElementById("hover");

export function prepare(canvas, height) {
  const scale = window.devicePixelRatio || 1;
  const width = canvas.parentElement.clientWidth;
  canvas.style.height = `${height}px`;
  const [w, h] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = '11px system-ui, "Segoe UI", "DejaVu Sans", sans-serif';
  return { context, width, height };
}

// Shows a tooltip over a canvas. `tooltip(x, y)` returns the text for a place, or null.
export function explain(canvas, tooltip) {
  canvas.tooltip = tooltip;
  if (canvas.hasTooltip) return;
  canvas.hasTooltip = true;
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const text = canvas.tooltip(event.clientX - box.left, event.clientY - box.top);
    hover.hidden = !text;
    if (!text) return;
    hover.textContent = text;
    const { offsetWidth: w, offsetHeight: h } = hover;
    const { clientX: x, clientY: y } = event;
    hover.style.left = `${x + 14 + w > innerWidth ? x - w - 10 : x + 14}px`;
    hover.style.top = `${y + 16 + h > innerHeight ? y - h - 10 : y + 16}px`;
  });
  canvas.addEventListener("pointerleave", () => {
    hover.hidden = true;
  });
}

const mix = (a, b, t) => a.map((v, i) => Math.round(v + (b[i] - v) * t));
const css = (rgb) => `rgb(${rgb.join(" ")})`;
const SCALES = {
  light: {
    middle: [232, 235, 240],
    slow: [
      [253, 200, 110],
      [235, 120, 20],
      [140, 45, 4],
    ],
    fast: [
      [150, 190, 225],
      [40, 110, 175],
    ],
  },
  dark: {
    middle: [44, 51, 62],
    slow: [
      [130, 84, 30],
      [240, 140, 30],
      [255, 226, 150],
    ],
    fast: [
      [40, 80, 120],
      [100, 175, 235],
    ],
  },
};

const theme = () => document.documentElement.dataset.theme || "light";

function along(stops, t) {
  const at = Math.min(Math.max(t, 0), 1) * (stops.length - 1);
  const low = Math.min(Math.floor(at), stops.length - 2);
  return css(mix(stops[low], stops[low + 1], at - low));
}

// The color of a ratio to the usual: like the page at 1, orange up to 2 and more, blue below 1.
export function relative(ratio) {
  const scale = SCALES[theme()];
  const t = Math.log2(ratio);
  return t >= 0
    ? along([scale.middle, ...scale.slow], t)
    : along([scale.middle, ...scale.fast], -t);
}

// The color of a share of the maximum.
export const amount = (share) => along([SCALES[theme()].middle, ...SCALES[theme()].slow], share);

export function ramp(element, of) {
  const colors = Array.from({ length: 13 }, (_, i) => of(i / 12));
  element.style.background = `linear-gradient(90deg, ${colors.join(", ")})`;
}
