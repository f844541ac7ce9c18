// What the API answers, as far as pages read it. The whole of it: GET /api/v1/openapi.json.

export type Tier = "ready" | "asleep" | "cold";
export type StatusWord = "unloaded" | "loading" | "loaded" | "sleeping" | "failed";
export type MoveKind = "load" | "wake" | "sleep" | "prepare" | "unload";

export interface Moving {
  kind: MoveKind;
  since_s: number | null;
  eta_s: number | null;
}

export interface Slot {
  id: string;
  model: string;
  revision: number;
  tier: Tier;
  moving: Moving | null;
  leaving_to: Tier | null;
  in_flight: number;
  concurrency: number;
  last_used_s_ago: number | null;
  memory: Record<string, number>;
  unload_in_s: number | null;
  pid: number | null;
}

export interface Need {
  gpu_mib: number;
  host_mib: number;
  source: string;
  measured_gpu_mib: number | null;
  measured_host_mib: number | null;
  estimate_error: number | null;
}

export interface Model {
  id: string;
  tier: Tier;
  status: StatusWord;
  engine: string;
  capabilities: string[] | null;
  revision: number;
  pinned: boolean;
  priority: number;
  ttl_s: number;
  in_flight: number;
  waiting: number;
  concurrency: number | null;
  last_used_s_ago: number | null;
  memory: Record<string, number>;
  need: Need;
  unload_in_s: number | null;
  moving: Moving | null;
  slots: Slot[];
  failures: number;
  retry_in_s: number | null;
  last_error: { code: string; message: string } | null;
  missing: string | null;
  cache: { kv_used: number; prefix_queries: number | null; prefix_hits: number | null; kv_tokens: number | null } | null;
  no_sleep: string | null;
  /** Its weights can be changed while it serves. */
  versioned: boolean;
  pid: number | null;
  /** performance.now() when it was told: its times are of then. */
  told_at: number;
}

export interface Device {
  id: string;
  kind: "gpu" | "host";
  capacity_mib: number;
  margin_mib: number;
  used_mib: number;
  free_mib: number;
  foreign_mib: number;
}

export interface Gpu {
  id: string;
  index: number;
  name: string;
  total_mib: number;
  used_mib: number;
  foreign_mib: number;
  free_mib: number;
  weights_mib: number;
  kv_mib: number;
  other_mib: number;
  utilisation: number | null;
  temperature_c: number | null;
}

export interface Waiting {
  id: string;
  position: number;
  model: string;
  tenant: string;
  waited_s: number;
}

/** The gateway besides its models. */
export interface Status {
  version: string;
  build: "pure" | "compiled";
  started: string;
  draining: boolean;
  addresses: string[];
  queue: { depth: number; max: number; avg_wait_ms: number | null };
  lease_store: { up: boolean; why: string | null } | null;
  key_problems: string[];
  devices: Device[];
  green_room: { size_mib: number | null; used_mib: number; free_mib: number | null; models: string[] };
  probe: { kind: string; failure: string | null; pids_visible: boolean };
  gpus: Gpu[];
  other_slots: Slot[];
  /** The first in the queue, at most 100. */
  waiting: Waiting[];
  told_at: number;
}

/** An event of kind "state": at first everything, later what changed. */
export interface State {
  first: boolean;
  /** Further models of this state follow in the next event. */
  more: boolean;
  models: Model[];
  gone: string[];
  status: Status;
}

export interface RequestRecord {
  id: string;
  model: string;
  asked_as: string;
  tenant: string;
  client: string | null;
  route: string;
  stream: boolean;
  priority: number;
  arrived_at: number;
  state: "waiting" | "serving" | "done";
  slot: string | null;
  model_version: number | null;
  model_repo_id: string | null;
  wait_s: number | null;
  first_byte_s: number | null;
  total_s: number | null;
  status: number | null;
  error_code: string | null;
  error_message: string | null;
  reason: string | null;
  details: string | null;
  prompt_tokens: number | null;
  completion_tokens: number | null;
  cached_tokens: number | null;
  gpu_time_ms: number | null;
  audio_s: number | null;
  pictures: number | null;
  estimated: boolean;
  chunks: number;
}

export interface Decision {
  seq: number;
  at: number;
  what: string;
  why: string;
  model?: string | null;
  for_model?: string | null;
  request?: string;
  slot?: string;
  [more: string]: unknown;
}

export interface Lease {
  id: string;
  name: string;
  kind: "program" | "slot";
  state: "held" | "pending" | "waiting";
  token: number;
  claim: Record<string, number>;
  priority: number;
  preemptible: boolean;
  ttl_s: number;
  expires_in_s: number;
  recall_in_s: number | null;
  overdue: boolean;
  holder: { host: string; pid: number } | null;
}
