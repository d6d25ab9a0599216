// What all pages to play with share: the controls, the row of the data that they choose, and drawing.
"use strict";
const SVG = "http://www.w3.org/2000/svg";
const $ = id => document.getElementById(id);

function element(tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// A picture of this size: give(tag, attributes, text) adds to it. `says` is what a screen reader says of it.
function picture(width, height, says) {
  const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": says });
  return { svg, give: (tag, attributes, text) => svg.append(element(tag, attributes, text)) };
}

// A control for each choice, and show(row, chosen) whenever one changes. `start` names other first values.
function controls(start, show) {
  const form = $("controls");
  for (const [name, values] of Object.entries(DATA.choices)) {
    const label = document.createElement("label"), select = document.createElement("select");
    label.append(name, select);
    select.name = name;
    for (const value of values) select.add(new Option(value, value, false, String(value) === String(start[name])));
    form.append(label);
  }
  const update = () => {
    const chosen = Object.keys(DATA.choices).map(name => form.elements[name].value);
    show(DATA.rows[chosen.join("|")], chosen);
  };
  form.addEventListener("change", update);
  form.addEventListener("submit", event => event.preventDefault());
  update();
  return update;
}

// Buttons "back" and "next" for what goes in steps; step(number) draws one. Returns a function that begins again.
function steps(count, step) {
  let now = 0;
  const go = by => { now = (now + by + count()) % count(); step(now); };
  $("back").onclick = () => go(-1);
  $("next").onclick = () => go(1);
  return () => { now = 0; step(0); };
}
