// The three tiers as places: on stage per device, in the green room, at home. Models move between them live.
import { useMemo, useState } from "preact/hooks";
import { get } from "../api";
import { useFlip } from "../flip";
import { clock, count, mib, plural, seconds } from "../format";
import { age, link, modelById, models, status } from "../live";
import { Badge, Empty, Figure, PageHead, Progress, Search } from "../parts/bits";
import { Icon } from "../parts/icon";
import { MemoryBar, toneOf, type Segment } from "../parts/memory";
import { usePoll, useReloadOnEvents } from "../poll";
import { leaseOf, modelSays, placesOf, shareDone, slotSays, type Floor, type Occupant } from "../places";
import { decided } from "../reasons";
import { href, place, setParams } from "../route";
import type { Decision, Lease, Model, Slot, Status } from "../types";
import { ModelDrawer } from "./model";

const pick = (model: string) => setParams({ model });
// More chips than this make a wall; a search finds the rest.
const HOME_SHOWN_MAX = 240;
const LATEST = 3;

export function Stage() {
  const seen = status.value;
  const picked = place.value.params.get("model");
  const model = picked === null ? undefined : modelById.value.get(picked);
  return (
    <>
      <PageHead title="Stage" about="Where every model is now: ready on a GPU, asleep in the green room, or at home on disk." />
      {seen ? <Whole seen={seen} /> : <Limited />}
      {model && <ModelDrawer model={model} onClose={() => setParams({})} />}
    </>
  );
}

function Whole({ seen }: { seen: Status }) {
  const names = useLeaseNames(seen);
  const all = models.value;
  const places = useMemo(() => placesOf(seen, all, names), [seen, all, names]);
  const box = useFlip(seen);
  if (!all.length && !seen.other_slots.length) return <NoModels />;
  return (
    <div class="stage" ref={box}>
      <div class="stage-top">
        <Figures seen={seen} />
        <Latest />
      </div>
      <section aria-labelledby="on-stage">
        <PlaceHead id="on-stage" title="On stage" about="Answers at once" />
        <div class="floors">
          {places.stage.map((floor) => (
            <FloorPanel key={floor.device.id} floor={floor} />
          ))}
          {!places.stage.length && <Empty title="Nothing is on stage">There are no GPUs, and no model is ready on the host.</Empty>}
        </div>
      </section>
      <div class="below">
        <Room seen={seen} room={places.room} />
        <Home home={places.home} />
      </div>
    </div>
  );
}

/** The names of leases by their ids; asked for only where there are leases. */
function useLeaseNames(seen: Status): ReadonlyMap<string, string> {
  const held = seen.other_slots.map(leaseOf).filter((id) => id !== null);
  const { data } = usePoll(async () => (held.length ? (await get<{ leases: Lease[] }>("/api/v1/leases")).leases : []), 0, [held.join()]);
  return useMemo(() => new Map((data ?? []).map((lease) => [lease.id, lease.name])), [data]);
}

function PlaceHead({ id, title, about, right }: { id: string; title: string; about: string; right?: string }) {
  return (
    <div class="place-head">
      <h2 id={id}>{title}</h2>
      <p>{about}</p>
      {right && <p class="right">{right}</p>}
    </div>
  );
}

function Figures({ seen }: { seen: Status }) {
  const all = models.value;
  const answering = all.reduce((sum, model) => sum + model.in_flight, 0);
  const failed = all.filter((model) => model.status === "failed").length;
  return (
    <div class="figures">
      <Figure value={count(answering)} name="answering" tone={answering ? "busy" : ""} />
      <Figure value={count(seen.queue.depth)} name="waiting" tone={seen.queue.depth ? "moving" : ""} />
      <Figure value={seen.queue.avg_wait_ms === null ? "–" : seconds(seen.queue.avg_wait_ms / 1000)} name="average wait" />
      <Figure value={count(all.filter((model) => model.tier === "ready").length)} name="ready" />
      <Figure value={count(all.filter((model) => model.tier === "asleep").length)} name="asleep" />
      <Figure value={count(all.length)} name="models" />
      {failed > 0 && <Figure value={count(failed)} name="failed" tone="bad" />}
    </div>
  );
}

