// What a click does: choose a map, sort a table by a column, hide a curve. The page needs none of it.
for (const choice of document.querySelectorAll(".choice")) {
  const parts = [...choice.querySelectorAll("section")], select = choice.querySelector("select");
  const show = (at) => { parts.forEach((part, i) => { part.hidden = i !== at; }); if (select) select.selectedIndex = at; };
  if (select) select.addEventListener("change", () => show(select.selectedIndex));
  const follow = () => {
    const cell = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const at = cell ? parts.findIndex((part) => part.contains(cell)) : -1;
    if (at >= 0) { show(at); cell.scrollIntoView({ block: "center" }); }
  };
  addEventListener("hashchange", follow);
  follow();
}
for (const table of document.querySelectorAll("table.numbers, table.words")) {
  const body = table.tBodies[0] || table;
  table.querySelectorAll("thead th").forEach((head, at) => {
    head.addEventListener("click", () => {
      const rows = [...body.rows].filter((row) => !row.closest("thead"));
      const value = (row) => { const text = row.cells[at].textContent.replace(/[≥×]/g, ""); return isNaN(parseFloat(text)) ? text : parseFloat(text); };
      const down = head.dataset.down !== "1";
      head.dataset.down = down ? "1" : "0";
      rows.sort((a, b) => { const x = value(a), y = value(b); return (x > y ? 1 : x < y ? -1 : 0) * (down ? -1 : 1); });
      rows.forEach((row) => row.parentNode.append(row));
    });
  });
}
for (const name of document.querySelectorAll("svg .name")) {
  name.addEventListener("click", () => name.parentNode.classList.toggle("off"));
}
