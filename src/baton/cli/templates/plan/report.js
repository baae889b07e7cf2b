// What the report says.

function readSide(side, loads) {
  let stride = side.ranks;
  const axes = side.layout.split(".").map((text) => {
    const [, name, size] = text.match(/^([a-z]+)([0-9]+)/);
    stride /= Number(size);
    return { name, size: Number(size), stride };
  });
  const groups = axes.filter((axis) => axis.name === "dp");
  const ranks = [...Array(side.ranks).keys()].filter((rank) => groups.every((axis) => indexOn(axis, rank) === side.dp));
  return {
    ...side,
    ranks,
    loads,
    numRanks: side.ranks,
    numGroups: groups.length ? groups[0].size : 1,
    axes: axes.filter((axis) => axis.name !== "dp" && axis.size > 1),
  };
}

function indexOn(axis, rank) {
  return Math.floor(rank / axis.stride) % axis.size;
}

function place(side, rank) {
  return side.axes.map((axis) => `${axis.name}${indexOn(axis, rank)}`).join(" ");
}

function rankText(side, rank) {
  const where = side.axes.length > 1 ? ` (${place(side, rank)})` : "";
  return `${rank}${where}`;
}

function readPairs() {
  const found = new Map();
  for (const route of report.routes) {
    const key = `${route.source},${route.target}`;
    if (!found.has(key)) found.set(key, { source: route.source, target: route.target, bytes: 0, routes: [] });
    found.get(key).bytes += route.bytes;
    found.get(key).routes.push(route);
  }
  return found;
}

function numTokens(index) {
  if (index === null) return 1;
  return report.token_sets[index].reduce((sum, [start, stop, block, period]) => {
    const length = stop - start;
    return sum + (block ? Math.floor(length / period) * block + Math.min(length % period, block) : length);
  }, 0);
}

function alike(routes) {
  const rows = new Map();
  for (const route of routes) {
    const key = JSON.stringify([route.layers, route.units, route.tokens]);
    if (!rows.has(key)) rows.set(key, { ...route, names: [], bytes: 0 });
    rows.get(key).names.push(route.component);
    rows.get(key).bytes += route.bytes;
  }
  return [...rows.values()];
}
