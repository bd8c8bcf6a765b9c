// OpenClaw's messages as the gateway has them: OpenAI's chat messages.

export interface Wire {
  role: "user" | "assistant" | "tool";
  content: string;
  tool_calls?: { id: string; type: "function"; function: { name: string; arguments: string } }[];
  tool_call_id?: string;
}

interface Block {
  type?: string;
  text?: string;
  id?: string;
  name?: string;
  arguments?: unknown;
}

/** A message of a session; undefined for one that no model is sent (notes of OpenClaw's own). */
export function asWire(message: unknown): Wire | undefined {
  if (typeof message !== "object" || message === null) return undefined;
  const { role, content, toolCallId } = message as { role?: unknown; content?: unknown; toolCallId?: unknown };
  const blocks = blocksOf(content);
  const text = blocks.map((block) => (block.type === "text" ? (block.text ?? "") : "")).join("");
  if (role === "user") return { role, content: text };
  if (role === "toolResult") return { role: "tool", tool_call_id: String(toolCallId), content: text };
  if (role !== "assistant") return undefined;
  const calls = blocks.filter((block) => block.type === "toolCall");
  if (calls.length === 0) return { role, content: text };
  const told = calls.map((call) => ({
    id: String(call.id),
    type: "function" as const,
    function: { name: String(call.name), arguments: JSON.stringify(call.arguments ?? {}) },
  }));
  return { role, content: text, tool_calls: told };
}

function blocksOf(content: unknown): Block[] {
  if (typeof content === "string") return [{ type: "text", text: content }];
  if (!Array.isArray(content)) return [];
  return content.filter((block): block is Block => typeof block === "object" && block !== null);
}

/** What OpenClaw asks for where its user has not said what to focus on (2026.9.x). */
const UNFOCUSED = "Write the summary body in the primary language used in the conversation.";

/**
 * Whether instructions for a summary hold a focus of the user's (`/compact Focus on …`, `compaction.customInstructions`):
 * it stands in the place of OpenClaw's own words.
 */
export function isFocused(instructions: string | undefined): boolean {
  const block = /^Additional context from \/compact.*\s<untrusted-text>\s*([\s\S]*?)\s*<\/untrusted-text>/m;
  const focus = block.exec(instructions ?? "")?.[1] ?? "";
  return focus !== "" && !focus.startsWith(UNFOCUSED);
}
