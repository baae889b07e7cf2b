// What one target rank gets: layers by units, coloured by source.

function drawTarget() {
  const routes = report.routes.filter((route) => route.target === state.target);
  const sources = [...new Set(routes.map((route) => route.source))].sort((a, b) => a - b);
  state.colours = sourceColours(sources);
  drawKey(routes, sources);
  const groups = groupComponents(routes);
  panels = groups.slice(0, PANELS_MAX).map((group) => ({ ...group, blocks: blocksOf(group.routes) }));
  const layers = hull(panels.flatMap((panel) => panel.routes.flatMap((route) => route.layers)));
  panels.forEach((panel) => Object.assign(panel, { layers, units: hull(panel.routes.map(unitsOf)) }));
  find("panels").replaceChildren(...panels.map(makePanel));
  if (groups.length > PANELS_MAX)
    find("panels").append(
      make("p", { className: "note" }, `${groups.length - PANELS_MAX} more groups of components; choose one above.`),
    );
  const panel = panels.find((each) => each.routes[0].tokens !== null) ?? panels[0];
  setSpot(panel ? { panel, layer: panel.blocks[0].layers[0], unit: panel.blocks[0].units[0] } : null);
}

function unitsOf(route) {
  return route.units ?? [0, 1];
}

function hull(ranges) {
  return ranges.reduce(([low, high], [start, stop]) => [Math.min(low, start), Math.max(high, stop)], [Infinity, 0]);
}

function drawKey(routes, sources) {
  const total = routes.reduce((sum, route) => sum + route.bytes, 0);
  const held = report.skip_tokens ? ` It holds the first ${plural(report.skip_tokens, "token")} already.` : "";
  const who = `Target ${rankText(target, state.target)}`;
  find("gets").textContent = total
    ? `${who} gets ${bytesText(total)} in ${plural(routes.length, "route")} from ${plural(sources.length, "source")}.${held}`
    : `${who} gets nothing.${held}`;
  const sent = new Map();
  for (const route of routes) sent.set(route.source, (sent.get(route.source) ?? 0) + route.bytes);
  const isLong = sources.length > 16;
  find("key").classList.toggle("long", isLong);
  const items = sources.slice(0, KEY_MAX).map((rank) => {
    const swatch = make("span", { className: "swatch" });
    swatch.style.background = state.colours.get(rank);
    const load = `${bytesText(sent.get(rank))}, ${shareText(sent.get(rank) / total)}`;
    const item = make("li", { "data-source": rank, title: load }, swatch, `source ${rankText(source, rank)}`);
    if (!isLong) item.append(make("span", { className: "quiet" }, load));
    return item;
  });
  if (sources.length > KEY_MAX) items.push(make("li", {}, `and ${sources.length - KEY_MAX} more`));
  find("key").replaceChildren(...items);
}

// Components that come from the same places share a panel, and so do those of one shape on different layers.
function groupComponents(routes) {
  const groups = new Map();
  for (const component of report.components) {
    const own = routes.filter((route) => route.component === component.name);
    if (!own.length || ![ALL, component.name].includes(state.component)) continue;
    const key = JSON.stringify([
      component.units,
      own.map((route) => [route.source, route.layers, route.units, route.tokens]),
    ]);
    if (!groups.has(key)) groups.set(key, { members: [], component, routes: own });
    groups.get(key).members.push(component);
  }
  return stacked([...groups.values()].sort((a, b) => a.component.layers[0][0] - b.component.layers[0][0]));
}

function stacked(groups) {
  const stacks = [];
  for (const group of groups) {
    const below = stacks.find(
      (stack) =>
        shapeOf(stack) === shapeOf(group) &&
        stack.members.every((old) => group.members.every((member) => !overlap(old.layers, member.layers))),
    );
    if (!below) {
      stacks.push(group);
      continue;
    }
    below.members.push(...group.members);
    below.routes = [...below.routes, ...group.routes];
  }
  return stacks;
}

function shapeOf({ component, routes }) {
  return JSON.stringify([component.units, component.window, routes[0].tokens === null]);
}

function overlap(left, right) {
  return left.some(([start, stop]) => right.some(([low, high]) => start < high && low < stop));
}

function namesAt(panel, layer) {
  return panel.members.filter(({ layers }) => layers.some((range) => holds(range, layer))).map(({ name }) => name);
}

function cuts(ranges) {
  const points = [...new Set(ranges.flat())].sort((a, b) => a - b);
  return points.slice(1).map((stop, i) => [points[i], stop]);
}

function holds([start, stop], at) {
  return start <= at && at < stop;
}

// Boxes of layers by units inside which nothing changes, each with the routes that share it by tokens.
function blocksOf(routes) {
  const blocks = [];
  for (const layers of cuts(routes.flatMap((route) => route.layers))) {
    const here = routes.filter((route) => route.layers.some((range) => holds(range, layers[0])));
    for (const units of cuts(here.map(unitsOf))) {
      const own = here.filter((route) => holds(unitsOf(route), units[0]));
      if (own.length) blocks.push({ layers, units, parts: partsOf(own) });
    }
  }
  return blocks;
}

