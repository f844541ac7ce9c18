// Markdown that a model wrote. It is attacker input: tokens become elements that are listed here, everything else is text.
// Nothing is loaded from elsewhere, and links lead only where people mean them to.
import type { ComponentChildren } from "preact";
import { useMemo } from "preact/hooks";
import { lexer, type Token, type Tokens } from "marked";

// Deeper than any text that a person reads; beyond it the source is shown.
const DEPTH_MAX = 24;
const SAFE_LINK = /^(https?:|mailto:)/i;

export function Markdown({ text }: { text: string }) {
  const tokens = useMemo(() => tokensOf(text), [text]);
  return <div class="markdown">{tokens === null ? <p class="plain">{text}</p> : many(tokens, 0)}</div>;
}

function tokensOf(text: string): Token[] | null {
  try {
    return lexer(text);
  } catch {
    // Text that is nested thousands of times deep.
    return null;
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
