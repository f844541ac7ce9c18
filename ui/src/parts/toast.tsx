// Short messages about what an order did.
import { signal } from "@preact/signals";
import { key, words } from "../api";

interface Toast {
  id: number;
  text: string;
  isBad: boolean;
}

const toasts = signal<Toast[]>([]);
const SHOWN_MS = 5000;
const BAD_SHOWN_MS = 12000;
let lastId = 0;

key.subscribe(() => (toasts.value = []));

export function say(text: string, isBad = false): void {
  const id = ++lastId;
  toasts.value = [...toasts.value.slice(-3), { id, text, isBad }];
  setTimeout(() => dismiss(id), isBad ? BAD_SHOWN_MS : SHOWN_MS);
}

/** Do something, and say how it went. Returns true if it succeeded. */
export async function tryTo(act: () => Promise<string>): Promise<boolean> {
  try {
    say(await act());
    return true;
  } catch (error) {
    say(words(error), true);
    return false;
  }
}

function dismiss(id: number): void {
  toasts.value = toasts.value.filter((one) => one.id !== id);
}

export function Toasts() {
  return (
    <div class="toasts" role="status" aria-live="polite">
      {toasts.value.map((one) => (
        <button key={one.id} type="button" class={one.isBad ? "toast bad" : "toast"} onClick={() => dismiss(one.id)}>
          {one.text}
        </button>
      ))}
    </div>
  );
}
