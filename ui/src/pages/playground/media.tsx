// Pictures, speech and transcription: one request each, and what came back.
import { useEffect, useRef, useState } from "preact/hooks";
import { get, open, post, words } from "../../api";
import { seconds } from "../../format";
import { Problem } from "../../parts/bits";
import type { Model } from "../../types";
import { ModelSelect } from "./models";

interface Props {
  able: Model[];
  wanted: string;
}

/** The chosen model: the one in the address, else the first. */
export function useChoice({ able, wanted }: Props): [string, (model: string) => void] {
  const [chosen, choose] = useState("");
  const first = able.find((model) => model.id === wanted) ?? able[0];
  return [chosen || first?.id || "", choose];
}

interface Job<T> {
  result: T | null;
  error: string;
  tookS: number | null;
  isRunning: boolean;
  run: (act: (signal: AbortSignal) => Promise<T>) => void;
  stop: () => void;
}

/** One request at a time, which can be stopped; it stops when the page is left. */
export function useJob<T>(): Job<T> {
  const [state, setState] = useState<{ result: T | null; error: string; tookS: number | null }>({ result: null, error: "", tookS: null });
  const [isRunning, setRunning] = useState(false);
  const current = useRef<AbortController | null>(null);
  useEffect(() => () => current.current?.abort(), []);
  const run = (act: (signal: AbortSignal) => Promise<T>) => {
    const stop = (current.current = new AbortController());
    const began = performance.now();
    setRunning(true);
    setState({ result: null, error: "", tookS: null });
    act(stop.signal)
      .then((result) => setState({ result, error: "", tookS: (performance.now() - began) / 1000 }))
      .catch((error: unknown) => setState({ result: null, error: stop.signal.aborted ? "" : words(error), tookS: null }))
      .finally(() => setRunning(false));
  };
  return { ...state, isRunning, run, stop: () => current.current?.abort() };
}

type Running = Pick<Job<unknown>, "isRunning" | "tookS" | "stop">;

export function Go({ job, name, disabled }: { job: Running; name: string; disabled: boolean }) {
  return (
    <div class="actions">
      {job.isRunning ? (
        <button type="button" onClick={job.stop}>
          Stop
        </button>
      ) : (
        <button type="submit" class="main" disabled={disabled}>
          {name}
        </button>
      )}
      {job.isRunning && <span class="fine wait">Waiting for the model …</span>}
      {job.tookS !== null && <span class="fine wait">{seconds(job.tookS)}</span>}
    </div>
  );
}

function onSubmit(act: () => void): (event: Event) => void {
  return (event) => {
    event.preventDefault();
    act();
  };
}

export function Images(props: Props) {
  const [model, choose] = useChoice(props);
  const [prompt, setPrompt] = useState("");
  const [size, setSize] = useState("512x512");
  const [count, setCount] = useState(1);
  const job = useJob<string[]>();
  const draw = () =>
    job.run(async (signal) => {
      const body = { model, prompt, n: count, size, response_format: "b64_json" };
      const made = await post<{ data: { b64_json?: string; url?: string }[] }>("/v1/images/generations", body, { signal });
      return made.data.flatMap((one) => (one.b64_json ? [`data:image/png;base64,${one.b64_json}`] : []));
    });
  return (
    <form class="panel stack" onSubmit={onSubmit(draw)}>
      <ModelSelect label="Model" able={props.able} value={model} onChange={choose} />
      <label class="field">
        What the picture shows
        <textarea rows={3} value={prompt} onInput={(event) => setPrompt(event.currentTarget.value)} />
      </label>
      <div class="row">
        <label class="field">
          Size
          <select value={size} onChange={(event) => setSize(event.currentTarget.value)}>
            {["256x256", "512x512", "768x768", "1024x1024"].map((one) => (
              <option key={one}>{one}</option>
            ))}
          </select>
        </label>
        <label class="field">
          Pictures
          <input type="number" min={1} max={4} value={count} onInput={(event) => setCount(Number(event.currentTarget.value) || 1)} />
        </label>
      </div>
      <Go job={job} name="Draw" disabled={!model || !prompt.trim()} />
      <Problem>{job.error}</Problem>
      <div class="pictures">
        {job.result?.map((source, at) => <img key={at} src={source} alt={`Picture ${at + 1}: ${prompt}`} />)}
      </div>
    </form>
  );
}

