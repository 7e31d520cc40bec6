// What a click does: choose a map, sort a table by a column, hide a curve, copy a table; and a hint over each table that is wider than its
// box. The page needs none of it.
const hint = () => document.querySelectorAll(".scroll").forEach((box) => box.classList.toggle("more", box.scrollWidth > box.clientWidth + 1));
addEventListener("load", hint);
addEventListener("resize", hint);
document.addEventListener("toggle", hint, true); // details that open, and a map that is chosen
document.addEventListener("change", hint);
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
for (const figure of document.querySelectorAll("figure")) {
  const toggle = (number) => figure.querySelectorAll(`[data-curve="${number}"]`).forEach((part) => part.classList.toggle("off"));
  figure.querySelectorAll("svg .name").forEach((name) => name.addEventListener("click", () => toggle(name.parentNode.dataset.curve)));
  figure.querySelectorAll(".legend button").forEach((button) => button.addEventListener("click", () => toggle(button.dataset.curve)));
}
for (const button of document.querySelectorAll("button.copy")) {
  const text = button.dataset.markdown, name = button.textContent;
  const select = () => { // where a page may not write to the clipboard
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    return copied;
  };
  const say = (copied) => { button.textContent = copied ? "Copied" : "Not copied"; setTimeout(() => { button.textContent = name; }, 2000); };
  button.hidden = false;
  button.addEventListener("click", () => {
    if (navigator.clipboard) navigator.clipboard.writeText(text).then(() => say(true), () => say(select()));
    else say(select());
  });
}
addEventListener("beforeprint", () => document.querySelectorAll("details.section").forEach((each) => { each.open = true; }));
