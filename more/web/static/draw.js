// Every picture of both pages: a Schedule over time, and the explorer's curve.
//
// Colours, heights and hatches are those of more/pictures/gantt.py, so that a kind of bar looks the
// same in all pictures. It is told by its height or hatch, too, and not by its colour alone.

import { make } from "./dom.js";
import { promptTokens, seconds, whole } from "./schedule.js";

export const LOOKS = { // low, high: bottom and top in a lane from 0 to 1
  waiting: { colour: "#999999", low: 0.51, high: 0.59 },
  prefill: { colour: "#F5C45E", low: 0.2, high: 0.9, edge: "#8A6100" },
  decode: { colour: "#0072B2", low: 0.34, high: 0.76 },
  stall: { colour: "#D55E00", low: 0.05, high: 0.16 },
};
const MEANINGS = { // in the order of the legend
  prefill: "prefill chunk, tokens",
  decode: "decode",
  waiting: "waits in its slot",
  stall: "generation stall: TBT above the SLO",
  queue: "requests in the queue",
  bound: "budget C, and the SLO",
  cross: "preempted",
};
const FONT = "14px system-ui, sans-serif";
const LEFT = 58; // px: margins of a picture
const RIGHT = 10;
const BOTTOM = 22; // of the axis of time
const ROW = 18; // px: above the lanes, one row for names and one for the queue
const TOP = 2 * ROW + 4;
const HEAD = 16; // px: of a lane, for the names of its requests, if the lane is high enough
const LEAST_LANES = 8;
const TILE = 7; // px: of the hatch
const APART = 4; // px: from this width on, bars side by side stay apart
const LEAST_CHUNK = 3; // px: a narrower chunk would not be seen ...
const NAME = 110; // px at the right edge, for the name of a policy that has just begun
const CROWDED = 20; // px for a second: ... but with less, chunks would hide the decodes

// The smallest of 1, 2, 5, 10, ... that is at least `value`: a step between ticks.
function round(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= value * 0.9999);
}

const decimals = (step) => Math.max(0, -Math.floor(Math.log10(step) + 1e-9));

// A canvas, and what is drawn with on it. Lengths are CSS pixels.
class Picture {
  constructor(canvas) {
    this.canvas = canvas;
  }

  // Empty the canvas, sharp on every screen; colours are those of its style. below: of its bottom.
  begin(below) {
    const { canvas } = this;
    const { width, height } = canvas.getBoundingClientRect();
    const style = getComputedStyle(canvas);
    canvas.width = Math.round(width * window.devicePixelRatio); // this empties it
    canvas.height = Math.round(height * window.devicePixelRatio);
    this.pen = canvas.getContext("2d");
    this.pen.scale(window.devicePixelRatio, window.devicePixelRatio);
    this.pen.font = FONT;
    this.pen.textBaseline = "middle";
    this.ink = style.color;
    this.paper = style.backgroundColor;
    this.grid = style.borderTopColor;
    this.right = width - RIGHT;
    this.bottom = height - below;
  }

  // An axis of time, with its seconds if there is room for them below.
  beginTime(from, to, below = BOTTOM) {
    this.begin(below);
    this.perSecond = (this.right - LEFT) / (to - from);
    this.from = Math.round(from * this.perSecond) / this.perSecond; // so bars keep their widths
    this.to = this.from + (to - from);
    const step = round(60 / this.perSecond);
    for (let tick = Math.max(0, Math.ceil(this.from / step)); tick * step <= this.to; tick++) {
      const x = this.x(tick * step);
      this.line(x, 0, x, this.bottom, this.grid);
      if (below < BOTTOM || x < LEFT + 16 && tick || x > this.right - 14) continue;
      this.write(`${(tick * step).toFixed(decimals(step))} s`, x, this.bottom + BOTTOM / 2, "center");
    }
  }

