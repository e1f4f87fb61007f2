/** Calls of the service. Paths are relative to the page, so that they work below any prefix of a proxy. */

/** What went wrong: as the service told it, or `code` null where it was not the service that answered. */
export class CallError extends Error {
  constructor(message, { status = null, code = null, param = null, requestId = null, retryAfterS = null } = {}) {
    super(message);
    Object.assign(this, { status, code, param, requestId, retryAfterS });
  }
}

/** The model served, and the capacity in force. */
export async function describe(key) {
  const [models, capacity] = await Promise.all(
    ["v1/models", "v1/capacity"].map(async (path) => (await call(path, { key })).json()),
  );
  return { model: models.data[0], capacity };
}

/** The answer for one image file: its bytes, and what its headers tell. `oversize` empty: as the service is set. */
export async function encode(file, { key, oversize, signal }) {
  const started = performance.now();
  const response = await call(encodePath(oversize), {
    key,
    signal,
    method: "POST",
    body: file,
    headers: { "content-type": "application/octet-stream" }, // never JSON or a form, whatever the file is called
  });
  const body = await readBody(response);
  return {
    body,
    elapsedMs: performance.now() - started,
    requestId: response.headers.get("x-request-id"),
    stages: readStages(response.headers.get("server-timing") ?? ""),
  };
}

/** Where an image is posted to, relative to the page. */
export const encodePath = (oversize) => `v1/encode${oversize ? `?oversize=${oversize}` : ""}`;

async function call(path, { key, headers, ...options }) {
  const authorization = key ? { authorization: `Bearer ${key}` } : {};
  let response;
  try {
    response = await fetch(path, { ...options, headers: { ...headers, ...authorization }, cache: "no-store" });
  } catch (error) {
    throw withoutAnswer(error);
  }
  if (!response.ok) throw await readError(response);
  return response;
}

async function readBody(response) {
  try {
    return await response.arrayBuffer();
  } catch (error) {
    throw withoutAnswer(error);
  }
}

function withoutAnswer(error) {
  return error.name === "AbortError" ? error : new CallError(`There was no answer: ${error.message}`);
}

async function readError(response) {
  const { error } = await response.json().catch(() => ({}));
  const message = error?.message ?? `Something else than the service answered: ${response.status} ${response.statusText}`;
  return new CallError(message, {
    status: response.status,
    code: error?.code,
    param: error?.param,
    requestId: response.headers.get("x-request-id"),
    retryAfterS: response.headers.get("retry-after"),
  });
}

function readStages(timing) {
  return timing.split(",").filter(Boolean).map((entry) => {
    const [name, duration] = entry.trim().split(";dur=");
    return { name, ms: Number(duration) };
  });
}
