// Chat with one model, or ask several the same and compare.
import { useEffect, useRef, useState } from "preact/hooks";
import { seconds } from "../../format";
import { modelById } from "../../live";
import { Empty, Problem } from "../../parts/bits";
import { Icon } from "../../parts/icon";
import { Markdown } from "../../parts/markdown";
import type { Model } from "../../types";
import {
  LANES_MAX,
  addLane,
  ask,
  clearAll,
  lanes,
  removeLane,
  sampling,
  setModel,
  stopAll,
  tokensPerSecond,
  type Lane,
  type Turn,
} from "./chat-state";
import { ModelSelect } from "./models";

export function Chat({ able, wanted }: { able: Model[]; wanted: string }) {
  const columns = lanes.value;
  // The first choice, and another one where a model has gone meanwhile.
  useEffect(() => {
    const first = able.find((model) => model.id === wanted) ?? able.find((model) => model.tier === "ready") ?? able[0];
    for (const lane of lanes.value) if (!lane.model && first) setModel(lane.id, first.id);
  }, [able.length > 0, wanted]);
  const next = able.find((model) => !columns.some((lane) => lane.model === model.id)) ?? able[0];
  return (
    <>
      <div class="lane-tools">
        {columns.length < LANES_MAX && (
          <button type="button" onClick={() => next && addLane(next.id)}>
            Compare with another model
          </button>
        )}
        <button type="button" class="quiet" onClick={clearAll} disabled={columns.every((lane) => !lane.turns.length)}>
          Clear
        </button>
      </div>
      <div class="lanes">
        {columns.map((lane, at) => (
          <Column key={lane.id} lane={lane} number={at + 1} able={able} isOnly={columns.length === 1} />
        ))}
      </div>
      <Composer />
    </>
  );
}

function Column({ lane, number, able, isOnly }: { lane: Lane; number: number; able: Model[]; isOnly: boolean }) {
  const end = useRef<HTMLDivElement>(null);
  const last = lane.turns[lane.turns.length - 1];
  // Follows the answer, unless the reader has scrolled back.
  useEffect(() => {
    const box = end.current;
    if (box && box.scrollHeight - box.scrollTop - box.clientHeight < 160) box.scrollTop = box.scrollHeight;
  }, [last?.answer, last?.thought, lane.turns.length]);
  return (
    <section class="panel lane" aria-label={`Conversation ${number}`}>
      <header>
        <ModelSelect label={`Model ${number}`} able={able} value={lane.model} onChange={(model) => setModel(lane.id, model)} />
        {!isOnly && (
          <button type="button" class="quiet square" aria-label={`Remove conversation ${number}`} onClick={() => removeLane(lane.id)}>
            <Icon name="close" />
          </button>
        )}
      </header>
      <div class="turns" ref={end} tabIndex={0} role="log" aria-label={`Messages of conversation ${number}`}>
        {lane.turns.map((turn, at) => (
          <Exchange key={at} turn={turn} model={lane.model} />
        ))}
        {!lane.turns.length && <Empty title="Say something">A model that is not loaded yet is loaded for your message.</Empty>}
      </div>
    </section>
  );
}

function Exchange({ turn, model }: { turn: Turn; model: string }) {
  return (
    <article class="exchange">
      <p class="question">{turn.question}</p>
      {turn.thought && (
        <details class="thought" open={turn.isRunning && !turn.answer}>
          <summary>Thoughts</summary>
          <p class="plain">{turn.thought}</p>
        </details>
      )}
      {turn.answer && <Markdown text={turn.answer} />}
      {turn.isRunning && !turn.answer && !turn.thought && <Waiting model={model} />}
      <Problem>{turn.error}</Problem>
      <Facts turn={turn} />
    </article>
  );
}

/** What an answer that has not begun waits for, as far as the gateway tells. */
function Waiting({ model }: { model: string }) {
  const seen = modelById.value.get(model);
  const moving = seen?.moving;
  const what = moving ? { load: "is loading", wake: "is waking", sleep: "is going to sleep", prepare: "is being prepared", unload: "is leaving" }[moving.kind] : null;
  const eta = moving?.eta_s == null ? "" : `, about ${seconds(moving.eta_s)}`;
  const said = what ? `${model} ${what}${eta} …` : seen && seen.tier !== "ready" ? `${model} waits for memory …` : `${model} is reading …`;
  return <p class="fine">{said}</p>;
}

function Facts({ turn }: { turn: Turn }) {
  const { firstMs, tokens, totalMs } = turn.timing;
  const speed = tokensPerSecond(turn.timing);
  if (firstMs === null) return null;
  return (
    <p class="fine facts-line">
      <span>first token {seconds(firstMs / 1000)}</span>
      {speed !== null && <span>{speed.toFixed(1)} tokens/s</span>}
      {tokens !== null && <span>{tokens} tokens</span>}
      {!turn.isRunning && totalMs !== null && <span>{seconds(totalMs / 1000)} in all</span>}
    </p>
  );
}

function Composer() {
  const [text, setText] = useState("");
  const isRunning = lanes.value.some((lane) => lane.turns.at(-1)?.isRunning);
  const canSend = text.trim() !== "" && lanes.value.some((lane) => lane.model);
  const send = (event?: Event) => {
    event?.preventDefault();
    if (!canSend || isRunning) return;
    ask(text.trim());
    setText("");
  };
  const onKey = (event: KeyboardEvent) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  };
  return (
    <form class="panel composer" onSubmit={send}>
      <textarea
        rows={2}
        value={text}
        aria-label="Message"
        placeholder="Message. Enter sends it, Shift and Enter begin a new line."
        onInput={(event) => setText(event.currentTarget.value)}
        onKeyDown={onKey}
      />
      <div class="composer-foot">
        <Settings />
        {isRunning ? (
          <button type="button" onClick={stopAll}>
            Stop
          </button>
        ) : (
          <button type="submit" class="main" disabled={!canSend}>
            Send
          </button>
        )}
      </div>
    </form>
  );
}

function Settings() {
  const { system, temperature, maxTokens } = sampling.value;
  const set = (what: object) => (sampling.value = { ...sampling.value, ...what });
  return (
    <details class="settings">
      <summary>Settings</summary>
      <div class="settings-body">
        <label class="field wide">
          System prompt
          <textarea rows={2} value={system} onInput={(event) => set({ system: event.currentTarget.value })} />
        </label>
        <label class="field">
          Temperature
          <input type="number" min={0} max={2} step={0.1} placeholder="the model's" value={temperature} onInput={(event) => set({ temperature: event.currentTarget.value })} />
        </label>
        <label class="field">
          Tokens at most
          <input type="number" min={1} step={1} placeholder="no limit" value={maxTokens} onInput={(event) => set({ maxTokens: event.currentTarget.value })} />
        </label>
      </div>
    </details>
  );
}
