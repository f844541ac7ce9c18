// What the scheduler decided and why, in sentences. Its own words are short codes with facts.
import { seconds } from "./format";
import type { Decision } from "./types";

export interface Explained {
  action: "serve" | "join" | "wait" | "swap" | "refuse";
  model: string;
  task: string | null;
  candidates: { model: string; verdict: string; why: string | null; eta_s: number | null }[];
  slot: string | null;
  move: string | null;
  devices: { id: string; name: string; mib: number }[];
  why: string | null;
  detail: string | null;
  leases: string[];
  behind: string[];
  beside: string[];
  evict: { model: string; slot: string; to: "asleep" | "cold"; why: string }[];
  calls_off: string[];
  too_late: boolean;
  position: number | null;
  eta_s: number | null;
  wait_max_s: number | null;
  retry_after_s: number | null;
}

const WAITING: Record<string, string> = {
  busy: "it is ready, and answers as many requests at once as it can",
  leaving: "it is on its way out and has to be gone first",
  no_room: "the models that would have to leave for it may not do so yet",
  leased: "its memory is leased to other programs",
  kept_for_others: "its memory is kept for requests that have waited too long already",
  crowd: "requests for many models wait already, and are handled in turn",
  excluded: "scheduler.company does not let it be ready beside models that cannot leave now",
  held: "its next version takes its place, and needs its memory",
  green_room: "the green room has no memory left for it",
  no_lease: "its memory is leased to another program or not really free yet",
  store_down: "the lease store does not answer",
};

const REFUSED: Record<string, string> = {
  queue_full: "the queue is full",
  tenant_queue_full: "the tenant's places in the queue are taken",
  load_failed: "its last load failed or its engine ended again, and it is not tried again yet",
  excluded: "scheduler.company does not let it be ready beside a pinned model",
  too_large: "it does not fit on the devices there are",
  expired: "it had waited as long as its caller allowed",
  shutting_down: "the gateway is shutting down",
  store_down: "the lease store does not answer",
  unknown_model: "there is no such model",
  unloaded: "its model was unloaded by order",
  removed: "its model was removed from the configuration",
  lost: "its engine ended",
};

const VERDICTS: Record<string, string> = {
  chosen: "it is the one",
  refused: "it cannot serve now",
  last_resort: "it is remote, and used only if no other can serve in time",
  late: "its answer would not be there within the budget",
  not_sooner: "it comes after the one that was chosen",
  slower: "a later one serves sooner by more than prefer_first_s",
  left_out: "it cannot serve such a request",
};

const plain = (code: string) => code.replace(/_/g, " ");

export function waitReason(why: string): string {
  return WAITING[why] ?? plain(why);
}

export function verdict(code: string): string {
  return VERDICTS[code] ?? plain(code);
}

/** "a, b and c". */
export function list(names: readonly string[]): string {
  return names.length < 2 ? (names[0] ?? "") : `${names.slice(0, -1).join(", ")} and ${names.at(-1)}`;
}

/** What is happening to a waiting request's model. */
export function planReason(plan: string | null, why: string | null, behind: readonly string[]): string {
  const first = behind.length ? `; ${list(behind)} ${behind.length === 1 ? "goes" : "go"} first` : "";
  if (plan === "join") return `its model is being loaded${first}`;
  if (plan === "swap") return `its model can be loaded now${first}`;
  if (plan === "serve") return "its model is ready, and it is next";
  if (plan === "wait" && why) return waitReason(why) + first;
  return "";
}

/** The first sentence of an explanation. */
export function explains(said: Explained): string {
  const name = said.model;
  switch (said.action) {
    case "serve":
      return `${name} is ready: the request would be served at once.`;
    case "join":
      return `${name} is on its way already: the request would wait for it.`;
    case "swap": {
      const room = said.evict.length ? ` after ${list(said.evict.map((one) => one.model))} made room` : "";
      return `${name} would be ${said.move === "wake" ? "woken" : "loaded"}${comesTo(said)}${room}.`;
    }
    case "wait": {
      const leases = said.leases.length ? ` (${list(said.leases)})` : "";
      return `${name} would have to wait: ${waitReason(said.why ?? "")}${leases}.`;
    }
    case "refuse":
      return `${name} would be refused: ${REFUSED[said.why ?? ""] ?? plain(said.why ?? "")}.`;
  }
}