  x(moment) {
    const seen = Math.min(Math.max(moment, this.from), this.to) - this.from;
    return LEFT + Math.round(seen * this.perSecond);
  }

  // The axis of values, from `least` to `most`; then `y` knows their places. text: of a tick.
  beginValues(least, most, top, text) {
    const high = this.bottom - top;
    this.y = (value) => this.bottom - ((value - least) / (most - least)) * high;
    const step = round((24 * (most - least)) / high);
    for (let tick = Math.ceil(least / step); tick * step <= most; tick++) {
      const y = this.y(tick * step);
      this.line(LEFT, y, this.right, y, this.grid);
      if (y > 7) this.write(text(tick * step, step), LEFT - 6, Math.min(y, this.bottom - 6), "right");
    }
  }

  line(x0, y0, x1, y1, colour = this.ink, wide = 1, dash = []) {
    const { pen } = this;
    pen.strokeStyle = colour;
    pen.lineWidth = wide;
    pen.setLineDash(dash);
    pen.beginPath();
    pen.moveTo(x0, y0);
    pen.lineTo(x1, y1);
    pen.stroke();
    pen.setLineDash([]);
  }

  fill(colour, left, top, wide, high) {
    this.pen.fillStyle = colour;
    this.pen.fillRect(left, top, wide, high);
  }

  frame(left, right, top, bottom, wide, colour = this.ink) {
    this.pen.strokeStyle = colour;
    this.pen.lineWidth = wide;
    this.pen.strokeRect(left, top, right - left, bottom - top);
  }

  write(text, x, y, align = "left", colour = this.ink) {
    this.pen.fillStyle = colour;
    this.pen.textAlign = align;
    this.pen.fillText(text, x, y);
  }

  // A text in a box, from `left` on.
  box(text, left, middle, paper = this.paper, ink = this.ink) {
    this.fill(paper, left - 1, middle - 8, this.pen.measureText(text).width + 2, 16);
    this.write(text, left, middle + 0.5, "left", ink);
  }

  // A text in a white box between left and right, if it fits there.
  label(text, left, right, middle) {
    const spare = right - left - this.pen.measureText(text).width;
    if (spare >= 2) this.box(text, left + spare / 2, middle, "#FFFFFF", "#000000");
  }

  // A dashed line down from the row at `y`, with its name beside it.
  mark(x, text = "", y = 0) {
    this.line(x, y, x, this.bottom, this.ink, 2, [6, 4]);
    const wide = this.pen.measureText(text).width + 8;
    if (text) this.box(text, x + wide > this.right ? x - wide : x + 6, y + ROW / 2);
  }

  // A text from `left` on, of which nothing is seen from `right` on.
  cut(text, left, right, middle) {
    const { pen } = this;
    pen.save();
    pen.beginPath();
    pen.rect(left, 0, right - left, this.bottom);
    pen.clip();
    this.write(text, left, middle);
    pen.restore();
  }

  // A dashed bound at `y`, with its name above it.
  bound(left, right, y, text) {
    this.line(left, y, right, y, this.ink, 2, [8, 4]);
    const last = this.right - this.pen.measureText(text).width - 2; // for a name that is still seen
    if (text) this.box(text, Math.min(left + 6, last), y > 22 ? y - 10 : y + 11);
  }

  bar(kind, left, right, top, high) {
    const { colour, edge } = LOOKS[kind];
    const chunk = kind === "prefill";
    const least = chunk && !(this.perSecond < CROWDED) ? LEAST_CHUNK : 1;
    const wide = Math.max(right - left, least);
    this.fill(chunk && wide >= APART ? HATCH : colour, left, top, wide, high);
    if (chunk && wide >= APART) {
      this.frame(left + 0.5, left + wide - 0.5, top + 0.5, top + high - 0.5, 1, edge);
    } else if (chunk && wide >= LEAST_CHUNK || kind === "decode" && wide >= APART) {
      this.fill(edge ?? this.paper, left + wide - 1, top, 1, high);
    }
  }

