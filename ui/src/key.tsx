// Where the user enters a key.
import { useState } from "preact/hooks";
import { isKeyKept, key, useKey } from "./api";
import { Dialog } from "./parts/dialog";

export function KeyForm({ onDone }: { onDone?: () => void }) {
  const [value, setValue] = useState(key.value);
  const [keep, setKeep] = useState(isKeyKept());
  const submit = (event: Event) => {
    event.preventDefault();
    useKey(value.trim(), keep);
    onDone?.();
  };
  return (
    <form class="stack" onSubmit={submit}>
      <label class="field">
        API key
        <input
          type="password"
          value={value}
          autocomplete="off"
          spellcheck={false}
          onInput={(event) => setValue(event.currentTarget.value)}
        />
      </label>
      <label class="check">
        <input type="checkbox" checked={keep} onChange={(event) => setKeep(event.currentTarget.checked)} />
        Keep it until this tab is closed
      </label>
      <p class="fine">
        {keep ? "It stays in this tab's session storage." : "It stays in the memory of this page, and a reload forgets it."} It is sent
        to this gateway as a header and nowhere else.
      </p>
      <div class="actions">
        <button type="submit" class="main">
          Use this key
        </button>
        {key.value && (
          <button type="button" onClick={() => (useKey("", false), onDone?.())}>
            Forget it
          </button>
        )}
      </div>
    </form>
  );
}

export function KeyDialog({ onClose }: { onClose: () => void }) {
  return (
    <Dialog title="API key" onClose={onClose}>
      <KeyForm onDone={onClose} />
    </Dialog>
  );
}
