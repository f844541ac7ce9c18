// The small pieces that every page is made of.
import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import { link } from "../live";
import { Icon } from "./icon";

/** The head of a page: its name, one sentence, and what can be done. */
export function PageHead({ title, about, children }: { title: string; about?: ComponentChildren; children?: ComponentChildren }) {
  return (
    <div class="page-head">
      <div>
        <h1>{title}</h1>
        {about && <p class="about">{about}</p>}
      </div>
      {children && <div class="page-tools">{children}</div>}
    </div>
  );
}

/** What stands where there is nothing yet, and what to do about it. */
export function Empty({ title, children, command }: { title: string; children?: ComponentChildren; command?: string }) {
  return (
    <div class="empty">
      <p class="empty-title">{title}</p>
      {children && <p>{children}</p>}
      {command && <Command text={command} />}
    </div>
  );
}

/** A command to type, which a press copies. */
export function Command({ text }: { text: string }) {
  const [copied, setCopied] = useState(false);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
      setCopied(true);
      setTimeout(() => setCopied(false), 1500);
    } catch {
      // Not on a page without TLS; the text can still be selected.
    }
  };
  return (
    <div class="command">
      <code>{text}</code>
      <button type="button" class="quiet" onClick={() => void copy()}>
        {copied ? "Copied" : "Copy"}
      </button>
    </div>
  );
}

/** `share` from 0 to 1; null moves without end. */
export function Progress({ share, label }: { share: number | null; label: string }) {
  const known = share === null ? {} : { "aria-valuenow": Math.round(share * 100), "aria-valuemin": 0, "aria-valuemax": 100 };
  return (
    <div class={share === null ? "progress unknown" : "progress"} role="progressbar" aria-label={label} {...known}>
      <div style={{ width: share === null ? undefined : `${Math.min(100, share * 100)}%` }} />
    </div>
  );
}

/** A figure with its name below. */
export function Figure({ value, name, tone = "" }: { value: ComponentChildren; name: string; tone?: string }) {
  return (
    <div class={`figure ${tone}`}>
      <div class="value">{value}</div>
      <div class="name">{name}</div>
    </div>
  );
}

export function Badge({ tone = "", children }: { tone?: string; children: ComponentChildren }) {
  return <span class={`badge ${tone}`}>{children}</span>;
}

/** What went wrong on this page. */
export function Problem({ children }: { children: ComponentChildren }) {
  return children ? (
    <p class="problem" role="alert">
      {children}
    </p>
  ) : null;
}

export function Search({ value, onChange, label }: { value: string; onChange: (value: string) => void; label: string }) {
  return (
    <label class="search">
      <Icon name="search" />
      <input
        type="search"
        value={value}
        placeholder={label}
        aria-label={label}
        spellcheck={false}
        onInput={(event) => onChange(event.currentTarget.value)}
      />
    </label>
  );
}

/** The page for keys that may read everything; says so to others. */
export function Readers({ children }: { children: ComponentChildren }) {
  if (link.value === "limited") {
    return (
      <Empty title="This key may not see this page">
        It may ask models. To see the gateway itself, use a key with <code>verbs: [read]</code> or <code>admin: true</code>.
      </Empty>
    );
  }
  return <>{children}</>;
}
