// Data that one page alone reads: asked for while the page is open and the tab visible.
import { useEffect, useRef, useState } from "preact/hooks";
import { ApiError, words } from "./api";
import { onEvent } from "./live";

export interface Polled<T> {
  data: T | null;
  /** Why the last try failed, in words; the data of the one before stays, unless the key may no longer see it. */
  error: string;
  /** Ask again now. */
  reload: () => void;
}

/** Calls `ask` now, every `everyMs` (0: once), and whenever `deps` change. */
export function usePoll<T>(ask: (signal: AbortSignal) => Promise<T>, everyMs: number, deps: unknown[] = []): Polled<T> {
  const [data, setData] = useState<T | null>(null);
  const [error, setError] = useState("");
  const again = useRef<() => void>(() => {});
  useEffect(() => {
    const stop = new AbortController();
    let timer: ReturnType<typeof setTimeout> | undefined;
    let running = false;
    const run = async () => {
      if (running) return;
      running = true;
      clearTimeout(timer);
      try {
        if (!document.hidden) {
          const got = await ask(stop.signal);
          if (stop.signal.aborted) return;
          setData(got);
          setError("");
        }
      } catch (problem) {
        if (!stop.signal.aborted) {
          setError(words(problem));
          if (problem instanceof ApiError && (problem.isForbidden || problem.needsKey)) setData(null);
        }
      }
      running = false;
      if (everyMs && !stop.signal.aborted) timer = setTimeout(run, everyMs);
    };
    const onShown = () => void run();
    again.current = () => void run();
    document.addEventListener("visibilitychange", onShown);
    void run();
    return () => {
      stop.abort();
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", onShown);
    };
  }, deps);
  return { data, error, reload: () => again.current() };
}

/** Calls `reload` soon after an event, of one of these kinds if they are named; at most once a second. */
export function useReloadOnEvents(reload: () => void, kinds?: string[]): void {
  const timer = useRef<ReturnType<typeof setTimeout> | undefined>(undefined);
  useEffect(() => {
    const stop = onEvent((event) => {
      if (timer.current !== undefined || (kinds && !kinds.includes(event.kind))) return;
      timer.current = setTimeout(() => {
        timer.current = undefined;
        reload();
      }, 1000);
    });
    return () => {
      stop();
      clearTimeout(timer.current);
    };
  }, []);
}
