// A schedule as both pages draw it. The explorer has one that is over; the live page makes it from
// the events of /live/events. No drawing, no network. Times are seconds on the engine's clock.

export const KEPT = 60; // s of history
const MOST_ENTRIES = 100000; // chunks and decodes kept, however short an iteration is
export const ENOUGH = 100; // gaps, before their median sets the SLO
export const FACTOR = 5; // times the median; Sarathi-Serve's strict SLO is 5 decode iterations
export const LEAST = 0.05; // s: a shorter pause no reader sees, and a busy machine makes many
const SAID = 6; // s for which the sentence tells of what is over

export const seconds = (value) =>
  value < 0.9995 ? `${Number((value * 1000).toPrecision(value < 0.01 ? 2 : 3))} ms`
    : `${value.toPrecision(3)} s`;
export const whole = (number) => number.toLocaleString("en");
export const many = (count, noun) => `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;
// Of an iteration. A chunk: request, lane, first token, tokens, whether it is its prefill's last.
export const promptTokens = ({ chunks }) => chunks.reduce((sum, [, , , length]) => sum + length, 0);

// A batch in words.
export function contents(batch) {
  const { chunks } = batch;
  const decodes = many(batch.decodes.length, "decode");
  if (!chunks.length) return decodes;
  const whose = chunks.length > 1 ? `${chunks.length} requests` : `request ${chunks[0][0]}`;
  const prompts = `${many(promptTokens(batch), "prompt token")} of ${whose}`;
  return batch.decodes.length ? `${prompts}, and ${decodes}` : `${prompts}, alone`;
}

const middle = (values) => [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)];

export class Schedule {
  tallies = new Map(); // "policy C" -> gaps, stalls and the longest gap under it
  ownSLO = null; // s, as the reader has set it

  constructor(known = {}) {
    this.clear();
    Object.assign(this, known);
  }

  // Forget the history: the page starts to watch, or has a new snapshot.
  clear() {
    this.iterations = []; // the runner's, and in `gaps` the TBTs that end with it
    this.entries = 0; // chunks and decodes in them
    this.places = []; // a request in its slot: id, lane, from, to (null: still there)
    this.stalls = []; // id, lane, from, to
    this.policies = []; // t, from which on it decides; policy, budget
    this.marks = []; // t, and a lane that a request lost too early; or null, and a text
    this.queue = []; // t, and how many requests wait from then on
    this.requests = new Map(); // by id, until they end: tokens, label, last, place, chunks, from
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
    return new Schedule(structuredClone({ ...this }));
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
    this.tallies.clear();
    this.stalls = [];
    for (const iteration of this.iterations) this.count(iteration);
  }

  take(event, now) {
    this[event.type]?.(event); // below, a method for each type that changes the schedule
    if (event.t === undefined) return;
    const end = event.t + (event.seconds ?? 0);
    this.newest = Math.max(this.newest, end);
    this.lateness = Math.min(this.lateness, now - end);
  }

  snapshot(event) {
    const { median, state } = this;
    this.clear();
    if (event.description === state.description) this.median = median; // the same engine: its SLO
    this.state = event;
    this.obey(event);
    this.queue.push([event.t, event.waiting]);
  }

  numbers(event) {
    Object.assign(this.state, event);
  }

  chats({ count }) {
    this.state.chats = count;
    if (count) this.story = null;
  }

  queued({ id, t, prompt_tokens: tokens, label }) {
    this.requests.set(id, { tokens, label, last: null, place: null, chunks: 0 });
    this.wait(t, 1);
  }

  started(event) {
    this.current = event;
    this.queue.push([event.t, event.waiting]);
    for (const [id, lane] of event.chunks) this.settle(id, lane, event.t);
  }

  iteration(event) {
    this.current = null;
    event.end = event.t + event.seconds;
    event.gaps = []; // id, lane, from
    for (const [id, lane, start, length, isLast] of event.chunks) {
      const request = this.settle(id, lane, event.t);
      request.tokens = Math.max(request.tokens, start + length);
      request.chunks += 1;
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

  ended({ id, t, reason }) {
    if (this.requests.get(id)?.place === null) this.wait(t, -1);
    this.leave(id, t, reason === "error");
    this.requests.delete(id);
  }

  preempted({ id, t }) {
    this.leave(id, t, true);
    const request = this.requests.get(id);
    if (request) Object.assign(request, { chunks: 0, from: undefined });
    this.wait(t, 1);
  }

  switched(event) {
    const { policy, chunk_size: size } = event;
    Object.assign(this.state, { policy, chunk_size: size });
    this.story = null; // it was the other policy's
    this.obey(event);
  }

  // From t on, this policy decides.
  obey({ t, policy, budget }) {
    const last = this.policies.at(-1);
    if (last?.policy !== policy || last?.budget !== budget) this.policies.push({ t, policy, budget });
  }

  // From t on, `by` more requests wait. Of those that come during a batch we hear after it.
  wait(t, by) {
    let at = this.queue.length;
    while (at > 0 && this.queue[at - 1][0] > t) {
      at -= 1;
      this.queue[at][1] += by;
    }
    this.queue.splice(at, 0, [t, (this.queue[at - 1]?.[1] ?? 0) + by]);
  }

  // The request, which holds this slot. Of one that ran before we watched, no more is known.
  settle(id, lane, t) {
    if (!this.requests.has(id)) this.requests.set(id, { tokens: 0, label: "", last: null, chunks: 0 });
    const request = this.requests.get(id);
    if (!request.place) {
      request.place = { id, lane, from: t, to: null, label: request.label };
      this.places.push(request.place);
    }
    return request;
  }

  // It gives its slot back; `crossed`: too early.
  leave(id, t, crossed) {
    const request = this.requests.get(id);
    if (!request?.place) return;
    request.place.to = t;
    if (crossed) this.marks.push({ t, lane: request.place.lane });
    request.place = null;
  }

  token(event, id, lane, request) {
    if (request.last !== null) {
      event.gaps.push([id, lane, request.last]);
      if (this.median === null) this.first.push(event.end - request.last);
      if (this.first.length >= ENOUGH) {
        this.median = middle(this.first);
        this.first = [];
        this.setSLO(this.ownSLO);
      }
    }
    request.last = event.end;
  }

  // Add the gaps that end with this iteration to the tally of their policy.
  count(event) {
    if (!event.gaps.length) return;
    const since = Math.min(...event.gaps.map(([, , last]) => last));
    const longest = event.end - since;
    const late = event.gaps.filter(([, , last]) => this.slo !== null && event.end - last > this.slo);
    this.stalls.push(...late.map(([id, lane, from]) => ({ id, lane, from, to: event.end })));
    const cause = late.length ? this.causeOf(since, event) : event;
    const { policy, budget: c } = cause;
    const tally = this.tallies.get(`${policy} ${c}`) ?? { policy, c, gaps: 0, stalls: 0, longest: 0 };
    tally.gaps += event.gaps.length;
    tally.stalls += late.length;
    tally.longest = Math.max(tally.longest, longest);
    this.tallies.set(`${policy} ${c}`, tally);
    if (!late.length) return;
    const who = `${many(late.length, "decode")} froze for ${seconds(longest)}`;
    const between = this.iterations.filter(({ end }) => since < end && end < event.end).length;
    const skipped = between > 1 ? `${between} batches ran without them; ` : "";
    const text = `${who}: ${skipped}the longest batch held ${contents(cause)}.`;
    this.story = { kind: "froze", until: event.end + SAID, text };
  }

  // The longest iteration of the gap from `since` to the end of `last`.
  causeOf(since, last) {
    let found = last;
    for (let i = this.iterations.lastIndexOf(last); this.iterations[i]?.end > since; i -= 1) {
      if (this.iterations[i].seconds > found.seconds) found = this.iterations[i];
    }
    return found;
  }

  // A prefill has ended: if it was cut into chunks and nobody stalled, say so.
  tell(event, id) {
    const { chunks, from, tokens } = this.requests.get(id);
    if (chunks < 2 || this.slo === null) return;
    const beside = this.iterations.filter(({ end }) => end > from).flatMap(({ end, gaps }) =>
      gaps.filter(([other]) => other !== id).map(([, , last]) => end - last));
    const longest = beside.reduce((most, gap) => Math.max(most, gap), 0);
    if (!longest || longest > this.slo) return;
    const text = `The prompt of request ${id} (${whole(tokens)} tokens) ran in ${chunks} chunks, in ` +
      `${seconds(event.end - from)}. Nobody froze: the longest wait for a token was ${seconds(longest)}.`;
    this.story = { kind: "smooth", until: event.end + SAID, text };
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
    return [...this.requests]
      .filter(([, { place, last }]) => place && last !== null && t - last > this.slo)
      .map(([id, { place, last }]) => ({ id, lane: place.lane, from: last, to: t }));
  }

  // What is seen now, as a sentence of a kind.
  sentence(t) {
    const waits = this.waits(t);
    const latest = this.current ?? this.iterations.at(-1);
    if (waits.length) {
      const longest = Math.max(...waits.map(({ from }) => t - from));
      const who = `${many(waits.length, "decode")} without a token for ${longest.toFixed(1)} s`;
      return { kind: "freeze", text: `${who}: the batch holds ${contents(this.current)}.` };
    }
    if (this.story && t < this.story.until) return this.story;
    if (!latest || (!this.current && t - latest.end > 1)) {
      const nothing = "Nothing runs. Start some chats, then throw in a long prompt.";
      return { kind: "idle", text: this.state.running ? "The engine is busy." : nothing };
    }
    const text = `The batch holds ${contents(latest)}.`;
    if (latest.chunks.length) return { kind: "prefill", text };
    return { kind: "decode", text: `${text} Each gets a token every ${seconds(this.pace())}.` };
  }

  // The median gap of the last iterations.
  pace() {
    const latest = this.iterations.slice(-20);
    const gaps = latest.flatMap(({ end, gaps: own }) => own.map(([, , last]) => end - last));
    return middle(gaps) ?? latest.at(-1)?.seconds ?? 0;
  }

  // Drop what is older than KEPT, or too much.
  prune() {
    const from = this.newest - KEPT;
    while (this.iterations[0]?.end < from || this.entries > MOST_ENTRIES) {
      const { chunks, decodes } = this.iterations.shift();
      this.entries -= chunks.length + decodes.length;
    }
    const oldest = Math.max(from, this.iterations[0]?.t ?? from);
    this.places = this.places.filter(({ to }) => to === null || to >= oldest);
    this.stalls = this.stalls.filter(({ to }) => to >= oldest);
    this.marks = this.marks.filter(({ t }) => t >= from);
    while (this.policies[1]?.t <= from) this.policies.shift();
    while (this.queue[1]?.[0] <= oldest) this.queue.shift();
  }
}