  // How many requests wait: steps above `base`, the highest with its number, if that fits.
  // queue: [moment, how many from then on]; end: of the last step.
  queue(queue, end, base, high) {
    const ends = [...queue.slice(1).map(([from]) => from), end];
    const steps = queue.map(([from, count], i) => [this.x(from), this.x(ends[i]), count])
      .filter(([left, right, count]) => count && right > left);
    if (!steps.length) return;
    const most = Math.max(...steps.map(([, , count]) => count));
    let widest = [0, 0]; // of the highest
    for (const [left, right, count] of steps) {
      const top = base - (high * count) / most;
      this.fill("#D9D9D9", left, top, right - left, base - top);
      this.line(left, top, right, top, this.ink, 1.5);
      if (count === most && right - left > widest[1] - widest[0]) widest = [left, right];
    }
    this.label(`${most}`, ...widest, base - high / 2);
  }

  // A triangle with an exclamation mark.
  sign(x, y, size) {
    const { pen } = this;
    pen.beginPath();
    pen.moveTo(x, y - size);
    pen.lineTo(x + size, y + size * 0.8);
    pen.lineTo(x - size, y + size * 0.8);
    pen.fillStyle = LOOKS.stall.colour;
    pen.fill();
    this.fill("#FFFFFF", x - 1, y - size * 0.4, 2, size * 0.6);
    this.fill("#FFFFFF", x - 1, y + size * 0.4, 2, 2);
  }

  cross(x, y) {
    this.line(x - 6, y - 6, x + 6, y + 6, this.ink, 3);
    this.line(x - 6, y + 6, x + 6, y - 6, this.ink, 3);
  }

  dot(x, y, size, colour) {
    this.pen.beginPath();
    this.pen.arc(x, y, size, 0, 7);
    this.pen.fillStyle = colour;
    this.pen.fill();
  }
}

// The hatch of prefills, as a colour to fill with. It is drawn at four times its size, to be sharp.
function hatch() {
  const tile = new Picture(make("canvas", { width: 4 * TILE, height: 4 * TILE }));
  tile.pen = tile.canvas.getContext("2d");
  tile.pen.scale(4, 4);
  tile.fill(LOOKS.prefill.colour, 0, 0, TILE, TILE);
  for (const shift of [-TILE, 0, TILE]) {
    tile.line(shift, TILE, shift + TILE, 0, LOOKS.prefill.edge, 0.8);
  }
  const pattern = tile.pen.createPattern(tile.canvas, "repeat");
  pattern.setTransform(new DOMMatrix().scale(1 / 4));
  return pattern;
}

const HATCH = hatch();

// A Schedule on one axis of time: its lanes; and below them, where there are canvases for that,
// the rows of its batches and the gaps between tokens.
export class Pictures {
  constructor({ lanes, rows, tbt }) {
    this.lanes = new Picture(lanes);
    this.rows = rows && new Picture(rows);
    this.tbt = tbt && new Picture(tbt);
  }

  // from, to: seconds at both edges; now: the end of the history; chosen: a batch to frame.
  draw(schedule, from, to, now, chosen) {
    const seen = schedule.iterations.filter((each) => each.end >= from && each.t <= to);
    const { current } = schedule; // the batch that runs, as far as it has come
    if (current && current.t <= to) {
      const rows = promptTokens(current) + current.decodes.length;
      const { budget } = schedule.state;
      seen.push({ ...current, rows, budget, end: now, seconds: now - current.t, gaps: [] });
    }
    this.lanes.beginTime(from, to);
    drawLanes(this.lanes, schedule, seen, now);
    drawPolicies(this.lanes, schedule);
    if (chosen) this.lanes.frame(this.lanes.x(chosen.t), this.lanes.x(chosen.end), TOP, this.lanes.bottom, 2);
    if (!this.rows) return;
    this.rows.beginTime(from, to, 4);
    drawRows(this.rows, schedule, seen);
    drawSwitches(this.rows, schedule);
    this.tbt.beginTime(from, to);
    drawTBT(this.tbt, schedule, seen, now);
    drawSwitches(this.tbt, schedule);
  }

