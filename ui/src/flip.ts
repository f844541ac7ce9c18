// Lets things glide to their new place instead of jumping there. Only transforms; nothing where motion is unwelcome.
import { useLayoutEffect, useRef } from "preact/hooks";

const STILL = matchMedia("(prefers-reduced-motion: reduce)");
const GLIDE_MS = 450;
// More than this many at once is no movement that an eye can follow.
const FOLLOWED_MAX = 250;

/** Follows the elements with `data-flip` inside the returned element across renders. */
export function useFlip(trigger: unknown) {
  const box = useRef<HTMLDivElement>(null);
  const before = useRef(new Map<string, DOMRect>());
  useLayoutEffect(() => {
    const found = box.current?.querySelectorAll<HTMLElement>("[data-flip]") ?? [];
    const after = new Map<string, DOMRect>();
    if (found.length <= FOLLOWED_MAX) {
      const root = box.current!.getBoundingClientRect();
      for (const element of found) {
        const name = element.dataset.flip!;
        const at = element.getBoundingClientRect();
        // Relative to the page itself, so that scrolling is no movement.
        const rect = new DOMRect(at.x - root.x, at.y - root.y, at.width, at.height);
        after.set(name, rect);
        const was = before.current.get(name);
        if (was && !STILL.matches) glide(element, was.x - rect.x, was.y - rect.y);
      }
    }
    before.current = after;
  }, [trigger]);
  return box;
}

function glide(element: HTMLElement, x: number, y: number): void {
  if (Math.abs(x) < 2 && Math.abs(y) < 2) return;
  element.animate([{ transform: `translate(${x}px, ${y}px)` }, { transform: "none" }], {
    duration: GLIDE_MS,
    easing: "cubic-bezier(.2, .7, .2, 1)",
  });
}
