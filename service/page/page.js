"use strict";

// Shows the events of /ui/events. Everything that came over the wire is set as text, never as markup.

const POOLS = {
  req: "Request rows",
  kv_page: "KV pages",
  swa_page: "Window pages",
  cross_page: "Encoder pages",
  mamba: "Recurrent states",
  adapter_bytes: "Adapters",
};
const NEAR_FULL = 0.9;
const KEPT_SAMPLES = 121; // half a minute
const FEWEST_SAMPLES = 41; // a line of less than ten seconds does not fill its tile
const RATE_SECONDS = 2;
const SILENT_SECONDS = 3;
const SUBMIT = 3;
const PHASE_INKS = ["take", "take", "plan", "plan", "tell", "tell"]; // of PHASES in core/lanes.py
const INKS = ["card", "ink", "quiet", "track", "take", "plan", "tell", "device", "device-odd", "on-device", "copy", "gap", "on-gap"];
const LANES = { scheduler: [0, 34], device: [40, 46], copy: [92, 16] }; // top and height; page.css names them beside
const AXIS_TOP = 108;

const at = (id) => document.getElementById(id);
const count = new Intl.NumberFormat("en").format;
const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.0995 ? 1 : 0)} %`;

function put(id, text) {
  const place = typeof id === "string" ? at(id) : id;
  if (place.textContent !== text) place.textContent = text;
}

function lasting(micros) {
  if (micros < 999.5) return `${Math.round(micros)} µs`;
  if (micros < 999500) return `${Number((micros / 1000).toPrecision(3))} ms`;
  return `${Number((micros / 1e6).toPrecision(3))} s`;
}

function age(seconds) {
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const whole = Math.floor(seconds);
  const two = (number) => String(number).padStart(2, "0");
  if (whole < 3600) return `${Math.floor(whole / 60)} m ${two(whole % 60)} s`;
  return `${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} m`;
}

// ---------------------------------------------------------------- figures over time

let samples = [];

function remember(moment) {
  const last = samples.at(-1);
  // Another server, or a long silence: what came before says nothing about now.
  if (last && (moment.step < last.step || moment.at < last.at || moment.at - last.at > 5)) samples = [];
  samples.push({
    at: moment.at,
    step: moment.step,
    tokens: moment.generation_tokens,
    busy: moment.device_busy_seconds,
    idle: moment.device_idle_seconds,
    running: moment.running,
    waiting: moment.waiting,
  });
  samples = samples.slice(-KEPT_SAMPLES);
}

function between(older, newer) {
  const work = newer.busy - older.busy + newer.idle - older.idle;
  return {
    rate: (newer.tokens - older.tokens) / Math.max(newer.at - older.at, 1e-3),
    idle: work > 0 ? (newer.idle - older.idle) / work : null,
  };
}

function recently() {
  const newest = samples.at(-1);
  const older = samples.find((each) => newest.at - each.at <= RATE_SECONDS);
  return older === newest ? null : between(older, newest);
}

function spark(id, values, top) {
  const most = Math.max(top, ...values);
  const step = 120 / (Math.max(values.length, FEWEST_SAMPLES) - 1);
  const left = 120 - (values.length - 1) * step;
  const points = values.map((value, place) => `${(left + place * step).toFixed(1)},${(27 - (26 * value) / most).toFixed(1)}`);
  const line = points.length > 1 ? `M${points.join("L")}` : "";
  const [area, stroke] = at(id).children;
  area.setAttribute("d", line && `${line}L120,28L${left.toFixed(1)},28Z`);
  stroke.setAttribute("d", line);
}

function showLoad(moment) {
  put("running", count(moment.running));
  const rows = moment.pools.find((pool) => pool.name === "req");
  put("running-of", rows ? `of ${count(rows.capacity)}` : "");
  put("waiting", count(moment.waiting));
  put("waiting-of", `of ${count(moment.waiting_limit)}`);
  const now = recently();
  put("rate", now ? count(Math.round(now.rate)) : "–");
  put("idle", now && now.idle !== null ? percent(now.idle) : "–");
  const pairs = samples.slice(1).map((each, place) => between(samples[place], each));
  spark("running-line", samples.map((each) => each.running), 1);
  spark("waiting-line", samples.map((each) => each.waiting), 1);
  spark("rate-line", pairs.map((each) => each.rate), 1);
  spark("idle-line", pairs.map((each) => each.idle ?? 0), 0.05);
}

// ---------------------------------------------------------------- lanes

let timeline = null;
let selected = null;
let inks = {};

function readInks() {
  const style = getComputedStyle(document.documentElement);
  inks = Object.fromEntries(INKS.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  inks.font = `11px ${getComputedStyle(document.body).fontFamily}`;
}

function slices(flat) {
  const found = [];
  for (let place = 0; place < flat.length; place += 4) {
    const [begin, took, number, tokens] = flat.slice(place, place + 4);
    found.push({ begin, end: begin + took, number, tokens });
  }
  return found;
}

function chosenSteps() {
  return Number(document.querySelector('input[name="steps"]:checked').value);
}

// What is in view: the newest steps, and of the other lanes what falls into their time.
function view() {
  const steps = timeline ? slices(timeline.device).slice(-chosenSteps()) : [];
  if (!steps.length) return null;
  const [from, to] = [steps[0].begin, steps.at(-1).end];
  const within = (flat) => slices(flat)
    .filter((each) => each.end > from && each.begin < to)
    .map((each) => ({ ...each, begin: Math.max(each.begin, from), end: Math.min(each.end, to) }));
  return { steps, from, to, scheduler: within(timeline.scheduler), copy: within(timeline.copy) };
}

function sum(intervals) {
  return intervals.reduce((total, each) => total + each.end - each.begin, 0);
}

// The time in which both were at work; the slices of each follow one another.
function shared(one, other) {
  let total = 0;
  let place = 0;
  for (const each of one) {
    while (place < other.length && other[place].end <= each.begin) place += 1;
    for (let next = place; next < other.length && other[next].begin < each.end; next += 1) {
      total += Math.max(0, Math.min(each.end, other[next].end) - Math.max(each.begin, other[next].begin));
    }
  }
  return total;
}

function showSteps(seen) {
  if (!seen) {
    ["shown", "median", "view-idle", "beside"].forEach((id) => put(id, "–"));
    put("readout", "No steps yet.");
    at("lanes").setAttribute("aria-label", "No steps yet");
    return;
  }
  const long = seen.to - seen.from;
  const lengths = seen.steps.map((each) => each.end - each.begin).sort((one, other) => one - other);
  const idle = percent(Math.max(0, 1 - sum(seen.steps) / long));
  // Submitting is no work of its own: without overlap it is the step itself.
  const work = seen.scheduler.filter((each) => each.number !== SUBMIT);
  const beside = work.length ? percent(shared(work, seen.steps) / sum(work)) : "–";
  put("shown", `${seen.steps.length} in ${lasting(long)}`);
  put("median", lasting(lengths[Math.floor(lengths.length / 2)]));
  put("view-idle", idle);
  put("beside", beside);
  at("lanes").setAttribute(
    "aria-label",
    `Scheduler, device and copy lanes of ${seen.steps.length} steps in ${lasting(long)}: device idle ${idle}, `
      + `${beside} of scheduling beside the device`,
  );
  showSelected(seen);
}

function showSelected(seen) {
  const place = seen.steps.findIndex((each) => each.number === selected);
  if (place < 0) {
    put("readout", "Point at a step, or use the arrow keys, for its figures.");
    return;
  }
  const step = seen.steps[place];
  const gap = place ? step.begin - seen.steps[place - 1].end : 0;
  const copied = seen.copy.find((each) => each.number === step.number);
  put("readout", [
    `Step ${count(step.number)}`,
    `${count(step.tokens)} ${step.tokens === 1 ? "token" : "tokens"}`,
    `${lasting(step.end - step.begin)} on the device`,
    gap > 0 ? `${lasting(gap)} idle before it` : "no idle time before it",
    ...(copied ? [`copied in ${lasting(copied.end - copied.begin)}`] : []),
  ].join(" · "));
}

function draw(seen) {
  const canvas = at("lanes");
  const [width, height, scale] = [canvas.clientWidth, canvas.clientHeight, window.devicePixelRatio || 1];
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = inks.font;
  for (const [top, tall] of Object.values(LANES)) fill(pen, "track", 0, width, top, tall);
  if (!seen) return;
  const x = (micros) => ((micros - seen.from) / (seen.to - seen.from)) * width;
  drawDevice(pen, seen, x, width);
  for (const each of seen.scheduler) {
    fill(pen, PHASE_INKS[each.number], x(each.begin), Math.max(x(each.end) - x(each.begin), 0.75), ...LANES.scheduler);
  }
  for (const each of seen.copy) fill(pen, "copy", x(each.begin), Math.max(x(each.end) - x(each.begin), 1), ...LANES.copy);
  drawAxis(pen, seen.to - seen.from, width);
  const step = seen.steps.find((each) => each.number === selected);
  if (step) {
    pen.strokeStyle = inks.ink;
    pen.lineWidth = 1.5;
    pen.strokeRect(x(step.begin), LANES.device[0] + 0.75, Math.max(x(step.end) - x(step.begin), 2), LANES.device[1] - 1.5);
  }
}

function fill(pen, ink, left, wide, top, tall) {
  pen.fillStyle = inks[ink];
  pen.fillRect(left, top, wide, tall);
}

// What is not covered by a step is idle time; steps take turns in colour, so that each is seen without a seam.
function drawDevice(pen, seen, x, width) {
  const [top, tall] = LANES.device;
  fill(pen, "gap", 0, width, top, tall);
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  seen.steps.forEach((step, place) => {
    const [left, wide] = [x(step.begin), Math.max(x(step.end) - x(step.begin), 0.75)];
    fill(pen, step.number % 2 ? "device-odd" : "device", left, wide, top, tall);
    const gap = place ? left - x(seen.steps[place - 1].end) : 0;
    label(pen, "on-gap", place ? lasting(step.begin - seen.steps[place - 1].end) : "", left - gap / 2, gap, top + tall / 2);
    label(pen, "on-device", `${count(step.tokens)} tok`, left + wide / 2, wide, top + tall / 2);
  });
}

function label(pen, ink, text, middle, room, line) {
  if (room < 30 || pen.measureText(text).width + 8 > room) return;
  pen.fillStyle = inks[ink];
  pen.fillText(text, middle, line);
}

function drawAxis(pen, span, width) {
  const rough = span / Math.max(2, Math.floor(width / 110));
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  pen.textBaseline = "top";
  for (let tick = 0; tick <= span; tick += step) {
    const place = (tick / span) * width;
    fill(pen, "quiet", Math.min(place, width - 1), 1, AXIS_TOP + 3, 4);
    pen.textAlign = place < 20 ? "left" : place > width - 30 ? "right" : "center";
    pen.fillStyle = inks.quiet;
    pen.fillText(tick ? lasting(tick) : "0", place, AXIS_TOP + 10);
  }
}

function showLanes() {
  const seen = view();
  showSteps(seen);
  draw(seen);
}

function select(step) {
  selected = step;
  showLanes();
}

function pointAt(event) {
  const seen = view();
  if (!seen) return;
  const canvas = at("lanes");
  const micros = seen.from + (event.offsetX / canvas.clientWidth) * (seen.to - seen.from);
  // In a gap, the step that it comes before.
  select((seen.steps.find((each) => each.end >= micros) ?? seen.steps.at(-1)).number);
}

function walk(event) {
  const seen = view();
  const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (event.key === "Escape") select(null);
  if (!way || !seen) return;
  event.preventDefault();
  const place = seen.steps.findIndex((each) => each.number === selected);
  const next = place < 0 ? (way > 0 ? 0 : seen.steps.length - 1) : place + way;
  select(seen.steps[Math.min(Math.max(next, 0), seen.steps.length - 1)].number);
}

// ---------------------------------------------------------------- pools and streams

function make(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

function newPool(pool) {
  const meter = make("div", "meter", make("span", "held"), make("span", "kept"));
  meter.setAttribute("role", "meter");
  meter.setAttribute("aria-valuemin", "0");
  const line = make("li", "", make("span"), meter, make("span", "figures quiet"));
  line.dataset.pool = pool.name;
  line.firstElementChild.textContent = POOLS[pool.name] ?? pool.name;
  meter.setAttribute("aria-label", line.firstElementChild.textContent);
  return line;
}

function showPools(pools) {
  const list = at("pools");
  if (pools.map((pool) => pool.name).join() !== [...list.children].map((line) => line.dataset.pool).join()) {
    list.replaceChildren(...pools.map(newPool));
  }
  pools.forEach((pool, place) => {
    const [, meter, figures] = list.children[place].children;
    const share = (units) => (pool.capacity ? units / pool.capacity : 0);
    meter.children[0].style.width = `${100 * share(pool.used)}%`;
    // A full batch is what one hopes for; memory that runs out is not.
    meter.children[0].classList.toggle("near", pool.name !== "req" && share(pool.used) >= NEAR_FULL);
    meter.children[1].style.width = `${100 * share(pool.cached)}%`;
    const told = pool.name === "adapter_bytes" ? (bytes) => `${count(Math.round(bytes / 2 ** 20))} MiB` : count;
    const cached = pool.cached ? ` + ${told(pool.cached)} cached` : "";
    const text = `${told(pool.used)}${cached} of ${told(pool.capacity)}`;
    meter.setAttribute("aria-valuemax", String(pool.capacity));
    meter.setAttribute("aria-valuenow", String(pool.used));
    meter.setAttribute("aria-valuetext", text);
    put(figures, text);
  });
}

function newRow() {
  return make("tr", "", make("td"), make("td"), make("td", "number"), make("td", "number"), make("td", "number"), make("td", "adapter"));
}

function showStreams(streams) {
  const body = at("streams").tBodies[0];
  while (body.rows.length > streams.rows.length) body.rows[body.rows.length - 1].remove();
  while (body.rows.length < streams.rows.length) body.append(newRow());
  streams.rows.forEach(([id, stage, prompt, output, seconds, adapter], place) => {
    const cells = body.rows[place].cells;
    [id, stage, count(prompt), count(output), age(seconds), adapter].forEach((text, cell) => put(cells[cell], text));
    cells[0].title = id;
    cells[1].dataset.stage = stage;
  });
  at("streams").classList.toggle("plain", !streams.rows.some((row) => row[5]));
  at("streams").hidden = !streams.rows.length;
  at("streams-none").hidden = streams.rows.length > 0;
  const shown = streams.total > streams.rows.length ? `the ${count(streams.rows.length)} oldest of ` : "";
  const late = streams.age > 1 ? `, as of ${age(streams.age)} ago` : "";
  put("streams-note", streams.total ? `${shown}${count(streams.total)}${late}` : late.slice(2));
}

function showTotals(moment) {
  put("step", count(moment.step));
  put("generated", count(moment.generation_tokens));
  put("prompted", count(moment.prompt_tokens));
  put("hits", moment.prompt_tokens ? percent(moment.cached_tokens / moment.prompt_tokens) : "–");
  put("ended", count(Object.values(moment.finished).reduce((total, each) => total + each, 0)));
  put("preemptions", count(moment.preemptions));
  showDrafts(moment.drafts);
}

function showDrafts(drafts) {
  document.querySelectorAll(".drafts").forEach((each) => { each.hidden = !drafts; });
  if (!drafts) return;
  put("drafted", count(drafts.tokens));
  put("accepted", drafts.tokens ? percent(drafts.accepted / drafts.tokens) : "–");
  // Each output: its drafts that were right, and the token behind them.
  put("length", drafts.rows ? (1 + drafts.accepted / drafts.rows).toFixed(2) : "–");
}

function showServer(moment) {
  const { model, dtype, quantization, version, overlap } = moment.served;
  const facts = [model, dtype, quantization, overlap ? "" : "overlap off", version && `v${version}`];
  put("served", facts.filter(Boolean).join(" · "));
  document.title = model ? `${model} · slipstream` : "slipstream";
  const draining = moment.state === "draining" ? ` for ${age(moment.drain_seconds)}` : "";
  put("state", moment.state + draining);
  at("state").dataset.state = moment.state;
  at("notice").hidden = moment.assert_failures === 0;
  if (moment.assert_failures) {
    put("notice", `${count(moment.assert_failures)} violated invariants: a bug in this server, please report it.`);
  }
}

function show(moment) {
  remember(moment);
  showServer(moment);
  showLoad(moment);
  showPools(moment.pools);
  showStreams(moment.streams);
  showTotals(moment);
  timeline = moment.timeline;
  showLanes();
}

// ---------------------------------------------------------------- the connection

let source = null;
let heardAt = performance.now();
let paused = false;

function say(link, text) {
  at("link").dataset.link = link;
  put("link", text);
}

function connect() {
  source?.close();
  heardAt = performance.now();
  source = new EventSource("ui/events");
  source.onmessage = (event) => {
    heardAt = performance.now();
    say("live", "live");
    if (!paused) show(JSON.parse(event.data));
  };
  source.onerror = () => {
    if (source.readyState === EventSource.CLOSED) explain();
    else say("lost", "connection lost, trying again");
  };
}

// A refusal ends an EventSource for good and does not say why: ask again, in words.
async function explain() {
  try {
    const stop = new AbortController();
    const answer = await fetch("ui/events", { signal: stop.signal });
    const words = answer.ok ? "" : (await answer.text()).trim();
    stop.abort();
    if (words) say("refused", words);
  } catch {
    say("lost", "connection lost, trying again");
  }
  setTimeout(() => { if (!document.hidden) connect(); }, 2000);
}

function watchSilence() {
  const silent = (performance.now() - heardAt) / 1000;
  if (source?.readyState === EventSource.OPEN && silent > SILENT_SECONDS) say("silent", `no news for ${Math.round(silent)} s`);
}

function pause() {
  paused = !paused;
  at("pause").setAttribute("aria-pressed", String(paused));
  put("pause", paused ? "Resume" : "Pause");
}

function begin() {
  readInks();
  at("pause").addEventListener("click", pause);
  at("lanes").addEventListener("pointermove", pointAt);
  at("lanes").addEventListener("pointerleave", () => select(null));
  at("lanes").addEventListener("keydown", walk);
  document.querySelectorAll('input[name="steps"]').forEach((each) => each.addEventListener("change", showLanes));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readInks(); showLanes(); });
  new ResizeObserver(showLanes).observe(at("lanes"));
  // A page that nobody sees costs the server nothing.
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) source?.close();
    else connect();
  });
  setInterval(watchSilence, 1000);
  connect();
}

begin();
