// Draws a Schedule on three canvases with one axis of time.

import { make } from "./dom.js";
import { drawQueue, hatched, label, line, LOOKS, prepare, round } from "./looks.js";
import { promptTokens, seconds, whole } from "./schedule.js";

const LEFT = 54, RIGHT = 10, BOTTOM = 22; // px: margins of a picture; BOTTOM: of the axis of time
const NAMES = 18, QUEUE = 18, TOP = NAMES + QUEUE + 4; // px: names of policies, the queue, lanes
const HEAD = 15; // px: of a lane, for the names of its requests, if the lane is high enough
const FONT = "13px system-ui, sans-serif", BOLD = `600 ${FONT}`;
const LEAST_LANES = 8, APART = 5; // px: from this width on, bars side by side stay apart
const LEAST_CHUNK = 3; // px: a narrower chunk would not be seen ...
const CROWDED = 20; // px for a second: ... but with less, chunks would hide the decodes
const MEANINGS = { // in the order of the legend
  prefill: "prefill chunk, tokens",
  decode: "decode",
  waiting: "waits in its slot",
  stall: "generation stall: TBT above the SLO",
  queue: "requests in the queue",
  bound: "budget C, and the SLO",
  cross: "preempted",
};

export class Pictures {
  constructor(lanes, rows, tbt) {
    this.canvases = { lanes, rows, tbt };
  }

  // schedule; from, to: the engine's seconds at both edges; now: the end of the history.
  draw(schedule, from, to, now) {
    // Move by whole pixels, so that bars keep their widths.
    const { width } = this.canvases.lanes.getBoundingClientRect();
    this.perSecond = (width - LEFT - RIGHT) / (to - from);
    from = Math.round(from * this.perSecond) / this.perSecond;
    to = from + (width - LEFT - RIGHT) / this.perSecond;
    Object.assign(this, { schedule, from, to, now });
    const seen = schedule.iterations.filter((each) => each.end >= from && each.t <= to);
    const { current, state: { budget } } = schedule; // the batch that runs, as far as it has come
    if (current && current.t <= to) {
      const rows = promptTokens(current) + current.decodes.length;
      seen.push({ ...current, rows, budget, end: now, seconds: now - current.t, gaps: [] });
    }
    this.drawLanes(seen);
    this.drawRows(seen);
    this.drawTBT(seen);
  }

  // Where a place in the pictures lies: 0 at their left edge of time, 1 at their right edge.
  share(px) {
    return Math.min(Math.max((px - LEFT) / (this.width - LEFT - RIGHT), 0), 1);
  }

  // Clear a canvas, and draw its axis of time. low: px below it; seconds are written if they fit.
  begin(name, low = BOTTOM) {
    const { height, ...prepared } = prepare(this.canvases[name], FONT), { pen, width } = prepared;
    Object.assign(this, prepared, { bottom: height - low });
    const step = round(80 / this.perSecond), digits = Math.max(0, -Math.floor(Math.log10(step)));
    pen.fillStyle = this.ink;
    pen.strokeStyle = this.grid;
    pen.lineWidth = 1;
    pen.textAlign = "center";
    for (let t = Math.ceil(this.from / step) * step; t <= this.to; t += step) {
      if (t < 0) continue; // before the engine began
      const x = this.x(t);
      this.line(x, 0, x, this.bottom);
      if (low === BOTTOM && x > LEFT + 16 && x < width - 24) {
        pen.fillText(`${t.toFixed(digits)} s`, x, height - BOTTOM / 2);
      }
    }
    return pen;
  }

  x(t) {
    const seen = Math.min(Math.max(t, this.from), this.to) - this.from;
    return LEFT + Math.round(seen * this.perSecond);
  }

  line(...ends) {
    line(this.pen, ...ends);
  }

  bar(kind, left, right, top, height) {
    const look = LOOKS[kind], pen = this.pen, chunk = kind === "prefill";
    const wide = Math.max(right - left, chunk && !(this.perSecond < CROWDED) ? LEAST_CHUNK : 1);
    pen.fillStyle = chunk && wide >= APART ? hatched() : look.colour;
    pen.fillRect(left, top, wide, height);
    if (wide < (chunk ? LEAST_CHUNK : APART) || kind === "stall" || kind === "waiting") return;
    pen.fillStyle = look.edge ?? this.paper;
    pen.fillRect(left + wide - 1, top, 1, height);
    if (!look.edge || wide < APART) return;
    pen.strokeStyle = look.edge;
    pen.lineWidth = 1;
    pen.strokeRect(left + 0.5, top + 0.5, wide - 1, height - 1);
  }

