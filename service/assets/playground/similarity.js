/** The page's end of the worker that holds embeddings and compares them: one method a call of it. */

export class Similarity {
  #worker = new Worker(new URL("similarity-worker.js", import.meta.url), { type: "module" });
  #waiting = new Map();
  #lastId = 0;

  constructor() {
    this.#worker.onmessage = ({ data: { id, result, error } }) => {
      const { resolve, reject } = this.#waiting.get(id);
      this.#waiting.delete(id);
      if (error === undefined) resolve(result);
      else reject(new Error(error));
    };
  }

  /** Keep a picture's embeddings; its answer's buffer moves to the worker. */
  add(name, buffer, header) {
    return this.#call("add", { name, buffer, header }, [buffer]);
  }

  remove(name) {
    return this.#call("remove", { name });
  }

  compare(name, token) {
    return this.#call("compare", { name, token });
  }

  pooled(names) {
    return this.#call("pooled", { names });
  }

  #call(call, values, transfer = []) {
    const id = (this.#lastId += 1);
    this.#worker.postMessage({ id, call, values }, transfer);
    return new Promise((resolve, reject) => this.#waiting.set(id, { resolve, reject }));
  }
}
