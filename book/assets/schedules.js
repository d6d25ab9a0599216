"use strict";
const FILL = { F: "var(--f)", B: "var(--b)", W: "var(--w)", BW: "var(--bw)" };
controls({ schedule: "1f1b", ranks: 4, "micro-batches": 8 }, (row, chosen) => {
  $("drawing").replaceChildren();
  if (!row) {
    $("says").value = `There is no ${chosen[0]} of ${chosen[1]} ranks and ${chosen[2]} micro-batches; choose more micro-batches, or another number of ranks.`;
    return;
  }
  const wide = 1000, high = 26, scale = (wide - 60) / row.length;
  const says = `length ${row.length.toFixed(1)}, idle time / compute time ${(100 * row.bubble).toFixed(1)} %, ` +
    `micro-batches in flight on each rank, at most: ${row.held.join(", ")}`;
  const { svg, give } = picture(wide, row.ranks.length * (high + 6), `${chosen.join(", ")}: ${says}`);
  row.ranks.forEach((actions, rank) => {
    const y = rank * (high + 6);
    give("text", { x: 0, y: y + 18, "font-size": 13 }, `rank ${rank}`);
    give("rect", { x: 60, y, width: wide - 60, height: high, fill: "var(--idle)" });
    for (const [kind, stage, batch, start, end] of actions) {
      const x = 60 + start * scale, width = (end - start) * scale;
      const pale = row.stages > row.ranks.length && stage >= row.ranks.length;
      if (pale) give("rect", { x, y, width, height: high, fill: "#fff" });  // paler on a dark page, too
      give("rect", { x, y, width, height: high, fill: FILL[kind], stroke: "#fff", "stroke-width": .6, "fill-opacity": pale ? .6 : 1 });
      if (width > 13) give("text", { x: x + width / 2, y: y + 17, "font-size": 11, "text-anchor": "middle", class: kind === "W" && !pale ? "white" : "on" }, batch);
    }
  });
  $("drawing").append(svg);
  $("says").value = says;
});