  // The right edge of a view of `shown` seconds that ends now; later, where a policy that has just
  // begun has no room for its name else.
  edge(schedule, now, shown) {
    const began = schedule.policies.at(-1)?.t ?? -Infinity;
    return Math.max(now, began + (NAME * shown) / (this.lanes.canvas.clientWidth - LEFT - RIGHT));
  }

  // Where a place in the pictures lies: 0 at their left edge of time, 1 at their right edge.
  share(px) {
    return Math.min(Math.max((px - LEFT) / (this.lanes.right - LEFT), 0), 1);
  }
}

function drawLanes(picture, schedule, seen, now) {
  const places = schedule.places.filter(({ from, to }) =>
    (to ?? picture.to) >= picture.from && from <= picture.to);
  const least = Math.min(LEAST_LANES, schedule.state.max_batch_size ?? LEAST_LANES);
  const lanes = Math.max(least, ...places.map(({ lane }) => lane + 1));
  const high = (picture.bottom - TOP) / lanes;
  const head = high > 2 * HEAD ? HEAD : 0;
  const roomy = high > 17; // for words in a lane
  const top = (lane, share) => TOP + (lane + 1) * high - share * (high - head);
  const middle = (lane) => top(lane, 0.55);
  const put = (kind, lane, from, to) => {
    const upper = top(lane, LOOKS[kind].high);
    picture.bar(kind, picture.x(from), picture.x(to), upper, top(lane, LOOKS[kind].low) - upper);
  };
  picture.write("queue", LEFT - 6, TOP - 4 - ROW / 2, "right");
  picture.queue(schedule.queue, now, TOP - 4, ROW);
  for (let lane = 0; lane < lanes; lane += Math.ceil(16 / high)) {
    picture.write(`slot ${lane}`, LEFT - 6, middle(lane), "right");
  }
  const known = schedule.current ? now : schedule.newest; // after it, decodes may run
  for (const { lane, from, to } of places) put("waiting", lane, from, to ?? known);
  for (const { lane, from, to } of decodeBars(seen, APART / picture.perSecond)) {
    put("decode", lane, from, to);
  }
  for (const { t, end, chunks } of seen) {
    for (const [, lane, , length] of chunks) {
      put("prefill", lane, t, end);
      if (roomy) picture.label(whole(length), picture.x(t), picture.x(end), middle(lane));
    }
  }
  for (const { lane, from, to } of [...schedule.stalls, ...schedule.waits(now)]) {
    if (to < picture.from || from > picture.to) continue;
    put("stall", lane, from, to);
    if (roomy) drawStall(picture, from, to, top(lane, 0.9), middle(lane));
  }
  if (head) for (const place of places) drawName(picture, place, TOP + place.lane * high + head / 2 + 2);
  for (const { t, lane, text } of schedule.marks) {
    if (t < picture.from || t > picture.to) continue;
    if (lane === null) picture.mark(picture.x(t), text);
    else picture.cross(picture.x(t), middle(lane));
  }
}

// A dashed line where a policy begins to decide.
function drawSwitches(picture, { policies }) {
  for (const { t } of policies.slice(1)) if (t > picture.from && t <= picture.to) picture.mark(picture.x(t));
}

// A band for each policy, as long as it decides, with its name: whole, short or cut off, and never
// over the part of another one.
function drawPolicies(picture, schedule) {
  const { policies } = schedule;
  policies.forEach(({ t, policy, budget }, i) => {
    const left = picture.x(t);
    const right = picture.x(policies[i + 1]?.t ?? picture.to) - 2;
    if (right <= left) return; // before the view, or after it
    picture.fill(picture.grid, left, 0, right - left, ROW - 1);
    const whole = budget ? `${policy}, C = ${budget}` : policy;
    const fits = left + 6 + picture.pen.measureText(whole).width < right;
    picture.cut(fits ? whole : policy, left + 6, right, ROW / 2);
  });
  drawSwitches(picture, schedule);
}

