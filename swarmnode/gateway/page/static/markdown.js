// Markdown as elements: the parts of CommonMark and of GitHub's tables that models use most. It builds text nodes, so text of
// strangers stays text; links lead only to the web.

import { h } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)\s*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(\S.*)$/;
const RULE = /^ {0,3}([-*_])( *\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const TABLE_RULE = /^ *\|?( *:?-+:? *\|)+ *(:?-+:? *)?$/;
const WEB = /^https?:\/\//i;
// Every part is bounded, so that no text takes long to parse.
const INLINE = new RegExp(
  [
    /(`{1,3})(?!`)([^`\n]{1,500})\1(?!`)/,
    /\*\*(?=\S)([^*\n]{1,1000})\*\*/,
    /__(?=\S)([^_\n]{1,1000})__/,
    /~~(?=\S)([^~\n]{1,1000})~~/,
    /\*(?=\S)([^*\n]{1,1000})\*/,
    /(?<!\w)_(?=\S)([^_\n]{1,1000})_(?!\w)/,
    /\[([^\]\n]{1,300})\]\(([^\s()]{1,2000})\)/,
    /(https?:\/\/[^\s<>()]{1,2000})/,
  ]
    .map((each) => each.source)
    .join("|"),
);
const MAX_DEPTH = 8;

/** Return the elements of a text, which may be incomplete. */
export const markdown = (text) => blocks(text.split("\n"), 0);

function blocks(lines, depth) {
  if (depth > MAX_DEPTH) return [h("p", {}, lines.join("\n"))];
  const found = [];
  let at = 0;
  while (at < lines.length) {
    const [element, next] = block(lines, at, depth);
    if (element) found.push(element);
    at = next;
  }
  return found;
}

function block(lines, at, depth) {
  const line = lines[at];
  if (!line.trim()) return [null, at + 1];
  let match;
  if ((match = FENCE.exec(line))) return code(lines, at + 1, match[1], match[2]);
  if ((match = HEADING.exec(line))) return [h(`h${Math.min(6, match[1].length + 2)}`, {}, inline(match[2].replace(/ *#+ *$/, ""))), at + 1];
  if (RULE.test(line)) return [h("hr"), at + 1];
  if (QUOTE.test(line)) {
    const end = endOf(lines, at, (each) => QUOTE.test(each));
    return [h("blockquote", {}, blocks(lines.slice(at, end).map((each) => each.replace(QUOTE, "")), depth + 1)), end];
  }
  if (ITEM.test(line)) return list(lines, at, depth);
  if (line.includes("|") && TABLE_RULE.test(lines[at + 1] ?? "")) return table(lines, at);
  const end = endOf(lines, at + 1, (each) => each.trim() && !FENCE.test(each) && !HEADING.test(each) && !QUOTE.test(each) && !ITEM.test(each));
  return [h("p", {}, inline(lines.slice(at, end).join("\n"))), end];
}

function endOf(lines, at, holds) {
  let end = at;
  while (end < lines.length && holds(lines[end])) end += 1;
  return end;
}

function code(lines, at, fence, language) {
  const end = endOf(lines, at, (each) => !(each.trim().startsWith(fence) && !each.trim().replaceAll(fence[0], "")));
  const text = lines.slice(at, end).join("\n");
  const copy = h("button", { type: "button", class: "quiet copy", onclick: () => navigator.clipboard.writeText(text) }, "Copy");
  const head = h("figcaption", {}, h("span", {}, language || "code"), copy);
  return [h("figure", { class: "code" }, head, h("pre", { tabindex: "0" }, h("code", {}, text))), end + 1];
}

function list(lines, at, depth) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const inside = indent.length + 1;
  const isNumbered = /\d/.test(mark);
  const element = isNumbered ? h("ol", { start: parseInt(mark, 10) }) : h("ul");
  let next = at;
  while (next < lines.length) {
    const item = ITEM.exec(lines[next]);
    if (!item || item[1].length !== indent.length || /\d/.test(item[2]) !== isNumbered) break;
    const end = endOf(lines, next + 1, (each) => /^ */.exec(each)[0].length >= inside && each.trim());
    const deeper = lines.slice(next + 1, end).map((each) => each.slice(Math.min(/^ */.exec(each)[0].length, inside + 1)));
    const children = deeper.some((each) => ITEM.test(each) || FENCE.test(each)) ? [inline(item[3]), blocks(deeper, depth + 1)] : inline([item[3], ...deeper].join("\n"));
    element.append(h("li", {}, children.flat()));
    next = end;
    if (!(lines[next] ?? "x").trim() && ITEM.test(lines[next + 1] ?? "")) next += 1;
  }
  return [element, next];
}

function table(lines, at) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((each) => each.trim());
  const end = endOf(lines, at + 2, (each) => each.includes("|"));
  const row = (line, tag) => h("tr", {}, cells(line).map((each) => h(tag, {}, inline(each))));
  const body = lines.slice(at + 2, end).map((line) => row(line, "td"));
  return [h("div", { class: "table", tabindex: "0" }, h("table", {}, h("thead", {}, row(lines[at], "th")), h("tbody", {}, body))), end];
}

function inline(text, depth = 0) {
  const found = [];
  let rest = text;
  let match;
  while (depth < MAX_DEPTH && (match = INLINE.exec(rest))) {
    if (match.index) found.push(rest.slice(0, match.index));
    found.push(...[span(match, depth)].flat());
    rest = rest.slice(match.index + match[0].length);
  }
  return [...found, rest];
}

function span(match, depth) {
  const [whole, , codeText, strong, strongToo, struck, emphasis, emphasisToo, label, target, bare] = match;
  if (codeText !== undefined) return h("code", {}, codeText);
  if (strong ?? strongToo) return h("strong", {}, inline(strong ?? strongToo, depth + 1));
  if (struck) return h("s", {}, inline(struck, depth + 1));
  if (emphasis ?? emphasisToo) return h("em", {}, inline(emphasis ?? emphasisToo, depth + 1));
  const address = target ?? bare;
  if (!WEB.test(address)) return whole;
  const [, end, rest] = target ? [null, target, ""] : /^(.*?)([.,;:!?'"]*)$/.exec(bare);
  return [h("a", { href: end, target: "_blank", rel: "noopener noreferrer nofollow" }, label ?? end), rest];
}