/** Its GPUs; the host only for a model that uses none. */
function comesTo(said: Explained): string {
  const names = said.devices.map((one) => one.name);
  const gpus = names.filter((name) => name !== "host");
  return names.length ? ` on ${list(gpus.length ? gpus : names)}` : "";
}

/** The further sentences of an explanation. */
export function explainsMore(said: Explained): string[] {
  const lines = said.evict.map((one) => `${one.model} would ${one.to === "asleep" ? "fall asleep" : "be unloaded"}: ${one.why}.`);
  if (said.detail) lines.push(said.detail);
  if (said.behind.length) lines.push(`Requests for ${list(said.behind)} would go first.`);
  if (said.beside.length) lines.push(`It may not be ready beside ${list(said.beside)}.`);
  if (said.calls_off.length) lines.push(`${list(said.calls_off)} would have to be planned again, being less urgent.`);
  if (said.wait_max_s === 0) {
    lines.push("This caller would be refused at once: it may not wait (server.wait_max_s, stream_wait_max_s).");
    return said.too_late ? [...lines, "The model would be brought all the same."] : lines;
  }
  if (said.too_late) lines.push("This caller would be refused: its time is over by then. The model would be brought all the same.");
  if (said.position !== null) lines.push(`Its place in the queue: ${said.position}.`);
  if (said.action === "refuse") {
    if (said.retry_after_s) lines.push(`Worth another try in about ${seconds(said.retry_after_s)}.`);
  } else if (said.action !== "serve") {
    lines.push(said.eta_s === null ? "How long that takes is not known yet." : `Its answer would begin in about ${seconds(said.eta_s)}.`);
    if (said.wait_max_s !== null) lines.push(`After ${seconds(said.wait_max_s)} it would be refused.`);
  }
  return lines;
}

const DONE: Record<string, string> = {
  load: "loaded",
  wake: "woken",
  sleep: "sent to sleep",
  prepare: "prepared in the green room",
  unload: "unloaded",
  abort: "no longer loaded",
};

/** One decision as a sentence; `subject` stands before it. */
export function decided(one: Decision): { subject: string; text: string } {
  const subject = String(one.model ?? one.lease ?? one.request ?? "").replace(/^lease:/, "lease ");
  if (one.what === "reject") {
    const what = String(one.request).startsWith("lease:") ? "lease" : `request ${one.request}`;
    return { subject, text: `${what} refused: ${REFUSED[one.why] ?? plain(one.why)}` };
  }
  if (one.what === "cut") return { subject, text: `answer ${one.request} cut: ${because(one)}` };
  if (one.what === "recall") return { subject, text: `lease recalled: ${because(one)}` };
  return { subject, text: `${DONE[one.what] ?? plain(one.what)}: ${because(one)}` };
}

/** Why a move was begun or an answer cut, in words. */
export function because(one: Decision): string {
  const ttl = typeof one.ttl_s === "number" ? ` for ${seconds(one.ttl_s)}` : "";
  switch (one.why) {
    case "asked_for":
      return "it was asked for";
    case "asked":
      return "an operator asked for that";
    case "leaving":
      // It was told to leave earlier, while it answered or moved.
      return `${because({ ...one, why: String(one.cause) })}; it left once it was idle`;
    case "evicted":
      return one.for_model ? `it made room for ${one.for_model}` : "it made room for another model";
    case "ttl":
      return `it was idle${ttl}`;
    case "budget":
      return "the request's time was over";
    case "cannot_sleep":
      return "its engine cannot sleep";
    case "grace_over":
      return "the time for running answers was over";
    case "green_room":
      return "the green room needed its memory";
    case "held":
      return "its next version needs its memory";
    case "lease_lost":
      return "its lease had ended, and its memory was granted to another holder";
    case "new_revision":
      return "its configuration changed";
    case "new_version":
      return "its next version takes its place";
    case "removed":
      return "it was removed from the configuration";
    case "shutdown":
      return "the gateway was shutting down";
    case "sleep_failed":
      return "it could not fall asleep";
    case "wake_ended":
      return "its wake ended";
    case "back_off":
      return "it failed before, and is not tried again yet";
    default:
      return plain(one.why);
  }
}