function partsOf(routes) {
  const total = routes.reduce((sum, route) => sum + numTokens(route.tokens), 0);
  return routes.map((route) => ({
    source: route.source,
    tokens: route.tokens,
    share: numTokens(route.tokens) / total,
  }));
}

function makePanel(panel) {
  const { component, layers, units } = panel;
  const names = panel.members.map(({ name }) => name);
  const tall = hull(report.components.flatMap((each) => each.layers))[1];
  const wide = component.units ?? 1;
  const box = make("i");
  Object.assign(box.style, {
    left: `${(100 * units[0]) / wide}%`,
    width: `${(100 * (units[1] - units[0])) / wide}%`,
    top: `${(100 * layers[0]) / tall}%`,
    height: `${(100 * (layers[1] - layers[0])) / tall}%`,
  });
  const own = rangesText(mergedLayers(panel));
  const where = component.units ? `units ${rangeText(units)} of ${component.units}` : "no units";
  const what = component.window
    ? `, last ${plural(component.window, "token")}`
    : panel.routes[0].tokens === null
      ? ", state without tokens"
      : "";
  panel.canvas = make("canvas", {
    tabIndex: 0,
    role: "application",
    "aria-label": `${namesText(names)}: layers by units, by source. Arrow keys move.`,
  });
  panel.canvas.dataset.component = names.join(" ");
  panel.canvas.append(describePanel(panel));
  listenToPanel(panel);
  const title = make(
    "span",
    {},
    make("strong", {}, namesText(names)),
    make("span", { className: "quiet" }, `layers ${own}, ${where}${what}`),
  );
  return make(
    "figure",
    {},
    make(
      "figcaption",
      {},
      make("span", { className: "locator", title: `Where this lies among ${tall} layers and ${wide} units` }, box),
      title,
    ),
    panel.canvas,
  );
}

function mergedLayers(panel) {
  const merged = [];
  for (const { layers } of panel.blocks) {
    if (merged.length && merged.at(-1)[1] >= layers[0]) merged.at(-1)[1] = Math.max(merged.at(-1)[1], layers[1]);
    else merged.push([...layers]);
  }
  return merged;
}

function describePanel({ blocks }) {
  const rows = blocks
    .slice(0, 400)
    .flatMap(({ layers, units, parts }) =>
      parts.map(({ source: rank, share }) =>
        make(
          "tr",
          { "data-source": rank, "data-layers": layers.join(), "data-units": units.join(), "data-share": share },
          make("td", {}, `layers ${rangeText(layers)}, units ${rangeText(units)}: source ${rank}, ${shareText(share)}`),
        ),
      ),
    );
  return make("table", {}, make("tbody", {}, ...rows));
}

function measurePanel(panel) {
  const { layers, units, blocks } = panel;
  const room = find("share").clientWidth - 44;
  const [numLayers, numUnits] = [layers[1] - layers[0], units[1] - units[0]];
  const most = blocks.reduce((high, { parts }) => Math.max(high, parts.length), 1);
  const wish = numUnits * Math.max(56, most * 62);
  const width = Math.min(room, clamp(wish, 180, panels.length > 1 ? 400 : 720));
  const height = clamp(numLayers * 26, 44, 460);
  return {
    left: 40,
    top: panel.component.units ? 34 : 16,
    width,
    height,
    unitW: width / numUnits,
    layerH: height / numLayers,
  };
}

function drawPanel(panel) {
  panel.shape = measurePanel(panel);
  const { left, top, width, height } = panel.shape;
  const ctx = context(panel.canvas, left + width + 2, top + height + 2);
  ctx.fillStyle = colour("empty");
  ctx.fillRect(left, top, width, height);
  for (const block of panel.blocks) drawBlock(ctx, panel, block);
  drawHairlines(ctx, panel);
  labelBlocks(ctx, panel);
  drawPanelLabels(ctx, panel);
  if (state.spot?.panel === panel) drawSpotBox(ctx, panel);
}

function slices(panel, block) {
  const { left, unitW } = panel.shape;
  const [first, last] = block.units;
  if (block.parts.length === 1)
    return [{ x: left + (first - panel.units[0]) * unitW, width: (last - first) * unitW, part: block.parts[0] }];
  const step = Math.ceil(4 / unitW);
  const found = [];
  for (let unit = first; unit < last; unit += step) {
    const wide = Math.min(step, last - unit) * unitW;
    let x = left + (unit - panel.units[0]) * unitW;
    for (const part of block.parts) {
      found.push({ x, width: part.share * wide, part });
      x += part.share * wide;
    }
  }
  return found;
}

function drawBlock(ctx, panel, block) {
  const { top, layerH } = panel.shape;
  for (const { x, width, part } of slices(panel, block)) {
    ctx.fillStyle = state.colours.get(part.source);
    ctx.fillRect(x, top + (block.layers[0] - panel.layers[0]) * layerH, width, blockHeight(panel, block));
  }
}