/** The last decisions, so that a move is seen with its reason. */
function Latest() {
  const { data, reload } = usePoll(async () => (await get<{ decisions: Decision[] }>(`/api/v1/decisions?limit=${LATEST}`)).decisions.reverse(), 0);
  useReloadOnEvents(reload);
  if (!data?.length) return null;
  return (
    <ul class="latest" aria-label="Latest decisions">
      {data.map((one) => {
        const { subject, text } = decided(one);
        return (
          <li key={one.seq}>
            <a href={href("decisions")}>
              <time>{clock(one.at)}</time> <b>{subject}</b> {text}
            </a>
          </li>
        );
      })}
    </ul>
  );
}

function FloorPanel({ floor }: { floor: Floor }) {
  const { device, gpu, name } = floor;
  const busy = gpu?.utilisation ?? null;
  return (
    <article class="panel floor" aria-label={name}>
      <header>
        <h3>{name}</h3>
        <span class="quiet-text">{gpu?.name ?? (device.kind === "host" ? "models that run on the processor" : "")}</span>
        <span class="right figures-text">
          {busy !== null && <span title="Share of the time that something ran on it">{busy} % busy</span>}
          {gpu?.temperature_c != null && <span>{gpu.temperature_c} °C</span>}
        </span>
      </header>
      <MemoryBar label={`Memory of ${name}`} total={device.capacity_mib} segments={segmentsOf(floor)} />
      <p class="memory-legend">
        <b>{mib(device.free_mib)}</b> free of {mib(device.capacity_mib)}
        {device.foreign_mib > 0 && (
          <span class="key foreign" title="Used by processes that belong to no model and no lease">
            {mib(device.foreign_mib)} other programs
          </span>
        )}
        {device.margin_mib > 0 && <span class="key margin">{mib(device.margin_mib)} kept free</span>}
      </p>
      <ul class="occupants">
        {floor.occupants.map((one) => (
          <Row key={one.slot.id} occupant={one} flip={`${one.name}`} />
        ))}
        {!floor.occupants.length && <li class="nothing">Empty. A request for a model brings it here.</li>}
      </ul>
    </article>
  );
}

function segmentsOf({ device, occupants }: Floor): Segment[] {
  return [
    ...occupants.map((one) => ({
      key: one.slot.id,
      label: one.isLease ? `Lease ${one.name}` : one.name,
      mib: one.mib,
      tone: `${one.isLease ? "lease" : toneOf(one.name)} ${one.slot.moving ? "moving" : ""}`,
    })),
    { key: "foreign", label: "Other programs", mib: device.foreign_mib, tone: "foreign" },
    { key: "free", label: "Free", mib: device.free_mib, tone: "free" },
    { key: "margin", label: "Kept free", mib: device.margin_mib, tone: "margin" },
  ];
}

function Row({ occupant, flip }: { occupant: Occupant; flip: string }) {
  const { slot, model, name, isLease } = occupant;
  const said = slotSays(slot);
  const later = age(model ?? status.value!);
  const body = (
    <>
      <i class={`swatch ${isLease ? "lease" : toneOf(name)}`} aria-hidden="true" />
      <span class="name">
        {name}
        {model?.pinned && <Pinned />}
      </span>
      {isLease && <Badge>lease</Badge>}
      {model && model.waiting > 0 && <Badge tone="moving">{count(model.waiting)} waiting</Badge>}
      {slot.unload_in_s !== null && !slot.moving && (
        <span class="fine wide-only">leaves in {seconds(Math.max(0, slot.unload_in_s - later))}</span>
      )}
      <State text={said.text} tone={said.tone} />
      <span class="amount">{occupant.mib ? mib(occupant.mib) : ""}</span>
      {slot.moving && slot.moving.since_s !== null && (
        <span class="row-progress">
          <Progress share={shareDone(slot, later)} label={`${name}: ${said.text}`} />
          <span class="fine">{timing(slot, later)}</span>
        </span>
      )}
    </>
  );
  return (
    <li data-flip={flip}>
      {model ? (
        <button type="button" class="occupant" onClick={() => pick(model.id)}>
          {body}
        </button>
      ) : (
        <div class="occupant">{body}</div>
      )}
    </li>
  );
}

function timing(slot: Slot, later: number): string {
  const since = (slot.moving?.since_s ?? 0) + later;
  const eta = slot.moving?.eta_s;
  return eta == null ? seconds(since) : `${seconds(since)} of about ${seconds((slot.moving!.since_s ?? 0) + eta)}`;
}

