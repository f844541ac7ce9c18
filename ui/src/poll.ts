// Data that one page alone reads: asked for while the page is open and the tab visible.
import { useEffect, useRef, useState } from "preact/hooks";
import { words } from "./api";
import { onEvent } from "./live";

export interface Polled<T> {
  data: T | null;
  /** Why the last try failed, in words; the data of the one before stays. */
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
        if (!stop.signal.aborted) setError(words(problem));
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

/** Calls `reload` soon after something happened, at most once a second. */
export function useReloadOnEvents(reload: () => void): void {
  const timer = useRef<ReturnType<typeof setTimeout> | undefined>(undefined);
  useEffect(() => {
    const stop = onEvent(() => {
      if (timer.current !== undefined) return;
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
