"""Model servers: one protocol, the openai client behind it, a dialect per server, a pacer."""
