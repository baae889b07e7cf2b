// The header.

function drawHeader() {
  const { tokens, skip_tokens: held, bytes, routes, copies } = report;
  find("model").textContent = report.model;
  find("between").append(endText(source), make("span", { className: "arrow" }, "→"), endText(target));
  const packed = copies.packed_pairs ? `, ${plural(copies.packed_pairs, "pair")} packed` : "";
  const facts = [
    ["Bytes", bytesText(bytes.total), `${count(bytes.total)} in all`],
    ["Tokens", count(tokens), held ? `the target holds the first ${count(held)}` : "none held by the target"],
    ["Routes", count(routes.length), `between ${plural(pairs.size, "pair")} of ranks`],
    ["Copies", count(copies.count), `median ${bytesText(copies.bytes_median)}${packed}`],
    ["Idle sources", count(idle.size), `of ${plural(source.ranks.length, "rank")}`],
  ];
  for (const [name, figure, note] of facts) {
    find("facts").append(
      make("div", {}, make("dt", {}, name), make("dd", { className: "figure" }, figure), make("dd", {}, note)),
    );
  }
}

function endText(side) {
  const group = side.numGroups > 1 ? `, dp group ${side.dp} of ${side.numGroups}` : "";
  return make(
    "span",
    { className: "end" },
    side.layout,
    " ",
    make("small", {}, `${plural(side.numRanks, "rank")}, page ${side.page}${group}`),
  );
}

function loadText(side, noun, verb) {
  const loads = side.ranks.map((rank) => side.loads[rank]);
  const [low, high] = [loads.reduce((a, b) => Math.min(a, b)), loads.reduce((a, b) => Math.max(a, b))];
  if (low === high) return `${loads.length === 1 ? `The ${noun}` : `Each ${noun}`} ${verb}s ${bytesText(high)}.`;
  const mean = loads.reduce((a, b) => a + b) / loads.length;
  return `A ${noun} ${verb}s ${bytesText(low)} to ${bytesText(high)}, ${bytesText(mean)} on average.`;
}

function drawLoadText() {
  if (!report.bytes.total) {
    find("load").textContent = "Nothing is sent: the target holds everything already.";
    return;
  }
  const words = [loadText(source, "source", "send"), loadText(target, "target", "get")];
  words.push(idle.size ? `Idle sources: ${ranksText(report.idle_sources)}.` : "No source is idle.");
  if (source.numGroups > 1 || target.numGroups > 1)
    words.push("Ranks of the other dp groups take no part and are left out.");
  find("load").textContent = words.join(" ");
}