  // A text in a box, if it fits between left and right.
  label(text, left, right, middle) {
    label(this.pen, text, left, right - left, middle);
  }

  drawLanes(seen) {
    const { schedule, now } = this, pen = this.begin("lanes");
    const places = schedule.places.filter((place) => (place.to ?? this.to) >= this.from
      && place.from <= this.to);
    const most = schedule.state.max_batch_size ?? LEAST_LANES;
    const lanes = Math.max(Math.min(LEAST_LANES, most), ...places.map((place) => place.lane + 1));
    const high = (this.bottom - TOP) / lanes, head = high > 2 * HEAD ? HEAD : 0;
    const top = (lane, share) => TOP + (lane + 1) * high - share * (high - head);
    const middle = (lane) => top(lane, 0.55);
    const put = (kind, lane, from, to) => {
      const { low, high: upper } = LOOKS[kind];
      this.bar(kind, this.x(from), this.x(to), top(lane, upper), (upper - low) * (high - head));
    };
    pen.fillStyle = this.ink;
    pen.textAlign = "right";
    pen.fillText("queue", LEFT - 6, TOP - 4 - QUEUE / 2);
    drawQueue(pen, schedule.queue, this.to, (t) => this.x(t), TOP - 4, QUEUE, this.ink);
    pen.fillStyle = this.ink;
    pen.textAlign = "right";
    for (let lane = 0; lane < lanes; lane += Math.ceil(16 / high)) {
      pen.fillText(`slot ${lane}`, LEFT - 6, middle(lane));
    }
    const known = schedule.current ? now : schedule.newest; // after it, decodes may run
    for (const place of places) put("waiting", place.lane, place.from, place.to ?? known);
    this.drawDecodes(seen, put);
    for (const { t, end, chunks } of seen) {
      for (const [, lane, , length] of chunks) {
        put("prefill", lane, t, end);
        if (high > 17) this.label(whole(length), this.x(t), this.x(end), middle(lane));
      }
    }
    for (const stall of [...schedule.stalls, ...schedule.waits(now)]) {
      if (stall.to < this.from || stall.from > this.to) continue;
      put("stall", stall.lane, stall.from, stall.to);
      if (high > 17) this.drawStall(stall, top(stall.lane, 0.9), middle(stall.lane));
    }
    if (head) for (const place of places) this.drawName(place, TOP + place.lane * high + head / 2 + 2);
    const marks = schedule.marks.filter((mark) => mark.t >= this.from && mark.t <= this.to);
    const switches = marks.filter((mark) => mark.lane === null);
    switches.forEach((mark, i) => this.drawSwitch(mark, switches[i + 1]));
    for (const { t, lane } of marks) if (lane !== null) this.drawCross(this.x(t), middle(lane));
  }

  // Decodes, lane by lane. Those that are too narrow to be told apart are drawn together.
  drawDecodes(seen, put) {
    const open = new Map(); // lane -> from, to of a bar that may still grow
    const thin = APART / this.perSecond; // s
    for (const each of seen) {
      for (const [, lane] of each.decodes) {
        const bar = open.get(lane);
        if (bar && each.seconds < thin && each.t - bar.to < thin / 5) {
          bar.to = each.end;
          continue;
        }
        if (bar) put("decode", lane, bar.from, bar.to);
        open.set(lane, { from: each.t, to: each.end });
      }
    }
    for (const [lane, bar] of open) put("decode", lane, bar.from, bar.to);
  }

  // What the eye shall not miss: the empty place in the lane, a sign, and how long it lasts.
  drawStall({ from, to }, top, middle) {
    const left = this.x(from), right = this.x(to), pen = this.pen;
    pen.globalAlpha = 0.22;
    pen.fillStyle = LOOKS.stall.colour;
    pen.fillRect(left, top, right - left, 2 * (middle - top));
    pen.globalAlpha = 1;
    if (right - left < 20) return;
    this.sign(left + 10, middle, 8);
    pen.font = BOLD;
    this.label(seconds(to - from), left + 18, right, middle);
    pen.font = FONT;
  }

