// The tokens of one layer and unit, in their order, coloured by source.

function drawSpot() {
  find("strip").replaceChildren();
  find("spot").textContent = "";
  if (!state.spot) return;
  const { panel, layer, unit } = state.spot;
  const block = panel.blocks.find((each) => holds(each.layers, layer) && holds(each.units, unit));
  const names = namesText(namesAt(panel, layer)) || "No component";
  const at = `${names}, layer ${layer}${panel.component.units ? `, unit ${unit}` : ""}`;
  find("spot").textContent = `${at}: ${block ? sharesText(block.parts) : "nothing comes."}`;
  if (block && block.parts[0].tokens !== null) drawStrip(block.parts);
}

function sharesText(parts) {
  if (parts[0].tokens === null) return `source ${parts[0].source} sends the state.`;
  const texts = parts.slice(0, 4).map(({ source: rank, tokens, share }) => {
    const percent = share < 1 ? ` (${shareText(share)})` : "";
    return `source ${rank} sends ${plural(numTokens(tokens), "token")}${percent}`;
  });
  return `${texts.join(", ")}${parts.length > 4 ? `, and ${parts.length - 4} more sources share the rest` : ""}.`;
}

// The whole prompt where its blocks can be seen, otherwise the stretch at its first sent token where they can.
function stripRange(parts, width) {
  const items = parts.flatMap((part) => report.token_sets[part.tokens]);
  const block = items.reduce((low, [start, stop, size]) => Math.min(low, size ?? stop - start), Infinity);
  if ((block * width) / report.tokens >= 3 || (parts.length + items.length === 2 && items[0].length === 2))
    return [0, report.tokens];
  const length = Math.min(report.tokens, Math.ceil((width * block) / 12));
  const first = Math.min(
    items.reduce((low, [start]) => Math.min(low, start), Infinity),
    report.tokens - length,
  );
  return [first, first + length];
}

function drawStrip(parts) {
  const width = find("strip").clientWidth;
  const range = stripRange(parts, width);
  const canvas = make("canvas", { role: "img", "aria-label": "Tokens in their order, coloured by source" });
  const isExcerpt = range[1] - range[0] < report.tokens;
  const ctx = context(canvas, width, isExcerpt ? 64 : 44);
  if (isExcerpt) drawOverview(ctx, parts, range, width);
  const scale = width / (range[1] - range[0]);
  ctx.fillStyle = colour("empty");
  ctx.fillRect(0, 0, width, 22);
  const held = Math.min(report.skip_tokens, range[1]) - range[0];
  ctx.fillStyle = colour("line");
  if (held > 0) ctx.fillRect(0, 0, held * scale, 22);
  for (const part of parts) {
    ctx.fillStyle = state.colours.get(part.source);
    for (const item of report.token_sets[part.tokens]) drawTokens(ctx, item, range, scale);
  }
  labelStrip(ctx, range, width);
  find("strip").append(canvas, stripKey(parts, range));
}

// The whole prompt in a thin line, the excerpt below it opened out.
function drawOverview(ctx, parts, [low, high], width) {
  const scale = width / report.tokens;
  const [first, last] = hull(parts.flatMap((part) => report.token_sets[part.tokens]));
  for (const [name, from, to] of [
    ["empty", 0, report.tokens],
    ["line", 0, report.skip_tokens],
    ["bar", first, last],
  ]) {
    ctx.fillStyle = colour(name);
    ctx.fillRect(from * scale, 0, (to - from) * scale, 5);
  }
  ctx.fillStyle = colour("empty");
  ctx.beginPath();
  for (const [x, y] of [
    [low * scale, 6],
    [Math.max(high * scale, low * scale + 1), 6],
    [width, 20],
    [0, 20],
  ])
    ctx.lineTo(x, y);
  ctx.fill();
  ctx.fillStyle = colour("ink");
  ctx.fillRect(low * scale, 0, Math.max((high - low) * scale, 1.5), 5);
  ctx.translate(0, 20);
}

function drawTokens(ctx, [start, stop, block, period], [low, high], scale) {
  const [size, step] = block ? [block, period] : [stop - start, stop - start];
  const skipped = Math.max(0, Math.floor((low - start) / step));
  for (let first = start + skipped * step; first < Math.min(stop, high); first += step) {
    const last = Math.min(first + size, stop, high);
    const from = Math.max(first, low);
    if (last > from)
      ctx.fillRect((from - low) * scale, 0, Math.max((last - from) * scale - (size * scale > 4 ? 0.5 : 0), 0.5), 22);
  }
}

function labelStrip(ctx, [low, high], width) {
  const rough = (high - low) / Math.max(2, width / 110);
  const step = 2 ** Math.ceil(Math.log2(rough));
  const first = Math.ceil(low / step) * step;
  for (let token = first; token < high; token += step) {
    const x = ((token - low) / (high - low)) * width;
    ctx.fillStyle = colour("quiet");
    ctx.fillRect(x, 22, 0.75, 5);
    if (x < width - 40) write(ctx, count(token), token === low ? x : x - 2, 35);
  }
}

function stripKey(parts, [low, high]) {
  const sent = parts.reduce((sum, part) => sum + numTokens(part.tokens), 0);
  const items = [
    high - low < report.tokens
      ? `tokens ${count(low)} to ${count(high - 1)} of ${count(report.tokens)}`
      : `all ${plural(report.tokens, "token")}`,
  ];
  const list = make("ul", { className: "key" }, make("li", { className: "quiet" }, ...items));
  if (report.skip_tokens) list.append(make("li", {}, make("span", { className: "swatch held" }), "held by the target"));
  if (sent + report.skip_tokens < report.tokens)
    list.append(make("li", {}, make("span", { className: "swatch absent" }), "not on this rank"));
  return list;
}
