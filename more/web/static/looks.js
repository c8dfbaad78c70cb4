// What the pictures of both pages share. Colours, heights and hatches are those of
// more/pictures/gantt.py, so that a kind of bar looks the same in all pictures.

export const LOOKS = { // low, high: bottom and top in a lane from 0 to 1
  waiting: { colour: "#999999", low: 0.51, high: 0.59 },
  prefill: { colour: "#F5C45E", low: 0.2, high: 0.9, edge: "#8A6100" },
  decode: { colour: "#0072B2", low: 0.34, high: 0.76 },
  stall: { colour: "#D55E00", low: 0.05, high: 0.16 },
};

// A canvas in CSS pixels, empty, and sharp on every screen: its pen and size, and its style's colours.
export function prepare(canvas, font) {
  const scale = window.devicePixelRatio || 1;
  const { width, height } = canvas.getBoundingClientRect();
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = font;
  pen.textBaseline = "middle";
  const { color: ink, backgroundColor: paper, borderTopColor: grid } = getComputedStyle(canvas);
  return { pen, width, height, ink, paper, grid };
}

export function line(pen, x0, y0, x1, y1) {
  pen.beginPath();
  pen.moveTo(x0, y0);
  pen.lineTo(x1, y1);
  pen.stroke();
}

// The smallest of 1, 2, 5, 10, ... that is at least `value`: a step between ticks.
export function round(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= value * 0.9999);
}

const TILE = 7; // px: of the hatch
let hatch = null; // the pattern, and the scale of the screen that it was made for

// The hatch of prefills, as a colour to fill with.
export function hatched() {
  const scale = window.devicePixelRatio || 1;
  if (hatch?.scale === scale) return hatch.pattern;
  const tile = document.createElement("canvas"), pen = tile.getContext("2d");
  tile.width = tile.height = Math.round(TILE * scale);
  pen.scale(tile.width / TILE, tile.height / TILE);
  pen.fillStyle = LOOKS.prefill.colour;
  pen.fillRect(0, 0, TILE, TILE);
  pen.strokeStyle = LOOKS.prefill.edge;
  pen.lineWidth = 0.8;
  pen.beginPath();
  for (const shift of [-TILE, 0, TILE]) {
    pen.moveTo(shift, TILE);
    pen.lineTo(shift + TILE, 0);
  }
  pen.stroke();
  const pattern = pen.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(TILE / tile.width));
  hatch = { scale, pattern };
  return pattern;
}

// A text in a white box, in the middle of a place that is `wide`, if it fits there.
export function label(pen, text, left, wide, middle, colour = "#000000") {
  const size = pen.measureText(text).width, at = left + wide / 2;
  if (size + 6 > wide) return;
  pen.fillStyle = "#FFFFFF";
  pen.fillRect(at - size / 2 - 2, middle - 8, size + 4, 16);
  pen.fillStyle = colour;
  pen.textAlign = "center";
  pen.fillText(text, at, middle + 0.5);
}

// How many requests wait: steps above the line `base`, with the highest number in them, if it fits.
// queue: [moment, how many from then on]; end: of the last step; x: moment -> px.
export function drawQueue(pen, queue, end, x, base, tall, edge) {
  const steps = queue.map(([from, waiting], i) => [x(from), x(queue[i + 1]?.[0] ?? end), waiting])
    .filter(([left, right, waiting]) => waiting && right - left >= 0.3);
  const most = Math.max(...steps.map(([, , waiting]) => waiting));
  let peak = [0, 0];
  pen.fillStyle = "#D9D9D9";
  pen.strokeStyle = edge;
  pen.lineWidth = 1.5;
  for (const [left, right, waiting] of steps) {
    const high = (tall * waiting) / most;
    pen.fillRect(left, base - high, right - left, high);
    line(pen, left, base - high, right, base - high);
    if (waiting === most && right - left > peak[1]) peak = [left, right - left];
  }
  if (steps.length) label(pen, `${most}`, ...peak, base - tall / 2);
}
