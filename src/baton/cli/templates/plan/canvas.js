// Colours and text on a canvas.

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function isDark() {
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

function heat(t) {
  const [l0, l1, c0, c1] = isDark() ? [0.3, 0.76, 0.05, 0.11] : [0.92, 0.43, 0.03, 0.13];
  return `oklch(${l0 + t * (l1 - l0)} ${c0 + t * (c1 - c0)} ${255 - 8 * t})`;
}

function heatInk(t) {
  return t > (isDark() ? 0.5 : 0.6) ? colour("paper") : colour("ink");
}

function sourceColours(ranks) {
  const few = [
    [0.68, 250],
    [0.79, 75],
    [0.66, 160],
    [0.72, 350],
    [0.82, 115],
    [0.6, 290],
    [0.68, 40],
    [0.76, 205],
  ];
  return new Map(
    ranks.map((rank, i) => {
      const [lightness, hue] =
        ranks.length <= few.length ? few[i] : [0.62 + 0.07 * (i % 3), 250 + (330 * i) / ranks.length];
      return [rank, `oklch(${lightness - (isDark() ? 0.02 : 0)} 0.105 ${hue % 360})`];
    }),
  );
}

function context(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const ctx = canvas.getContext("2d");
  ctx.scale(ratio, ratio);
  ctx.textBaseline = "middle";
  return ctx;
}

function textWidth(ctx, text, size) {
  ctx.font = `${size}px ${colour("sans")}`;
  return ctx.measureText(text).width;
}

function write(ctx, text, x, y, { align = "left", ink = "quiet", size = 11 } = {}) {
  ctx.font = `${size}px ${colour("sans")}`;
  ctx.textAlign = align;
  ctx.fillStyle = ink.startsWith("#") || ink.startsWith("oklch") ? ink : colour(ink);
  ctx.fillText(text, x, y);
}
