// The matrix of source and target ranks, with the load of each rank beside it.

function bins(ranks, room) {
  const least = Math.max(1, Math.ceil((ranks.length * CELL_MIN) / room));
  let width = least;
  while (ranks.length % width && width < 2 * least) width += 1;
  if (ranks.length % width) width = least;
  const found = [];
  for (let i = 0; i < ranks.length; i += width) found.push(ranks.slice(i, i + width));
  return found;
}

function measureMatrix(available) {
  const gutter = (side, ranks) => 30 + 7 * String(ranks.at(-1)).length + (side.axes.length > 1 ? 34 : 0);
  const left = gutter(source, state.rows);
  const top = target.axes.length > 1 ? 54 : 38;
  const bars = Math.max(84, Math.min(state.rows.length > 48 ? 130 : 190, available * 0.23));
  const roomX = Math.max(120, Math.min(available - left - bars - 12, 640));
  const tallest = state.rows.length > 32 ? clamp(1.1 * roomX, 300, 640) : 640;
  const rows = bins(state.rows, tallest);
  const columns = bins(state.columns, roomX);
  let cellH = Math.min(84, Math.max(Math.min(420, tallest) / rows.length, Math.min(20, tallest / rows.length)));
  const cellW = Math.min(roomX / columns.length, Math.max(cellH * 1.3, 78));
  cellH = Math.min(cellH, Math.max(2 * cellW, 30));
  const [width, height] = [cellW * columns.length, cellH * rows.length];
  return { left, top, bars, rows, columns, cellW, cellH, width, height, ...matrixCells(rows, columns) };
}

function matrixCells(rows, columns) {
  const rowOf = new Map(rows.flatMap((ranks, i) => ranks.map((rank) => [rank, i])));
  const columnOf = new Map(columns.flatMap((ranks, j) => ranks.map((rank) => [rank, j])));
  const cells = new Map();
  for (const pair of pairs.values()) {
    const [i, j] = [rowOf.get(pair.source), columnOf.get(pair.target)];
    if (i === undefined || j === undefined) continue;
    const key = `${i},${j}`;
    if (!cells.has(key)) cells.set(key, { i, j, bytes: 0, pairs: [] });
    cells.get(key).bytes += pair.bytes;
    cells.get(key).pairs.push(pair);
  }
  const most = [...cells.values()].reduce((high, cell) => Math.max(high, cell.bytes), 1);
  return { cells, most, columnOf };
}

function drawMatrix() {
  const available = find("pair").clientWidth;
  matrix = measureMatrix(available >= 900 ? available - 424 : available);
  const { left, top, width, height, bars } = matrix;
  const size = [left + width + 12 + bars, top + height + 112];
  matrix.picture = make("canvas");
  const ctx = context(matrix.picture, ...size);
  ctx.fillStyle = colour("empty");
  ctx.fillRect(left, top, width, height);
  drawCells(ctx);
  drawGroups(ctx);
  drawRankLabels(ctx);
  drawSourceBars(ctx);
  drawTargetBars(ctx);
  matrix.ctx = context(find("matrix"), ...size);
  markMatrix();
}

// The marks alone change while the pointer moves, so the picture under them is kept.
function markMatrix() {
  const { ctx, picture } = matrix;
  ctx.save();
  ctx.resetTransform();
  ctx.clearRect(0, 0, picture.width, picture.height);
  ctx.drawImage(picture, 0, 0);
  ctx.restore();
  drawMarks(ctx);
}

function drawCells(ctx) {
  const { left, top, cellW, cellH, cells, most } = matrix;
  const gap = Math.min(cellW, cellH) >= 8 ? 1 : 0;
  for (const cell of cells.values()) {
    const t = cell.bytes / most;
    ctx.fillStyle = heat(t);
    ctx.fillRect(left + cell.j * cellW, top + cell.i * cellH, cellW - gap, cellH - gap);
    const size = [14, 11].find(
      (each) => cellH >= 2.6 * each - 14 && textWidth(ctx, bytesText(cell.bytes), each) + 8 <= cellW,
    );
    if (size)
      write(ctx, bytesText(cell.bytes), left + (cell.j + 0.5) * cellW, top + (cell.i + 0.5) * cellH, {
        align: "center",
        ink: heatInk(t),
        size,
      });
  }
}

function runs(side, depth, ranks) {
  const found = [];
  ranks.forEach((bin, i) => {
    const key = side.axes
      .slice(0, depth + 1)
      .map((axis) => indexOn(axis, bin[0]))
      .join();
    if (!found.length || found.at(-1).key !== key)
      found.push({ key, start: i, stop: i, name: `${side.axes[depth].name}${indexOn(side.axes[depth], bin[0])}` });
    found.at(-1).stop = i + 1;
  });
  return found;
}

