// Elements and words.

function find(id) {
  return document.getElementById(id);
}

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function count(n) {
  return n.toLocaleString("en-US");
}

function plural(n, word) {
  return `${count(n)} ${word}${n === 1 ? "" : "s"}`;
}

function bytesText(n) {
  const names = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let i = 0;
  while (n >= 1024 && i < names.length - 1) {
    n /= 1024;
    i += 1;
  }
  return `${Number(n.toPrecision(4))} ${names[i]}`;
}

function shareText(share) {
  return `${Number((100 * share).toPrecision(3))}%`;
}

function rangeText([start, stop]) {
  return stop - start === 1 ? `${start}` : `${start}–${stop - 1}`;
}

function rangesText(ranges) {
  if (ranges.length <= 4) return ranges.map(rangeText).join(", ");
  const total = ranges.reduce((sum, [start, stop]) => sum + stop - start, 0);
  return `${total} of ${ranges[0][0]}–${ranges.at(-1)[1] - 1}`;
}

function ranksText(ranks) {
  const ranges = [];
  for (const rank of ranks) {
    if (ranges.length && ranges.at(-1)[1] === rank) ranges.at(-1)[1] += 1;
    else ranges.push([rank, rank + 1]);
  }
  const shown = ranges.slice(0, 8).map(rangeText).join(", ");
  return ranges.length > 8 ? `${shown} and more` : shown;
}

function tokensText(index) {
  if (index === null) return "state";
  const items = report.token_sets[index].map(([start, stop, block, period]) =>
    block
      ? `${block} of every ${period} from ${count(start)}${stop < report.tokens ? ` to ${count(stop - 1)}` : ""}`
      : `${count(start)}–${count(stop - 1)}`,
  );
  return items.slice(0, 3).join(", ") + (items.length > 3 ? ` and ${items.length - 3} more` : "");
}

function namesText(names) {
  return names.length > 6 ? `${names.slice(0, 4).join(", ")} and ${names.length - 4} more` : names.join(", ");
}

function sideText(noun, side, ranks) {
  return ranks.length === 1 ? `${noun} ${rankText(side, ranks[0])}` : `${noun}s ${ranksText(ranks)}`;
}

function capital(text) {
  return text.replace(/^./, (letter) => letter.toUpperCase());
}

function unitsText(units) {
  return units ? rangeText(units) : "none";
}

function table(heads, rows, numeric = []) {
  const cell = (tag) => (text, i) => make(tag, numeric.includes(i) ? { className: "number" } : {}, text);
  const wide = (row) =>
    row.map((text, i) => {
      const td = cell("td")(text, i);
      if (text.length > 18 && !numeric.includes(i)) td.className = "wrap";
      return td;
    });
  return make(
    "table",
    {},
    make("thead", {}, make("tr", {}, ...heads.map(cell("th")))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...wide(row)))),
  );
}
