// Dialogs by the browser's own <dialog>: it keeps the focus inside, and Escape closes it.
import type { ComponentChildren } from "preact";
import { useEffect, useId, useRef } from "preact/hooks";
import { Icon } from "./icon";

interface Props {
  title: ComponentChildren;
  onClose: () => void;
  /** "drawer" stands at the right edge, over the whole height. */
  kind?: "box" | "drawer";
  children: ComponentChildren;
}

export function Dialog({ title, onClose, kind = "box", children }: Props) {
  const element = useRef<HTMLDialogElement>(null);
  const titleId = useId();
  useEffect(() => {
    element.current?.showModal();
    // Else the first button has the focus, which reads as if it were to be pressed.
    element.current?.querySelector("h2")?.focus();
  }, []);
  // A press outside of the box lands on the dialog itself.
  const outside = (event: MouseEvent) => event.target === element.current && onClose();
  return (
    <dialog ref={element} class={kind} aria-labelledby={titleId} onClose={onClose} onMouseDown={outside}>
      <div class="dialog-body">
        <header>
          <h2 id={titleId} tabIndex={-1}>{title}</h2>
          <button type="button" class="quiet square" onClick={onClose} aria-label="Close">
            <Icon name="close" />
          </button>
        </header>
        {children}
      </div>
    </dialog>
  );
}
