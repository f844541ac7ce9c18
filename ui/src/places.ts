// Which place each model stands in: on a device, in the green room, or at home. From the state alone.
import type { Device, Gpu, Model, Slot, Status } from "./types";

/** A model's slot, or a lease, on one device. */
export interface Occupant {
  slot: Slot;
  /** Null for leases, and for models that are no longer configured. */
  model: Model | null;
  name: string;
  isLease: boolean;
  /** MiB on this device. */
  mib: number;
}

export interface Floor {
  device: Device;
  /** Null for the host, and for a GPU that cannot be seen. */
  gpu: Gpu | null;
  name: string;
  occupants: Occupant[];
}

export interface Places {
  /** GPUs, then the host if something is ready there. */
  stage: Floor[];
  /** Asleep, or on the way to sleep. */
  room: Occupant[];
  /** Models without a slot, or with one that holds nothing yet. */
  home: Model[];
}

// The slots of leases bear this before the id of the lease. No model can: ids do not begin with a space.
const LEASE = " lease:lease:";

/** `leaseNames` are by the ids of leases. */
export function placesOf(status: Status, models: readonly Model[], leaseNames: ReadonlyMap<string, string>): Places {
  const gpus = new Map(status.gpus.map((gpu) => [gpu.id, gpu]));
  const floors = status.devices.map((device): Floor => {
    const gpu = gpus.get(device.id) ?? null;
    return { device, gpu, name: device.kind === "host" ? "Host" : gpu ? `gpu${gpu.index}` : device.id, occupants: [] };
  });
  const room: Occupant[] = [];
  const home: Model[] = [];
  for (const model of models) {
    const placed = model.slots.map((slot) => place(slot, model, slot.model, floors, room));
    if (!placed.some(Boolean)) home.push(model);
  }
  for (const slot of status.other_slots) {
    const lease = leaseOf(slot);
    place(slot, null, lease === null ? slot.model : (leaseNames.get(lease) ?? lease), floors, room);
  }
  const stage = floors.filter((floor) => floor.device.kind === "gpu" || floor.occupants.length > 0);
  return { stage, room, home };
}

/** The id of the lease that this slot is; null for models. */
export function leaseOf(slot: Slot): string | null {
  return slot.model.startsWith(LEASE) ? slot.model.slice(LEASE.length) : null;
}

/** Put a slot where it stands; false if it stands nowhere yet. */
function place(slot: Slot, model: Model | null, name: string, floors: Floor[], room: Occupant[]): boolean {
  const isLease = leaseOf(slot) !== null;
  const occupant = (mib: number): Occupant => ({ slot, model, name, isLease, mib });
  const held = floors.filter((floor) => (slot.memory[floor.device.id] ?? 0) > 0);
  if (isInRoom(slot)) {
    room.push(occupant(Object.values(slot.memory).reduce((sum, mib) => sum + mib, 0)));
    return true;
  }
  const onGpus = held.filter((floor) => floor.device.kind === "gpu");
  const on = onGpus.length ? onGpus : held;
  for (const floor of on) floor.occupants.push(occupant(slot.memory[floor.device.id]!));
  if (on.length) return true;
  // Ready without any memory of ours, such as a server that runs elsewhere.
  const host = floors.find((floor) => floor.device.kind === "host");
  if (slot.tier !== "ready" || !host) return false;
  host.occupants.push(occupant(0));
  return true;
}

function isInRoom(slot: Slot): boolean {
  const kind = slot.moving?.kind;
  if (slot.tier === "asleep") return kind !== "wake" || slot.moving?.since_s === null;
  return slot.tier === "cold" && kind === "prepare" && slot.moving?.since_s !== null;
}

/** A state in a word or two, with the tone of its colour. */
export interface Said {
  text: string;
  tone: "ready" | "busy" | "asleep" | "cold" | "bad" | "moving";
}

const MOVES = {
  load: "loading",
  wake: "waking",
  sleep: "falling asleep",
  prepare: "preparing",
  unload: "unloading",
} as const;

export function slotSays(slot: Slot): Said {
  if (slot.moving) {
    const text = MOVES[slot.moving.kind];
    return { text: slot.moving.since_s === null ? `${text}, waits for memory` : text, tone: "moving" };
  }
  if (slot.leaving_to) return { text: slot.in_flight ? "leaving, answers end" : "leaving", tone: "moving" };
  if (slot.tier === "ready") {
    if (leaseOf(slot) !== null) return { text: "leased", tone: "ready" };
    return slot.in_flight ? { text: `answering ${slot.in_flight}`, tone: "busy" } : { text: "ready", tone: "ready" };
  }
  return slot.tier === "asleep" ? { text: "asleep", tone: "asleep" } : { text: "cold", tone: "cold" };
}

export function modelSays(model: Model): Said {
  if (model.status === "failed") return { text: "failed", tone: "bad" };
  const slot = model.slots.find((one) => one.moving) ?? model.slots.find((one) => one.tier === "ready") ?? model.slots[0];
  if (slot) return slotSays(slot);
  if (model.missing) return { text: "not installed", tone: "bad" };
  if (model.last_error) return { text: "last load failed", tone: "bad" };
  return { text: "cold", tone: "cold" };
}

/** How far a move is, from 0 to 1; null if it was never timed. `later` is how old the state is, in seconds. */
export function shareDone(slot: Slot, later: number): number | null {
  const { since_s = null, eta_s = null } = slot.moving ?? {};
  if (since_s === null || eta_s === null || since_s + eta_s <= 0) return null;
  return Math.min(0.98, (since_s + later) / (since_s + eta_s));
}
