// A bar of memory: what holds how much of it.
import { computed } from "@preact/signals";
import { mib } from "../format";
import { models } from "../live";

export interface Segment {
  key: string;
  label: string;
  mib: number;
  /** A class: c0 … c7, "foreign", "margin", "lease", "free". */
  tone: string;
}

export function MemoryBar({ label, total, segments }: { label: string; total: number; segments: Segment[] }) {
  const whole = Math.max(total, segments.reduce((sum, one) => sum + one.mib, 0), 1);
  const said = segments.filter((one) => one.mib > 0).map((one) => `${one.label} ${mib(one.mib)}`);
  return (
    <div class="memory" role="img" aria-label={`${label}: ${said.join(", ") || "empty"}, of ${mib(total)}`}>
      {segments.map((one) => (
        <div
          key={one.key}
          class={`segment ${one.tone}`}
          style={{ width: `${(100 * Math.max(0, one.mib)) / whole}%` }}
          title={`${one.label}: ${mib(one.mib)}`}
        />
      ))}
    </div>
  );
}

const TONES = 8;

/** The colour of a model: by its place in the configuration, so that neighbours differ, and the same on every page. */
export function toneOf(name: string): string {
  const place = places.value.get(name) ?? places.value.get(name.replace(/@\d+$/, ""));
  return `c${(place ?? hash(name)) % TONES}`;
}

const places = computed(() => new Map(models.value.map((model, at) => [model.id, at])));

/** For names that are not configured any more. */
function hash(name: string): number {
  let sum = 0;
  for (let at = 0; at < name.length; at += 1) sum = (sum * 31 + name.charCodeAt(at)) >>> 0;
  return sum;
}
