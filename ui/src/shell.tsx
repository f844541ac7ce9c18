// The frame around every page: navigation, the state of the connection, the key, the theme.
import { signal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { key } from "./api";
import { count } from "./format";
import { KeyDialog, KeyForm } from "./key";
import { link, models, status, trouble } from "./live";
import { Icon } from "./parts/icon";
import { Toasts } from "./parts/toast";
import { PAGES, type Page } from "./pages";
import { href, place } from "./route";
import { setTheme, theme, type Theme } from "./theme";

const isMenuOpen = signal(false);
const isKeyOpen = signal(false);

export function Shell() {
  const page = PAGES.find((one) => one.path === place.value.page) ?? PAGES[0]!;
  const depth = status.value?.queue.depth ?? 0;
  useEffect(() => {
    document.title = `${depth ? `(${count(depth)}) ` : ""}${page.title} · Greenroom`;
  }, [page, depth]);
  useEffect(() => {
    isMenuOpen.value = false;
  }, [page]);
  return (
    <div class="shell">
      <a class="skip" href="#main" onClick={(event) => (event.preventDefault(), document.getElementById("main")?.focus())}>
        Skip to the page
      </a>
      <Navigation page={page} />
      <div class="content">
        <Notices />
        <Main page={page} />
      </div>
      {isKeyOpen.value && <KeyDialog onClose={() => (isKeyOpen.value = false)} />}
      <Toasts />
    </div>
  );
}

function Main({ page }: { page: Page }) {
  const element = useRef<HTMLElement>(null);
  useEffect(() => element.current?.scrollTo(0, 0), [page]);
  const View = page.view;
  return (
    <main id="main" tabIndex={0} ref={element}>
      {/* Another key begins with a page that holds nothing of the former one's. */}
      {link.value === "locked" ? <Locked /> : <View key={`${page.path} ${key.value}`} />}
    </main>
  );
}

function Locked() {
  return (
    <section class="panel key-page">
      <h1>This gateway asks for a key</h1>
      <p class="about">{key.value ? trouble.value : "Enter an API key. What you may see and do depends on it."}</p>
      <KeyForm />
    </section>
  );
}

function Navigation({ page }: { page: Page }) {
  const groups = [...new Set(PAGES.map((one) => one.group))];
  const open = isMenuOpen.value;
  return (
    <header class={open ? "nav open" : "nav"}>
      <div class="brand">
        <a href={href("stage")}>
          <span class="mark" aria-hidden="true">
            <i />
            <i />
            <i />
          </span>
          Greenroom
        </a>
        <span class="phone-only">
          <LinkState />
        </span>
        <button
          type="button"
          class="quiet square phone-only"
          aria-expanded={open}
          aria-controls="nav"
          aria-label="Menu"
          onClick={() => (isMenuOpen.value = !open)}
        >
          <Icon name={open ? "close" : "menu"} />
        </button>
      </div>
      <div class="nav-body" id="nav">
        <nav aria-label="Pages">
          {groups.map((group) => (
            <div key={group} class="nav-group">
              <h2>{group}</h2>
              {PAGES.filter((one) => one.group === group).map((one) => (
                <a key={one.path} href={href(one.path)} aria-current={one === page ? "page" : undefined}>
                  {one.title}
                  <NavCount path={one.path} />
                </a>
              ))}
            </div>
          ))}
        </nav>
        <div class="nav-foot">
          <LinkState />
          <div class="nav-tools">
            <button type="button" class="quiet" onClick={() => (isKeyOpen.value = true)}>
              <Icon name="key" />
              {key.value ? "Key" : "No key"}
            </button>
            <ThemeSwitch />
          </div>
          <p class="fine">
            {status.value && `${status.value.version} · `}
            <a href="licences.txt">Licences</a>
          </p>
        </div>
      </div>
    </header>
  );
}

/** How many wait, beside the page that shows them. */
function NavCount({ path }: { path: string }) {
  const depth = path === "queue" ? (status.value?.queue.depth ?? 0) : 0;
  return depth ? <span class="nav-count">{count(depth)}</span> : null;
}

const LINK_WORDS = {
  connecting: "Connecting",
  live: "Live",
  limited: "Live, models only",
  locked: "Key needed",
  lost: "Reconnecting",
} as const;

function LinkState() {
  return (
    <span class={`link ${link.value}`} role="status">
      <i aria-hidden="true" />
      {LINK_WORDS[link.value]}
    </span>
  );
}

const NEXT: Record<Theme, Theme> = { system: "light", light: "dark", dark: "system" };
const THEME_ICON = { system: "screen", light: "sun", dark: "moon" } as const;

function ThemeSwitch() {
  const next = NEXT[theme.value];
  return (
    <button
      type="button"
      class="quiet square"
      onClick={() => setTheme(next)}
      aria-label={`Theme: ${theme.value}. Change to ${next}.`}
      title={`Theme: ${theme.value}`}
    >
      <Icon name={THEME_ICON[theme.value]} />
    </button>
  );
}

/** What an operator should know on every page. */
function Notices() {
  const told: [string, string][] = [];
  const seen = status.value;
  if (link.value === "lost") told.push(["bad", models.value.length ? `${trouble.value} The figures are old.` : trouble.value]);
  if (seen?.draining) told.push(["warn", "The gateway is shutting down: running answers end, new requests are refused."]);
  if (seen?.lease_store && !seen.lease_store.up) {
    told.push(["bad", `The shared lease store is down: only loaded models are served. ${seen.lease_store.why ?? ""}`]);
  }
  if (seen?.probe.failure) told.push(["warn", `GPUs cannot be measured: ${seen.probe.failure}`]);
  for (const problem of seen?.key_problems ?? []) told.push(["warn", `Key file: ${problem}`]);
  return (
    <div class="notices" role="status">
      {told.map(([tone, text]) => (
        <p key={text} class={`notice ${tone}`}>
          {text}
        </p>
      ))}
    </div>
  );
}
