// Markdown that a model wrote. It is attacker input: tokens become elements that are listed here, everything else is text.
// Nothing is loaded from elsewhere, and links lead only where people mean them to.
import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";
import { lexer, type Token, type Tokens } from "marked";

// Deeper than any text that a person reads; beyond it the source is shown.
const DEPTH_MAX = 24;
const SAFE_LINK = /^(https?:|mailto:)/i;
// While an answer comes it is read anew, as a whole, so seldom.
const EVERY_MS = 250;
// The lexer takes time by the square of the length for some texts. So much of a text is always read, however slowly.
const ALWAYS_CHARS = 2_000;
const SLOW_MS = 50;
const CHARS_MAX = 200_000;

interface Lexed {
  text: string;
  /** Null: shown as it is, from now on. */
  tokens: Token[] | null;
  at: number;
}

export function Markdown({ text }: { text: string }) {
  const [lexed, setLexed] = useState(() => lex(text, 0));
  useEffect(() => {
    if (lexed.text === text || lexed.tokens === null) return;
    const wait = lexed.at + EVERY_MS - performance.now();
    const timer = setTimeout(() => setLexed(lex(text, lexed.text.length)), Math.max(0, wait));
    return () => clearTimeout(timer);
  }, [text, lexed]);
  return <div class="markdown">{lexed.tokens === null ? <p class="plain">{text}</p> : many(lexed.tokens, 0)}</div>;
}

/** `known` characters were read quickly. */
function lex(text: string, known: number): Lexed {
  let tokens: Token[] | null = null;
  try {
    if (text.length <= CHARS_MAX) tokens = tokensOf(text, known);
  } catch {
    // Text that is nested thousands of times deep.
  }
  return { text, tokens, at: performance.now() };
}

/** Reads twice as much at each try, so that a text that is slow to read is found out before it holds up the page. */
function tokensOf(text: string, known: number): Token[] | null {
  for (let size = Math.max(ALWAYS_CHARS, 2 * known); ; size *= 2) {
    const began = performance.now();
    const tokens = lexer(text.slice(0, size));
    if (Math.min(size, text.length) > ALWAYS_CHARS && performance.now() - began > SLOW_MS) return null;
    if (size >= text.length) return tokens;
  }
}

function many(tokens: Token[] | undefined, depth: number): ComponentChildren {
  return (tokens ?? []).map((token) => one(token, depth + 1));
}

function inside(token: Token, depth: number): ComponentChildren {
  const nested = (token as Tokens.Generic).tokens;
  return nested ? many(nested, depth) : plain(token);
}

function plain(token: Token): string {
  return (token as { text?: string }).text ?? token.raw;
}

function one(token: Token, depth: number): ComponentChildren {
  if (depth > DEPTH_MAX) return token.raw;
  switch (token.type) {
    case "space":
    case "def":
      return null;
    case "heading":
      return <Heading depth={(token as Tokens.Heading).depth}>{inside(token, depth)}</Heading>;
    case "paragraph":
      return <p>{inside(token, depth)}</p>;
    case "blockquote":
      return <blockquote>{inside(token, depth)}</blockquote>;
    case "list":
      return <List token={token as Tokens.List} depth={depth} />;
    case "code":
      return (
        <pre tabIndex={0}>
          <code>{plain(token)}</code>
        </pre>
      );
    case "table":
      return <Grid token={token as Tokens.Table} depth={depth} />;
    case "hr":
      return <hr />;
    case "br":
      return <br />;
    case "strong":
      return <strong>{inside(token, depth)}</strong>;
    case "em":
      return <em>{inside(token, depth)}</em>;
    case "del":
      return <del>{inside(token, depth)}</del>;
    case "codespan":
      return <code>{plain(token)}</code>;
    case "link":
      return <Link href={(token as Tokens.Link).href}>{inside(token, depth)}</Link>;
    case "image":
      return <Link href={(token as Tokens.Image).href}>{plain(token) || "picture"}</Link>;
    case "text":
      return inside(token, depth);
    case "escape":
      return plain(token);
    default:
      // HTML among it.
      return token.raw;
  }
}

/** A heading of the answer, below those of the page. */
function Heading({ depth, children }: { depth: number; children: ComponentChildren }) {
  return (
    <p role="heading" aria-level={Math.min(6, depth + 2)} class={`heading h${Math.min(4, depth)}`}>
      {children}
    </p>
  );
}

function List({ token, depth }: { token: Tokens.List; depth: number }) {
  const items = token.items.map((item, at) => (
    <li key={at}>
      {item.task && <input type="checkbox" checked={item.checked} disabled aria-label={item.checked ? "done" : "to do"} />}
      {many(item.tokens, depth)}
    </li>
  ));
  return token.ordered ? <ol start={Number(token.start) || 1}>{items}</ol> : <ul>{items}</ul>;
}

function Grid({ token, depth }: { token: Tokens.Table; depth: number }) {
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label="Table">
      <table>
        <thead>
          <tr>
            {token.header.map((cell, at) => (
              <th key={at}>{many(cell.tokens, depth)}</th>
            ))}
          </tr>
        </thead>
        <tbody>
          {token.rows.map((row, at) => (
            <tr key={at}>
              {row.map((cell, column) => (
                <td key={column}>{many(cell.tokens, depth)}</td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Link({ href, children }: { href: string; children: ComponentChildren }) {
  if (!SAFE_LINK.test(href)) return <span title={href}>{children}</span>;
  return (
    <a href={href} title={href} target="_blank" rel="noopener noreferrer">
      {children}
    </a>
  );
}
