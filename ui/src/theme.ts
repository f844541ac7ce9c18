// Light or dark: as the system says, until the user chooses.
import { signal } from "@preact/signals";

export type Theme = "system" | "light" | "dark";
const STORED = "greenroom.theme";
const system = matchMedia("(prefers-color-scheme: dark)");

function stored(): Theme {
  const said = localStorage.getItem(STORED);
  return said === "light" || said === "dark" ? said : "system";
}

export const theme = signal<Theme>(stored());
/** The theme that is shown; plots draw with its colours. */
export const isDark = signal(false);

function apply(): void {
  isDark.value = theme.value === "dark" || (theme.value === "system" && system.matches);
  document.documentElement.dataset.theme = isDark.value ? "dark" : "light";
}

export function setTheme(value: Theme): void {
  if (value === "system") localStorage.removeItem(STORED);
  else localStorage.setItem(STORED, value);
  theme.value = value;
  apply();
}

system.addEventListener("change", apply);
apply();
