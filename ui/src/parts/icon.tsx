// Small line drawings; decoration only, so screen readers skip them.

const PATHS = {
  menu: "M3 5h14M3 10h14M3 15h14",
  close: "M5 5l10 10M15 5L5 15",
  key: "M12.8 3.8a3.7 3.7 0 1 0 0 7.4 3.7 3.7 0 0 0 0-7.4zM10.2 10.2L4 16.4M6.4 14l2 2",
  sun: "M10 6.5a3.5 3.5 0 1 0 0 7 3.5 3.5 0 0 0 0-7zM10 2v1.5M10 16.5V18M2 10h1.5M16.5 10H18M4.3 4.3l1.1 1.1M14.6 14.6l1.1 1.1M4.3 15.7l1.1-1.1M14.6 5.4l1.1-1.1",
  moon: "M16 11.5A6.5 6.5 0 0 1 8.5 4a6.5 6.5 0 1 0 7.5 7.5z",
  screen: "M3 4h14v9H3zM7.5 16.5h5",
  pin: "M7 3.5h6M8 3.5v5l-2 2.5h8l-2-2.5v-5M10 11v5.5",
  search: "M9 4a5 5 0 1 0 0 10A5 5 0 0 0 9 4zM12.8 12.8L16.5 16.5",
  arrow: "M4 10h12M11.5 5.5L16 10l-4.5 4.5",
} as const;

export type IconName = keyof typeof PATHS;

export function Icon({ name }: { name: IconName }) {
  return (
    <svg class="icon" viewBox="0 0 20 20" aria-hidden="true">
      <path d={PATHS[name]} />
    </svg>
  );
}
