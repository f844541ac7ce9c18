// Asks the gateway: the key as a header, errors in words. Owns the key.
import { signal } from "@preact/signals";

/** The gateway's address: the page lies at `ui/` below it, also behind a proxy with a path of its own. */
const root = new URL("..", location.href.split("#")[0]);
const STORED_KEY = "greenroom.key";

/** The key of this tab; empty without one. */
export const key = signal(sessionStorage.getItem(STORED_KEY) ?? "");

/** Use another key from now on. Only with `keep` it outlives a reload of the tab. */
export function useKey(value: string, keep: boolean): void {
  sessionStorage.removeItem(STORED_KEY);
  if (keep && value) sessionStorage.setItem(STORED_KEY, value);
  key.value = value;
}

/** Counts what this tab orders, when it is sent and when it is answered: it may have changed what other data say. */
export const orders = signal(0);

export function isKeyKept(): boolean {
  return sessionStorage.getItem(STORED_KEY) !== null;
}

/** An answer that is an error, or no answer at all (status 0). Its message is fit to be shown. */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    readonly code: string,
    message: string,
    readonly details: string | null = null,
  ) {
    super(message);
  }

  /** No key, or one that the gateway does not know. */
  get needsKey(): boolean {
    return this.status === 401;
  }

  /** The key is known, but may not do this. */
  get isForbidden(): boolean {
    return this.status === 403;
  }
}

export interface Ask {
  method?: string;
  /** Sent as JSON, unless it is a form. */
  body?: unknown;
  headers?: Record<string, string>;
  signal?: AbortSignal;
}

export function url(path: string): string {
  return new URL(path.replace(/^\//, ""), root).href;
}

/** Ask, and return the answer as it comes, for streams and files. Throws ApiError. */
export async function open(path: string, ask: Ask = {}): Promise<Response> {
  const headers = new Headers(ask.headers);
  if (key.value) headers.set("authorization", `Bearer ${key.value}`);
  const isForm = ask.body instanceof FormData;
  if (ask.body !== undefined && !isForm) headers.set("content-type", "application/json");
  const body = ask.body === undefined ? undefined : isForm ? (ask.body as FormData) : JSON.stringify(ask.body);
  const method = ask.method ?? (body === undefined ? "GET" : "POST");
  const isOrder = method !== "GET";
  let answer: Response;
  if (isOrder) orders.value += 1;
  try {
    answer = await fetch(url(path), { method, headers, body, signal: ask.signal, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (ask.signal?.aborted) throw error;
    throw new ApiError(0, "unreachable", "The gateway does not answer. It may be restarting.");
  }
  if (isOrder) orders.value += 1;
  if (!answer.ok) throw await errorOf(answer);
  return answer;
}

/** Ask for JSON. Throws ApiError. */
export async function get<T>(path: string, ask: Ask = {}): Promise<T> {
  const answer = await open(path, ask);
  if (answer.status === 204) return undefined as T;
  return (await answer.json()) as T;
}

export function post<T>(path: string, body?: unknown, ask: Ask = {}): Promise<T> {
  return get<T>(path, { ...ask, method: "POST", body });
}

/** The path of a model; ids may hold slashes. */
export function modelPath(id: string, order = ""): string {
  return `/api/v1/models/${encodeURIComponent(id)}${order && `/${order}`}`;
}

/** What went wrong, in words. */
export function words(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}

async function errorOf(answer: Response): Promise<ApiError> {
  let said: { message?: string; code?: string; details?: string | null } = {};
  try {
    said = ((await answer.json()) as { error?: typeof said }).error ?? {};
  } catch {
    // Not JSON: something between us and the gateway answered.
  }
  const message = said.message ?? `${answer.status} ${answer.statusText || "from the server"}`;
  return new ApiError(answer.status, said.code ?? "unknown", message, said.details ?? null);
}
