"use strict";
// A lesson beside its code. In two columns the code follows the text; in one, what a paragraph names is folded below it.
const lines = [...document.querySelectorAll(".beside .work .line")], pane = document.querySelector(".beside .work .highlight");
const plain = line => line.textContent.replace(/\n$/, "");
const place = mark => {  // the line that a link leads to, or that defines the name in a heading
  if (mark.hash) return lines.findIndex(line => line.id === mark.hash.slice(1));
  const name = mark.textContent.replace(/\W.*/, "");
  return lines.findIndex(line => name && new RegExp(`^\\s*(class|def|__global__ \\w+) ${name}\\b`).test(plain(line)));
};
const marks = [...document.querySelectorAll('.beside .lesson :is(a.to-code[href^="#L"], h3 code)')]
  .map(mark => ({ mark, at: place(mark) })).filter(({ at }) => at >= 0);
const narrow = matchMedia("(max-width: 60em)");
let now;
function follow() {
  const last = marks.filter(({ mark }) => mark.getBoundingClientRect().top < innerHeight / 3).pop();
  if (narrow.matches || !last || last === now) return;
  now = last;
  const line = lines[last.at], fold = line.closest("details:not([open])") || line;
  const top = fold.getBoundingClientRect().top - pane.getBoundingClientRect().top + pane.scrollTop - 40;
  pane.scrollTo({ top, behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
}
function fold() {
  const told = new Set();
  for (const { mark, at } of narrow.matches ? marks : []) {
    if (told.has(at)) continue;
    told.add(at);
    const indent = plain(lines[at]).search(/\S/);
    const next = lines.slice(at + 1).findIndex(line => /^\s*[^\s)\]}#]/.test(plain(line)) && plain(line).search(/\S/) <= indent);
    let end = next < 0 ? lines.length : at + 1 + next;
    while (!plain(lines[end - 1]).trim() || /^\S*#/.test(plain(lines[end - 1]))) end -= 1;
    const here = document.createElement("details"), head = document.createElement("summary");
    here.className = "here work";
    head.textContent = `${plain(lines[at]).trim().replace(/[(:].*/, "")}: lines ${at + 1} to ${end}`;
    const box = document.createElement("div"), code = document.createElement("code"), pre = document.createElement("pre");
    box.className = "highlight";
    code.append(...lines.slice(at, end).map(line => line.cloneNode(true)));
    for (const line of code.children) line.removeAttribute("id");
    pre.append(code);
    box.append(pre);
    here.append(head, box);
    let block = mark.closest(".lesson > *");
    while (block.nextElementSibling?.matches("details.here")) block = block.nextElementSibling;
    block.after(here);
  }
}
fold();
addEventListener("scroll", follow, { passive: true });
