// Show /openapi.json as a page: every endpoint with its fields, its answers and a line for curl.

import { ask } from "./api.js";
import { withKey } from "./key.js";
import { copyButton } from "./markdown.js";

const by = (id) => document.getElementById(id);
const GROUPS = [["/v1/", "Generation and requests"], ["/health", "Health"], ["/ready", "Health"], ["/", "Other"]];
const SAMPLES = {
  model: "MODEL", prompt: "def main():", input: "Write a loop.", tokens: [1, 2, 3],
  messages: [{ role: "user", content: "Write a loop." }],
};
const LIMITS = [["minimum", "maximum", ""], ["minLength", "maxLength", " characters"], ["minItems", "maxItems", " items"], ["minProperties", "maxProperties", " entries"]];
const FAR = 2 ** 53; // a bound of 64 bits says nothing to a reader

function make(tag, text = "", className = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  element.className = className;
  return element;
}

function resolve(schema, all) {
  return schema?.$ref ? all[schema.$ref.split("/").at(-1)] : schema;
}

// Return the type of a schema in words.
function typeOf(schema) {
  if (schema.$ref) return schema.$ref.split("/").at(-1);
  const options = schema.anyOf ?? schema.oneOf ?? schema.allOf;
  if (options) return [...new Set(options.map(typeOf))].filter((name) => name !== "null").join(" or ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(", ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.type === "array") return `list of ${schema.items ? typeOf(schema.items) : "anything"}`;
  return schema.type ?? "anything";
}

function limitsOf(schema) {
  const parts = [];
  const shown = (value) => value.toLocaleString("en");
  const counted = (value, what) => shown(value) + (value === 1 ? what.replace(/ies$/, "y").replace(/s$/, "") : what);
  for (const [low, high, what] of LIMITS) {
    const [least, most] = [schema[low], schema[high]].map((value) => (Math.abs(value) < FAR ? value : undefined));
    if (least !== undefined && most !== undefined) parts.push(`${shown(least)} to ${shown(most)}${what}`);
    else if (most !== undefined) parts.push(`at most ${counted(most, what)}`);
    else if (least !== undefined) parts.push(`at least ${counted(least, what)}`);
  }
  if (schema.exclusiveMinimum > -FAR) parts.push(`above ${shown(schema.exclusiveMinimum)}`);
  if (schema.exclusiveMaximum < FAR) parts.push(`below ${shown(schema.exclusiveMaximum)}`);
  for (const option of schema.anyOf ?? []) parts.push(...limitsOf(option));
  return [...new Set(parts)];
}

function meaningOf(schema, isRequired) {
  const parts = limitsOf(schema);
  if (!isRequired && schema.default !== undefined && schema.default !== null) parts.unshift(`default ${JSON.stringify(schema.default)}`);
  return [schema.description, parts.join(", ")].filter(Boolean).join("; ");
}

