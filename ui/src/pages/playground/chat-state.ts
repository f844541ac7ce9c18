// Conversations with one or several models at once. They outlive a change of the page, not one of the key or a reload of the tab.
import { signal } from "@preact/signals";
import { key, open, words } from "../../api";
import { readEvents } from "../../sse";

/** What an answer took, measured in this browser. */
export interface Timing {
  /** Milliseconds until the first word; null before it. */
  firstMs: number | null;
  totalMs: number | null;
  tokens: number | null;
  /** As the engine counts them; else each piece of the stream counts as one. */
  isCounted: boolean;
}

export interface Turn {
  question: string;
  answer: string;
  /** What a reasoning model thinks before it answers. */
  thought: string;
  timing: Timing;
  error: string;
  isRunning: boolean;
}

/** One conversation: a column of the page. */
export interface Lane {
  id: number;
  model: string;
  turns: Turn[];
}

export interface Sampling {
  system: string;
  temperature: string;
  maxTokens: string;
}

export const LANES_MAX = 4;
const NO_SAMPLING: Sampling = { system: "", temperature: "", maxTokens: "" };
export const lanes = signal<Lane[]>([]);
export const sampling = signal(NO_SAMPLING);

const running = new Map<number, AbortController>();
let lastId = 0;

// What was said with one key is not for the next.
key.subscribe(() => {
  stopAll();
  lanes.value = [newLane(++lastId, "")];
  sampling.value = NO_SAMPLING;
});

function newLane(id: number, model: string): Lane {
  return { id, model, turns: [] };
}

export function addLane(model: string): void {
  lanes.value = [...lanes.value, newLane(++lastId, model)];
}

export function removeLane(id: number): void {
  running.get(id)?.abort();
  lanes.value = lanes.value.filter((lane) => lane.id !== id);
}

export function setModel(id: number, model: string): void {
  change(id, (lane) => ({ ...lane, model }));
}

export function clearAll(): void {
  stopAll();
  lanes.value = lanes.value.map((lane) => ({ ...lane, turns: [] }));
}

export function stopAll(): void {
  for (const one of running.values()) one.abort();
}

/** Ask every model of the page the same. */
export function ask(question: string): void {
  for (const lane of lanes.value) if (lane.model && !running.has(lane.id)) void answer(lane, question);
}

async function answer(lane: Lane, question: string): Promise<void> {
  const stop = new AbortController();
  running.set(lane.id, stop);
  const turn: Turn = { question, answer: "", thought: "", timing: untimed(), error: "", isRunning: true };
  change(lane.id, (was) => ({ ...was, turns: [...was.turns, { ...turn }] }));
  const show = onceAFrame(() => change(lane.id, (was) => ({ ...was, turns: [...was.turns.slice(0, -1), { ...turn }] })));
  const began = performance.now();
  try {
    const body = { model: lane.model, messages: messagesOf(lane, question), stream: true, stream_options: { include_usage: true }, ...options() };
    const stream = await open("/v1/chat/completions", { body, signal: stop.signal });
    await readEvents(stream, (event) => {
      if (event.data !== "[DONE]") take(turn, JSON.parse(event.data) as Chunk, began);
      show();
    });
  } catch (error) {
    if (!stop.signal.aborted) turn.error = words(error);
  }
  turn.timing.totalMs = performance.now() - began;
  turn.isRunning = false;
  running.delete(lane.id);
  show.now();
}

interface Chunk {
  choices?: { delta?: { content?: string | null; reasoning_content?: string | null } }[];
  usage?: { completion_tokens?: number } | null;
  error?: { message?: string };
}

function take(turn: Turn, chunk: Chunk, began: number): void {
  if (chunk.error) turn.error = chunk.error.message ?? "The answer broke off.";
  const delta = chunk.choices?.[0]?.delta;
  const [said, thought] = [delta?.content ?? "", delta?.reasoning_content ?? ""];
  const timing = (turn.timing = { ...turn.timing });
  if (said || thought) {
    timing.firstMs ??= performance.now() - began;
    timing.totalMs = performance.now() - began;
    if (!timing.isCounted) timing.tokens = (timing.tokens ?? 0) + 1;
  }
  turn.answer += said;
  turn.thought += thought;
  if (chunk.usage?.completion_tokens != null) {
    timing.tokens = chunk.usage.completion_tokens;
    timing.isCounted = true;
  }
}

function untimed(): Timing {
  return { firstMs: null, totalMs: null, tokens: null, isCounted: false };
}

/** Of the time after the first token; null if there is too little to tell. */
export function tokensPerSecond({ firstMs, totalMs, tokens }: Timing): number | null {
  if (firstMs === null || totalMs === null || tokens === null || tokens < 2 || totalMs <= firstMs) return null;
  return (1000 * (tokens - 1)) / (totalMs - firstMs);
}

function messagesOf(lane: Lane, question: string): { role: string; content: string }[] {
  const { system } = sampling.value;
  return [
    ...(system ? [{ role: "system", content: system }] : []),
    ...lane.turns
      .filter((turn) => turn.answer)
      .flatMap((turn) => [
        { role: "user", content: turn.question },
        { role: "assistant", content: turn.answer },
      ]),
    { role: "user", content: question },
  ];
}

function options(): Record<string, number> {
  const { temperature, maxTokens } = sampling.value;
  return {
    ...(temperature === "" ? {} : { temperature: Number(temperature) }),
    ...(maxTokens === "" ? {} : { max_tokens: Number(maxTokens) }),
  };
}

function change(id: number, how: (lane: Lane) => Lane): void {
  lanes.value = lanes.value.map((lane) => (lane.id === id ? how(lane) : lane));
}

/** Several calls between two frames are one: a fast model sends more tokens than a screen has frames. */
function onceAFrame(act: () => void): { (): void; now: () => void } {
  let frame = 0;
  const later = () => {
    frame ||= requestAnimationFrame(() => {
      frame = 0;
      act();
    });
  };
  later.now = () => {
    cancelAnimationFrame(frame);
    act();
  };
  return later;
}
