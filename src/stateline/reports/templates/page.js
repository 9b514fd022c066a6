"use strict";
// Tables: a click on a heading sorts upwards, downwards, and back to the given order.
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0], given = [...body.rows];
  const headings = [...table.querySelectorAll("th[data-column]")];
  for (const heading of headings) {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const next = { ascending: "descending", descending: null }[heading.getAttribute("aria-sort")];
      for (const other of headings) other.removeAttribute("aria-sort");
      const order = next === undefined ? "ascending" : next;
      if (order) heading.setAttribute("aria-sort", order);
      body.append(...(order ? sorted(given, Number(heading.dataset.column), order) : given));
    });
  }
}
for (const note of document.querySelectorAll(".scripted")) note.classList.remove("scripted");

// By the values of a column, with missing ones last; a column without values is sorted as text.
function sorted(rows, column, order) {
  const sign = order === "ascending" ? 1 : -1;
  const cell = (row) => row.cells[column];
  const text = (row) => column ? cell(row).textContent : row.dataset.model;
  const numbered = rows.filter((row) => cell(row).dataset.value !== undefined);
  const present = numbered.length ? numbered : [...rows];
  const missing = rows.filter((row) => !present.includes(row));
  const compare = numbered.length
    ? (a, b) => cell(a).dataset.value - cell(b).dataset.value
    : (a, b) => text(a).localeCompare(text(b), "en", { numeric: true });
  return [...present.sort((a, b) => sign * compare(a, b)), ...missing];
}

// Charts: a picture becomes interactive shortly before it is seen.
const specs = JSON.parse(document.getElementById("charts").textContent);
const views = [], chosen = new Set();
const near = new IntersectionObserver((entries) => {
  for (const entry of entries.filter((entry) => entry.isIntersecting)) {
    near.unobserve(entry.target);
    draw(entry.target);
  }
}, { rootMargin: "600px" });
for (const chart of document.querySelectorAll("[data-chart]")) near.observe(chart);

async function draw(chart) {
  const options = { ast: true, renderer: "svg", actions: false, tooltip: { theme: "page" } };
  const { view } = await vegaEmbed(chart, specs[chart.dataset.chart], options);
  views.push(view);
  view.addEventListener("click", (event, item) => item && toggle(keyOf(item.datum.model)));
  await show(view);
  chart.dataset.drawn = "";
}

// Legend: a click isolates a model in all charts and tables, another adds one or takes it away.
const keys = [...document.querySelectorAll("[data-models]")];
const members = (key) => JSON.parse(key.dataset.models);
const keyOf = (model) => keys.find((key) => members(key).includes(model));
for (const key of keys) {
  const button = document.createElement("button");
  button.type = "button";
  button.setAttribute("aria-pressed", "false");
  button.append(...key.childNodes);
  key.append(button);
  button.addEventListener("click", () => toggle(key));
}

function toggle(key) {
  if (!key) return;
  if (!chosen.delete(key)) chosen.add(key);
  const shown = [...chosen].flatMap(members);
  for (const other of keys) {
    other.firstChild.setAttribute("aria-pressed", String(chosen.has(other)));
    other.classList.toggle("faded", chosen.size > 0 && !chosen.has(other));
  }
  for (const row of document.querySelectorAll("[data-model]")) {
    row.classList.toggle("faded", shown.length > 0 && !shown.includes(row.dataset.model));
  }
  views.forEach(show);
}

function show(view) {
  return view.signal("shown", [...chosen].flatMap(members)).runAsync();
}