// Return the names of schemas that a schema uses.
function usedBy(schema) {
  return [...JSON.stringify(schema).matchAll(/#\/components\/schemas\/(\w+)/g)].map((match) => match[1]);
}

function tableOf(heads, rows) {
  const [table, head, body, line] = [make("table"), make("thead"), make("tbody"), make("tr")];
  for (const text of heads) line.append(Object.assign(make("th", text), { scope: "col" }));
  head.append(line);
  for (const [name, ...cells] of rows) {
    const row = make("tr");
    const first = Object.assign(make("th"), { scope: "row" });
    first.append(name);
    row.append(first, ...cells.map((text) => make("td", text)));
    body.append(row);
  }
  table.append(head, body);
  const box = make("div", "", "scroll");
  box.append(table);
  return box;
}

function fieldsOf(schema) {
  const rows = Object.entries(schema.properties ?? {}).map(([name, field]) => {
    const isRequired = (schema.required ?? []).includes(name);
    const cell = document.createDocumentFragment();
    cell.append(make("code", name), isRequired ? make("small", " required") : "");
    return [cell, typeOf(field), meaningOf(field, isRequired), isRequired];
  });
  rows.sort((a, b) => b[3] - a[3]);
  return tableOf(["field", "type", "meaning"], rows.map((row) => row.slice(0, 3)));
}

// Return an element for each schema that a body uses, however deep.
function nested(schema, all) {
  const names = new Set(usedBy(schema));
  for (const name of names) for (const deeper of usedBy(all[name])) names.add(deeper);
  return [...names].filter((name) => all[name].properties).map((name) => {
    const box = make("details");
    box.append(make("summary", name), fieldsOf(all[name]));
    return box;
  });
}

function curl(path, method, schema) {
  const parts = [`curl ${location.origin}${path}`];
  if (method !== "get") parts[0] += method === "post" && schema ? "" : ` -X ${method.toUpperCase()}`;
  if (schema) {
    const names = schema.required ?? [];
    const body = Object.fromEntries(names.map((name) => [name, SAMPLES[name] ?? "..."]));
    if (schema.properties.prompt && !body.messages && !body.tokens) body.prompt = SAMPLES.prompt;
    parts.push("-H 'Content-Type: application/json'", `-d '${JSON.stringify(body)}'`);
  }
  if (!path.startsWith("/health") && path !== "/ready") parts.splice(1, 0, '-H "Authorization: Bearer $ORCINUS_API_KEY"');
  return parts.join(" \\\n  ");
}

function section(path, method, operation, all) {
  const box = make("section");
  box.id = `${method}-${path.replace(/\W+/g, "-")}`;
  const head = make("h2");
  head.append(make("b", method.toUpperCase(), `method ${method}`), make("code", path));
  box.append(head);
  if (operation.description) box.append(make("p", operation.description));
  const parameters = operation.parameters ?? [];
  if (parameters.length) {
    const rows = parameters.map((one) => [make("code", one.name), one.in, one.description ?? typeOf(one.schema ?? {})]);
    box.append(make("h3", "Parameters"), tableOf(["name", "in", "type"], rows));
  }
  const body = resolve(operation.requestBody?.content["application/json"]?.schema, all);
  if (body) box.append(make("h3", "Body"), fieldsOf(body), ...nested(body, all));
  const text = curl(path, method, body);
  const [example, code] = [make("div", "", "example"), make("pre")];
  code.append(make("code", text));
  code.tabIndex = 0;
  example.append(code, copyButton(() => text, "Copy the line for curl"));
  const answers = Object.entries(operation.responses).map(([status, answer]) => {
    const kinds = Object.keys(answer.content ?? {}).join(", ");
    return [make("code", status), answer.description, kinds];
  });
  const rest = make("details");
  rest.append(make("summary", "Answers"), tableOf(["status", "meaning", "as"], answers));
  box.append(make("h3", "Example"), example, rest);
  return box;
}

function show(api) {
  const all = api.components.schemas;
  by("about").textContent =
    `Version ${api.info.version}. The base address of clients of OpenAI's API is ${location.origin}/v1. Where the server has keys, every call but those of Health needs one.`;
  const groups = new Map();
  for (const [path, operations] of Object.entries(api.paths)) {
    const [, group] = GROUPS.find(([prefix]) => path.startsWith(prefix));
    for (const [method, operation] of Object.entries(operations)) {
      if (!groups.has(group)) groups.set(group, []);
      groups.get(group).push([path, method, operation]);
    }
  }
  for (const [, name] of GROUPS) {
    const rows = groups.get(name) ?? [];
    groups.delete(name);
    if (rows.length) by("contents").append(make("h2", name));
    for (const [path, method, operation] of rows) {
      const box = section(path, method, operation, all);
      const link = make("a");
      link.href = `#${box.id}`;
      link.append(make("b", method.toUpperCase(), `method ${method}`), make("span", path));
      by("contents").append(link);
      by("main").append(box);
    }
  }
  document.getElementById(location.hash.slice(1))?.scrollIntoView();
}

// Save the document with the key of this tab, which a link would not send.
function offer(api) {
  by("document").addEventListener("click", (click) => {
    click.preventDefault();
    const link = make("a");
    link.href = URL.createObjectURL(new Blob([JSON.stringify(api, null, 1)], { type: "application/json" }));
    link.download = "openapi.json";
    link.click();
    URL.revokeObjectURL(link.href);
  });
}

try {
  const api = await withKey(async () => (await ask("/openapi.json")).json());
  show(api);
  offer(api);
} catch (error) {
  by("about").textContent = "";
  by("banner").hidden = false;
  by("banner").textContent = error.message;
}
