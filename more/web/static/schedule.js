// What the engine has done lately, from the events of /live/events. No drawing, no network.
// All times are seconds on the engine's clock.

export const KEPT = 60; // s of history
const MOST_ENTRIES = 100000; // chunks and decodes kept, however short an iteration is
const TYPES = [
  "snapshot", "numbers", "chats", "queued", "started", "iteration", "ended", "preempted", "switched",
];
export const ENOUGH = 100; // gaps, before their median sets the SLO
export const FACTOR = 5; // times the median; Sarathi-Serve's strict SLO is 5 decode iterations
export const LEAST = 0.05; // s: a shorter pause no reader sees, and a busy machine makes many
const SAID = 6; // s for which the sentence tells of what is over

export const seconds = (value) =>
  value < 0.9995 ? `${Number((value * 1000).toPrecision(value < 0.01 ? 2 : 3))} ms`
    : `${value.toPrecision(3)} s`;
// Of an iteration. A chunk: request, lane, first token, tokens, whether it is its prefill's last.
export const promptTokens = ({ chunks }) => chunks.reduce((sum, [, , , length]) => sum + length, 0);
export const whole = (number) => number.toLocaleString("en");
const many = (count, noun) => `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;

export class Schedule {
  constructor() {
    this.tallies = new Map(); // "policy C" -> gaps, stalls and the longest gap under it
    this.ownSLO = null; // s, as the reader has set it
    this.clear();
  }

  // Forget the history: the page starts to watch, or has a new snapshot.
  clear() {
    this.iterations = []; // the runner's, and in `gaps` the TBTs that end with it
    this.entries = 0; // chunks and decodes in them
    this.places = []; // a request in its slot: id, lane, from, to (null: still there)
    this.stalls = []; // lane, id, from, to
    this.marks = []; // t, lane or null, kind, text
    this.queue = []; // t, and how many requests wait from then on
    this.requests = new Map(); // by id, until they end: tokens, label, last, place
    this.current = null; // the batch that runs now, if it holds chunks
    this.first = []; // gaps, until their median sets the SLO
    this.median = null;
    this.newest = 0;
    this.lateness = Infinity; // the page's clock minus the engine's
    this.state = {};
    this.story = null; // a sentence about what is over: text, kind, until
  }

  // A copy that stands still: what the engine does from now on is not in it.
  still() {
    const copy = Object.assign(new Schedule(), this);
    for (const name of ["iterations", "stalls", "marks"]) copy[name] = [...this[name]];
    copy.places = this.places.map((place) => ({ ...place }));
    copy.queue = this.queue.map((step) => [...step]);
    copy.requests = new Map([...this.requests].map(([id, request]) => [id, { ...request }]));
    copy.tallies = new Map();
    copy.state = { ...this.state };
    return copy;
  }

  // The engine's time at the page's time `now`.
  time(now) {
    return this.lateness === Infinity ? 0 : now - this.lateness;
  }

  get slo() {
    return this.ownSLO ?? (this.median === null ? null : Math.max(FACTOR * this.median, LEAST));
  }

  setSLO(value) {
    this.ownSLO = value;
    this.countAnew();
    this.stalls = [];
    for (const iteration of this.iterations) this.count(iteration);
  }

  countAnew() {
    this.tallies.clear();
  }

  take(event, now) {
    if (TYPES.includes(event.type)) this[event.type](event);
    if (event.t === undefined) return;
    this.newest = Math.max(this.newest, event.t + (event.seconds ?? 0));
    this.lateness = Math.min(this.lateness, now - event.t - (event.seconds ?? 0));
  }

  snapshot(event) {
    const { median, state } = this;
    this.clear();
    if (event.description === state.description) this.median = median; // the same engine: its SLO
    this.state = event;
    this.budget = event.budget ?? null; // C, or null: the policy takes whole prompts
    this.queue.push([event.t, event.waiting]);
  }

  numbers(event) {
    Object.assign(this.state, event);
  }

  chats(event) {
    this.state.chats = event.count;
    if (event.count) this.story = null;
  }

  queued(event) {
    this.requests.set(event.id, { tokens: event.prompt_tokens, label: event.label, last: null,
      place: null });
    this.wait(event.t, 1);
  }

  started(event) {
    this.current = event;
    this.queue.push([event.t, event.waiting]);
    for (const [id, lane] of event.chunks) this.settle(id, lane, event.t);
  }

  iteration(event) {
    this.current = null;
    event.end = event.t + event.seconds;
    event.c = this.budget;
    event.gaps = []; // id, lane, from
    for (const [id, lane, start, length, isLast] of event.chunks) {
      const request = this.settle(id, lane, event.t);
      request.tokens = Math.max(request.tokens, start + length);
      request.chunks = (request.chunks ?? 0) + 1;
      request.from ??= event.t;
      if (isLast) this.token(event, id, lane, request);
    }
    for (const [id, lane] of event.decodes) {
      this.token(event, id, lane, this.settle(id, lane, event.t));
    }
    this.iterations.push(event);
    if (event.waiting !== this.queue.at(-1)?.[1]) this.queue.push([event.end, event.waiting]);
    this.entries += event.chunks.length + event.decodes.length;
    this.count(event);
    for (const [id, , , , isLast] of event.chunks) if (isLast) this.tell(event, id);
  }

  ended(event) {
    if (this.requests.get(event.id)?.place === null) this.wait(event.t, -1);
    this.leave(event.id, event.t, event.reason === "error" ? "ended by an error" : "");
    this.requests.delete(event.id);
  }

  preempted(event) {
    this.leave(event.id, event.t, "preempted");
    const request = this.requests.get(event.id);
    if (request) Object.assign(request, { chunks: 0, from: undefined });
    this.wait(event.t, 1);
  }

  switched(event) {
    const { policy, chunk_size, budget } = event;
    Object.assign(this.state, { policy, chunk_size });
    this.budget = budget;
    this.story = null; // it was the other policy's
    this.marks.push({ t: event.t, lane: null, kind: "switched",
      text: budget === null ? policy : `${policy}, C = ${budget}` });
  }

  // From t on, `by` more requests wait. Of those that come during a batch we hear after it.
  wait(t, by) {
    let at = this.queue.length;
    while (at > 0 && this.queue[at - 1][0] > t) this.queue[--at][1] += by;
    this.queue.splice(at, 0, [t, (this.queue[at - 1]?.[1] ?? 0) + by]);
  }

  // The request, which holds this slot.
  settle(id, lane, t) {
    let request = this.requests.get(id);
    if (!request) this.requests.set(id, (request = { tokens: 0, label: "", last: null }));
    if (!request.place) {
      request.place = { id, lane, from: t, to: null, label: request.label };
      this.places.push(request.place);
    }
    return request;
  }

  leave(id, t, text) {
    const place = this.requests.get(id)?.place;
    if (!place) return;
    place.to = t;
    this.requests.get(id).place = null;
    if (text) this.marks.push({ t, lane: place.lane, kind: "preempted", text });
  }

  token(event, id, lane, request) {
    if (request.last !== null) {
      event.gaps.push([id, lane, request.last]);
      if (this.median === null) this.first.push(event.end - request.last);
      if (this.first.length >= ENOUGH && this.median === null) this.settleSLO();
    }
    request.last = event.end;
  }

  settleSLO() {
    this.median = middle(this.first);
    this.first = [];
    this.setSLO(this.ownSLO);
  }

  // Add the gaps that end with this iteration to the tally of their policy.
  count(event) {
    let over = 0, longest = 0, from = event.t;
    for (const [id, lane, last] of event.gaps) {
      const gap = event.end - last;
      if (gap > longest) [longest, from] = [gap, last];
      if (this.slo === null || gap <= this.slo) continue;
      over += 1;
      this.stalls.push({ id, lane, from: last, to: event.end });
    }
    if (!event.gaps.length) return;
    const cause = over ? this.causeOf(from, event) : event;
    const key = `${cause.policy} ${cause.c}`;
    const tally = this.tallies.get(key) ??
      { policy: cause.policy, c: cause.c, gaps: 0, stalls: 0, longest: 0 };
    tally.gaps += event.gaps.length;
    tally.stalls += over;
    tally.longest = Math.max(tally.longest, longest);
    this.tallies.set(key, tally);
    if (over) {
      this.story = { kind: "froze", until: event.end + SAID,
        text: `${many(over, "decode")} froze for ${seconds(longest)}: ${this.why(cause, true)}.` };
    }
  }

  // The longest iteration of the gap from `from` to the end of `last`; one with chunks, if any.
  causeOf(from, last) {
    let found = last;
    for (let i = this.iterations.lastIndexOf(last); i >= 0 && this.iterations[i].end > from; i--) {
      const each = this.iterations[i];
      const more = Boolean(each.chunks.length) - Boolean(found.chunks.length);
      if (more > 0 || (more === 0 && each.seconds > found.seconds)) found = each;
    }
    return found;
  }

  // In words, what a batch was busy with.
  why(batch, over) {
    if (!batch.chunks.length) {
      return "no prompt was in the way; " + (batch.seconds > this.slo
        ? `a batch of decodes took ${seconds(batch.seconds)}` : "the machine was busy");
    }
    const [id, , start, length, isLast] = batch.chunks[0];
    const some = batch.chunks.length > 1;
    const tokens = promptTokens(batch);
    const part = start === 0 && isLast ? "the prompt" : "a chunk of the prompt";
    const what = some ? `the prompts of ${batch.chunks.length} requests`
      : `${part} of request ${id}`;
    const verb = some ? (over ? "ran" : "run") : (over ? "ran" : "runs");
    const how = batch.decodes.length ? "in the same batch" : "alone";
    return `${what} (${whole(tokens)} tokens) ${verb} ${how}`;
  }

  // A prefill has ended: if it was cut into chunks and nobody stalled, say so.
  tell(event, id) {
    const request = this.requests.get(id);
    if (!request || request.chunks < 2) return;
    let longest = 0;
    for (let i = this.iterations.length - 1; i >= 0 && this.iterations[i].end > request.from; i--) {
      const each = this.iterations[i];
      for (const [other, , last] of each.gaps) {
        if (other !== id) longest = Math.max(longest, each.end - last);
      }
    }
    if (!longest || this.slo === null || longest > this.slo) return;
    this.story = { kind: "smooth", until: event.end + SAID,
      text: `The prompt of request ${id} (${whole(request.tokens)} tokens) ran in ` +
        `${request.chunks} chunks, in ${seconds(event.end - request.from)}. Nobody froze: ` +
        `the longest wait for a token was ${seconds(longest)}.` };
  }

  // What came out under each policy, until there is news.
  tellAll() {
    const each = [...this.tallies.values()].map(({ policy, stalls, longest }) =>
      `${policy}: ${many(stalls, "stall")}, up to ${seconds(longest)} without a token.`);
    this.story = { kind: "smooth", until: Infinity, text: each.join(" ") };
  }

  // Those who wait for a token longer than the SLO, at time t: id, lane, from, to.
  waits(t) {
    if (this.slo === null || !this.current) return [];
    const found = [];
    for (const [id, { place, last }] of this.requests) {
      if (place && last !== null && t - last > this.slo) {
        found.push({ id, lane: place.lane, from: last, to: t });
      }
    }
    return found;
  }

  // What is seen now, as a sentence of a kind.
  sentence(t) {
    const waits = this.waits(t), latest = this.current ?? this.iterations.at(-1);
    if (waits.length) {
      const longest = Math.max(...waits.map((wait) => t - wait.from));
      const verb = waits.length === 1 ? "has" : "have";
      return { kind: "freeze", text: `${many(waits.length, "decode")} ${verb} waited ` +
        `${longest.toFixed(1)} s: ${this.why(this.current, false)}.` };
    }
    if (this.story && t < this.story.until) return this.story;
    if (!latest || (!this.current && t - latest.end > 1)) {
      return this.state.running ? { kind: "idle", text: "The engine is busy." }
        : { kind: "idle", text: "Nothing runs. Start some chats, then throw in a long prompt." };
    }
    const chunks = latest.chunks, decodes = latest.decodes.length;
    if (chunks.length && decodes) {
      const tokens = promptTokens(latest);
      const whose = chunks.length === 1 ? `the prompt of request ${chunks[0][0]}`
        : `${chunks.length} prompts`;
      return { kind: "hybrid", text: `${many(tokens, "token")} of ${whose} ` +
        `${tokens === 1 ? "runs" : "run"} beside ${many(decodes, "decode")}, in one batch.` };
    }
    if (chunks.length) {
      const place = this.why(latest, false);
      return { kind: "prefill", text: `${place[0].toUpperCase()}${place.slice(1)}.` };
    }
    const each = decodes === 1 ? "a token" : "a token each,";
    return { kind: "decode", text: `${many(decodes, "request")} ` +
      `${decodes === 1 ? "decodes" : "decode"}: ${each} every ${seconds(this.pace())}.` };
  }

  // The median gap of the last iterations.
  pace() {
    const gaps = [];
    for (const each of this.iterations.slice(-20)) {
      for (const [, , last] of each.gaps) gaps.push(each.end - last);
    }
    return gaps.length ? middle(gaps) : this.iterations.at(-1)?.seconds ?? 0;
  }

  // Drop what is older than KEPT, or too much.
  prune() {
    const from = this.newest - KEPT;
    let gone = 0;
    while (gone < this.iterations.length &&
        (this.iterations[gone].end < from || this.entries > MOST_ENTRIES)) {
      const each = this.iterations[gone++];
      this.entries -= each.chunks.length + each.decodes.length;
    }
    this.iterations.splice(0, gone);
    const oldest = Math.max(from, this.iterations[0]?.t ?? from);
    this.places = this.places.filter((place) => place.to === null || place.to >= oldest);
    this.stalls = this.stalls.filter((stall) => stall.to >= oldest);
    this.marks = this.marks.filter((mark) => mark.t >= from);
    while (this.queue[1]?.[0] <= oldest) this.queue.shift();
  }
}

function middle(values) {
  return [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)];
}
