// Figures as people read them.

/** "18.2 GiB", "640 MiB". */
export function mib(value: number): string {
  if (Math.abs(value) >= 10 * 1024) return `${(value / 1024).toFixed(1)} GiB`;
  if (Math.abs(value) >= 1024) return `${(value / 1024).toFixed(2)} GiB`;
  return `${Math.round(value)} MiB`;
}

export function bytes(value: number): string {
  return value < 1024 * 1024 ? `${Math.max(0, Math.round(value / 1024))} KiB` : mib(value / 1024 / 1024);
}

/** "380 ms", "4.2 s", "3 min 10 s", "2 h 5 min", "3 days". */
export function seconds(value: number): string {
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 10) return `${value.toFixed(1)} s`;
  if (value < 60) return `${Math.round(value)} s`;
  const whole = Math.round(value);
  if (whole < 3600) return both(Math.floor(whole / 60), "min", whole % 60, "s");
  if (whole < 86400) return both(Math.floor(whole / 3600), "h", Math.floor((whole % 3600) / 60), "min");
  const days = Math.floor(whole / 86400);
  return `${days} day${days === 1 ? "" : "s"}`;
}

function both(large: number, largeUnit: string, small: number, smallUnit: string): string {
  return small ? `${large} ${largeUnit} ${small} ${smallUnit}` : `${large} ${largeUnit}`;
}

/** "now", "40 s ago". */
export function ago(value: number): string {
  return value < 1.5 ? "now" : `${seconds(Math.round(value))} ago`;
}

export function count(value: number): string {
  return value.toLocaleString("en");
}

/** "1 request", "3 requests". */
export function plural(value: number, one: string, many = `${one}s`): string {
  return `${count(value)} ${value === 1 ? one : many}`;
}

export function percent(share: number): string {
  return `${Math.round(share * 100)} %`;
}

/** The time of day of a Unix time: "14:03:22". */
export function clock(unixSeconds: number): string {
  return new Date(unixSeconds * 1000).toLocaleTimeString("en-GB");
}
