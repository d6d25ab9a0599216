"use strict";
let rounds;
function draw(number) {
  const ranks = rounds[number], P = ranks.length, n = 2 * P, cell = 320 / n, left = 30, top = 24;
  const computed = ranks.map(rank => rank.pairs.length);
  const says = `Round ${number} of ${P}. ` + ranks.map((rank, r) => `Rank ${r} has block ${rank.owner} and computes ${computed[r]} pairs`).join(". ") + ".";
  const pairs = picture(360, 350, says), give = pairs.give;
  give("text", { x: left, y: 14, "font-size": 13 }, "keys: chunks 0, 1, 2, …");
  const earlier = rounds.slice(0, number + 1);
  for (let q = 0; q < n; q++) for (let k = 0; k <= q; k++)
    give("rect", { x: left + k * cell, y: top + q * cell, width: cell - 1, height: cell - 1, fill: "var(--idle)" });
  earlier.forEach((all, t) => all.forEach((rank, r) => rank.pairs.forEach(([q, k]) => {
    const place = { x: left + k * cell, y: top + q * cell, width: cell - 1, height: cell - 1 };
    give("rect", { ...place, fill: "#fff" });
    give("rect", { ...place, fill: t === number ? "var(--b)" : "var(--f)", "fill-opacity": t === number ? 1 : .55 });
    if (cell > 18) give("text", { x: left + k * cell + cell / 2, y: top + q * cell + cell / 2 + 4, "font-size": 11, "text-anchor": "middle", class: "on" }, r);
  })));
  const ring = picture(360, 350, "");
  ring.svg.setAttribute("aria-hidden", "true");
  ranks.forEach((rank, r) => {
    const give = ring.give;
    const angle = 2 * Math.PI * r / P - Math.PI / 2, x = 180 + 130 * Math.cos(angle), y = 180 + 130 * Math.sin(angle);
    const next = 2 * Math.PI * (r + 1) / P - Math.PI / 2, far = 180 + 130 * Math.cos(next), low = 180 + 130 * Math.sin(next);
    const along = Math.hypot(far - x, low - y), dx = (far - x) / along, dy = (low - y) / along;
    if (number < P - 1) {
      const [ax, ay] = [far - 38 * dx, low - 38 * dy];
      give("line", { x1: x + 36 * dx, y1: y + 36 * dy, x2: ax, y2: ay, stroke: "var(--bw)", "stroke-width": 3 });
      give("polygon", { points: `${ax},${ay} ${ax - 10 * dx - 6 * dy},${ay - 10 * dy + 6 * dx} ${ax - 10 * dx + 6 * dy},${ay - 10 * dy - 6 * dx}`, fill: "var(--bw)" });
    }
    give("circle", { cx: x, cy: y, r: 36, fill: "var(--f)" });
    give("text", { x, y: y - 8, "font-size": 13, "text-anchor": "middle", class: "on" }, `rank ${r}`);
    give("text", { x, y: y + 9, "font-size": 12, "text-anchor": "middle", class: "on" }, `K/V ${rank.owner}`);
    give("text", { x, y: y + 27, "font-size": 10, "text-anchor": "middle", class: "on" }, `${computed[r]} pairs`);
  });
  $("drawing").replaceChildren(pairs.svg, ring.svg);
  $("says").value = says;
}
const begin = steps(() => rounds.length, draw);
controls({ ranks: 4 }, row => { rounds = row; begin(); });