// Decodes by lane. Those shorter than `thin` seconds could not be told apart: they are one bar.
function decodeBars(seen, thin) {
  const bars = [];
  const newest = new Map(); // lane -> its bar that may still grow
  for (const { t, end, seconds: long, decodes } of seen) {
    for (const [, lane] of decodes) {
      const bar = newest.get(lane);
      if (bar && long < thin && t - bar.to < thin / 5) {
        bar.to = end;
        continue;
      }
      bars.push({ lane, from: t, to: end });
      newest.set(lane, bars.at(-1));
    }
  }
  return bars;
}

// What the eye shall not miss: the empty place in the lane, a sign, and how long it lasts.
function drawStall(picture, from, to, top, middle) {
  const left = picture.x(from);
  const right = picture.x(to);
  picture.pen.globalAlpha = 0.22;
  picture.fill(LOOKS.stall.colour, left, top, right - left, 2 * (middle - top));
  picture.pen.globalAlpha = 1;
  if (right - left < 20) return;
  picture.sign(left + 10, middle, 8);
  picture.label(seconds(to - from), left + 18, right, middle);
}

// A request's number, and what it is called, above its place in the lane.
function drawName(picture, { id, label, from, to }, y) {
  const left = picture.x(from);
  const room = Math.max(picture.x(to ?? picture.to) - left, 30);
  const names = [`${id} ${label ?? ""}`.trim(), `${id}`];
  const name = names.find((each) => picture.pen.measureText(each).width < room);
  if (name) picture.write(name, left + 1, y);
}

function drawRows(picture, schedule, seen) {
  if (!seen.length) return;
  const x = (moment) => picture.x(moment);
  const most = Math.max(schedule.state.budget ?? 0, ...seen.map(({ rows }) => rows), 8);
  picture.beginValues(0, 1.35 * most, 8, (value) => whole(Math.round(value)));
  const { y } = picture;
  for (const each of [...seen].sort((a, b) => a.rows - b.rows)) { // of those in one pixel, the highest is seen
    const left = x(each.t);
    const right = x(each.end);
    const tokens = promptTokens(each);
    const decodes = each.rows - tokens;
    const foot = decodes ? Math.min(y(decodes), picture.bottom - 3) : picture.bottom;
    const top = Math.min(y(each.rows), foot - 2);
    if (decodes) picture.bar("decode", left, right, foot, picture.bottom - foot);
    if (tokens) picture.bar("prefill", left, right, top, foot - top);
    if (tokens && y(0) - top > 30) picture.label(whole(each.rows), left, right, top + 12);
  }
  let first = null; // of those with one budget, where the policy keeps one
  for (const each of [...seen, null]) {
    if (each && each.budget === first?.budget) continue;
    if (first?.budget) {
      const name = each ? "" : `C = ${first.budget}`;
      picture.bound(x(first.t), x(each?.t ?? picture.to), y(first.budget), name);
    }
    first = each;
  }
}

