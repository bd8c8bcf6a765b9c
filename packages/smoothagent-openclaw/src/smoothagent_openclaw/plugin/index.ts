// The SmoothAgent gateway's side of OpenClaw (2026.9.x): its session ids, and a compaction that has a summary already.
//
// Types are stripped by whoever loads this (OpenClaw, Node.js >= 24.16), so that there is nothing to build.
import { asWire, isFocused } from "./messages.ts";
import type { OpenClawPluginApi } from "openclaw/plugin-sdk/core";

/** Names the conversation for the gateway; it goes no further. */
const SESSION = "x-smoothagent-session";

interface Settings {
  /** Root of the gateway, without /v1. */
  gateway: string;
  /** The provider whose requests go through it; absent where another plugin has that name already. */
  provider?: string;
}

export default function register(api: OpenClawPluginApi): void {
  const settings = api.pluginConfig as unknown as Settings;
  if (settings.provider !== undefined) {
    api.registerProvider({
      id: settings.provider,
      label: "SmoothAgent",
      auth: [],
      wrapStreamFn: ({ streamFn }) => {
        if (streamFn === undefined) return undefined;
        return (model, context, options) => {
          const session = options?.sessionId;
          if (session === undefined) return streamFn(model, context, options);
          return streamFn(model, context, { ...options, headers: { ...options?.headers, [SESSION]: session } });
        };
      },
    });
  }
  // The provider is not told whose messages it gets; this hook is, a moment before. Where two sessions are compacted at
  // once the gateway sees by the messages that it is another's.
  let compacting: string | undefined;
  api.on("before_compaction", (_event, context) => {
    compacting = context.sessionId;
  });
  api.registerCompactionProvider({
    id: "smoothagent",
    label: "SmoothAgent",
    summarize: async ({ messages, signal, customInstructions }) => {
      const asked: Record<string, unknown> = { messages: messages.map(asWire).filter((m) => m !== undefined) };
      if (compacting !== undefined) asked.session = compacting;
      // What its user wants to know more of is in no summary that was written before; it is asked for then.
      if (isFocused(customInstructions)) asked.question = customInstructions;
      const told = await post(`${settings.gateway}/smoothagent/summary`, asked, signal);
      api.logger.info(`compaction: the summary was ${told.kind === "ready" ? "ready" : "written now"}`);
      return told.summary;
    },
  });
}

interface Told {
  summary: string;
  kind?: string;
}

/** What the gateway answers. Throws where that is no summary: OpenClaw says why, and asks the model itself. */
async function post(url: string, asked: object, signal: AbortSignal | undefined): Promise<Told> {
  let response: Response;
  try {
    response = await fetch(url, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(asked),
      signal: signal ?? null,
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Error(`the SmoothAgent gateway does not answer at ${url}: start it with smoothagent openclaw run`);
  }
  const told = (await response.json()) as Partial<Told> & { error?: { message?: string } };
  if (!response.ok || !told.summary) {
    throw new Error(`the SmoothAgent gateway has no summary: ${told.error?.message ?? `status ${response.status}`}`);
  }
  return { ...told, summary: told.summary };
}
