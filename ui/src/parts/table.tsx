// A table whose rows are drawn only where they can be seen: ten thousand rows scroll like ten.
import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

export interface Column<T> {
  name: string;
  cell: (row: T) => ComponentChildren;
  /** A CSS grid track, such as "2fr", "7rem" or "minmax(8rem, 1fr)". */
  width?: string;
  /** Figures stand at the right. */
  right?: boolean;
  /** Left out where the window is narrow; the row's details show it. */
  wide?: boolean;
}

interface Props<T> {
  label: string;
  columns: Column<T>[];
  rows: readonly T[];
  rowKey: (row: T) => string;
  /** A row where the window is narrow, in two lines; without it the columns that are not `wide`. */
  phone?: (row: T) => ComponentChildren;
  /** Makes rows pressable. */
  onPick?: (row: T) => void;
  isPicked?: (row: T) => boolean;
  /** A class for a row, such as "bad". */
  rowClass?: (row: T) => string;
  /** Told the number of the first row in sight, for rows that are fetched as they are needed. */
  onRange?: (first: number) => void;
  /** Shown instead of the table when there are no rows. */
  empty?: ComponentChildren;
}

const ROW_PX = 40;
const PHONE_ROW_PX = 62;
const HEAD_PX = 36;
// A table that does not fit into the window scrolls by itself, but is never lower than this.
const LOW_PX = 300;
const EXTRA_ROWS = 8;
const PHONE = matchMedia("(max-width: 760px)");

export function Table<T>(props: Props<T>) {
  const { rows, rowKey, onPick } = props;
  const isPhone = usePhone();
  const isTall = isPhone && props.phone !== undefined;
  const rowPx = isTall ? PHONE_ROW_PX : ROW_PX;
  const box = useRef<HTMLDivElement>(null);
  const [first, last] = useWindow(box, rows.length, rowPx);
  useEffect(() => props.onRange?.(first), [first]);
  if (!rows.length && props.empty) return <>{props.empty}</>;
  const columns = isTall ? [phoneColumn(props)] : props.columns.filter((column) => !(isPhone && column.wide));
  const tracks = { gridTemplateColumns: columns.map((column) => column.width ?? "minmax(0, 1fr)").join(" ") };
  const whole = rows.length * rowPx;
  return (
    <div class={isTall ? "table tall" : "table"} style={{ minHeight: `${Math.min(LOW_PX, whole + (isTall ? 0 : HEAD_PX) + 2)}px` }}>
      <div class="tscroll" role="table" aria-label={props.label} aria-rowcount={rows.length + 1} ref={box} tabIndex={0}>
        <div class={isTall ? "thead unseen" : "thead"} role="row" style={tracks}>
          {columns.map((column) => (
            <div key={column.name} role="columnheader" class={column.right ? "right" : ""}>
              {column.name || <span class="unseen">What can be done</span>}
            </div>
          ))}
        </div>
        <div class="tspace" role="rowgroup" style={{ height: `${whole}px` }}>
          {rows.slice(first, last).map((row, at) => (
            <div
              key={rowKey(row)}
              role="row"
              aria-rowindex={first + at + 2}
              class={`trow ${onPick ? "pressable" : ""} ${props.isPicked?.(row) ? "picked" : ""} ${props.rowClass?.(row) ?? ""}`}
              style={{ ...tracks, height: `${rowPx}px`, transform: `translateY(${(first + at) * rowPx}px)` }}
              tabIndex={onPick ? 0 : undefined}
              onClick={onPick && (() => onPick(row))}
              onKeyDown={onPick && ((event) => (event.key === "Enter" || event.key === " ") && press(event, () => onPick(row)))}
            >
              {columns.map((column) => (
                <div key={column.name} role="cell" class={column.right ? "right" : ""}>
                  {column.cell(row)}
                </div>
              ))}
            </div>
          ))}
        </div>
      </div>
    </div>
  );
}

function phoneColumn<T>(props: Props<T>): Column<T> {
  return { name: props.label, cell: props.phone! };
}

/** The two lines of a row where the window is narrow. */
export function Lines({ first, second }: { first: ComponentChildren; second: ComponentChildren }) {
  return (
    <>
      <div class="line">{first}</div>
      <div class="line second">{second}</div>
    </>
  );
}

function press(event: KeyboardEvent, act: () => void): void {
  if (event.target !== event.currentTarget) return;
  event.preventDefault();
  act();
}

export function usePhone(): boolean {
  const [is, setIs] = useState(PHONE.matches);
  useEffect(() => {
    const look = () => setIs(PHONE.matches);
    PHONE.addEventListener("change", look);
    return () => PHONE.removeEventListener("change", look);
  }, []);
  return is;
}

/** The rows that can be seen in a scrolled box, and some beyond: [first, end). */
function useWindow(box: { current: HTMLDivElement | null }, count: number, rowPx: number): [number, number] {
  const [range, setRange] = useState<[number, number]>([0, 40]);
  useEffect(() => {
    const element = box.current;
    if (!element) return undefined;
    const look = () => {
      const first = Math.max(0, Math.floor(element.scrollTop / rowPx) - EXTRA_ROWS);
      const end = Math.ceil((element.scrollTop + element.clientHeight) / rowPx) + EXTRA_ROWS;
      setRange((was) => (was[0] === first && was[1] === end ? was : [first, end]));
    };
    const resized = new ResizeObserver(look);
    resized.observe(element);
    element.addEventListener("scroll", look, { passive: true });
    return () => {
      resized.disconnect();
      element.removeEventListener("scroll", look);
    };
  }, [count > 0, rowPx]);
  return [Math.min(range[0], Math.max(0, count - 1)), Math.min(range[1], count)];
}
