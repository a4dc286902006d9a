"use strict";
// Sorting, filters, CSV, and the cards of shapes. Text is only ever set as text.
const data = JSON.parse(document.getElementById("data").textContent);
const make = (name, text, attributes) => {
  const element = document.createElement(name);
  if (text !== undefined && text !== null) element.textContent = text;
  for (const [key, value] of Object.entries(attributes || {})) element.setAttribute(key, value);
  return element;
};
const cell = (column, at) => (column.v ? column.v[at] : column.t[column.c[at]]);
const key = (task) => (task.match(/^\d+x\d+x\d+/) || [task])[0];
const short = (value) => (typeof value === "number" ? String(Number(value.toPrecision(5))) : value);

function save(name, lines) {
  const quoted = (value) => {
    const text = value === null || value === undefined ? "" : String(value);
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const text = lines.map((line) => line.map(quoted).join(",")).join("\n") + "\n";
  const link = make("a", "", { download: `${name}.csv` });
  link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

const value = (td) => (td.dataset.v !== undefined ? td.dataset.v : td.textContent);

function equip(table, whole) {
  const body = table.tBodies[0];
  [...table.tHead.rows[0].cells].forEach((th, at) => {
    const button = make("button", th.textContent, { type: "button" });
    th.replaceChildren(button);
    button.addEventListener("click", () => {
      const down = th.getAttribute("aria-sort") === "ascending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      th.setAttribute("aria-sort", down ? "descending" : "ascending");
      const numbers = (row) => (row.cells[at].dataset.v !== undefined ? Number(row.cells[at].dataset.v) : NaN);
      const order = (a, b) => {
        const [x, y] = [numbers(a), numbers(b)];
        if (Number.isNaN(x) !== Number.isNaN(y)) return Number.isNaN(x) ? 1 : -1; // no number comes last
        const less = Number.isNaN(x) ? a.cells[at].textContent.localeCompare(b.cells[at].textContent, "en", { numeric: true }) : x - y;
        return down ? -less : less;
      };
      body.append(...[...body.rows].sort(order));
    });
  });
  const tools = make("div", null, { class: "tools" });
  const csv = make("button", "Save as CSV", { type: "button" });
  csv.addEventListener("click", () =>
    save(table.dataset.name, whole ? whole() : [...table.rows].map((row) => [...row.cells].map(value))));
  tools.append(csv);
  if (body.rows.length > 12) {
    const input = make("input", null, { type: "search", placeholder: "filter rows", "aria-label": `filter ${table.dataset.name}` });
    input.addEventListener("input", () => {
      for (const row of body.rows) row.hidden = !row.textContent.toLowerCase().includes(input.value.toLowerCase());
    });
    tools.append(input);
  }
  table.parentElement.before(tools);
}
document.querySelectorAll("table").forEach((table) => equip(table));

// every set of rows, its table made when it is opened
const places = new Map();
data.sets.forEach((set, which) => {
  set.by = Object.fromEntries(set.columns.map((column) => [column.n, column]));
  set.by.task.c.forEach((_, at) => {
    const shape = key(cell(set.by.task, at));
    if (!places.has(shape)) places.set(shape, []);
    places.get(shape).push([set, at]);
  });
  const details = make("details");
  const count = set.by.task.c.length;
  details.append(make("summary", `${set.file}, ${set.protocol}: ${count} ${count === 1 ? "row" : "rows"}`), make("p", set.source, { class: "caption" }));
  details.addEventListener("toggle", () => {
    if (details.querySelector("table")) return;
    const shown = set.columns.filter((column) => !/ (low|high|id|schedule)$/.test(column.n));
    const table = make("table", null, { "data-name": `rows-${which}` });
    const head = table.createTHead().insertRow();
    shown.forEach((column) => head.append(make("th", column.n, column.v ? { scope: "col", class: "number" } : { scope: "col" })));
    const body = table.createTBody();
    for (let at = 0; at < count; at++) {
      const row = body.insertRow();
      for (const column of shown) {
        const found = cell(column, at);
        const td = make("td", column.n === "task" ? null : short(found));
        if (typeof found === "number") td.dataset.v = found;
        if (column.n === "task") td.append(make("a", found, { href: `#${found}` }));
        row.append(td);
      }
    }
    const scroll = make("div", null, { class: "scroll", tabindex: "0", role: "region", "aria-label": set.file });
    scroll.append(table);
    details.append(scroll);
    equip(table, () => [set.columns.map((c) => c.n),
      ...Array.from({ length: count }, (_, at) => set.columns.map((c) => cell(c, at)))]);
  });
  document.getElementById("sets").append(details);
});

// cards
const dialog = document.getElementById("card");
function list(pairs) {
  const dl = make("dl");
  for (const [name, text] of pairs) if (text !== "" && text !== null && text !== undefined) dl.append(make("dt", name), make("dd", text));
  return dl;
}
function interval(set, name, at) {
  const get = (column) => (set.by[column] ? cell(set.by[column], at) : null);
  const [us, low, high] = [get(name), get(`${name} low`), get(`${name} high`)];
  if (us === null) return null;
  return low === null || high === null ? short(us) : `${short(us)} [${short(low)}, ${short(high)}]`;
}
function entry(set, at) {
  const get = (name) => (set.by[name] ? cell(set.by[name], at) : "");
  const part = make("section");
  part.append(make("h3", `${get("task")}, ${set.protocol}, ${set.device}`));
  for (const use of ["plain", "any launch"]) {
    const [name, family, schedule, id] = [get(use), get(`${use} family`), get(`${use} schedule`), get(`${use} id`)];
    if (!name || (use === "any launch" && name === get("plain"))) continue;
    const proof = data.proofs[id];
    part.append(list([
      [use === "plain" ? "kernel" : "with dependent launch", `${name} ${id}`], ["time, us [95 %]", interval(set, `${use} us`, at)],
      ["speedup over tuned", interval(set, `${use} speedup`, at)], ["family", family],
      ["evidence", proof ? `${proof[1]} at ${proof[3]}, by ${proof[2]} (${proof[0]})` : get("verdict") ? `${get("verdict")}; passed: ${get("checks")}` : "none in these files"],
    ]));
    if (schedule) {
      const words = make("details");
      words.append(make("summary", "schedule in words"));
      const helps = data.helps[family] || {};
      words.append(list(schedule.split(" ").map((choice) => [choice, helps[choice.split("=")[0]] || " "])));
      part.append(words);
    }
  }
  const ours = get("plain us");
  const rivals = set.columns.filter((c) => / us$/.test(c.n) && !/^(plain|any launch) us$/.test(c.n) && cell(c, at) !== null);
  if (rivals.length) {
    const scroll = make("div", null, { class: "scroll" });
    const table = make("table", null, { "data-name": `${get("task")}-${set.protocol}`.replaceAll(":", "-") });
    const head = table.createTHead().insertRow();
    for (const name of ["baseline", "us", "over our time", "speedup, paired rounds"]) head.append(make("th", name, { scope: "col" }));
    const body = table.createTBody();
    for (const column of rivals) {
      const us = cell(column, at);
      const row = body.insertRow();
      row.append(make("th", column.n.slice(0, -3), { scope: "row" }), make("td", short(us), { "data-v": us }));
      row.append(ours ? make("td", (us / ours).toFixed(3), { "data-v": us / ours }) : make("td", "-"));
      const paired = get(column.n.replace(/ us$/, " speedup"));
      row.append(typeof paired === "number" ? make("td", paired.toFixed(3), { "data-v": paired }) : make("td", "-"));
    }
    scroll.append(table);
    part.append(scroll);
    equip(table);
  }
  part.append(list([["proposed by", get("proposer")], ["status", get("status")], ["reason", get("reason")],
    ["measured", get("measured at")], ["row", `${set.file}, row ${get("row")}`], ["command", set.command]]));
  return part;
}
function open(shape) {
  const known = places.get(key(shape));
  if (!known) return false;
  const asked = ([set, at]) => (cell(set.by.task, at) === shape ? 0 : 1);
  const found = [...known].sort((a, b) => asked(a) - asked(b)); // the very task first
  const body = document.getElementById("card-body");
  body.replaceChildren(make("h2", key(shape), { id: "card-title" }), ...found.map(([set, at]) => entry(set, at)));
  const tried = data.searches.filter(([task]) => key(task) === key(shape));
  for (const [task, file, device, count, rejected] of tried) {
    const said = Object.entries(rejected).map(([reason, number]) => `${number} ${reason}`).join("; ") || "none";
    body.append(make("h3", `Search, ${task}, ${device}`), list([["tried", `${count} candidates`], ["rejected", said], ["file", file]]));
  }
  if (!tried.length) body.append(make("p", "What a search tried and rejected is not in these files: add its archive to the report.", { class: "caption" }));
  const texts = Object.entries(data.sources).filter(([task]) => key(task) === key(shape));
  for (const [task, text] of texts) {
    const details = make("details");
    details.append(make("summary", `Source, ${task}`), make("pre", text));
    body.append(details);
  }
  if (!texts.length) body.append(make("p", `Source: cuda-l2 show ${shape} --source, where its archive is.`, { class: "caption" }));
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
  return true;
}
const follow = () => open(decodeURIComponent(location.hash.slice(1)));
addEventListener("hashchange", follow);
dialog.addEventListener("close", () => history.replaceState(null, "", location.pathname + location.search));
const form = document.getElementById("find");
form.hidden = !places.size;
document.getElementById("shapes").append(...[...places.keys()].slice(0, 1000).map((shape) => make("option", null, { value: shape })));
form.addEventListener("submit", (event) => {
  event.preventDefault();
  const shape = document.getElementById("shape").value.trim();
  document.getElementById("unknown").textContent = open(shape) ? "" : `${shape} is not among the rows`;
});
follow();
