// A request as code that runs: curl and Python for OpenAI's endpoints, curl for /jobs.

import { base, hasKey } from "./client.js";

const OWN = ["top_k", "min_p", "repetition_penalty", "priority"];
const shell = (text) => `'${text.replaceAll("'", "'\\''")}'`;
// JSON's strings, numbers and lists are Python's, too
const python = (value, indent) => {
  if (Array.isArray(value) && value.some((one) => typeof one === "object")) {
    return `[\n${value.map((one) => `${indent}    ${python(one, indent)},\n`).join("")}${indent}]`;
  }
  if (typeof value === "object" && !Array.isArray(value)) {
    return `{${Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${python(one, indent)}`).join(", ")}}`;
  }
  return Array.isArray(value) ? `[${value.map((one) => python(one, indent)).join(", ")}]` : JSON.stringify(value);
};

function curl(path, body, flags) {
  const lines = [`curl ${flags} ${shell(new URL(path, base).href)}`, "-H 'Content-Type: application/json'"];
  if (hasKey()) lines.push('-H "Authorization: Bearer $CARPOOL_API_KEY"');
  lines.push(`-d ${shell(JSON.stringify(body, null, 2))}`);
  return lines.join(" \\\n  ");
}

/** Code for this body of POST /jobs: the one that OpenAI's clients know has the same fields. */
export function snippet(language, body, defaultModel) {
  const isChat = body.messages !== undefined;
  const path = isChat ? "v1/chat/completions" : "v1/completions";
  if (language === "job") return curl("jobs", body, "-s");
  const streamed = { ...body, stream: true };
  if (language === "curl") return curl(path, streamed, "-sN");
  const { model, ...rest } = streamed;
  const own = Object.fromEntries(Object.entries(rest).filter(([name]) => OWN.includes(name)));
  const args = [["model", model ?? defaultModel], ...Object.entries(rest).filter(([name]) => !OWN.includes(name))];
  const lines = args.map(([name, value]) => `    ${name}=${value === true ? "True" : python(value, "    ")},\n`);
  if (Object.keys(own).length) lines.push(`    extra_body=${python(own, "    ")},\n`);
  const create = isChat ? "chat.completions" : "completions";
  const piece = isChat ? "chunk.choices[0].delta.content" : "chunk.choices[0].text";
  return [
    ...(hasKey() ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${JSON.stringify(new URL("v1", base).href)}, api_key=${
      hasKey() ? 'os.environ["CARPOOL_API_KEY"]' : '"none"'})`,
    `stream = client.${create}.create(`,
    `${lines.join("")})`,
    "for chunk in stream:",
    `    print(${piece} or "", end="", flush=True)`,
    "print()",
  ].join("\n");
}

/** What else there is to know of it. */
export function note(language) {
  const key = hasKey() ? " Put your key into CARPOOL_API_KEY first." : "";
  if (language === "python") return `Needs: pip install openai.${key}`;
  if (language === "job") return `Answers at once; the tokens come from /jobs/{id}/stream, also tomorrow.${key}`;
  return `Streams the same tokens as events.${key}`;
}
