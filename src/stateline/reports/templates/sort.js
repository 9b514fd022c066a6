"use strict";
// A click on a heading sorts its table: upwards, downwards, and back to the given order.
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

function sorted(rows, column, order) {
  const sign = order === "ascending" ? 1 : -1;
  const value = (row) => row.cells[column].dataset.value;
  const present = rows.filter((row) => column === 0 || value(row) !== undefined);
  const missing = rows.filter((row) => !present.includes(row));
  const compare = column === 0
    ? (a, b) => a.cells[0].textContent.localeCompare(b.cells[0].textContent, "en", { numeric: true })
    : (a, b) => value(a) - value(b);
  return [...present.sort((a, b) => sign * compare(a, b)), ...missing];
}
