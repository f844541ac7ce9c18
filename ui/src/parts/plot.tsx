// A plot over time, by uPlot, in the colours of the theme.
import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import { isDark } from "../theme";

export interface Line {
  name: string;
  /** A custom property of the style sheet, such as "--c0". */
  colour?: string;
  /** Filled below. */
  filled?: boolean;
}

interface Props {
  label: string;
  lines: Line[];
  /** Unix seconds, then the values of each line; null where there is none. */
  data: [number[], ...(number | null)[][]];
  height?: number;
  /** How values are written, such as mib. */
  format?: (value: number) => string;
  /** False: x is a plain number. */
  isTime?: boolean;
  /** The least upper end of the axis. */
  max?: number;
}

/** Values without neighbours, which no line shows. */
function lonely(plot: uPlot, series: number): number[] {
  const values = plot.data[series]!;
  return [...values.keys()].filter((at) => values[at] != null && values[at - 1] == null && values[at + 1] == null);
}

export function Plot({ label, lines, data, height = 160, format = String, isTime = true, max }: Props) {
  const box = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const dark = isDark.value;
  useEffect(() => {
    const element = box.current!;
    const style = getComputedStyle(element);
    const colour = (name: string) => style.getPropertyValue(name).trim();
    const axis = { stroke: colour("--ink-3"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: `11px ${style.fontFamily}` };
    const made = (plot.current = new uPlot(
      {
        width: element.clientWidth,
        height,
        legend: { show: lines.length > 1, live: false },
        cursor: { y: false, points: { size: 6 } },
        scales: { x: { time: isTime }, y: { range: (_, low, high) => [Math.min(0, low ?? 0), Math.max(max ?? 0, high ?? 0) || 1] } },
        axes: [
          { ...axis, size: 28, space: 70, values: isTime ? (_, ticks) => ticks.map((at) => new Date(at * 1000).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" })) : undefined },
          { ...axis, size: 64, space: 36, values: (_, ticks) => ticks.map(format) },
        ],
        series: [
          {},
          ...lines.map((line, at) => {
            const stroke = colour(line.colour ?? `--c${at % 8}`);
            return { label: line.name, stroke, width: 1.5, fill: line.filled ? `${stroke}22` : undefined, points: { show: true, size: 4, fill: stroke, filter: lonely } };
          }),
        ],
      },
      data as uPlot.AlignedData,
      element,
    ));
    const resized = new ResizeObserver(() => element.clientWidth && made.setSize({ width: element.clientWidth, height }));
    resized.observe(element);
    return () => {
      resized.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [dark, height, isTime, lines.map((line) => line.name).join("\n")]);
  useEffect(() => plot.current?.setData(data as uPlot.AlignedData), [data]);
  return <div class="plot" ref={box} role="img" aria-label={label} />;
}
