// The explorer's pictures on canvas: schedules by slot over time, and the curve of the gain.

import { drawQueue, hatched, label, line, LOOKS, prepare, round } from "./looks.js";

const FONT = "14px system-ui, sans-serif";

// Ticks at 1, 2 or 5 times a power of ten; at most `most` of them up to `end`.
function ticks(end, most) {
  const step = round(end / most), digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const found = [];
  for (let i = 0; i * step <= end * (1 + 1e-9); i++) found.push([i * step, (i * step).toFixed(digits)]);
  return found;
}

// Where things are: a place on the time axis, and lanes below the row of the queue.
export function frame(width, height, slots, end) {
  const left = 58, right = width - 8, top = 34, bottom = height - 38;
  const lane = (bottom - top) / slots;
  return {
    left, right, top, bottom, lane,
    x: (moment) => left + (moment / end) * (right - left),
    bar: (slot, { low, high }) => [top + (slot + 1 - high) * lane, Math.max(1, (high - low) * lane)],
  };
}

// One schedule. view: {end, long}; step: the iteration that the keyboard or the pointer has chosen.
export function drawSchedule(canvas, side, view, step = null) {
  const { pen, width, height, ...colours } = prepare(canvas, FONT);
  const place = { ...frame(width, height, side.slots, view.end), ...colours };
  drawTime(pen, place, view.end, height);
  drawLanes(pen, place, side.slots);
  drawWaiting(pen, place, side.queue, view);
  const bar = (kind, slot, start, end) => {
    const [y, tall] = place.bar(slot, LOOKS[kind]);
    const x = place.x(start);
    return [x, y, place.x(end) - x, tall];
  };
  pen.fillStyle = LOOKS.waiting.colour;
  for (const [slot, start, end] of side.waits) pen.fillRect(...bar("waiting", slot, start, end));
  const labels = [];
  for (const { t, seconds, chunks, decodes } of side.iterations) {
    pen.fillStyle = LOOKS.decode.colour;
    for (const [, slot] of decodes) {
      const [x, y, wide, tall] = bar("decode", slot, t, t + seconds);
      pen.fillRect(x, y, wide > 3 ? wide - 0.8 : wide, tall);
    }
    for (const [, slot, , tokens] of chunks) {
      const box = bar("prefill", slot, t, t + seconds);
      pen.fillStyle = hatched();
      pen.fillRect(...box);
      if (box[2] > 3 && box[3] > 3) {
        pen.strokeStyle = LOOKS.prefill.edge;
        pen.lineWidth = 0.8;
        pen.strokeRect(box[0] + 0.4, box[1] + 0.4, box[2] - 0.8, box[3] - 0.8);
      }
      if (box[3] >= 12) labels.push([String(tokens), box[0], box[2], box[1] + box[3] / 2]);
    }
  }
  pen.fillStyle = LOOKS.stall.colour;
  for (const [slot, start, end] of side.stalls) pen.fillRect(...bar("stall", slot, start, end));
  for (const [text, left, wide, middle] of labels) label(pen, text, left, wide, middle);
  const longest = side.stalls.reduce((a, b) => (a && a[2] - a[1] >= b[2] - b[1] ? a : b), null);
  if (longest && place.lane >= 17) {
    const [slot, start, end] = longest;
    const [y] = place.bar(slot, LOOKS.prefill), left = place.x(start);
    const seconds = `${(end - start).toFixed(2)} s`, wide = place.x(end) - left;
    const text = pen.measureText(`stall ${seconds}`).width + 6 > wide ? seconds : `stall ${seconds}`;
    label(pen, text, left, wide, y + 0.35 * place.lane, "#A34600");
  }
  if (step !== null) {
    const { t, seconds } = side.iterations[step];
    pen.strokeStyle = place.ink;
    pen.lineWidth = 2;
    const x = place.x(t);
    pen.strokeRect(x, place.top, Math.max(2, place.x(t + seconds) - x), place.bottom - place.top);
  }
}

function drawTime(pen, place, end, height) {
  pen.strokeStyle = place.grid;
  pen.lineWidth = 1;
  pen.fillStyle = place.ink;
  pen.textAlign = "center";
  for (const [moment, text] of ticks(end, (place.right - place.left) / 60)) {
    const x = Math.round(place.x(moment)) + 0.5;
    line(pen, x, place.top, x, place.bottom + 4);
    pen.fillText(text, x, place.bottom + 13);
  }
  pen.fillText("time (s)", (place.left + place.right) / 2, height - 9);
}

function drawLanes(pen, place, slots) {
  pen.fillStyle = place.ink;
  pen.textAlign = "right";
  const every = [1, 2, 5, 10, 20, 50].find((each) => each * place.lane >= 15);
  for (let slot = 0; slot < slots; slot += every) {
    pen.fillText(`slot ${slot}`, place.left - 5, place.top + (slot + 0.45) * place.lane);
  }
}

