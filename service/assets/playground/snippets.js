/** The calls that the page made, as lines for a shell and for Python. Pure. */

import { encodePath } from "./api.js";

/**
 * `requests` are `{ fileName, oversize, download }`, `download` being where the file is had from, or null. Keys are never
 * shown: both forms read one from the environment where `hasKey`.
 */
export function curl(requests, { base, hasKey }) {
  const commands = requests.flatMap(({ fileName, oversize, download }, index) => {
    const get = download && ["curl -sS --fail-with-body", quoted(download), `-o ${quoted(fileName)}`];
    const post = [
      "curl -sS --fail-with-body",
      quoted(new URL(encodePath(oversize), base).href),
      `--data-binary ${quoted(`@${fileName}`)}`,
      ...(hasKey ? [`-H "Authorization: Bearer $TPVISION_API_KEY"`] : []),
      `-o tokens${requests.length === 2 ? `-${"ab"[index]}` : ""}.safetensors`,
    ];
    return [get, post].filter(Boolean).map((words) => words.join(" \\\n  "));
  });
  return [...new Set(commands)].join("\n");
}

export function python(requests, { base, hasKey }) {
  const isPair = requests.length === 2;
  const key = hasKey ? `, api_key=os.environ["TPVISION_API_KEY"]` : "";
  const encode = ({ fileName, oversize }) => {
    const option = oversize ? `, oversize=${JSON.stringify(oversize)}` : "";
    return `client.encode(${JSON.stringify(fileName)}${option})`;
  };
  return [
    ...(hasKey ? ["import os", ""] : []),
    ...(isPair ? ["import numpy as np", ""] : []),
    "from service.client import Client",
    "",
    `with Client(${JSON.stringify(base.replace(/\/$/, ""))}${key}) as client:`,
    ...requests.map((request, index) => `    ${isPair ? "ab"[index] : "embedding"} = ${encode(request)}`),
    ...(isPair ? PAIR : ["print(embedding.numpy().shape, embedding.geometry)"]),
  ].join("\n");
}

const PAIR = [
  "pooled_a, pooled_b = a.numpy().mean(axis=0), b.numpy().mean(axis=0)",
  "norms = np.linalg.norm(pooled_a) * np.linalg.norm(pooled_b)",
  "print(pooled_a @ pooled_b / norms)",
];

const quoted = (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`);
