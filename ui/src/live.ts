// The gateway's state, kept current: one stream of events, and the state read anew when something happened.
// Nothing is asked for while the tab is hidden.
import { batch, computed, signal } from "@preact/signals";
import { ApiError, get, key, open, words } from "./api";
import { readEvents } from "./sse";
import type { Model, Status } from "./types";

/** connecting: not yet; live: events come; limited: the key may see models only; locked: a key is needed; lost: retrying. */
export type Link = "connecting" | "live" | "limited" | "locked" | "lost";

export const link = signal<Link>("connecting");
/** Why it is not live, in words. */
export const trouble = signal("");
/** The whole gateway; null before the first answer, and for keys that may not read it. */
export const status = signal<Status | null>(null);
/** All models, also for keys that may see nothing else. */
export const models = signal<Model[]>([]);
/** performance.now() of the last answer: figures such as `since_s` are of that moment. */
export const seenAt = signal(0);
/** performance.now(), every half second while the tab is visible. */
export const now = signal(performance.now());

export const modelById = computed(() => new Map(models.value.map((model) => [model.id, model])));
/** Seconds since the last answer: add them to figures that grow by themselves. */
export const sinceSeen = computed(() => Math.max(0, (now.value - seenAt.value) / 1000));
/** "gpu0" for a GPU's id; other ids as they are. */
export const deviceNames = computed(
  () => new Map((status.value?.gpus ?? []).map((gpu) => [gpu.id, `gpu${gpu.index}`])),
);

export interface Happened {
  kind: string;
  data: Record<string, unknown>;
}
type Listener = (event: Happened) => void;

const listeners = new Set<Listener>();
// The state is read again this soon after an event, and this often without one.
const SOON_MS = 150;
const EVERY_MS = 2000;
// A large answer is asked for less often: at most this share of the time is spent on it.
const SHARE = 0.05;
const SILENT_MS = 40_000;
const RETRY_MAX_MS = 4_000;

let lastId: string | null = null;
let started: string | null = null;
let stopStream: AbortController | null = null;
let timer: ReturnType<typeof setTimeout> | undefined;
let due = Infinity;
let tookMs = 0;
let reading = false;

/** Hear every event; returns how to stop. */
export function onEvent(listener: Listener): () => void {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** Read the state soon; several calls at once are one. */
export function refresh(delayMs = SOON_MS): void {
  if (document.hidden) return;
  const at = Math.max(performance.now() + delayMs, seenAt.value + tookMs / SHARE);
  if (at >= due) return;
  clearTimeout(timer);
  due = at;
  timer = setTimeout(() => void read(), at - performance.now());
}

async function read(): Promise<void> {
  due = Infinity;
  if (reading) return;
  reading = true;
  const began = performance.now();
  try {
    await readState();
    tookMs = performance.now() - began;
  } catch (error) {
    failed(error);
  } finally {
    reading = false;
    if (link.value !== "locked") refresh(EVERY_MS);
  }
}

async function readState(): Promise<void> {
  if (link.value === "limited") {
    show(null, (await get<{ models: Model[] }>("/api/v1/models")).models);
    return;
  }
  try {
    const whole = await get<Status>("/api/v1/status");
    show(whole, whole.models);
  } catch (error) {
    if (!(error instanceof ApiError && error.isForbidden)) throw error;
    const seen = (await get<{ models: Model[] }>("/api/v1/models")).models;
    link.value = "limited";
    show(null, seen);
  }
}

function show(whole: Status | null, seen: Model[]): void {
  batch(() => {
    status.value = whole;
    models.value = seen;
    seenAt.value = now.value = performance.now();
    trouble.value = "";
    if (link.value === "lost") link.value = "connecting";
  });
  if (whole && started !== whole.started) {
    // Another run of the gateway counts its events anew.
    if (started !== null) lastId = null;
    started = whole.started;
  }
  if (whole && !stopStream) void listen();
}

function failed(error: unknown): void {
  batch(() => {
    trouble.value = words(error);
    if (error instanceof ApiError && error.needsKey) {
      link.value = "locked";
      status.value = null;
      models.value = [];
    } else {
      link.value = "lost";
    }
  });
}

async function listen(): Promise<void> {
  const stop = (stopStream = new AbortController());
  for (let tries = 0; !stop.signal.aborted; tries += 1) {
    if (tries) await new Promise((done) => setTimeout(done, Math.min(500 * 2 ** tries, RETRY_MAX_MS)));
    if (stop.signal.aborted) return;
    try {
      await hear(stop, () => (tries = 0));
    } catch (error) {
      if (stop.signal.aborted) return;
      if (error instanceof ApiError && error.status !== 0 && error.status < 500) break;
    }
    // The stream ended: the gateway restarts, or the network failed. Reading the state tells which.
    if (link.value === "live") link.value = "lost";
    refresh(0);
  }
  if (stopStream === stop) stopStream = null;
}

async function hear(stop: AbortController, isUp: () => void): Promise<void> {
  const one = new AbortController();
  const end = () => one.abort();
  stop.signal.addEventListener("abort", end);
  let watchdog = setTimeout(end, SILENT_MS);
  try {
    const answer = await open(`/api/v1/events${lastId === null ? "" : `?after=${lastId}`}`, { signal: one.signal });
    isUp();
    link.value = "live";
    refresh(0);
    await readEvents(answer, tell, () => {
      clearTimeout(watchdog);
      watchdog = setTimeout(end, SILENT_MS);
    });
  } finally {
    clearTimeout(watchdog);
    stop.signal.removeEventListener("abort", end);
  }
}

function tell(event: { kind: string; id: string | null; data: string }): void {
  if (event.id !== null) lastId = event.id;
  const happened = { kind: event.kind, data: JSON.parse(event.data) as Record<string, unknown> };
  for (const listener of listeners) listener(happened);
  refresh();
}

/** Begin, and begin anew whenever the key changes. */
export function start(): void {
  key.subscribe(() => {
    stopStream?.abort();
    stopStream = null;
    lastId = started = null;
    link.value = "connecting";
    due = Infinity;
    tookMs = 0;
    seenAt.value = 0;
    refresh(0);
  });
  setInterval(() => {
    if (!document.hidden) now.value = performance.now();
  }, 500);
  document.addEventListener("visibilitychange", () => refresh(0));
}