// How many requests wait, as steps above the lanes, and where the long prompt arrives.
function drawWaiting(pen, place, queue, { end, long }) {
  const base = place.top - 4, tall = 18;
  pen.fillStyle = place.ink;
  pen.textAlign = "right";
  pen.fillText("queue", place.left - 5, base - tall / 2);
  drawQueue(pen, queue, end, place.x, base, tall, place.ink);
  if (long !== null) {
    const x = place.x(long);
    pen.fillStyle = place.ink;
    pen.beginPath();
    pen.moveTo(x - 6, base - 14);
    pen.lineTo(x + 6, base - 14);
    pen.lineTo(x, base - 3);
    pen.fill();
  }
}

// The iteration at a place of the canvas, or null.
export function stepAt(canvas, side, view, x) {
  const { width, height } = canvas.getBoundingClientRect();
  const place = frame(width, height, side.slots, view.end);
  const moment = ((x - place.left) / (place.right - place.left)) * view.end;
  const found = side.iterations.findIndex(({ t, seconds }) => t <= moment && moment < t + seconds);
  return found < 0 ? null : found;
}

// The gain over P:D. now: this state's P:D; balance: C/(B-1) - 1, or null.
export function drawGain(canvas, points, all, now, balance) {
  const { pen, width, height, ink, paper, grid } = prepare(canvas, FONT);
  const left = 58, right = width - 14, top = 24, bottom = height - 42;
  const low = Math.min(all[0], now) / 1.1, high = Math.max(all.at(-1), now) * 1.1;
  const gains = points.map((point) => point.gain);
  const least = Math.min(0.8, ...gains.map((gain) => gain - 0.05));
  const most = Math.max(1.3, ...gains.map((gain) => gain + 0.05));
  const x = (ratio) => left + (Math.log(ratio / low) / Math.log(high / low)) * (right - left);
  const y = (gain) => bottom - ((gain - least) / (most - least)) * (bottom - top);
  pen.lineWidth = 1;
  for (let power = -2; power < 6; power++) {
    for (const factor of [1, 2, 5]) {
      const ratio = factor * 10 ** power;
      if (ratio < low || ratio > high) continue;
      rule(pen, grid, [], x(ratio), top, x(ratio), bottom);
      pen.fillStyle = ink;
      pen.textAlign = "center";
      pen.fillText(String(Number(ratio.toPrecision(1))), x(ratio), bottom + 13);
    }
  }
  pen.fillText("P:D, prompt tokens per decode", (left + right) / 2, height - 12);
  const step = most - least > 1.5 ? 0.5 : most - least > 0.7 ? 0.2 : 0.1;
  for (let i = Math.ceil(least / step); i * step <= most; i++) {
    rule(pen, grid, [], left, y(i * step), right, y(i * step));
    pen.fillStyle = ink;
    pen.textAlign = "right";
    pen.fillText((i * step).toFixed(1), left - 6, y(i * step));
  }
  pen.save();
  pen.translate(14, (top + bottom) / 2);
  pen.rotate(-Math.PI / 2);
  pen.textAlign = "center";
  pen.fillText("throughput, right / left", 0, 0);
  pen.restore();
  rule(pen, ink, [], left, y(1), right, y(1));
  if (balance !== null && balance > low && balance < high) {
    rule(pen, ink, [2, 4], x(balance), top, x(balance), bottom);
    pen.fillStyle = ink;
    pen.textAlign = x(balance) > width / 2 ? "right" : "left";
    pen.fillText(`C/(B-1) - 1 = ${balance.toFixed(1)}`, x(balance) + (x(balance) > width / 2 ? -5 : 5), top - 10);
  }
  pen.strokeStyle = pen.fillStyle = LOOKS.decode.colour;
  pen.lineWidth = 2.2;
  pen.setLineDash([]);
  pen.beginPath();
  points.forEach((point, i) => (i ? pen.lineTo : pen.moveTo).call(pen, x(point.x), y(point.gain)));
  pen.stroke();
  for (const point of points) {
    const here = Math.abs(point.x / now - 1) < 1e-9;
    pen.beginPath();
    pen.arc(x(point.x), y(point.gain), here ? 7 : 3.5, 0, 7);
    pen.fillStyle = here ? paper : LOOKS.decode.colour;
    pen.fill();
    if (here) pen.stroke();
  }
}

function rule(pen, colour, dash, ...ends) {
  pen.strokeStyle = colour;
  pen.setLineDash(dash);
  pen.lineWidth = dash.length ? 1.8 : 1;
  line(pen, ...ends);
}
