// Runs the functions that a client's program gives it, each once, and prints a JSON line for each.
import assert from "node:assert";

export const url = process.env.AIMGPU_CLIENTS_URL ?? "http://127.0.0.1:8080";
export const key = process.env.AIMGPU_CLIENTS_KEY ?? "none";
export const model = "chat";
export const city = { type: "object", properties: { city: { type: "string", maxLength: 20 } }, required: ["city"] };
export { assert };

export async function run(calls) {
  for (const [call, ask] of Object.entries(calls)) {
    let error = null;
    try {
      await ask();
    } catch (raised) {
      error = String(raised.stack ?? raised);
    }
    console.log(JSON.stringify({ call, error }));
  }
}
