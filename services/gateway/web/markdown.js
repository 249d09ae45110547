// Show a subset of Markdown: code, headings, lists, quotes, tables, emphasis, links. Text becomes text nodes only, so
// HTML in it stays text, nothing is loaded, and a link leads to http, https or mailto or is no link.

const DEEPEST = 6; // of lists in lists, and of emphasis in emphasis
const LONGEST = 50_000; // of a paragraph with markup; a longer one is shown as it is
const FENCE = /^ {0,3}(`{3,}|~{3,}) *([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6}) +(.*)$/;
const ITEM = /^( {0,8})([-*+]|\d{1,9}[.)])( +|$)(.*)$/;
const RULE = /^ {0,3}(?:(?:- *){3,}|(?:\* *){3,}|(?:_ *){3,})$/;
const COLUMNS = /^ *\|?(?: *:?-+:? *\|)+(?: *:?-+:? *)?$/;

// Keep an element in step with a text that grows: only blocks that changed are made anew.
export class Markdown {
  constructor(element) {
    this.element = element;
    this.shown = [];
  }

  show(text) {
    const found = blocks(text.split("\n"));
    let same = 0;
    while (same < found.length && same < this.shown.length && found[same].source === this.shown[same]) same++;
    while (this.element.children.length > same) this.element.lastElementChild.remove();
    for (const block of found.slice(same)) this.element.append(block.make());
    this.shown = found.map((block) => block.source);
  }
}

export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = make("textarea"); // without TLS, beyond localhost
  area.value = text;
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  if (!copied) throw new Error("the browser refused");
}

// Return a button that copies what `text` returns and says so.
export function copyButton(text, label) {
  const button = make("button", "Copy");
  button.type = "button";
  button.className = "copy";
  button.setAttribute("aria-label", label);
  button.addEventListener("click", async () => {
    try {
      await copy(text());
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not copied";
    }
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  return button;
}

function make(tag, text = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  return element;
}

// Return [{source, make}] of the lines.
function blocks(lines, depth = 0) {
  const found = [];
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) {
      at++;
      continue;
    }
    const [end, build] = block(lines, at, depth);
    found.push({ source: lines.slice(at, end).join("\n"), make: build });
    at = end;
  }
  return found;
}

// Return the line behind the block that begins at `at`, and the function that makes its element.
function block(lines, at, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return fenced(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) return [at + 1, () => inline(make(`h${Math.min(6, heading[1].length + 2)}`), heading[2])];
  if (RULE.test(line)) return [at + 1, () => make("hr")];
  if (line.startsWith(">")) return quoted(lines, at, depth);
  if (ITEM.test(line) && depth < DEEPEST) return list(lines, at, depth);
  if (line.includes("|") && COLUMNS.test(lines[at + 1] ?? "")) return table(lines, at);
  let end = at + 1;
  while (end < lines.length && !begins(lines, end, depth)) end++;
  return [end, () => inline(make("p"), lines.slice(at, end).join("\n"))];
}

// Tell whether a paragraph ends before this line.
function begins(lines, at, depth) {
  const line = lines[at];
  if (!line.trim() || line.startsWith(">") || FENCE.test(line) || HEADING.test(line) || RULE.test(line)) return true;
  if (line.includes("|") && COLUMNS.test(lines[at + 1] ?? "")) return true;
  return depth < DEEPEST && ITEM.test(line);
}

function fenced(lines, at, [, mark, language]) {
  let end = at + 1;
  const closes = (line) => line.trim().startsWith(mark) && !line.trim().replaceAll(mark[0], "");
  while (end < lines.length && !closes(lines[end])) end++;
  const code = lines.slice(at + 1, end).join("\n");
  return [Math.min(lines.length, end + 1), () => codeBlock(code, language.trim().split(" ")[0])];
}

function codeBlock(code, language) {
  const [box, bar, pre] = [make("div"), make("div"), make("pre")];
  box.className = "code";
  bar.className = "code-bar";
  bar.append(make("span", language || "text"), copyButton(() => code, "Copy code"));
  pre.tabIndex = 0; // scrolls by keyboard
  pre.setAttribute("aria-label", `${language || "text"} code`);
  pre.setAttribute("role", "region");
  pre.append(make("code", code));
  box.append(bar, pre);
  return box;
}

function quoted(lines, at, depth) {
  let end = at;
  while (end < lines.length && lines[end].startsWith(">")) end++;
  const inner = lines.slice(at, end).map((line) => line.replace(/^> ?/, ""));
  if (depth >= DEEPEST) return [end, () => make("p", inner.join("\n"))];
  return [end, () => fill(make("blockquote"), inner, depth)];
}

function list(lines, at, depth) {
  const [, , mark] = ITEM.exec(lines[at]);
  const isOrdered = /\d/.test(mark);
  const items = [];
  let end = at;
  let base = ITEM.exec(lines[at])[1].length;
  for (; end < lines.length; end++) {
    const item = ITEM.exec(lines[end]);
    const indent = lines[end].length - lines[end].trimStart().length;
    if (item && item[1].length <= base + 1 && /\d/.test(item[2]) === isOrdered && !RULE.test(lines[end])) {
      base = item[1].length;
      items.push([item[4]]);
    } else if (!lines[end].trim()) {
      const next = lines[end + 1] ?? "";
      const follows = ITEM.exec(next);
      if (!next.trim() || !(next.startsWith("  ") || (follows && /\d/.test(follows[2]) === isOrdered))) break;
      items.at(-1).push("");
    } else if (indent > base) {
      items.at(-1).push(lines[end].slice(Math.min(indent, base + mark.length + 1)));
    } else if (item || begins(lines, end, depth) || !lines[end - 1].trim()) {
      break;
    } else {
      items.at(-1).push(lines[end]); // a lazy line of the item's paragraph
    }
  }
  const element = () => {
    const box = make(isOrdered ? "ol" : "ul");
    if (isOrdered) box.start = parseInt(mark, 10);
    for (const item of items) box.append(fill(make("li"), item, depth));
    return box;
  };
  return [end, element];
}

function fill(element, lines, depth) {
  const inner = blocks(lines, depth + 1);
  for (const one of inner) element.append(one.make());
  return element;
}

function table(lines, at) {
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end++;
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|");
  const row = (line, tag) => {
    const element = make("tr");
    for (const cell of cells(line)) element.append(inline(make(tag), cell.trim()));
    return element;
  };
  const element = () => {
    const [box, whole, head, body] = [make("div"), make("table"), make("thead"), make("tbody")];
    box.className = "scroll";
    head.append(row(lines[at], "th"));
    for (const line of lines.slice(at + 2, end)) body.append(row(line, "td"));
    whole.append(head, body);
    box.append(whole);
    return box;
  };
  return [end, element];
}

const PAIRS = [["**", "strong"], ["__", "strong"], ["~~", "s"], ["*", "em"], ["_", "em"]];
const WORD = /[\p{L}\p{N}]/u;

// Append the text of a paragraph with its emphasis, code and links to an element, and return the element.
function inline(element, text, depth = 0) {
  if (text.length > LONGEST) {
    element.append(text);
    return element;
  }
  let plain = "";
  const absent = new Set(); // marks that do not come again, so that each is searched in vain once
  const put = (node, end) => {
    if (plain) element.append(plain);
    plain = "";
    element.append(node);
    return end;
  };
  const closing = (mark, from) => {
    if (absent.has(mark)) return -1;
    const found = text.indexOf(mark, from);
    if (found < 0) absent.add(mark);
    return found;
  };
  for (let at = 0; at < text.length; ) {
    const rest = text[at];
    if (rest === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "")) {
      plain += text[at + 1];
      at += 2;
      continue;
    }
    const next = special(text, at, depth, closing);
    if (next) {
      at = put(...next);
    } else {
      const run = rest === "`" ? /^`+/.exec(text.slice(at, at + 64))[0] : rest;
      plain += run;
      at += run.length;
    }
  }
  if (plain) element.append(plain);
  return element;
}

