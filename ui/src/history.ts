// The last hour in figures, shared by the pages that draw it. Asked for while one of them is open: at first the whole hour, then what is new.
import { useRef } from "preact/hooks";
import { get } from "./api";
import { usePoll, type Polled } from "./poll";

type Values = (number | null)[];

export interface History {
  every_s: number;
  at: number[];
  requests_per_s: Values;
  errors_per_s: Values;
  refused_per_s: Values;
  prompt_tokens_per_s: Values;
  completion_tokens_per_s: Values;
  cached_tokens_per_s: Values;
  mean_wait_s: Values;
  mean_total_s: Values;
  hit_share: Values;
  swaps_per_min: Values;
  mean_swap_s: Values;
  queue: number[];
  in_flight: number[];
  connections: number[];
  ready: number[];
  asleep: number[];
  green_room_mib: number[];
  used_mib: Record<string, Values>;
  utilisation: Record<string, Values>;
}

const KEPT_S = 3600;
const EVERY_MS = 5000;

/** The last hour, kept current while the page is open. */
export function useHistory(): Polled<History> {
  const known = useRef<History | null>(null);
  return usePoll(async (signal) => {
    const since = known.current?.at.at(-1) ?? 0;
    const news = await get<History>(`/api/v1/history?since=${since}`, { signal });
    if (known.current === null || news.at.length) known.current = joined(known.current, news);
    return known.current;
  }, EVERY_MS);
}

/** Both one after the other, without what is older than an hour. The news alone are all if the gateway's clock was set back. */
function joined(old: History | null, news: History): History {
  if (old === null || news.at[0]! <= (old.at.at(-1) ?? 0)) return news;
  const before = old.at.length;
  const last = news.at.at(-1) ?? 0;
  const from = [...old.at, ...news.at].findIndex((at) => at > last - KEPT_S);
  const list = (a: Values, b: Values) => [...a, ...b].slice(from);
  const byName = (a: Record<string, Values>, b: Record<string, Values>) => {
    const names = [...new Set([...Object.keys(a), ...Object.keys(b)])];
    const gap = (count: number): Values => new Array<null>(count).fill(null);
    return Object.fromEntries(names.map((name) => [name, list(a[name] ?? gap(before), b[name] ?? gap(news.at.length))]));
  };
  const merged: Record<string, unknown> = { every_s: news.every_s };
  for (const name of Object.keys(news) as (keyof History)[]) {
    const [a, b] = [old[name], news[name]];
    if (Array.isArray(a) && Array.isArray(b)) merged[name] = list(a, b);
    else if (typeof b === "object" && !Array.isArray(b)) merged[name] = byName(a as Record<string, Values>, b);
  }
  return merged as unknown as History;
}
