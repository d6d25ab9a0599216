"use strict";
// The colours of the figures: activations are pink, whatever they are activations of.
const COLOURS = { weights: "#0072b2", gradients: "#d55e00", "optimizer states": "#009e73", blocks: "#cc79a7", "the rest": "#8c8c8c" };
const OTHERS = ["#e69f00", "#56b4e9", "#b7791f", "#6b46c1"];
const SIZES = [24, 40, 80, 141];
const colourOf = name => COLOURS[name] ??= OTHERS[(Object.keys(COLOURS).length - 5) % OTHERS.length];
controls({ data: 8, tensor: 8, ZeRO: 1 }, (row, chosen) => {
  $("drawing").replaceChildren();
  $("table").replaceChildren();
  if (!row) {
    $("says").value = "The trainer refuses this: ZeRO-3 with a pipeline would gather a layer again for each micro-batch in flight.";
    return;
  }
  const GB = 1e9, total = Object.values(row).reduce((sum, size) => sum + size, 0);
  const large = Object.entries(row).filter(([, size]) => size > total / 100);
  const parts = [...large, ["the rest", total - large.reduce((sum, [, size]) => sum + size, 0)]];
  const most = Math.max(total, 80 * GB) * 1.05, wide = Math.max(300, Math.min(1000, $("drawing").clientWidth)), scale = wide / most;
  const fits = SIZES.find(size => size * GB * .92 > total);
  const says = `${(total / GB).toFixed(1)} GB at the peak: ` + (fits ? `fits a GPU of ${fits} GB` : "fits none of 24, 40, 80, 141 GB");
  const { svg, give } = picture(wide, 70, says);
  let x = 0;
  for (const [name, size] of parts) {
    give("rect", { x, y: 0, width: size * scale, height: 44, fill: colourOf(name) });
    x += size * scale;
  }
  let free = 0;  // from here on there is room for words
  for (const size of SIZES.filter(size => size * GB < most)) {
    const at = size * GB * scale;
    give("line", { x1: at, x2: at, y1: 0, y2: 52, stroke: "currentColor" });
    if (at - 50 < free) continue;
    give("text", { x: at - 4, y: 66, "font-size": 13, "text-anchor": "end" }, `${size} GB`);
    free = at;
  }
  $("drawing").append(svg);
  for (const [name, size] of parts) {
    const line = $("table").insertRow();
    const mark = document.createElement("span");
    mark.style.cssText = `display:inline-block;width:.9em;height:.9em;margin-right:.5em;background:${colourOf(name)}`;
    line.insertCell().append(mark, name);
    line.insertCell().textContent = `${(size / GB).toFixed(2)} GB`;
  }
  $("says").value = says;
});
