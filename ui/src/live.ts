// The gateway's state, kept current by one stream of events: all of it once, then what changes.
// A tab that is hidden for a while closes the stream, so that it costs nothing.
import { batch, computed, signal } from "@preact/signals";
import { ApiError, get, key, open, orders, words } from "./api";
import { readEvents, type ServerEvent } from "./sse";
import type { Model, State, Status } from "./types";

/** connecting: not yet; live: events come; limited: the key may see models only; locked: a key is needed; lost: retrying. */
export type Link = "connecting" | "live" | "limited" | "locked" | "lost";

export const link = signal<Link>("connecting");
/** Why it is not live, in words. */
export const trouble = signal("");
/** The whole gateway; null before the first answer, and for keys that may not read it. */
export const status = signal<Status | null>(null);
/** All models, also for keys that may see nothing else. */
export const models = signal<Model[]>([]);
/** performance.now(), every half second while the tab is visible. */
export const now = signal(performance.now());

export const modelById = computed(() => new Map(models.value.map((model) => [model.id, model])));
/** "gpu0" for a GPU's id; other ids as they are. */
export const deviceNames = computed(
  () => new Map((status.value?.gpus ?? []).map((gpu) => [gpu.id, `gpu${gpu.index}`])),
);

/** Seconds since this was told: add them to its figures that grow by themselves. */
export function age(told: { told_at: number }): number {
  return Math.max(0, (now.value - told.told_at) / 1000);
}

export interface Happened {
  kind: string;
  data: Record<string, unknown>;
}
type Listener = (event: Happened) => void;

const listeners = new Set<Listener>();
// The gateway sends a comment every 15 s; a stream that is silent for longer is dead.
const SILENT_MS = 40_000;
const RETRY_MAX_MS = 4_000;
const HIDDEN_MS = 30_000;
// How often models are read by keys that may not hear events: all of them each time, so seldom, and soon after an order.
const MODELS_MS = 30_000;
const AFTER_ORDER_MS = 1_000;

let lastId: string | null = null;
let started: string | null = null;
/** Ends the present connection, and all tries for it. */
let stop = new AbortController();
/** Models in the order of the configuration; those of a first state until it is whole. */
let known = new Map<string, Model>();

/** Hear every event but those of kind "state"; returns how to stop. */
export function onEvent(listener: Listener): () => void {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** Begin, and begin anew whenever the key changes. */
export function start(): void {
  key.subscribe(() => {
    batch(() => {
      lastId = started = null;
      known = new Map();
      status.value = null;
      models.value = [];
      link.value = "connecting";
    });
    connect();
  });
  setInterval(() => {
    if (!document.hidden) now.value = performance.now();
  }, 500);
  let hidden: ReturnType<typeof setTimeout> | undefined;
  document.addEventListener("visibilitychange", () => {
    clearTimeout(hidden);
    if (document.hidden) hidden = setTimeout(() => stop.abort(), HIDDEN_MS);
    else if (stop.signal.aborted) connect();
  });
}

function connect(): void {
  stop.abort();
  stop = new AbortController();
  void stay(stop.signal);
}

/** Stay connected until `signal` ends it, or a key is needed. */
async function stay(signal: AbortSignal): Promise<void> {
  for (let tries = 0; !signal.aborted; tries += 1) {
    try {
      if (link.value === "limited") await readModels(signal);
      else await hear(signal, () => (tries = 0));
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof ApiError && error.isForbidden && link.value !== "limited") {
        link.value = "limited";
        continue;
      }
      if (failed(error)) return;
    }
    if (signal.aborted) return;
    if (link.value === "live") link.value = "lost";
    if (link.value === "limited") await untilModelsAreOld();
    else await new Promise((done) => setTimeout(done, Math.min(250 * 2 ** tries, RETRY_MAX_MS)));
  }
}

/** Until the models should be read again: after a while, soon after an order of this tab, or when it is looked at again. */
function untilModelsAreOld(): Promise<void> {
  return new Promise((done) => {
    const before = orders.value;
    const end = () => {
      clearTimeout(timer);
      forget();
      document.removeEventListener("visibilitychange", end);
      done();
    };
    let timer = setTimeout(end, MODELS_MS);
    const forget = orders.subscribe((count) => {
      if (count === before) return;
      clearTimeout(timer);
      timer = setTimeout(end, AFTER_ORDER_MS);
    });
    document.addEventListener("visibilitychange", end);
  });
}

/** Read the stream until it ends. */
async function hear(signal: AbortSignal, onOpen: () => void): Promise<void> {
  const one = new AbortController();
  const end = () => one.abort();
  signal.addEventListener("abort", end);
  let watchdog = setTimeout(end, SILENT_MS);
  try {
    const after = lastId === null ? "" : `&after=${lastId}`;
    const answer = await open(`/api/v1/events?state=true${after}`, { signal: one.signal });
    onOpen();
    await readEvents(answer, tell, () => {
      clearTimeout(watchdog);
      watchdog = setTimeout(end, SILENT_MS);
    });
    trouble.value = "The connection to the gateway ended.";
  } catch (error) {
    if (!one.signal.aborted && !(error instanceof ApiError)) throw new ApiError(0, "unreachable", "The connection to the gateway was lost.");
    throw error;
  } finally {
    clearTimeout(watchdog);
    signal.removeEventListener("abort", end);
  }
}

function tell(event: ServerEvent): void {
  if (event.id !== null) lastId = event.id;
  const data = JSON.parse(event.data) as Record<string, unknown>;
  if (event.kind === "state") {
    take(data as unknown as State);
    return;
  }
  for (const listener of listeners) listener({ kind: event.kind, data });
}

function take(state: State): void {
  const told_at = performance.now();
  if (state.first) known = new Map();
  for (const model of state.models) known.set(model.id, { ...model, told_at });
  for (const id of state.gone) known.delete(id);
  // Another run of the gateway counts its events anew.
  if (started !== null && started !== state.status.started) lastId = null;
  started = state.status.started;
  if (state.more) return;
  show([...known.values()], { ...state.status, told_at });
  link.value = "live";
}

async function readModels(signal: AbortSignal): Promise<void> {
  if (document.hidden) return;
  const told_at = performance.now();
  const seen = (await get<{ models: Model[] }>("/api/v1/models", { signal })).models;
  show(seen.map((model) => ({ ...model, told_at })), null);
}

function show(seen: Model[], whole: Status | null): void {
  batch(() => {
    models.value = seen;
    status.value = whole;
    now.value = performance.now();
    trouble.value = "";
  });
}

/** Show what went wrong. Returns true if only another key can help. */
function failed(error: unknown): boolean {
  const needsKey = error instanceof ApiError && error.needsKey;
  batch(() => {
    trouble.value = words(error);
    link.value = needsKey ? "locked" : link.value === "limited" ? "limited" : "lost";
    if (needsKey) {
      status.value = null;
      models.value = [];
    }
  });
  return needsKey;
}