function drawGroups(ctx) {
  const { left, top, cellW, cellH, width, height, rows, columns } = matrix;
  ctx.fillStyle = colour("quiet");
  for (let depth = 0; depth < source.axes.length - 1; depth += 1) {
    const found = runs(source, depth, rows);
    ctx.globalAlpha = depth ? 0.2 : 0.5;
    for (const { start } of found.slice(1))
      ctx.fillRect(left - (depth ? 0 : 34), top + start * cellH - 0.75, width + (depth ? 0 : 34), 0.5);
  }
  for (let depth = 0; depth < target.axes.length - 1; depth += 1) {
    const found = runs(target, depth, columns);
    ctx.globalAlpha = depth ? 0.2 : 0.5;
    for (const { start } of found.slice(1))
      ctx.fillRect(left + start * cellW - 0.75, top - (depth ? 0 : 34), 0.5, height + (depth ? 0 : 34));
  }
  ctx.globalAlpha = 1;
}

function labelStep(cell, room) {
  let step = 1;
  while (step * cell < room) step *= 2;
  return step;
}

function drawRankLabels(ctx) {
  const { left, top, cellW, cellH, rows, columns, width, height } = matrix;
  const [rowStep, columnStep] = [labelStep(cellH, 13), labelStep(cellW, 10 + 7 * String(columns.at(-1)[0]).length)];
  rows.forEach((bin, i) => {
    if (i % rowStep === 0)
      write(ctx, bin[0], left - 8, top + (i + (rowStep > 1 ? 0 : 0.5)) * cellH + (rowStep > 1 ? 4 : 0), {
        align: "right",
      });
  });
  columns.forEach((bin, j) => {
    if (j % columnStep === 0) write(ctx, bin[0], left + (j + 0.5) * cellW, top - 12, { align: "center" });
  });
  write(ctx, "target rank", left, 8, { ink: "ink" });
  ctx.save();
  ctx.translate(7, top);
  ctx.rotate(-Math.PI / 2);
  write(ctx, "source rank", 0, 0, { align: "right", ink: "ink" });
  ctx.restore();
  drawRunNames(
    ctx,
    source.axes.length > 1 ? runs(source, 0, rows) : [],
    target.axes.length > 1 ? runs(target, 0, columns) : [],
  );
}

function drawRunNames(ctx, rowRuns, columnRuns) {
  const { left, top, cellW, cellH, rows } = matrix;
  const x = left - 16 - 7 * String(rows.at(-1).at(-1)).length;
  for (const { start, stop, name } of rowRuns) {
    if ((stop - start) * cellH >= 13) write(ctx, name, x, top + ((start + stop) / 2) * cellH, { align: "right" });
  }
  for (const { start, stop, name } of columnRuns) {
    if ((stop - start) * cellW >= 28)
      write(ctx, name, left + ((start + stop) / 2) * cellW, top - 28, { align: "center" });
  }
}

function largest(side, bin) {
  return bin.reduce((high, rank) => Math.max(high, side.loads[rank]), 0);
}

function drawSourceBars(ctx) {
  const { left, top, width, rows, cellH, bars, height } = matrix;
  const [x, most, isRoomy] = [
    left + width + 12,
    rows.reduce((high, bin) => Math.max(high, largest(source, bin)), 1),
    cellH >= 12,
  ];
  const long = bars - (isRoomy ? 66 : 14);
  write(ctx, rows[0].length > 1 ? `sends (most of ${rows[0].length})` : "sends", x, top - 12, { ink: "ink" });
  rows.forEach((bin, i) => {
    const load = largest(source, bin);
    const thick = Math.min(cellH + (cellH >= 6 ? -2 : 0.5), 18);
    ctx.fillStyle = colour(cellH >= 6 ? "bar" : "profile");
    ctx.fillRect(x, top + (i + 0.5) * cellH - thick / 2, (load / most) * long, thick);
    if (isRoomy && load)
      write(ctx, bytesText(load), x + (load / most) * long + 5, top + (i + 0.5) * cellH, { ink: "ink" });
    drawIdle(ctx, x, top + (i + 0.5) * cellH, bin.filter((rank) => idle.has(rank)).length / bin.length);
  });
  if (!isRoomy) write(ctx, bytesText(most), x + long, top + height + 10, { align: "right" });
}