export function State({ text, tone }: { text: string; tone: string }) {
  return (
    <span class={`state ${tone}`}>
      <i aria-hidden="true" />
      {text}
    </span>
  );
}

function Pinned() {
  return (
    <span class="pinned" title="Pinned: never evicted">
      <Icon name="pin" />
      <span class="unseen">pinned</span>
    </span>
  );
}

function Room({ seen, room }: { seen: Status; room: Occupant[] }) {
  const { size_mib: size, used_mib: used, free_mib: free } = seen.green_room;
  const total = size ?? (free === null ? used : used + free);
  const segments: Segment[] = [
    ...room.map((one) => ({ key: one.slot.id, label: one.name, mib: one.mib, tone: toneOf(one.name) })),
    { key: "free", label: "Free", mib: Math.max(0, total - room.reduce((sum, one) => sum + one.mib, 0)), tone: "free" },
  ];
  return (
    <section aria-labelledby="in-room">
      <PlaceHead id="in-room" title="In the green room" about="In host memory, wakes in a moment" />
      <div class="panel floor">
        {total > 0 && <MemoryBar label="Memory of the green room" total={total} segments={segments} />}
        <p class="memory-legend">
          <b>{mib(used)}</b> used{total > 0 && ` of ${mib(total)}`}
        </p>
        <ul class="occupants">
          {room.map((one) => (
            <Row key={one.slot.id} occupant={one} flip={one.name} />
          ))}
          {!room.length && <li class="nothing">No model is asleep. Engines that can sleep send their models here.</li>}
        </ul>
      </div>
    </section>
  );
}

function Home({ home }: { home: Model[] }) {
  const [wanted, setWanted] = useState("");
  const named = wanted ? home.filter((model) => model.id.toLowerCase().includes(wanted.toLowerCase())) : home;
  // What is asked for comes first, then what needs a look.
  const found = named.toSorted((one, two) => rank(one) - rank(two));
  return (
    <section aria-labelledby="at-home">
      <PlaceHead id="at-home" title="At home" about="On disk, loads when asked for" right={plural(home.length, "model")} />
      <div class="panel">
        {home.length > 12 && <Search value={wanted} onChange={setWanted} label="Find a model" />}
        <ul class="chips">
          {found.slice(0, HOME_SHOWN_MAX).map((model) => (
            <Chip key={model.id} model={model} />
          ))}
        </ul>
        {found.length > HOME_SHOWN_MAX && (
          <p class="fine">and {count(found.length - HOME_SHOWN_MAX)} more: find them by name.</p>
        )}
        {!found.length && <p class="nothing">{home.length ? "No model has that name." : "Every model is loaded or asleep."}</p>}
      </div>
    </section>
  );
}

function rank(model: Model): number {
  return model.waiting > 0 ? 0 : modelSays(model).tone === "cold" ? 2 : 1;
}

function Chip({ model }: { model: Model }) {
  const said = modelSays(model);
  const need = model.need.gpu_mib + model.need.host_mib;
  return (
    <li data-flip={model.id}>
      <button type="button" class={`chip ${said.tone}`} onClick={() => pick(model.id)}>
        <i class={`swatch ${toneOf(model.id)}`} aria-hidden="true" />
        <span class="name">
          {model.id}
          {model.pinned && <Pinned />}
        </span>
        {model.waiting > 0 && <Badge tone="moving">{count(model.waiting)} waiting</Badge>}
        {said.tone !== "cold" && <State text={said.text} tone={said.tone} />}
        {need > 0 && <span class="amount">{mib(need)}</span>}
      </button>
    </li>
  );
}

/** For keys that may see models and nothing else. */
function Limited() {
  if (link.value === "connecting" || link.value === "lost") return <p class="fine">Asking the gateway …</p>;
  if (!models.value.length) return <NoModels />;
  return (
    <div class="panel stack">
      <p class="about">This key sees its models, but not the GPUs, the queue or other tenants.</p>
      <ul class="chips">
        {models.value.map((model) => (
          <Chip key={model.id} model={model} />
        ))}
      </ul>
    </div>
  );
}

function NoModels() {
  return (
    <div class="panel">
      <Empty title="No models yet" command="greenroom pull Qwen/Qwen3-0.6B-GGUF">
        Name models in the configuration, or fetch one from the hub:
      </Empty>
    </div>
  );
}
