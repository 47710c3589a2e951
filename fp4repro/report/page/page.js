// A click on a heading sorts its table by that column: by number where every filled cell starts with one.
"use strict";

function key(cell) {
  const text = cell.textContent.trim();
  const number = parseFloat(text.replace(/(\d),(?=\d{3})/g, "$1"));
  return { text, number: /^[-+]?\.?\d/.test(text) ? number : NaN };
}

function sort(heading, column) {
  const table = heading.closest("table"), body = table.tBodies[0];
  const descending = heading.getAttribute("aria-sort") === "ascending";
  const rows = Array.from(body.rows, (row) => ({ row, ...key(row.cells[column]) }));
  const filled = rows.filter((entry) => entry.text);
  const numeric = filled.length > 0 && filled.every((entry) => !Number.isNaN(entry.number));
  const order = (a, b) => (numeric ? a.number - b.number : a.text.localeCompare(b.text, "en", { numeric: true }));
  filled.sort((a, b) => (descending ? order(b, a) : order(a, b)));
  body.append(...filled.map((entry) => entry.row), ...rows.filter((entry) => !entry.text).map((entry) => entry.row));
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
}

for (const table of document.querySelectorAll("table")) {
  Array.from(table.tHead.rows[0].cells).forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = heading.textContent;
    button.addEventListener("click", () => sort(heading, column));
    heading.replaceChildren(button);
  });
}
