// Charts as files of their own: SVG with all that the style sheet says of it in it, so that it looks the same elsewhere, and PNG made of that.

import { svg } from "../lib/dom.js";

const STYLES = [
  "fill", "fill-opacity", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray", "stroke-linecap", "stroke-linejoin", "opacity",
  "font-family", "font-size", "font-weight", "font-style", "text-anchor", "dominant-baseline", "visibility", "display", "color", "paint-order",
];
const SHARP = 2; // pixels of a PNG for each of the screen's

// The text of a file. What is drawn with boxes becomes boxes.
export function standalone(chart) {
  const { width, height } = chart.getBoundingClientRect();
  const ground = svg("rect", { width: "100%", height: "100%", style: { fill: getComputedStyle(document.body).backgroundColor } });
  const drawing = chart instanceof SVGElement ? styled(chart) : boxes(chart);
  if (!drawing.hasAttribute("viewBox")) drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const file = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}` }, ground, drawing);
  drawing.setAttribute("width", width);
  drawing.setAttribute("height", height);
  return new XMLSerializer().serializeToString(file);
}

// Through an image: of an address with data in it, as the page may load no other.
export async function pngOf(chart) {
  const { width, height } = chart.getBoundingClientRect();
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(standalone(chart))}`;
  await image.decode();
  const canvas = document.createElement("canvas");
  Object.assign(canvas, { width: Math.ceil(SHARP * width), height: Math.ceil(SHARP * height) });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  const blob = await new Promise((resolve) => { canvas.toBlob(resolve, "image/png"); });
  if (blob === null) throw new Error("it is too large for a picture");
  return blob;
}

function styled(chart) {
  const copy = chart.cloneNode(true);
  const originals = [chart, ...chart.querySelectorAll("*")];
  [copy, ...copy.querySelectorAll("*")].forEach((node, at) => {
    const style = getComputedStyle(originals[at]);
    for (const name of STYLES) node.style.setProperty(name, style.getPropertyValue(name));
  });
  return copy;
}

// Of each box its ground and its text, cut off where the box ends.
function boxes(chart) {
  const frame = chart.getBoundingClientRect();
  const drawing = svg("svg", {});
  for (const box of [chart, ...chart.querySelectorAll("*")]) {
    const [{ left, top, width, height }, style] = [box.getBoundingClientRect(), getComputedStyle(box)];
    if (!width || !height) continue;
    const part = svg("svg", { x: left - frame.left, y: top - frame.top, width, height });
    part.append(svg("rect", { width, height, style: { fill: style.backgroundColor } }));
    if (box.title) part.append(svg("title", {}, box.title));
    if (!box.childElementCount && box.textContent) {
      const baseline = parseFloat(style.paddingTop) + (parseFloat(style.lineHeight) + 0.7 * parseFloat(style.fontSize)) / 2;
      part.append(svg("text", {
        x: parseFloat(style.paddingLeft), y: baseline, style: { fill: style.color, fontFamily: style.fontFamily, fontSize: style.fontSize },
      }, box.textContent));
    }
    drawing.append(part);
  }
  return drawing;
}