  // A triangle with an exclamation mark.
  sign(x, y, size) {
    const pen = this.pen;
    pen.beginPath();
    pen.moveTo(x, y - size);
    pen.lineTo(x + size, y + size * 0.8);
    pen.lineTo(x - size, y + size * 0.8);
    pen.closePath();
    pen.fillStyle = LOOKS.stall.colour;
    pen.fill();
    if (size < 6) return;
    pen.fillStyle = "#FFFFFF";
    pen.fillRect(x - 1, y - size * 0.4, 2, size * 0.6);
    pen.fillRect(x - 1, y + size * 0.4, 2, 2);
  }

  drawName(place, y) {
    const pen = this.pen, left = this.x(place.from), right = this.x(place.to ?? this.to);
    const short = String(place.id), long = `${short} ${place.label ?? ""}`.trim();
    const fits = (text) => pen.measureText(text).width < Math.max(right - left, 30);
    pen.fillStyle = this.ink;
    pen.textAlign = "left";
    if (fits(long)) pen.fillText(long, left + 1, y);
    else if (fits(short)) pen.fillText(short, left + 1, y);
  }

  // A dashed line, where the policy changed. Its name, if that fits before the next such line.
  drawSwitch({ t, text }, next) {
    const pen = this.pen, x = this.x(t), wide = pen.measureText(text).width + 8;
    const left = x + wide > this.width ? x - wide - 3 : x + 3;
    pen.strokeStyle = this.ink;
    pen.lineWidth = 2;
    pen.setLineDash([6, 4]);
    this.line(x, 0, x, this.bottom);
    pen.setLineDash([]);
    if (next && this.x(next.t) - x < wide) return;
    pen.fillStyle = this.paper;
    pen.fillRect(left, 0, wide, NAMES);
    pen.fillStyle = this.ink;
    pen.textAlign = "left";
    pen.fillText(text, left + 4, NAMES / 2);
  }

  // A request was preempted, or failed.
  drawCross(x, y) {
    this.pen.strokeStyle = this.ink;
    this.pen.lineWidth = 3;
    this.line(x - 6, y - 6, x + 6, y + 6);
    this.line(x - 6, y + 6, x + 6, y - 6);
  }

  // The y axis of a picture from 0 to `most`: returns value -> y, after drawing three ticks.
  axis(most, text) {
    const y = (value) => this.bottom - (value / most) * (this.bottom - 8), step = round(most / 3.5);
    this.pen.textAlign = "right";
    for (let value = 0; value <= most; value += step) {
      this.pen.strokeStyle = this.grid;
      this.line(LEFT, y(value), this.width - RIGHT, y(value));
      this.pen.fillStyle = this.ink;
      if (y(value) > 7) this.pen.fillText(text(value), LEFT - 6, Math.min(y(value), this.bottom - 6));
    }
    return y;
  }

  // A dashed bound with its name, above the bars.
  bound(from, to, y, text) {
    const pen = this.pen;
    pen.setLineDash([8, 4]);
    pen.strokeStyle = this.ink;
    pen.lineWidth = 2;
    this.line(this.x(from), y, this.x(to), y);
    pen.setLineDash([]);
    if (!text) return;
    pen.font = BOLD;
    const wide = pen.measureText(text).width, above = y > 22 ? y - 10 : y + 11;
    pen.fillStyle = this.paper;
    const left = Math.min(this.x(from) + 4, this.width - RIGHT - wide - 6);
    pen.fillRect(left, above - 8, wide + 6, 16);
    pen.fillStyle = this.ink;
    pen.textAlign = "left";
    pen.fillText(text, left + 3, above);
    pen.font = FONT;
  }

