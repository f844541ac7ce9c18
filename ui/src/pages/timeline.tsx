// The last hour of every device: which model was there, its moves, and above them how many requests waited.
import { useMemo, useRef, useState } from "preact/hooks";
import { get } from "../api";
import { clock, mib, plural, seconds } from "../format";
import { useHistory, type History } from "../history";
import { deviceNames, status } from "../live";
import { Empty, PageHead, Problem, Readers } from "../parts/bits";
import { toneOf } from "../parts/memory";
import { usePoll, type Polled } from "../poll";
import { because } from "../reasons";
import { href } from "../route";
import type { Decision } from "../types";
import "./history.css";

export interface Span {
  slot: string;
  model: string;
  phase: string;
  devices: Record<string, number>;
  began: number;
  ended: number | null;
  outcome: string | null;
  decision: Decision | null;
}

interface Timeline {
  now: number;
  since: number;
  devices: string[];
  spans: Span[];
}

const RANGES: [string, number][] = [
  ["5 min", 300],
  ["15 min", 900],
  ["1 hour", 3600],
];
// Further models of a device are counted; each has a row of its own.
const ROWS_MAX = 40;
const TICKS = 6;
const EVERY_MS = 2000;
// Times are rounded: so much is told twice rather than never.
const OVERLAP_S = 1;
const SHORTEST_S = 60;
const HOST = "host";
const REST = new Set(["ready", "asleep"]);

export function TimelinePage() {
  const [range, setRange] = useState(900);
  return (
    <>
      <PageHead title="Timeline" about="Which model was on which GPU, when it was swapped and why, with the requests that waited above.">
        <div class="choice" role="group" aria-label="How far back">
          {RANGES.map(([name, value]) => (
            <button key={value} type="button" aria-pressed={range === value} onClick={() => setRange(value)}>
              {name}
            </button>
          ))}
        </div>
      </PageHead>
      <Readers>
        <Chart range={range} />
      </Readers>
    </>
  );
}

function Chart({ range }: { range: number }) {
  const { data, error } = useTimeline(range);
  const history = useHistory();
  const [picked, setPicked] = useState<Span | null>(null);
  if (!data) return <Problem>{error}</Problem>;
  if (!data.spans.length) {
    return (
      <div class="panel">
        <Empty title="No model was loaded in this time" command="greenroom chat MODEL">
          Ask a model, and its load appears here.
        </Empty>
      </div>
    );
  }
  return (
    <>
      <Problem>{error || history.error}</Problem>
      <Details span={picked} now={data.now} />
      <div class="panel gantt">
        {history.data && <Waits history={history.data} range={data} />}
        {data.devices.map((device) => (
          <DeviceRows key={device} device={device} range={data} picked={picked} onPick={setPicked} />
        ))}
        <Axis range={data} />
        <p class="gantt-legend fine">
          <span class="key">ready</span>
          <span class="key asleep">asleep</span>
          <span class="key move">loads, wakes, leaves</span>
          <span class="key failed">failed or lost</span>
        </p>
      </div>
    </>
  );
}

/** At first all spans of this time, then those that have ended meanwhile or go on. */
function useTimeline(range: number): Polled<Timeline> {
  const known = useRef<{ range: number; seen: Timeline } | null>(null);
  return usePoll(
    async (signal) => {
      const before = known.current?.range === range ? known.current.seen : null;
      const since = before ? before.now - OVERLAP_S : 0;
      const news = await get<Timeline>(`/api/v1/timeline?seconds=${range}&since=${since}`, { signal });
      // After its clock was set back the gateway tells everything.
      const seen = before && since <= news.now ? joined(before, news) : news;
      known.current = { range, seen };
      return fitted(seen);
    },
    EVERY_MS,
    [range],
  );
}

function joined(old: Timeline, news: Timeline): Timeline {
  const name = (span: Span) => `${span.slot} ${span.began} ${span.phase}`;
  const told = new Set(news.spans.map(name));
  const kept = old.spans.filter((span) => span.ended !== null && span.ended >= news.since && !told.has(name(span)));
  return { ...news, spans: [...kept, ...news.spans] };
}

/** Begins with the first span, where the gateway has not run for longer. */
function fitted(seen: Timeline): Timeline {
  const first = Math.min(seen.now - SHORTEST_S, ...seen.spans.map((span) => span.began));
  return { ...seen, since: Math.max(seen.since, first) };
}

/** Where a time lies between the ends, in percent. */
function at(time: number, { since, now }: Timeline): number {
  return (100 * Math.min(Math.max(time - since, 0), now - since)) / (now - since);
}

