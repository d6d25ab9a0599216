"use strict";
let now, names;
const LETTERS = "abcdfghijklmnopqrstuvwxyz";  // of tokens: e is for experts
const STEPS = ["tokens, and the experts they want", "sorted by expert, and so by rank", "sent: each expert has its rows", "back where they came from"];
// Rows as [rank they come from, token, expert].
const rowsOf = () => now.ranks.flatMap((rank, r) => rank.experts.flatMap((chosen, t) => chosen.map(e => [r, t, e])));
function draw(number) {
  const P = now.ranks.length, each = now.experts / P, all = rowsOf();
  const shown = now.ranks.map((_, r) => {
    if (number === 0 || number === 3) return all.filter(row => row[0] === r);
    const mine = number === 1 ? all.filter(row => row[0] === r) : all.filter(row => Math.floor(row[2] / each) === r);
    return mine.map((row, i) => [row, i]).sort((a, b) => a[0][2] - b[0][2] || a[1] - b[1]).map(([row]) => row);
  });
  const counts = shown.map(rows => rows.length), most = Math.max(...counts, all.length / P), wide = 1000, left = 70;
  const width = Math.min(48, (wide - left) / most);
  const loads = number === 2 ? `; rows of each rank: ${counts.join(", ")}, and the fullest decides` : "";
  const says = `Step ${number + 1} of 4: ${STEPS[number]}${loads}`;
  const { svg, give } = picture(wide, P * 64, says + ". " + shown.map((rows, r) => `Rank ${r}: ` + rows.map(([from, t, e]) => `${LETTERS[t]}${from} to expert ${e}`).join(", ")).join(". "));
  const hue = e => `hsl(${Math.round(360 * e / now.experts)} 65% 70%)`;
  shown.forEach((rows, r) => {
    give("text", { x: 0, y: r * 64 + 28, "font-size": 14 }, `rank ${r}`);
    give("text", { x: 0, y: r * 64 + 45, "font-size": 10 }, `experts ${Array.from({ length: each }, (_, i) => r * each + i).join(", ")}`);
    rows.forEach(([from, t, e], i) => {
      give("rect", { x: left + i * width, y: r * 64 + 8, width: width - 3, height: 42, rx: 4, fill: hue(e) });
      give("text", { x: left + i * width + width / 2 - 1, y: r * 64 + 26, "font-size": 13, "text-anchor": "middle", class: "on" }, `${LETTERS[t]}${from}`);
      give("text", { x: left + i * width + width / 2 - 1, y: r * 64 + 43, "font-size": 11, "text-anchor": "middle", class: "on" }, number === 3 ? `e${e} ✓` : `e${e}`);
    });
  });
  $("drawing").replaceChildren(svg);
  $("says").value = says;
  const table = $("table");
  table.replaceChildren();
  const head = table.createTHead().insertRow();
  ["rows from", ...Array.from({ length: now.experts }, (_, e) => `to expert ${e}`), "in all"].forEach(text => {
    const cell = document.createElement("th");
    cell.textContent = text;
    cell.scope = "col";
    head.append(cell);
  });
  now.ranks.forEach((rank, r) => {
    const line = table.insertRow();
    [`rank ${r}`, ...rank.table, rank.table.reduce((a, b) => a + b)].forEach(value => line.insertCell().textContent = value);
  });
}
const begin = steps(() => 4, draw);
controls({}, row => { now = row; begin(); });
