// What the pointer and the keys do on the matrix, and what is read out.

function cellAt(event) {
  const { left, top, cellW, cellH, rows, columns } = matrix;
  const box = find("matrix").getBoundingClientRect();
  const [i, j] = [
    Math.floor((event.clientY - box.top - top) / cellH),
    Math.floor((event.clientX - box.left - left) / cellW),
  ];
  const [row, column] = [i >= 0 && i < rows.length ? i : null, j >= 0 && j < columns.length ? j : null];
  return row === null && column === null ? null : { i: row, j: column };
}

function setCell(cell) {
  if (!cell || (state.cell && state.cell.i === cell.i && state.cell.j === cell.j)) return;
  state.cell = cell;
  markMatrix();
  drawReadout();
}

function dragBox() {
  const [a, b] = [state.drag, state.cell];
  return { i0: Math.min(a.i, b.i), i1: Math.max(a.i, b.i) + 1, j0: Math.min(a.j, b.j), j1: Math.max(a.j, b.j) + 1 };
}

function look(rows, columns) {
  Object.assign(state, { rows, columns, cell: null, drag: null });
  find("whole").hidden = rows.length === source.ranks.length && columns.length === target.ranks.length;
  drawMatrix();
  drawScale();
  describeMatrix();
  setCell(firstCell());
}

function firstCell() {
  const first = matrix.cells.values().next().value;
  return first ? { i: first.i, j: first.j } : { i: 0, j: 0 };
}

function lookAround({ i, j }) {
  const slice = (found, at) =>
    found.slice(Math.max(0, at - Math.ceil(found.length / 8)), at + Math.ceil(found.length / 8) + 1).flat();
  look(slice(matrix.rows, i ?? 0), slice(matrix.columns, j ?? 0));
}

function endDrag() {
  const box = state.drag ? dragBox() : null;
  state.drag = null;
  if (!box) return;
  if (box.i1 - box.i0 > 1 || box.j1 - box.j0 > 1)
    look(matrix.rows.slice(box.i0, box.i1).flat(), matrix.columns.slice(box.j0, box.j1).flat());
  else chooseTarget(matrix.columns[state.cell.j][0]);
}

function onMatrixKey(event) {
  const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  const cell = { i: state.cell?.i ?? 0, j: state.cell?.j ?? 0 };
  if (moves[event.key]) {
    const [di, dj] = moves[event.key];
    setCell({ i: clamp(cell.i + di, 0, matrix.rows.length - 1), j: clamp(cell.j + dj, 0, matrix.columns.length - 1) });
  } else if (event.key === "Enter") chooseTarget(matrix.columns[cell.j][0]);
  else if (event.key === "+") lookAround(cell);
  else if (event.key === "-" || event.key === "Escape") look(source.ranks, target.ranks);
  else return;
  event.preventDefault();
}

function clamp(value, low, high) {
  return Math.max(low, Math.min(high, value));
}

function listenToMatrix() {
  const canvas = find("matrix");
  canvas.addEventListener("pointermove", (event) => {
    const cell = cellAt(event);
    if (!state.drag || (cell && cell.i !== null && cell.j !== null)) setCell(cell);
  });
  canvas.addEventListener("pointerdown", (event) => {
    const cell = cellAt(event);
    if (!cell || cell.j === null) return;
    setCell(cell);
    if (cell.i === null || event.pointerType !== "mouse") chooseTarget(matrix.columns[cell.j][0]);
    else state.drag = cell;
  });
  window.addEventListener("pointerup", endDrag);
  canvas.addEventListener("keydown", onMatrixKey);
  find("whole").addEventListener("click", () => look(source.ranks, target.ranks));
  const isLarge = source.ranks.length * target.ranks.length > 64;
  find("hint").textContent =
    "Point at a cell to read it, click to choose its target below." +
    (isLarge ? " Drag a box (or press +) to look closer, Escape for the whole." : "");
}

function drawReadout() {
  const { i, j } = state.cell;
  if (i === null) return drawRankReadout(target, "target", matrix.columns[j]);
  if (j === null) return drawRankReadout(source, "source", matrix.rows[i]);
  const cell = matrix.cells.get(`${i},${j}`);
  const [rows, columns] = [matrix.rows[i], matrix.columns[j]];
  if (rows.length * columns.length > 1 && cell?.pairs.length !== 1) return drawManyReadout(rows, columns, cell);
  const [from, to] = [cell?.pairs[0].source ?? rows[0], cell?.pairs[0].target ?? columns[0]];
  const title = `Source ${rankText(source, from)} → target ${rankText(target, to)}`;
  if (!cell) return fillReadout(title, [make("p", { className: "quiet" }, "Nothing goes between these two.")]);
  const found = alike(cell.pairs[0].routes);
  const body = found
    .slice(0, 12)
    .map((row) => [
      namesText(row.names),
      rangesText(row.layers),
      unitsText(row.units),
      tokensText(row.tokens),
      bytesText(row.bytes),
    ]);
  const parts = [
    make("p", {}, `${bytesText(cell.bytes)} in ${plural(cell.pairs[0].routes.length, "route")}.`),
    make("div", { className: "scroll" }, table(["component", "layers", "units", "tokens", "bytes"], body, [4])),
  ];
  if (found.length > 12) parts.push(make("p", { className: "note" }, `and ${found.length - 12} more`));
  return fillReadout(title, parts);
}

function drawManyReadout(rows, columns, cell) {
  const title = capital(`${sideText("source", source, rows)} → ${sideText("target", target, columns)}`);
  if (!cell) return fillReadout(title, [make("p", { className: "quiet" }, "Nothing goes between these.")]);
  return fillReadout(title, [
    make("p", {}, `${bytesText(cell.bytes)} between ${plural(cell.pairs.length, "pair")} of ranks.`),
    ...pairsTable(cell.pairs),
  ]);
}

function drawRankReadout(side, noun, ranks) {
  const own = [...pairs.values()].filter((pair) => ranks.includes(pair[noun]));
  const total = bytesText(ranks.reduce((sum, rank) => sum + side.loads[rank], 0));
  const words = `${noun === "source" ? "Sent" : "Got"}${ranks.length > 1 ? " together" : ""}: ${total}.`;
  return fillReadout(capital(sideText(noun, side, ranks)), [
    make("p", {}, words),
    ...(own.length ? pairsTable(own) : []),
  ]);
}

function pairsTable(found) {
  const body = found
    .slice(0, 8)
    .map((pair) => [rankText(source, pair.source), rankText(target, pair.target), bytesText(pair.bytes)]);
  const more = found.length > 8 ? [make("p", { className: "note" }, `and ${count(found.length - 8)} more pairs`)] : [];
  return [make("div", { className: "scroll" }, table(["source", "target", "bytes"], body, [2])), ...more];
}

function fillReadout(title, parts) {
  find("readout").replaceChildren(make("h3", {}, title), ...parts);
}