function blockHeight(panel, { layers }) {
  return (layers[1] - layers[0]) * panel.shape.layerH;
}

// A block that looks like the one above it goes without a label.
function labelBlocks(ctx, panel) {
  const above = new Map();
  for (const block of panel.blocks) {
    const key = JSON.stringify(block.parts);
    if (above.get(block.units.join()) === key || blockHeight(panel, block) < 13) continue;
    labelBlock(ctx, panel, block);
    above.set(block.units.join(), key);
  }
}

function labelBlock(ctx, panel, block) {
  const { top, layerH } = panel.shape;
  const y = top + (block.layers[0] - panel.layers[0]) * layerH + blockHeight(panel, block) / 2;
  const found = slices(panel, block);
  const words = [
    (part) => (part.share < 1 ? `${part.source}: ${shareText(part.share)}` : `source ${part.source}`),
    (part) => `${part.source}`,
  ];
  const word = words.find((each) => found.every(({ width, part }) => textWidth(ctx, each(part), 11) + 4 <= width));
  for (const { x, width, part } of word ? found : []) {
    const text = word(part);
    const wide = textWidth(ctx, text, 11) + 4;
    ctx.fillStyle = state.colours.get(part.source);
    ctx.fillRect(x + (width - wide) / 2, y - 7, wide, 14);
    write(ctx, text, x + width / 2, y, { align: "center", ink: "#16181c", size: 11 });
  }
}

function drawHairlines(ctx, panel) {
  const { left, top, width, height, unitW, layerH } = panel.shape;
  ctx.fillStyle = colour("paper");
  ctx.globalAlpha = layerH >= 9 ? 0.7 : 0.35;
  if (layerH >= 6) for (let y = layerH; y < height - 0.5; y += layerH) ctx.fillRect(left, top + y - 0.5, width, 0.75);
  ctx.globalAlpha = 1;
  if (unitW >= 6) for (let x = unitW; x < width - 0.5; x += unitW) ctx.fillRect(left + x - 1, top, 2, height);
}

function drawPanelLabels(ctx, panel) {
  const { left, top, unitW, layerH, height } = panel.shape;
  const [layerStep, unitStep] = [labelStep(layerH, 13), labelStep(unitW, 10 + 7 * String(panel.units[1]).length)];
  for (
    let layer = panel.layers[0];
    layer < panel.layers[1] && (layer - panel.layers[0]) * layerH < height - 6;
    layer += layerStep
  ) {
    write(ctx, layer, left - 6, top + (layer - panel.layers[0]) * layerH + Math.max(layerH / 2, 5), { align: "right" });
  }
  ctx.save();
  ctx.translate(6, top);
  ctx.rotate(-Math.PI / 2);
  write(ctx, "layer", 0, 0, { align: "right", ink: "ink" });
  ctx.restore();
  if (!panel.component.units) return;
  write(ctx, "unit", left, 6, { ink: "ink" });
  for (let unit = panel.units[0]; unit < panel.units[1]; unit += unitStep) {
    write(ctx, unit, left + (unit - panel.units[0] + 0.5) * unitW, top - 10, { align: "center" });
  }
}

function drawSpotBox(ctx, panel) {
  const { left, top, unitW, layerH } = panel.shape;
  ctx.strokeStyle = colour("ink");
  ctx.lineWidth = 1.5;
  ctx.strokeRect(
    left + (state.spot.unit - panel.units[0]) * unitW,
    top + (state.spot.layer - panel.layers[0]) * layerH,
    Math.max(unitW, 3),
    Math.max(layerH, 3),
  );
}

function listenToPanel(panel) {
  panel.canvas.addEventListener("pointermove", (event) => {
    const box = panel.canvas.getBoundingClientRect();
    const { left, top, unitW, layerH } = panel.shape;
    moveSpot(
      panel,
      Math.floor((event.clientY - box.top - top) / layerH),
      Math.floor((event.clientX - box.left - left) / unitW),
    );
  });
  panel.canvas.addEventListener("keydown", (event) => {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!move) return;
    const at = state.spot?.panel === panel ? state.spot : { layer: panel.layers[0], unit: panel.units[0] };
    moveSpot(panel, at.layer - panel.layers[0] + move[0], at.unit - panel.units[0] + move[1]);
    event.preventDefault();
  });
}

function moveSpot(panel, row, column) {
  const spot = { panel, layer: panel.layers[0] + row, unit: panel.units[0] + column };
  if (!holds(panel.layers, spot.layer) || !holds(panel.units, spot.unit)) return;
  const { spot: old } = state;
  if (!old || old.panel !== panel || old.layer !== spot.layer || old.unit !== spot.unit) setSpot(spot);
}

function setSpot(spot) {
  state.spot = spot;
  panels.forEach(drawPanel);
  drawSpot();
}
