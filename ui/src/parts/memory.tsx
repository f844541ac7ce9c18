// A bar of memory: what holds how much of it.
import { mib } from "../format";

export interface Segment {
  key: string;
  label: string;
  mib: number;
  /** One of the classes c0 … c7, "foreign", "margin", "lease". */
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

/** A colour of its own for each name, the same on every page and every day. */
export function toneOf(name: string): string {
  let hash = 2166136261;
  for (let at = 0; at < name.length; at += 1) hash = Math.imul(hash ^ name.charCodeAt(at), 16777619);
  return `c${(hash >>> 0) % 8}`;
}