function drawTBT(picture, schedule, seen, now) {
  const { slo } = schedule;
  const gaps = seen.flatMap(({ end, gaps: own }) => own.map(([, , last]) => [end, end - last]));
  if (now < picture.to + 1 / picture.perSecond) { // those who wait still
    gaps.push(...schedule.waits(now).map(({ from }) => [now, now - from]));
  }
  if (!gaps.length) return; // no numbers without a point
  const longest = gaps.reduce((most, [, gap]) => Math.max(most, gap), 0);
  const most = Math.max(1.15 * longest, 1.4 * slo);
  const [unit, factor] = most < 1 ? ["ms", 1000] : ["s", 1];
  picture.beginValues(0, most, 8, (value) => `${Number((factor * value).toPrecision(3))} ${unit}`);
  if (slo !== null) picture.bound(LEFT, picture.right, picture.y(slo), `SLO ${seconds(slo)}`);
  const drawn = new Set(); // pixels that have a dot
  for (const [moment, gap] of gaps) {
    const x = picture.x(moment);
    const y = picture.y(gap);
    if (slo !== null && gap > slo) {
      picture.line(x, picture.bottom, x, y, LOOKS.stall.colour, 3);
      picture.sign(x, y, 7);
      continue;
    }
    const place = x * 10000 + Math.round(y);
    if (!drawn.has(place)) picture.dot(x, y, 2.5, LOOKS.decode.colour);
    drawn.add(place);
  }
}

// The gain over P:D. all: where points will be; now: this state's P:D; balance: C/(B-1) - 1, or null.
export function drawGain(canvas, points, all, now, balance) {
  const picture = new Picture(canvas);
  picture.begin(2 * ROW + 4);
  const low = Math.min(all[0], now) / 1.1;
  const high = Math.max(all.at(-1), now) * 1.1;
  const room = picture.right - LEFT;
  const x = (ratio) => LEFT + (Math.log(ratio / low) / Math.log(high / low)) * room;
  const gains = points.map(({ gain }) => gain);
  const least = Math.min(0.8, ...gains.map((gain) => gain - 0.05));
  const most = Math.max(1.3, ...gains.map((gain) => gain + 0.05));
  for (let ratio = round(low); ratio <= high; ratio = round(1.5 * ratio)) {
    picture.line(x(ratio), TOP, x(ratio), picture.bottom, picture.grid);
    picture.write(`${Number(ratio.toPrecision(1))}`, x(ratio), picture.bottom + ROW / 2, "center");
  }
  picture.beginValues(least, most, TOP, (value, step) => value.toFixed(decimals(step)));
  picture.line(LEFT, picture.y(1), picture.right, picture.y(1));
  picture.write("throughput, right / left", 0, ROW / 2);
  picture.write("P:D, prompt tokens per decode", LEFT + room / 2, picture.bottom + 1.6 * ROW, "center");
  if (balance > low && balance < high) picture.mark(x(balance), `C/(B-1) - 1 = ${balance.toFixed(1)}`, ROW);
  const place = (point) => [x(point.x), picture.y(point.gain)];
  points.forEach((point, i) => picture.line(...place(points[Math.max(i - 1, 0)]), ...place(point), picture.ink, 2));
  for (const point of points) {
    const here = Math.abs(point.x / now - 1) < 1e-9; // a ring
    picture.dot(...place(point), here ? 8 : 3.5, picture.ink);
    if (here) picture.dot(...place(point), 6, picture.paper);
  }
}

// The legend, drawn as the pictures are. kinds: of MEANINGS; slo: in seconds, where it is fixed.
export function legend(list, kinds = Object.keys(MEANINGS), slo = null) {
  list.replaceChildren();
  for (const kind of kinds) {
    const meaning = kind === "stall" && slo ? `${MEANINGS.stall}, ${seconds(slo)}` : MEANINGS[kind];
    const picture = new Picture(make("canvas", { className: "key" }));
    list.append(make("li", {}, picture.canvas, meaning));
    picture.begin(0);
    picture.x = (px) => px;
    if (kind === "cross") {
      picture.cross(17, 11);
    } else if (kind === "bound") {
      picture.bound(0, 34, 11, "");
    } else if (kind === "queue") {
      picture.queue([[1, 3]], 33, 20, 17);
    } else {
      const { low, high } = LOOKS[kind];
      picture.bar(kind, 1, 33, (1 - high) * 22, (high - low) * 22);
      if (kind === "stall") picture.sign(17, 9, 8);
    }
  }
}
