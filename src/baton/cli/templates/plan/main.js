// The page's state, and its start.

const CELL_MIN = 3;
const ROUTES_MAX = 200;
const PANELS_MAX = 8;
const KEY_MAX = 64;
const ALL = "";

const report = JSON.parse(find("report").textContent);
const source = readSide(report.source, report.bytes.by_source);
const target = readSide(report.target, report.bytes.by_target);
const idle = new Set(report.idle_sources);
const pairs = readPairs();
const state = {
  rows: source.ranks,
  columns: target.ranks,
  cell: null,
  drag: null,
  target: target.ranks[0],
  component: ALL,
  spot: null,
  colours: new Map(),
};
let matrix = null;
let panels = [];

function chooseTarget(rank) {
  state.target = rank;
  find("target").value = rank;
  markMatrix();
  drawTarget();
}

function chooseComponent(name) {
  state.component = name;
  find("component").value = name;
  drawTarget();
}

function fillChoices() {
  find("target").append(...target.ranks.map((rank) => make("option", { value: rank }, rankText(target, rank))));
  find("target").addEventListener("change", (event) => chooseTarget(Number(event.target.value)));
  find("component").append(
    make("option", { value: ALL }, "all"),
    ...report.components.map(({ name }) => make("option", { value: name }, name)),
  );
  find("component").addEventListener("change", (event) => chooseComponent(event.target.value));
}

// A link such as plan.html#target=3&component=k opens the page there.
function readAddress() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  const rank = Number(wanted.get("target") ?? target.ranks[0]);
  if (report.components.some(({ name }) => name === wanted.get("component"))) chooseComponent(wanted.get("component"));
  if (target.ranks.includes(rank)) chooseTarget(rank);
}

function fit() {
  if (state.width === document.body.clientWidth) return;
  state.width = document.body.clientWidth;
  redraw();
}

function redraw() {
  drawMatrix();
  drawScale();
  drawTarget();
}

function start() {
  state.width = document.body.clientWidth;
  drawHeader();
  drawLoadText();
  fillChoices();
  listenToMatrix();
  look(source.ranks, target.ranks);
  drawTarget();
  drawTables();
  find("tokens").classList.toggle("tokens", report.token_sets.length > 0);
  readAddress();
  window.addEventListener("hashchange", readAddress);
  window.addEventListener("resize", fit);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  document.documentElement.dataset.drawn = "yes";
}

start();
