// The same in tables.

function drawTables() {
  const sent = new Map();
  for (const route of report.routes) sent.set(route.component, (sent.get(route.component) ?? 0) + route.bytes);
  const stateful = new Set(report.routes.filter((route) => route.tokens === null).map((route) => route.component));
  find("components").replaceChildren(
    table(
      ["component", "layers", "units", "window", "one unit", "per", "bytes sent"],
      report.components.map((part) => [
        part.name,
        rangesText(part.layers),
        part.units === null ? "none" : count(part.units),
        part.window === null ? "none" : plural(part.window, "token"),
        bytesText(part.bytes_per_unit),
        stateful.has(part.name) ? "layer" : "layer and token",
        bytesText(sent.get(part.name) ?? 0),
      ]),
      [6],
    ),
  );
  drawRoutes();
}

function drawRoutes() {
  const { routes } = report;
  find("routes-title").textContent =
    routes.length > ROUTES_MAX
      ? `Routes: the first ${ROUTES_MAX} of ${count(routes.length)}`
      : `Routes: ${routes.length ? `all ${count(routes.length)}` : "none"}`;
  const rows = routes
    .slice(0, ROUTES_MAX)
    .map((route) => [
      `${route.source}`,
      `${route.target}`,
      route.component,
      rangesText(route.layers),
      unitsText(route.units),
      tokensText(route.tokens),
      bytesText(route.bytes),
    ]);
  find("routes").replaceChildren(
    table(["source", "target", "component", "layers", "units", "tokens", "bytes"], rows, [6]),
  );
  if (routes.length > ROUTES_MAX)
    find("routes").append(make("p", { className: "note" }, "baton plan --json lists them all."));
}