// Return [node, end] of the code, emphasis or link that begins at `at`, or null.
function special(text, at, depth, closing) {
  const rest = text[at];
  if (rest === "`") return code(text, at, closing);
  if (rest === "[" || (rest === "!" && text[at + 1] === "[")) return link(text, rest === "!" ? at + 1 : at, closing);
  if (rest === "h" && /^https?:\/\//.test(text.slice(at, at + 8)) && !WORD.test(text[at - 1] ?? "")) return bare(text, at);
  if (depth >= DEEPEST) return null;
  for (const [mark, tag] of PAIRS) {
    if (!text.startsWith(mark, at) || /\s/.test(text[at + mark.length] ?? " ")) continue;
    if (mark[0] === "_" && WORD.test(text[at - 1] ?? "")) continue;
    const end = closing(mark, at + mark.length + 1);
    if (end < 0 || /\s/.test(text[end - 1])) continue;
    if (mark[0] === "_" && WORD.test(text[end + mark.length] ?? "")) continue;
    if (mark.length === 1 && (text[end + 1] === mark || text[end - 1] === mark)) continue;
    return [inline(make(tag), text.slice(at + mark.length, end), depth + 1), end + mark.length];
  }
  return null;
}

function code(text, at, closing) {
  const [mark] = /^`+/.exec(text.slice(at, at + 64));
  const end = closing(mark, at + mark.length);
  if (end < 0) return null;
  const inner = text.slice(at + mark.length, end);
  return [make("code", /^ .+ $/.test(inner) ? inner.slice(1, -1) : inner), end + mark.length];
}

function link(text, at, closing) {
  const middle = closing("](", at);
  if (middle < 0 || text.slice(at + 1, middle).includes("[")) return null;
  const end = closing(")", middle);
  if (end < 0) return null;
  const node = anchor(text.slice(middle + 2, end).split(/\s/)[0], text.slice(at + 1, middle));
  return node && [node, end + 1];
}

function bare(text, at) {
  const [found] = /^[^\s<>"`]*/.exec(text.slice(at, at + 2000));
  const address = found.replace(/[.,;:!?'*_)\]]+$/, "");
  const node = anchor(address, address);
  return node && [node, at + address.length];
}

// Return a link, or null where the address leads to another kind of place.
function anchor(address, words) {
  let url;
  try {
    url = new URL(address);
  } catch {
    return null;
  }
  if (!["http:", "https:", "mailto:"].includes(url.protocol)) return null;
  const element = make("a", words || address);
  element.href = url.href;
  element.title = url.href;
  element.target = "_blank";
  element.rel = "noopener noreferrer nofollow";
  return element;
}