function drawIdle(ctx, x, y, share) {
  if (!share) return;
  if (matrix.cellH >= 12) {
    write(ctx, "idle", x, y, { ink: "warm" });
    return;
  }
  ctx.fillStyle = colour("warm");
  ctx.globalAlpha = share ** 2;
  ctx.fillRect(x - 9, y - matrix.cellH / 2, 5, Math.max(matrix.cellH - 1, 1.5));
  ctx.globalAlpha = 1;
}

function drawTargetBars(ctx) {
  const { left, top, height, columns, cellW } = matrix;
  const [y, most, isRoomy] = [
    top + height + 12,
    columns.reduce((high, bin) => Math.max(high, largest(target, bin)), 1),
    cellW >= 54,
  ];
  write(ctx, "gets", left - 8, y + 8, { align: "right", ink: "ink" });
  if (columns[0].length > 1) write(ctx, `(most of ${columns[0].length})`, left - 8, y + 22, { align: "right" });
  columns.forEach((bin, j) => {
    const load = largest(target, bin);
    const thick = Math.min(cellW + (cellW >= 6 ? -2 : 0.5), 40);
    ctx.fillStyle = colour(cellW >= 6 ? "bar" : "profile");
    ctx.fillRect(left + (j + 0.5) * cellW - thick / 2, y, thick, (load / most) * 74);
    if (isRoomy)
      write(ctx, bytesText(load), left + (j + 0.5) * cellW, y + (load / most) * 74 + 10, {
        align: "center",
        ink: "ink",
      });
  });
  if (!isRoomy) write(ctx, bytesText(most), left + cellW * columns.length + 5, y + 70);
}

function drawMarks(ctx) {
  const { left, top, cellW, cellH, columnOf, height, width } = matrix;
  const chosen = columnOf.get(state.target);
  if (chosen !== undefined)
    write(ctx, "▾", left + (chosen + 0.5) * cellW, top - 3, { align: "center", ink: "ink", size: 10 });
  if (state.drag) return drawBox(ctx, dragBox());
  if (!state.cell) return undefined;
  const { i, j } = state.cell;
  return drawBox(ctx, {
    i0: i ?? 0,
    i1: i === null ? height / cellH : i + 1,
    j0: j ?? 0,
    j1: j === null ? width / cellW : j + 1,
  });
}

function drawBox(ctx, { i0, i1, j0, j1 }) {
  const { left, top, cellW, cellH } = matrix;
  const grow = Math.min(cellW, cellH) < 8 ? 2 : 0;
  ctx.strokeStyle = colour("ink");
  ctx.lineWidth = 1.5;
  ctx.strokeRect(
    left + j0 * cellW - grow,
    top + i0 * cellH - grow,
    (j1 - j0) * cellW + 2 * grow,
    (i1 - i0) * cellH + 2 * grow,
  );
}

function drawScale() {
  const [rows, columns] = [matrix.rows[0].length, matrix.columns[0].length];
  const what =
    rows * columns > 1
      ? `Bytes in a cell of ${rows} source by ${columns} target ranks`
      : "Bytes from one rank to another";
  const stops = [...Array(9).keys()].map((i) => heat(i / 8)).join(", ");
  const ramp = make("div", { className: "ramp" });
  ramp.style.background = `linear-gradient(to right, ${stops})`;
  const ticks = make(
    "div",
    { className: "ticks" },
    ...[0, 0.5, 1].map((t) => make("span", {}, t ? bytesText(matrix.most * t) : "0")),
  );
  find("scale").hidden = !matrix.cells.size;
  find("scale").replaceChildren(make("div", { className: "note" }, what), ramp, ticks);
}

function describeMatrix() {
  const canvas = find("matrix");
  const size = `${plural(state.rows.length, "source rank")} by ${plural(state.columns.length, "target rank")}`;
  canvas.setAttribute("aria-label", `Matrix of bytes, ${size}. Arrow keys move, Enter chooses the target.`);
  canvas.dataset.rows = state.rows.length;
  canvas.dataset.columns = state.columns.length;
  const bySource = new Map(state.rows.map((rank) => [rank, []]));
  for (const pair of pairs.values()) bySource.get(pair.source)?.push(pair);
  const rows = [...bySource].map(([rank, sent]) => {
    const cells = sent
      .slice(0, 16)
      .map((pair) =>
        make(
          "td",
          { "data-target": pair.target, "data-bytes": pair.bytes },
          `target ${pair.target}: ${bytesText(pair.bytes)}`,
        ),
      );
    if (sent.length > 16) cells.push(make("td", {}, `and ${plural(sent.length - 16, "more target")}`));
    return make("tr", { "data-source": rank }, make("th", {}, `source ${rankText(source, rank)}`), ...cells);
  });
  canvas.replaceChildren(make("table", {}, make("tbody", {}, ...rows)));
}