  drawRows(seen) {
    this.begin("rows", 4);
    if (!seen.length) return;
    const budget = this.schedule.state.budget ?? 0;
    const most = 1.35 * Math.max(budget, ...seen.map((each) => each.rows), 8);
    const y = this.axis(most, (value) => whole(Math.round(value)));
    let last = -1;
    for (const each of columns(seen, 1.5 / this.perSecond)) {
      const left = Math.max(this.x(each.t), last), right = this.x(each.end);
      const tokens = promptTokens(each);
      const decodes = each.rows - tokens;
      const foot = decodes ? Math.min(y(decodes), this.bottom - 3) : this.bottom;
      if (decodes) this.bar("decode", left, right, foot, this.bottom - foot);
      if (tokens) this.bar("prefill", left, right, Math.min(y(each.rows), foot - 2),
        foot - Math.min(y(each.rows), foot - 2));
      if (tokens && y(0) - y(each.rows) > 30) {
        this.label(whole(each.rows), left, right, y(each.rows) + 12);
      }
      last = right;
    }
    let from = null; // the budget, where the policy keeps one
    for (let i = 0; i <= seen.length; i++) {
      if (from !== null && seen[i]?.budget !== from.budget) {
        this.bound(from.t, seen[i]?.t ?? this.to, y(from.budget), i === seen.length ?
          `C = ${from.budget}` : "");
        from = null;
      }
      if (from === null && seen[i]?.budget) from = seen[i];
    }
  }

  drawTBT(seen) {
    const pen = this.begin("tbt"), { now } = this, slo = this.schedule.slo;
    const waits = now < this.to + 1 / this.perSecond ? this.schedule.waits(now) : [];
    let most = 0;
    for (const each of seen) for (const [, , last] of each.gaps) most = Math.max(most, 1.15 * (each.end - last));
    for (const wait of waits) most = Math.max(most, 1.15 * (this.to - wait.from));
    if (!most) return; // no numbers without a point
    most = Math.max(most, 1.4 * slo);
    const [unit, factor] = most < 1 ? ["ms", 1000] : ["s", 1];
    const y = this.axis(most, (value) => `${Number((factor * value).toPrecision(3))} ${unit}`);
    let column = -10, low = 0, high = 0; // dots within one pixel are one stroke
    for (const each of seen) {
      const x = this.x(each.end);
      for (const [, , last] of each.gaps) {
        const gap = each.end - last, at = y(gap);
        if (slo !== null && gap > slo) {
          pen.strokeStyle = LOOKS.stall.colour;
          pen.lineWidth = 3;
          this.line(x, this.bottom, x, at);
          this.sign(x, at, 7);
          continue;
        }
        if (x - column < 1 && at >= low && at <= high) continue;
        [low, high] = x - column < 1 ? [Math.min(low, at), Math.max(high, at)] : [at, at];
        column = x;
        pen.fillStyle = LOOKS.decode.colour;
        pen.beginPath();
        pen.arc(x, at, 2.5, 0, 7);
        pen.fill();
      }
    }
    for (const wait of waits) {
      pen.strokeStyle = LOOKS.stall.colour;
      pen.lineWidth = 3;
      this.line(this.x(this.to) - 2, this.bottom, this.x(this.to) - 2, y(this.to - wait.from));
    }
    if (slo !== null) this.bound(this.from, this.to, y(slo), `SLO ${seconds(slo)}`);
  }
}

// Iterations, where those within one pixel are one: that with the most rows.
function* columns(seen, thin) {
  let open = null;
  for (const each of seen) {
    if (open && each.end - open.t < thin) {
      const { t } = open;
      open = { ...(each.rows > open.rows ? each : open), t, end: each.end };
      continue;
    }
    if (open) yield open;
    open = each;
  }
  if (open) yield open;
}

// The legend, drawn as the pictures are.
export function legend(list) {
  const pictures = Object.assign(new Pictures(), { paper: "#FFFFFF", ink: getComputedStyle(document.body).color });
  list.replaceChildren();
  for (const [kind, meaning] of Object.entries(MEANINGS)) {
    const scale = 2, canvas = make("canvas", { className: "key", width: 34 * scale, height: 22 * scale });
    const pen = (pictures.pen = canvas.getContext("2d"));
    pen.scale(scale, scale);
    if (kind === "cross") {
      pictures.drawCross(17, 11);
    } else if (kind === "bound") {
      pen.strokeStyle = pictures.ink;
      pen.lineWidth = 2;
      pen.setLineDash([8, 4]);
      pictures.line(0, 11, 34, 11);
    } else if (kind === "queue") {
      drawQueue(pen, [[1, 3]], 33, (px) => px, 20, 17, pictures.ink);
    } else {
      const look = LOOKS[kind];
      pictures.bar(kind, 1, 33, (1 - look.high) * 22, (look.high - look.low) * 22);
      if (kind === "stall") pictures.sign(17, 9, 8);
    }
    list.append(make("li", {}, canvas, meaning));
  }
}