/** Requests that waited, as an area over the same time as the rows below. */
function Waits({ history, range }: { history: History; range: Timeline }) {
  const from = history.at.findIndex((time) => time >= range.since - history.every_s);
  const known = from < 0 ? [] : history.at.slice(from).map((time, index): [number, number] => [time, history.queue[from + index] ?? 0]);
  // Up to this moment, which no sample has yet.
  const depths: [number, number][] = [...known, [range.now, status.value?.queue.depth ?? known.at(-1)?.[1] ?? 0]];
  const most = Math.max(...depths.map(([, depth]) => depth));
  const points = depths.map(([time, depth]) => `${10 * at(time, range)},${60 - (56 * depth) / Math.max(1, most)}`);
  const longest = from < 0 ? 0 : Math.max(0, ...history.mean_wait_s.slice(from).map((wait) => wait ?? 0));
  const said = `At most ${plural(most, "request")} waited at once; the longest mean wait was ${seconds(longest)}.`;
  return (
    <div class="gantt-row waits">
      <div class="gantt-name">
        <b>Waiting</b>
        <span class="fine">{said}</span>
      </div>
      <svg class="gantt-track" viewBox="0 0 1000 60" preserveAspectRatio="none" role="img" aria-label={said}>
        <polygon points={`${10 * at(depths[0]![0], range)},60 ${points.join(" ")} 1000,60`} />
      </svg>
    </div>
  );
}

function DeviceRows({ device, range, picked, onPick }: { device: string; range: Timeline; picked: Span | null; onPick: (span: Span) => void }) {
  const rows = useMemo(() => rowsOf(device, range.spans), [device, range]);
  const name = deviceNames.value.get(device) ?? (device === HOST ? "Host memory" : device);
  if (!rows.length) return null;
  return (
    <section aria-label={name}>
      <h2 class="gantt-device">{name}</h2>
      {rows.slice(0, ROWS_MAX).map(([model, spans]) => (
        <div key={model} class="gantt-row">
          <div class="gantt-name" title={model}>
            <a href={href("stage", { model })}>{model}</a>
          </div>
          <div class="gantt-track">
            {spans.map((span) => (
              <Bar key={`${span.slot} ${span.began}`} span={span} range={range} isPicked={span === picked} onPick={onPick} />
            ))}
          </div>
        </div>
      ))}
      {rows.length > ROWS_MAX && <p class="fine gantt-more">and {plural(rows.length - ROWS_MAX, "model")} more that were there earlier</p>}
    </section>
  );
}

/** The models that were on this device with their spans there, the last that came first. */
function rowsOf(device: string, spans: Span[]): [string, Span[]][] {
  const rows = new Map<string, Span[]>();
  for (const span of spans) {
    // What is asleep lies in host memory, also where nobody knows how much it takes.
    const isThere = device in span.devices || (device === HOST && span.phase === "asleep");
    if (!isThere) continue;
    const row = rows.get(span.model);
    if (row) row.push(span);
    else rows.set(span.model, [span]);
  }
  const latest = (row: Span[]) => Math.max(...row.map((span) => span.began));
  return [...rows].sort(([, a], [, b]) => latest(b) - latest(a));
}

function Bar({ span, range, isPicked, onPick }: { span: Span; range: Timeline; isPicked: boolean; onPick: (span: Span) => void }) {
  const left = at(span.began, range);
  const right = at(span.ended ?? range.now, range);
  const isRest = REST.has(span.phase);
  const failed = span.outcome !== null && span.outcome !== "done";
  const tone = `${isRest ? toneOf(span.model) : "move"} ${span.phase} ${failed ? "bad" : ""}`;
  return (
    <button
      type="button"
      class={`bar ${tone}`}
      style={{ left: `${left}%`, width: `${Math.max(right - left, 0)}%` }}
      title={says(span, range.now)}
      aria-label={says(span, range.now)}
      aria-pressed={isPicked}
      onMouseEnter={() => onPick(span)}
      onFocus={() => onPick(span)}
      onClick={() => onPick(span)}
    />
  );
}

function says(span: Span, now: number): string {
  const until = span.ended === null ? "until now" : `until ${clock(span.ended)}`;
  const how = span.outcome && span.outcome !== "done" ? ` (${span.outcome})` : "";
  return `${span.model}: ${span.phase}${how} from ${clock(span.began)} ${until}, ${seconds((span.ended ?? now) - span.began)}`;
}

/** What is known of the span under the pointer. Its place is always there, so that nothing jumps. */
function Details({ span, now }: { span: Span | null; now: number }) {
  if (!span) return <p class="panel gantt-details quiet-text">Point at a bar, or press it, to see what happened and why.</p>;
  const why = span.decision;
  const held = Object.entries(span.devices).map(([device, held_mib]) => `${mib(held_mib)} on ${deviceNames.value.get(device) ?? device}`);
  return (
    <p class="panel gantt-details" role="status">
      <b>{says(span, now)}</b>
      <span class="quiet-text">{held.join(", ")}</span>
      {why && <span>Why: {because(why)}</span>}
    </p>
  );
}

function Axis({ range }: { range: Timeline }) {
  const step = (range.now - range.since) / TICKS;
  return (
    <div class="gantt-row axis" aria-hidden="true">
      <div class="gantt-name" />
      <div class="gantt-track">
        {Array.from({ length: TICKS + 1 }, (_, tick) => (
          <span key={tick} style={{ left: `${(100 * tick) / TICKS}%` }}>
            {clock(range.since + tick * step).slice(0, step < 60 ? 8 : 5)}
          </span>
        ))}
      </div>
    </div>
  );
}