export function Speech(props: Props) {
  const [model, choose] = useChoice(props);
  const [text, setText] = useState("Good evening, and welcome to the green room.");
  const [voice, setVoice] = useState("");
  const job = useJob<string>();
  useEffect(() => () => (job.result ? URL.revokeObjectURL(job.result) : undefined), [job.result]);
  const speak = () =>
    job.run(async (signal) => {
      const answer = await open("/v1/audio/speech", { body: { model, input: text, ...(voice && { voice }) }, signal });
      return URL.createObjectURL(await answer.blob());
    });
  return (
    <form class="panel stack" onSubmit={onSubmit(speak)}>
      <ModelSelect label="Model" able={props.able} value={model} onChange={choose} />
      <label class="field">
        Text
        <textarea rows={3} value={text} onInput={(event) => setText(event.currentTarget.value)} />
      </label>
      <label class="field short">
        Voice
        <input value={voice} placeholder="the model's own" onInput={(event) => setVoice(event.currentTarget.value)} />
      </label>
      <Go job={job} name="Speak" disabled={!model || !text.trim()} />
      <Problem>{job.error}</Problem>
      {job.result && <audio controls src={job.result} aria-label="What the model said" />}
    </form>
  );
}

export function Transcription(props: Props) {
  const [model, choose] = useChoice(props);
  const [sound, setSound] = useState<File | null>(null);
  const job = useJob<string>();
  const listen = () =>
    job.run(async (signal) => {
      const form = new FormData();
      form.set("model", model);
      form.set("file", sound!);
      return (await get<{ text: string }>("/v1/audio/transcriptions", { method: "POST", body: form, signal })).text;
    });
  return (
    <form class="panel stack" onSubmit={onSubmit(listen)}>
      <ModelSelect label="Model" able={props.able} value={model} onChange={choose} />
      <label class="field">
        Sound file
        <input type="file" accept="audio/*,video/*" onChange={(event) => setSound(event.currentTarget.files?.[0] ?? null)} />
      </label>
      <Microphone onSound={setSound} />
      {sound && <p class="fine">{sound.name}</p>}
      <Go job={job} name="Write it down" disabled={!model || !sound} />
      <Problem>{job.error}</Problem>
      {job.result !== null && (
        <p class="plain heard" role="status">
          {job.result || "Nothing was heard."}
        </p>
      )}
    </form>
  );
}

function Microphone({ onSound }: { onSound: (sound: File) => void }) {
  const recorder = useRef<MediaRecorder | null>(null);
  const [isOn, setOn] = useState(false);
  const [problem, setProblem] = useState("");
  useEffect(() => () => recorder.current?.stop(), []);
  // Browsers give it to pages on https or localhost only.
  if (!navigator.mediaDevices) return <p class="fine">To use the microphone, open this page over https or on localhost.</p>;
  const begin = async () => {
    try {
      const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
      const made = (recorder.current = new MediaRecorder(stream));
      const parts: Blob[] = [];
      made.ondataavailable = (event) => parts.push(event.data);
      made.onstop = () => {
        for (const track of stream.getTracks()) track.stop();
        onSound(new File(parts, "microphone.webm", { type: made.mimeType }));
        recorder.current = null;
        setOn(false);
      };
      made.start();
      setOn(true);
      setProblem("");
    } catch (error) {
      setProblem(`The microphone cannot be used: ${words(error)}`);
    }
  };
  return (
    <>
      <div class="actions">
        <button type="button" onClick={() => (isOn ? recorder.current?.stop() : void begin())}>
          {isOn ? "Stop recording" : "Record with the microphone"}
        </button>
      </div>
      <Problem>{problem}</Problem>
    </>
  );
}
