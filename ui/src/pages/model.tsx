// One model: what it is doing, what it holds, its last lines, and what can be ordered.
import { useEffect, useRef, useState } from "preact/hooks";
import { modelPath, open, post, words } from "../api";
import { ago, mib, percent, plural, seconds } from "../format";
import { age, deviceNames, link } from "../live";
import { Badge, Problem, Progress } from "../parts/bits";
import { Dialog } from "../parts/dialog";
import { say, tryTo } from "../parts/toast";
import { modelSays, shareDone } from "../places";
import { href } from "../route";
import { readEvents } from "../sse";
import type { Model } from "../types";
import { State } from "./stage";

const LOG_LINES_MAX = 500;

export function ModelDrawer({ model, onClose }: { model: Model; onClose: () => void }) {
  const said = modelSays(model);
  const slot = model.slots.find((one) => one.moving);
  return (
    <Dialog kind="drawer" title={model.id} onClose={onClose}>
      <p class="drawer-state">
        <State text={said.text} tone={said.tone} />
        <Badge>{model.engine}</Badge>
        {(model.capabilities ?? []).map((one) => (
          <Badge key={one}>{one}</Badge>
        ))}
        {model.pinned && <Badge tone="ready">pinned</Badge>}
      </p>
      {slot && <Progress share={shareDone(slot, age(model))} label={said.text} />}
      {model.last_error && <Problem>{model.last_error.message}</Problem>}
      {model.missing && <Problem>{model.missing}</Problem>}
      <Orders model={model} />
      <Facts model={model} />
      {link.value !== "limited" && (
        <>
          <p class="drawer-links">
            <a href={href("requests", { model: model.id })}>Its requests</a>
            <a href={href("decisions", { model: model.id })}>Its decisions</a>
          </p>
          <Logs model={model.id} />
        </>
      )}
    </Dialog>
  );
}

const ORDERS = [
  { order: "load", text: "Load", done: "is ready", fits: (model: Model) => model.tier !== "ready" },
  { order: "prepare", text: "Prepare", done: "is in the green room", fits: (model: Model) => model.tier === "cold" && canSleep(model) },
  { order: "sleep", text: "Sleep", done: "sleeps", fits: (model: Model) => model.tier === "ready" && canSleep(model) },
  { order: "unload", text: "Unload", done: "is unloaded", fits: (model: Model) => model.tier !== "cold" },
] as const;

/** Engines say no themselves where they cannot; these never can. */
function canSleep(model: Model): boolean {
  return model.no_sleep === null && !["llamacpp", "command", "remote"].includes(model.engine);
}

function Orders({ model }: { model: Model }) {
  const [busy, setBusy] = useState("");
  const act = async (order: string, done: string) => {
    setBusy(order);
    await tryTo(async () => {
      const moved = await post<{ took_s: number }>(modelPath(model.id, order));
      return `${model.id} ${done} (${seconds(moved.took_s)})`;
    });
    setBusy("");
  };
  const pin = () =>
    tryTo(async () => {
      const { pinned } = await post<{ pinned: boolean }>(modelPath(model.id, "pin"), { pinned: !model.pinned });
      return pinned ? `${model.id} stays where it is` : `${model.id} may leave again`;
    });
  return (
    <div class="actions">
      {ORDERS.filter((one) => one.fits(model) || busy === one.order).map((one) => (
        <button
          key={one.order}
          type="button"
          class={one.order === "load" ? "main" : ""}
          disabled={busy !== ""}
          onClick={() => void act(one.order, one.done)}
        >
          {busy === one.order ? `${one.text} …` : one.text}
        </button>
      ))}
      {model.engine !== "remote" && (
        <button type="button" aria-pressed={model.pinned} title="Never evicted, and never unloaded for being idle, until a restart" onClick={() => void pin()}>
          {model.pinned ? "Unpin" : "Pin"}
        </button>
      )}
    </div>
  );
}

function Facts({ model }: { model: Model }) {
  const held = Object.entries(model.memory).map(([id, amount]) => `${mib(amount)} on ${deviceNames.value.get(id) ?? id}`);
  const { need } = model;
  const planned = [need.gpu_mib && `${mib(need.gpu_mib)} GPU`, need.host_mib && `${mib(need.host_mib)} host`].filter(Boolean);
  const facts: [string, string | null][] = [
    ["Answering", `${plural(model.in_flight, "request")}${model.concurrency ? `, at most ${model.concurrency} at once` : ""}`],
    ["Waiting", plural(model.waiting, "request")],
    ["Holds", held.join(", ") || "nothing"],
    ["Needs", planned.length ? `${planned.join(" + ")} (${need.source})` : null],
    ["Measured", need.measured_gpu_mib ? `${mib(need.measured_gpu_mib)} on GPUs at most` : null],
    ["Last used", model.last_used_s_ago === null ? "not yet" : ago(model.last_used_s_ago + age(model))],
    ["Leaves in", model.unload_in_s === null ? null : `${seconds(Math.max(0, model.unload_in_s - age(model)))} if it stays idle`],
    ["KV cache", model.cache ? `${percent(model.cache.kv_used)} used` : null],
    ["Priority", `${model.priority} (lower goes first)`],
    ["Failures", model.failures ? `${model.failures} in a row` : null],
    ["Tried again in", model.retry_in_s === null ? null : seconds(model.retry_in_s)],
    ["Sleep", model.no_sleep],
    ["Process", model.pid === null ? null : String(model.pid)],
  ];
  return (
    <dl class="facts">
      {facts.map(
        ([name, value]) =>
          value !== null && (
            <div key={name}>
              <dt>{name}</dt>
              <dd>{value}</dd>
            </div>
          ),
      )}
    </dl>
  );
}

/** The last lines that its engine printed, and each new one. */
function Logs({ model }: { model: string }) {
  const [lines, setLines] = useState<string[]>([]);
  const [problem, setProblem] = useState("");
  const box = useRef<HTMLPreElement>(null);
  useEffect(() => {
    const stop = new AbortController();
    void follow(model, stop.signal, setLines).catch((error: unknown) => {
      if (!stop.signal.aborted) setProblem(words(error));
    });
    return () => stop.abort();
  }, [model]);
  useEffect(() => {
    const element = box.current;
    const isAtEnd = element && element.scrollHeight - element.scrollTop - element.clientHeight < 80;
    if (isAtEnd || lines.length <= 1) element?.scrollTo(0, element.scrollHeight);
  }, [lines]);
  const copy = () => navigator.clipboard?.writeText(lines.join("\n")).then(() => say("Copied the log lines"));
  return (
    <section class="logs" aria-label="Log">
      <header>
        <h3>Log</h3>
        {lines.length > 0 && (
          <button type="button" class="quiet" onClick={() => void copy()}>
            Copy
          </button>
        )}
      </header>
      <Problem>{problem}</Problem>
      <pre ref={box} tabIndex={0}>
        {lines.length ? lines.join("\n") : "Its engine has printed nothing yet."}
      </pre>
    </section>
  );
}

type SetLines = (change: (was: string[]) => string[]) => void;

async function follow(model: string, signal: AbortSignal, setLines: SetLines): Promise<void> {
  const answer = await open(`${modelPath(model, "logs/stream")}?lines=200`, { signal });
  await readEvents(answer, (event) => setLines((was) => [...was.slice(1 - LOG_LINES_MAX), event.data]));
}
